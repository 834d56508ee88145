# SPDX-License-Identifier: Apache-2.0
"""Update clipping around Flower's strategies: which work, which are refused, and settings."""

import re
from typing import Any

import numpy as np
import pytest
from flower_loop import NOISE, NORMS, SEEDED, SIZE, TEN, ZEROS, Loop, directions, record, start
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.server import Server as LegacyServer
from flwr.server import SimpleClientManager
from flwr.server import strategy as legacy
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg, QFedAvg, Strategy
from hypothesis import given
from hypothesis import strategies as st

from fedclip.engines.flower import UpdateClipMod, UpdateClipStrategy
from fedclip.engines.flower.clipping import _AVERAGES
from fedclip.updates.client import UpdateClient
from fedclip.updates.store import PersistentServer

STRATEGIES = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.9},
    "FedProx": {"proximal_mu": 0.1},
    "FedAdagrad": {},
    "FedAdam": {"beta_1": 0.9},
    "FedYogi": {"beta_1": 0.9},
    "QFedAvg": {"client_learning_rate": 0.1},
}
PLAIN = ("FedAvg", "FedProx")


def inner(name: str) -> Strategy:
    found: Strategy = getattr(flower, name)(**STRATEGIES[name])
    return found


def measured(node: int) -> dict[str, Any]:
    return {"num-examples": 10 * node, "train_loss": 0.5}


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "QFedAvg"])
def test_a_round_that_is_withheld_leaves_the_model_alone(name: str) -> None:
    loop = Loop(TEN, directions(np.ones(10)), metrics=measured)
    # Without start_norm and with noise, the first round only counts votes.
    noise = {"noise_multiplier": 0.1, "bits_noise": 0.1, "expected_clients": 10}
    strategy = UpdateClipStrategy(inner(name), noise)
    models = start(strategy, loop, ZEROS, 6)
    withheld = [row["withheld"] for row in strategy.served.rounds]
    assert withheld == [True, *[False] * 5]
    for before, after, kept in zip(models, models[1:], withheld, strict=False):
        assert np.array_equal(before["w"], after["w"]) == kept


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_gets_the_average_whatever_its_weights(name: str) -> None:
    floats = {"w": np.zeros(SIZE, "f4"), "half": np.zeros(4, "f2"), "one": np.array(0.0)}
    model, random = {**floats, "n": np.array(7)}, directions(NORMS)
    loop = Loop(
        TEN,
        lambda node, round_: {**random(node, round_), "half": np.full(4, 0.01), "one": 0.1},
        metrics=measured,
    )
    strategy = UpdateClipStrategy(inner(name), {"start_norm": 1.0})
    found, _ = loop.run(strategy, model, 1)
    assert {k: x.dtype for k, x in found.items()} == {k: x.dtype for k, x in model.items()}
    assert found["n"] == 7
    if name in PLAIN:
        served, client = PersistentServer({"start_norm": 1.0}), UpdateClient()
        sent, replies = served.open(), []
        for node in TEN:
            update = {k: np.asarray(by, floats[k].dtype) for k, by in loop.update(node, 1).items()}
            replies.append(client.clip(update, sent))
        for tensor, average in served.close(replies, floats).average.items():
            np.testing.assert_allclose(found[tensor], -average, rtol=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_nobody_replies(name: str) -> None:
    lost = dict.fromkeys(TEN, lambda message: None)
    loop = Loop(TEN, directions(NORMS), change=lost)
    found, _ = loop.run(UpdateClipStrategy(inner(name), {}), ZEROS, 2)
    np.testing.assert_array_equal(found["w"], 0.0)
    if name == "QFedAvg":
        return
    # With noise, it must not be seen later whether anybody replies; at first it is a mistake.
    strategy = UpdateClipStrategy(inner(name), SEEDED)
    first, _ = Loop(TEN, directions(NORMS)).run(strategy, ZEROS, 1)
    found, _ = loop.run(strategy, first, 1)
    assert np.all(found["w"] != first["w"])


class Mine(flower.Krum):  # type: ignore[misc]
    pass


class Holds(FedAvg):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.within = flower.FedMedian()


ROBUST = [
    flower.FedMedian,
    flower.FedTrimmedAvg,
    *(lambda kind=kind: kind(num_malicious_nodes=1) for kind in (flower.Krum, flower.Bulyan, Mine)),
    lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    Holds,
]


def test_every_strategy_of_flower_is_known() -> None:
    """A robust one that a later version has must not pass as an average."""
    robust = {"Bulyan", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Strategy", "Result"}
    others = {name for name in flower.__all__ if name.startswith(("FedXgb", "Differential"))}
    assert set(flower.__all__) == _AVERAGES - {"FedOpt"} | robust | others


def test_an_apps_own_way_to_average_is_named(caplog: Any) -> None:
    class Own(FedAvg):  # type: ignore[misc]
        def aggregate_train(self, *args: Any) -> Any:
            return super().aggregate_train(*args)

    UpdateClipStrategy(Own(), {})
    assert "Own.aggregate_train gets the averaged model as each reply" in caplog.text


def test_the_older_api_gets_a_sentence() -> None:
    strategy = UpdateClipStrategy(FedAvg(), {})
    with pytest.raises(RuntimeError, match=r"older API: .* with @app\.main"):
        LegacyServer(client_manager=SimpleClientManager(), strategy=strategy).fit(1, 1.0)


@pytest.mark.parametrize(
    ("made", "settings", "why"),
    [
        (lambda: QFedAvg(0.1), NOISE, "it weighs by the clients' losses"),
        (lambda: flower.FedXgbBagging(), {}, "trees have no norm"),
        (lambda: legacy.FedAvg(), {}, r"got flwr\.server\.strategy\..*, of .* older API"),
        *((make, {}, 'each reply, .* combine = "trimmed" or "arc"') for make in ROBUST),
        (lambda: UpdateClipStrategy(FedAvg(), {}), {}, "once is enough"),
        (
            lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 10),
            {},
            "set noise_multiplier here",
        ),
        (FedAdam, {"start_nrom": 1.0}, "did you mean 'start_norm'"),
        (FedAvg, {**NOISE, "exclude": "n"}, "exclude"),
        (FedAvg, {**NOISE, "weights": "steps"}, "weights do not go with noise"),
    ],
)
def test_what_can_not_be_kept_is_refused(made: Any, settings: Any, why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        UpdateClipStrategy(made(), settings)


def test_a_strategy_that_sends_two_records_is_refused_before_it_does() -> None:
    class Two(FedAvg):  # type: ignore[misc]
        def configure_train(self, *args: Any) -> Any:
            for message in super().configure_train(*args):
                message.content["more"] = record(ZEROS)
                yield message

    loop = Loop([1, 2], directions(NORMS))
    with pytest.raises(ValueError, match="server's strategy holds 2 ArrayRecords"):
        loop.run(UpdateClipStrategy(Two(), {}), ZEROS, 1)
    assert loop.asked == []


def test_settings_come_from_the_run_configuration() -> None:
    weights = {"update-clip.weights.17": 2.0, "update-clip.weights.18": 1.0}
    config = {"num-server-rounds": 3, "update-clip.start-norm": 0.5, **weights}
    strategy = UpdateClipStrategy.from_run_config(FedAvg(), config)
    assert strategy.server.bound.bound == 0.5
    assert strategy.server.aggregation.shares.table == {"17": 2.0, "18": 1.0}


OUTSIDE = {"learning-rate": 0.5, "seed": 3, "num-server-rounds": 3, "weights": "w.npz"}
TABLES = ("update_clip", "updateclip", "Update-Clip", "update-clipping", "update-clip-server", "")


@given(
    table=st.sampled_from([*TABLES, "fedclip.update-clip", "dp", "app.privacy"]),
    key=st.sampled_from(["noise-multiplier", "noise_multiplier", "Max-Epsilon", "start-norm"]),
    right=st.booleans(),
)
def test_settings_that_nobody_would_read_stop_the_start(table: str, key: str, right: bool) -> None:
    """The law: whatever the table is called, on the server and on the clients."""
    name = f"{table}.{key}" if table else key
    config = {**OUTSIDE, name: 1.0} | ({"update-clip.quantile": 0.6} if right else {})
    with pytest.raises(ValueError, match=re.escape(f"nobody reads {name!r}: write update-clip.")):
        UpdateClipStrategy.from_run_config(FedAvg(), config)
    strategy, loop = UpdateClipStrategy(FedAvg(), {}), Loop([1, 2], directions(NORMS))
    asked = strategy.configure_train(1, record(ZEROS), ConfigRecord(), loop)
    message = Message(RecordDict({**asked[0].content}), 1, "train")
    context = Context(1, 1, {}, RecordDict(), config)
    reply = UpdateClipMod()(message, context, lambda *_: pytest.fail("trained"))
    assert "nobody reads" in reply.error.reason


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (OUTSIDE, "has no update-clip.… setting"),
        ({"update-clip.max-norm": 1.0, "update-clip.max_norm": 2.0}, "max-norm is given twice"),
        ({"update-clip.scope": "layer", "update-clip.scope.a*": 1.0}, "scope is given twice"),
    ],
)
def test_other_settings_that_are_lost_stop_the_start(config: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        UpdateClipStrategy.from_run_config(FedAvg(), config)
