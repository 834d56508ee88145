# SPDX-License-Identifier: Apache-2.0
"""Update clipping in Flower: bounds, noise, budget and turns, with Flower's own messages."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from flower_loop import Loop, app_that_takes_the_bound, arrays_of, record, rewritten
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.server import Server as LegacyServer
from flwr.server import SimpleClientManager
from flwr.server import strategy as legacy
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, QFedAvg, Strategy
from hypothesis import given
from hypothesis import strategies as st

from fedclip.engines.flower import UpdateClipMod, UpdateClipStrategy
from fedclip.engines.flower.strategy import _AVERAGES
from fedclip.updates.client import UpdateClient
from fedclip.updates.store import Served
from fedclip.updates.tables import client_of

TEN = range(1, 11)
SIZE = 50
ZEROS = {"w": np.zeros(SIZE)}


def directions(norms: Any, seed: int = 0) -> Any:
    """Return updates in random directions, each node's with its norm."""

    def update(node: int, round_: int) -> dict[str, Any]:
        drawn = np.random.default_rng([seed, node, round_]).normal(size=SIZE)
        return {"w": norms[node - 1] * drawn / np.linalg.norm(drawn)}

    return update


NORMS = np.exp(np.random.default_rng(0).normal(0.0, 0.4, len(TEN)))


# -- noise -------------------------------------------------------------------------------------
NOISE = {"noise_multiplier": 1.0, "expected_clients": 10, "start_norm": 1.0}
SEEDED = {**NOISE, "generator": "insecure", "seed": 1}


def start(strategy: UpdateClipStrategy, loop: Loop, model: Any, rounds: int) -> list[Any]:
    """Return the model after each round; the first one is that before."""
    seen: list[Any] = []

    def look(round_: int, arrays: ArrayRecord) -> None:
        seen.append(arrays_of(arrays))

    strategy.start(loop, record(model), rounds, evaluate_fn=look)
    return seen


@pytest.mark.parametrize(
    "settings",
    [{"scope": "tensor", "combine": "arc", "n_hostile": 2}, SEEDED],
    ids=["arc", "noise"],
)
def test_rounds_are_those_of_the_core(settings: dict[str, Any]) -> None:
    served, client, model = Served(settings), client_of(settings), ZEROS
    for round_ in range(1, 9):
        sent = served.open()
        update = directions(NORMS)
        replies = [client.clip(update(node, round_), sent) for node in TEN]
        average = served.close(replies, model).average
        model = {"w": model["w"] - average["w"]}
    strategy = UpdateClipStrategy(FedAvg(), settings)
    found, _ = Loop(TEN, directions(NORMS), settings).run(strategy, ZEROS, 8)
    assert strategy.served.rounds == served.rounds
    np.testing.assert_allclose(found["w"], model["w"], rtol=1e-12)


@pytest.mark.parametrize("there", [2, 9, 11])
def test_noise_asks_as_many_nodes_as_it_is_sized_on(there: int) -> None:
    loop = Loop(range(1, there + 1), directions(np.ones(20)))
    strategy = UpdateClipStrategy(FedAvg(), NOISE)
    with pytest.raises(RuntimeError, match=rf"{there} nodes would be asked.*min_train_nodes"):
        loop.run(strategy, ZEROS, 3)
    assert loop.asked == []
    assert strategy.server.bound.epsilon == 0.0


def test_of_more_nodes_a_small_fraction_is_as_many_as_noise_asks_for() -> None:
    loop = Loop(range(1, 21), directions(np.ones(20)))
    inner = FedAvg(fraction_train=0.01, min_train_nodes=10)
    loop.run(UpdateClipStrategy(inner, NOISE), ZEROS, 3)
    assert [len(asked) for asked in loop.asked] == [10, 10, 10]


def test_with_noise_nothing_of_the_clients_is_published() -> None:
    metrics = {"num-examples": 10, "train_loss": 0.5}
    loop = Loop(TEN, directions(NORMS), metrics=lambda node: metrics)
    _, noisy = loop.run(UpdateClipStrategy(FedAvg(), SEEDED), ZEROS, 2)
    assert set(noisy.train_metrics_clientapp[2]) == {"update-clip-bound", "update-clip-epsilon"}
    _, clear = loop.run(UpdateClipStrategy(FedAvg(), {"start_norm": 1.0}), ZEROS, 2)
    assert clear.train_metrics_clientapp[2]["train_loss"] == pytest.approx(0.5)
    assert not {"votes", "within"} & set(clear.train_metrics_clientapp[2])


def test_metrics_without_noise_are_flowers_own() -> None:
    loop = Loop([1, 2], directions(NORMS), metrics=lambda n: {"num-examples": n, "train_loss": n})
    _, found = loop.run(UpdateClipStrategy(FedAvg(), {}), ZEROS, 1)
    assert found.train_metrics_clientapp[1]["train_loss"] == pytest.approx((1 + 2 * 2) / 3)
    assert found.evaluate_metrics_clientapp[1] == {"loss": 0.5}


def test_a_budget_that_is_spent_ends_the_training_and_keeps_the_model() -> None:
    settings = {**SEEDED, "max_epsilon": 10.0}
    loop = Loop(TEN, directions(NORMS))
    strategy = UpdateClipStrategy(FedAvg(), settings)
    models = start(strategy, loop, ZEROS, 12)
    done = len(loop.asked)
    assert 1 < done < 12
    assert strategy.server.bound.epsilon <= 10.0
    for after in models[done:]:
        np.testing.assert_array_equal(after["w"], models[done]["w"])
    assert list(strategy.configure_evaluate(13, record(ZEROS), ConfigRecord(), loop)) == []


def test_a_run_that_changes_nothing_returns_the_first_model(tmp_path: Any) -> None:
    settings = {**SEEDED, "max_epsilon": 10.0}
    first = UpdateClipStrategy(FedAvg(), settings, folder=tmp_path)
    Loop(TEN, directions(NORMS)).run(first, ZEROS, 12)
    first.served.leave()
    again = UpdateClipStrategy(FedAvg(), settings, folder=tmp_path)
    loop = Loop(TEN, directions(NORMS))
    model, _ = loop.run(again, {"w": np.ones(SIZE)}, 3)
    assert loop.asked == []
    np.testing.assert_array_equal(model["w"], 1.0)


def test_a_run_from_the_file_is_one_without_interruption(tmp_path: Any) -> None:
    whole = UpdateClipStrategy(FedAvg(), SEEDED)
    expected, _ = Loop(TEN, directions(NORMS)).run(whole, ZEROS, 8)
    model, loop = ZEROS, Loop(TEN, directions(NORMS))
    for _ in range(2):
        part = UpdateClipStrategy(FedAvg(), SEEDED, folder=tmp_path)
        model, _ = loop.run(part, model, 4)
        part.served.leave()
    assert part.served.rounds == whole.served.rounds
    np.testing.assert_array_equal(model["w"], expected["w"])


# -- turns -------------------------------------------------------------------------------------
TURNS = {**SEEDED, "expected_clients": 2, "separation": 3}


@pytest.mark.parametrize("more", [{}, {"noise": "banded", "rounds": 7}])
def test_nodes_take_turns_by_their_numbers(more: dict[str, Any]) -> None:
    loop = Loop(range(1, 7), directions(NORMS))
    strategy = UpdateClipStrategy(FedAvg(min_available_nodes=6), {**TURNS, **more})
    loop.run(strategy, ZEROS, 7)
    assert loop.asked == [[1, 4], [2, 5], [3, 6]] * 2 + [[1, 4]]
    assert strategy.server.bound.budget.accountant.rounds == 3


def test_a_node_that_comes_later_has_no_turn_and_takes_nobodys_place() -> None:
    loop = Loop(range(1, 7), directions(np.ones(20)))
    strategy = UpdateClipStrategy(FedAvg(), TURNS)
    loop.run(strategy, ZEROS, 1)
    loop.nodes = [1, 4, 5, 6, 9]
    loop.apps[9], loop.contexts[9] = loop.apps[1], loop.contexts[1]
    loop.run(strategy, ZEROS, 2)
    assert loop.asked == [[1, 4], [5], [6]]
    loop.nodes = [2, 3, 5, 6]
    with pytest.raises(RuntimeError, match=r"whose turn it is have left \(1, 4\)"):
        loop.run(strategy, ZEROS, 1)


def test_turns_that_come_too_soon_are_refused(caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"separation=3 nodes take turns.*fraction_train"):
        UpdateClipStrategy(FedAvg(fraction_train=0.5), TURNS)
    loop = Loop(range(1, 5), directions(NORMS))
    with caplog.at_level(logging.ERROR, "fedclip.server"):
        loop.run(UpdateClipStrategy(FedAvg(), TURNS), ZEROS, 2)
    assert loop.asked == []
    assert "that takes more than 4 clients" in caplog.text


# -- around Flower's strategies ------------------------------------------------------------------
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


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "QFedAvg"])
def test_a_round_that_is_withheld_leaves_the_model_alone(name: str) -> None:
    loop = Loop(
        TEN,
        directions(np.ones(10)),
        metrics=lambda node: {"num-examples": 10 * node, "train_loss": 0.5},
    )
    # The default is a search, and withholds no average that goes out without noise.
    noise = {"noise_multiplier": 0.1, "bits_noise": 0.1, "expected_clients": 10}
    strategy = UpdateClipStrategy(inner(name), noise)
    models = start(strategy, loop, ZEROS, 6)
    withheld = [row["withheld"] for row in strategy.served.rounds]
    assert True in withheld[1:]
    assert not withheld[0]
    for before, after, kept in zip(models, models[1:], withheld, strict=False):
        assert np.array_equal(before["w"], after["w"]) == kept


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_gets_the_average_whatever_its_weights(name: str) -> None:
    model = {
        "w": np.zeros(SIZE, np.float32),
        "half": np.zeros(4, np.float16),
        "n": np.array(7),
        "one": np.array(0.0),
    }
    loop = Loop(
        TEN,
        lambda node, round_: {
            **directions(NORMS)(node, round_),
            "half": np.full(4, 0.01),
            "one": 0.1,
        },
        metrics=lambda node: {"num-examples": 10 * node, "train_loss": 0.5},
    )
    strategy = UpdateClipStrategy(inner(name), {"start_norm": 1.0})
    found, _ = loop.run(strategy, model, 1)
    assert {k: x.dtype for k, x in found.items()} == {k: x.dtype for k, x in model.items()}
    assert found["n"] == 7
    if name in PLAIN:
        served, client, floats = Served({"start_norm": 1.0}), UpdateClient(), ("w", "half", "one")
        sent, replies = served.open(), []
        for node in TEN:
            trained = {
                k: (model[k] - by).astype(model[k].dtype) for k, by in loop.update(node, 1).items()
            }
            replies.append(client.clip({k: model[k] - x for k, x in trained.items()}, sent))
        average = served.close(replies, {k: model[k] for k in floats}).average
        for tensor in floats:
            np.testing.assert_allclose(found[tensor], -average[tensor], rtol=1e-12)


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


def failing(node: int, round_: int) -> Any:
    raise RuntimeError("no data")


@pytest.mark.parametrize("how", ["no mod", "no reply", "apps that fail", "too long"])
def test_noise_ends_if_no_reply_of_the_first_round_can_be_used(how: str) -> None:
    far = rewritten(lambda content: content.update({"arrays": record({"w": np.ones(SIZE)})}))
    changes: dict[str, Any] = {"no reply": lambda message: None, "too long": far}
    loop = Loop(
        TEN,
        failing if how == "apps that fail" else directions(NORMS),
        change=dict.fromkeys(TEN, changes[how]) if how in changes else {},
    )
    if how == "no mod":
        loop.apps = {node: app_that_takes_the_bound(SIZE) for node in TEN}
    strategy = UpdateClipStrategy(FedAvg(), NOISE)
    with pytest.raises(RuntimeError, match="of the round can be used"):
        loop.run(strategy, ZEROS, 5)
    assert len(loop.asked) == 1


@pytest.mark.parametrize("name", ["bn.running_var", "bn/moving_mean:0", "batch_stats/bn/var"])
def test_noise_on_running_statistics_is_refused_before_the_first_message(name: str) -> None:
    loop, model = Loop(TEN, directions(NORMS)), {**ZEROS, name: np.ones(3)}
    with pytest.raises(ValueError, match=f"{name}.*Keep them at the clients.*use a layer without"):
        loop.run(UpdateClipStrategy(FedAvg(), NOISE), model, 1)
    assert loop.asked == []
    loop.run(UpdateClipStrategy(FedAvg(), {}), model, 1)


def test_momentum_is_the_strategys_own() -> None:
    loop = Loop(TEN, lambda node, round_: {"w": np.full(SIZE, 0.1)})
    fixed = {"start_norm": 10.0, "learning_rate": 0.0}
    strategy = UpdateClipStrategy(FedAvgM(server_momentum=0.5), fixed)
    model, _ = loop.run(strategy, ZEROS, 3)
    np.testing.assert_allclose(model["w"], -0.1 * (1 + 1.5 + 1.75))


class Mine(flower.Krum):  # type: ignore[misc]
    """A strategy of an app's own."""


class Holds(FedAvg):  # type: ignore[misc]
    """A strategy around another one."""

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

    with caplog.at_level(logging.WARNING, "flwr"):
        UpdateClipStrategy(Own(), {})
    assert "Own.aggregate_train gets the averaged model as each reply" in caplog.text


@pytest.mark.parametrize("folder", ["result", "", "../result"])
def test_a_folder_that_depends_on_where_a_server_starts_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="folder must be an absolute path on the server"):
        UpdateClipStrategy(FedAvg(), {}, folder=folder)


@pytest.mark.parametrize(("settings", "warned"), [(NOISE, True), ({}, False)])
def test_noise_without_a_folder_is_warned_of(settings: Any, warned: bool, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        UpdateClipStrategy(FedAvg(), settings)
    assert ("noise without a folder" in caplog.text) == warned


def test_the_older_api_gets_a_sentence() -> None:
    strategy = UpdateClipStrategy(FedAvg(), {})
    with pytest.raises(RuntimeError, match=r"older API: .* with @app\.main"):
        LegacyServer(client_manager=SimpleClientManager(), strategy=strategy).fit(1, 1.0)


@pytest.mark.parametrize(
    ("made", "settings", "why"),
    [
        (lambda: QFedAvg(0.1), NOISE, "QFedAvg weighs by the clients' losses"),
        (lambda: flower.FedXgbBagging(), {}, "trees have no norm"),
        (lambda: legacy.FedAvg(), {}, r"got flwr\.server\.strategy\.fedavg\.FedAvg: .* older API"),
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
    config = {
        "num-server-rounds": 3,
        "update-clip.start-norm": 0.5,
        "update-clip.weights.17": 2.0,
        "update-clip.weights.18": 1.0,
    }
    strategy = UpdateClipStrategy.from_run_config(FedAvg(), config)
    assert strategy.server.bound.bound == 0.5
    assert strategy.server.closing.shares.table == {"17": 2.0, "18": 1.0}


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
    given = dict(
        UpdateClipStrategy(FedAvg(), {})
        .configure_train(1, record(ZEROS), ConfigRecord(), Loop([1, 2], directions(NORMS)))[0]
        .content
    )
    context = Context(1, 1, {}, RecordDict(), config)
    reply = UpdateClipMod()(Message(RecordDict(given), 1, "train"), context, failing)
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
