# SPDX-License-Identifier: Apache-2.0
"""NVFlare: rounds of update clipping by its own types, beside the same rounds of the core."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.fl_model import ParamsType
from nvflare_rounds import Federation, contexts, result, task

from fedclip.engines.nvflare import ClipUpdate, CloseRound, ReceiveBound, SendBound
from fedclip.engines.nvflare.clipping import KEY
from fedclip.updates.store import client_of, server_of

NOISE = {"noise_multiplier": 1.0, "expected_clients": 9}
REPEATED = {"generator": "insecure", "seed": 1}

pytestmark = pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning")


def updates(round_: int, clients: int = 9) -> dict[str, dict[str, Any]]:
    """Return updates of lengths around 1, by the names of clients."""
    rng = np.random.default_rng(round_)
    lengths = rng.lognormal(0.0, 0.3, size=clients)
    rows = rng.normal(size=(clients, 12))
    rows *= (lengths / np.linalg.norm(rows, axis=1))[:, None]
    both = ({"a": row[:4], "b": row[4:].astype("f4")} for row in rows)
    return {f"site-{i}": update for i, update in enumerate(both, 1)}


@pytest.mark.parametrize(
    "settings",
    [
        {"start_norm": 0.1},
        {"start_norm": 10.0},
        {},
        {"start_norm": 1.0, "weights": "steps", "max_share": 0.3},
        {"start_norm": 1.0, "weights": {f"site-{i}": i for i in range(1, 10)}},
        {"start_norm": 1.0, "combine": "arc", "n_hostile": 2},
        {"start_norm": 1.0, "combine": "trimmed", "n_hostile": 2},
        {"start_norm": 1.0, "scope": "layer"},
        {"start_norm": 1.0, "exclude": ["b"]},
        {"start_norm": 1.0, **NOISE, **REPEATED},
        # The first round only counts votes.
        {"bits_noise": 0.6, **NOISE, **REPEATED},
    ],
    ids=str,
)
def test_rounds_are_those_of_the_core(settings: dict[str, Any], tmp_path: Path) -> None:
    ours = Federation(tmp_path, **settings)
    server, clients = server_of(settings), {}
    for round_ in range(12):
        given = updates(round_)
        steps = {name: 1 + i for i, name in enumerate(given)}
        sent = server.open()
        replies = []
        for name, update in sorted(given.items()):
            client = clients.setdefault(name, client_of(settings))
            reply = client.clip(update, sent, steps=steps[name])
            replies.append(reply.__class__(**{**vars(reply), "sender": name}))
        closed = server.close(replies, like=given["site-1"])
        # They arrive in another order.
        found = ours.round(dict(reversed(given.items())), steps)
        assert found.params_type == ParamsType.DIFF
        assert ours.rounds[-1] == closed.record
        for name, array in closed.average.items():
            np.testing.assert_allclose(found.params[name], array, rtol=1e-6, atol=1e-15)
            assert found.params[name].dtype == given["site-1"][name].dtype
        assert closed.record["withheld"] == (round_ == 0 and "bits_noise" in settings)
        states = ours.closing._served.server.get_state(), server.get_state()
        of_ours, of_core = ({**state, "ledger": ""} for state in states)
        assert of_ours == of_core


@pytest.mark.parametrize("kind", [DataKind.WEIGHT_DIFF, DataKind.WEIGHTS])
def test_a_missing_filter_is_zero_and_is_named(kind: str, tmp_path: Path, caplog: Any) -> None:
    ours = Federation(tmp_path, start_norm=1.0)
    ours.closing.reset_stats()
    for name in ("site-1", "site-2"):
        sent = ours.asked(name, {"w": np.zeros(2)})
        reply = ours.replied(name, {"w": np.array([0.3, 0.4])}, sent)
        if name == "site-2":
            reply = result({"w": np.array([0.3, 0.4])}, kind)
        ours.arrives(name, reply)
    average = ours.closing.aggregate_model().params["w"]
    np.testing.assert_allclose(average, [0.15, 0.2], rtol=1e-6)
    assert "'site-2' counts as zero: it says nothing that update clipping does" in caplog.text


@pytest.mark.parametrize(
    ("array", "averaged"),
    [
        (np.array([math.nan, 1.0]), [0.0, 0.0]),
        (np.zeros(2), [0.0, 0.0]),
        (np.array([3.0, 4.0], "f2"), [0.6, 0.8]),
        (np.array([3.0, 4.0], "f4"), [0.6, 0.8]),
        (np.float64(-5.0), -1.0),
    ],
    ids=str,
)
def test_every_dtype_and_what_is_not_finite(array: Any, averaged: Any, tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=1.0)
    average = np.asarray(ours.round({"site-1": {"w": array}}).params["w"])
    assert average.dtype == array.dtype
    np.testing.assert_allclose(average, averaged, rtol=2e-3)
    assert np.linalg.norm(average.astype("f8")) <= 1.0
    assert ours.rounds[0]["zeroed"] == (not np.isfinite(array).all())
    # Zeros after some steps are an update; what is not finite has no norm.
    assert (ours.rounds[0]["share"] is None) == ours.rounds[0]["zeroed"]


def test_integers_are_averaged_as_integers(tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=1.0, exclude=["seen"])
    given = {f"site-{n}": {"w": np.ones(2), "seen": np.array(n)} for n in (1, 2, 6)}
    average = ours.round(given).params
    assert average["seen"].dtype == given["site-1"]["seen"].dtype
    assert average["seen"] == 3


def test_nobody_sees_votes(tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=1.0)
    context = contexts("site-1").new_context()
    ours.closing.reset_stats()
    received = ReceiveBound().process(ours.asked("site-1", {"w": np.zeros(2)}), context)
    assert from_shareable(received).meta == {}
    assert KEY not in context.get_all_public_props()
    update = result({"w": np.ones(2)}, **{MetaKey.INITIAL_METRICS: {"accuracy": 0.5}})
    ours.arrives("site-1", ClipUpdate(ours.settings).process(update, context))
    published = ours.closing.aggregate_model()
    assert not published.meta
    assert published.metrics is None
    # Nor, with noise, how many have replied.
    for more in ({}, {**NOISE, "expected_clients": 1}):
        ours = Federation(tmp_path / str(len(more)), start_norm=1.0, **more)
        ours.closing.reset_stats()
        received = ours.asked("site-1", {"w": np.zeros(2)}, nr_aggregated=3)
        assert ("nr_aggregated" in from_shareable(received).meta) == (not more)


def test_what_comes_without_its_bound_or_whole_is_refused_and_errors_pass(tmp_path: Path) -> None:
    ours, manager = Federation(tmp_path, start_norm=1.0), contexts("site-1")
    clip, update, context = ClipUpdate({}), result({"w": np.ones(2)}), manager.new_context()
    ours.closing.reset_stats()
    ReceiveBound().process(ours.asked("site-1", {"w": np.zeros(2)}), context)
    with pytest.raises(ValueError, match="no bound has arrived with this task"):
        clip.process(update, manager.new_context())
    with pytest.raises(ValueError, match="make the job by add_update_clipping"):
        ReceiveBound().process(task({"w": np.zeros(2)}), manager.new_context())
    with pytest.raises(ValueError, match=r"params_transfer_type=TransferType\.DIFF"):
        clip.process(result({"w": np.ones(2)}, DataKind.WEIGHTS), context)
    error = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert clip.process(error, context) is error
    with pytest.raises(RuntimeError, match="CloseRound is not the aggregator"):
        SendBound().process(task({"w": np.zeros(2)}), contexts("server").new_context())
    with pytest.raises(RuntimeError, match="no round is open"):
        CloseRound({}, str(tmp_path)).sent_to("site-1", {})


def test_a_spent_budget_ends_the_job_in_good_order(tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=1.0, **NOISE, max_epsilon=8.0)
    ours.round(updates(0))
    # What asks for a task in the last moment gets none.
    with pytest.raises(RuntimeError, match="the privacy budget is spent"):
        list(map(ours.round, map(updates, range(100))))
    assert ours.aborted.triggered
    assert 0 < ours.rounds[-1]["epsilon"] <= 8.0
    assert ours.closing.aggregate_model().params == {}


def test_noise_for_more_clients_than_were_asked_is_refused(tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=1.0, **NOISE)
    with pytest.raises(RuntimeError, match=r"2 clients were asked.*expected_clients=9"):
        ours.round(updates(0, clients=2))
    # One that was asked may be silent.
    ours.closing.reset_stats()
    given = updates(0)
    for name, update in given.items():
        sent = ours.asked(name, {k: 0 * v for k, v in update.items()})
        if name != "site-9":
            ours.arrives(name, ours.replied(name, update, sent))
    assert ours.closing.aggregate_model().params


def test_noise_on_running_statistics_ends_the_job_before_the_first_task(tmp_path: Path) -> None:
    model = {"w": np.zeros(2), "bn.running_mean": np.ones(2)}
    clear = Federation(tmp_path / "clear", start_norm=1.0)
    noised = Federation(tmp_path / "noised", start_norm=1.0, **NOISE)
    for ours in (clear, noised):
        ours.closing.reset_stats()
    clear.asked("site-1", model)
    with pytest.raises(RuntimeError, match=r"the job ends: .*bn\.running_mean.* at the clients"):
        noised.asked("site-1", model)
    assert noised.aborted.triggered


def test_without_a_folder_the_jobs_is_taken(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    ours = Federation(tmp_path, start_norm=1.0, **NOISE)
    ours.closing.folder = None
    monkeypatch.setattr(ours.closing, "_run", lambda: tmp_path)
    ours.closing.reset_stats()
    assert "noise without a folder" in caplog.text
    assert ours.closing._served.path.parent == tmp_path
