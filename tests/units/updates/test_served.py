# SPDX-License-Identifier: Apache-2.0
"""A server for any engine: flat messages, replies one by one, and a state that is in a file."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedclip.cli.privacy import read_spent
from fedclip.core.records import SERVED
from fedclip.errors import StateError
from fedclip.report import read_report
from fedclip.updates import protocol
from fedclip.updates.aggregation import ExactSum
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Reply, SentBound, bound_from, bound_to, reply_from, reply_to
from fedclip.updates.server import UpdateServer
from fedclip.updates.store import PersistentServer, client_of, read, server_of
from fedclip.updates.votes import is_vote, one_hot

MODEL, DEEP = {"w": np.zeros(3)}, "[" * 10**5
SEED: dict[str, Any] = {"generator": "insecure", "seed": 1}
NOISE = {"start_norm": 1.0, "noise_multiplier": 2.0, "expected_clients": 2, **SEED}
BANDED = {**NOISE, "separation": 3, "noise": "banded", "rounds": 9}


def rounds(served: PersistentServer, count: int) -> list[Any]:
    bins = one_hot(0.5, clipped=False)
    replies = [Reply({"w": np.full(3, 0.1)}, votes=1, within=1, bins=bins)] * 2
    return [
        [*served.close(replies, MODEL).average["w"], served.rounds[-1]["next_bound"]]
        for _ in range(count)
        if not served.open(protocol.Participation(3, 9)).stop
    ]


def test_a_reply_comes_through_and_one_that_can_not_be_counts_as_zeros() -> None:
    reply = Reply(MODEL, 1, 0, clipped=1, steps=5, sender="a", bins=one_hot(3.0, clipped=True))
    said = json.loads(json.dumps(reply_to(reply)))
    assert said["bin"] == 7
    assert reply_from(MODEL, said, "a") == reply
    # An older server names no bins, and gets none; an older client's vote has none.
    older = {k: v for k, v in bound_to(SentBound(1.0)).items() if k not in ("bins", "only_votes")}
    plain = reply_to(UpdateClient().clip({"w": np.array([3.0])}, bound_from(older), steps=1))
    assert "bin" not in plain
    assert is_vote(1, 0, reply_from({}, plain).bins)
    for wrong in (None, {}, 3, {**said, "votes": True}, {**said, "votes": 1.0}, {**said, "x": 1}):
        assert "the client has no update clipping" in reply_from(MODEL, wrong, "a").fault
    served = PersistentServer({"start_norm": 1.0})
    served.open()
    closed = served.close([reply_from(MODEL, {**said, "votes": 10**9}, "a")], MODEL)
    assert closed.record["share"] is None


@pytest.mark.parametrize("settings", [NOISE, BANDED, {"start_norm": 1.0}, {}])
def test_a_server_that_was_killed_goes_on(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = PersistentServer(settings, tmp_path / "whole")
    told = rounds(whole, 6)
    for part in (2, 2, 2):
        served = PersistentServer(settings, tmp_path / "parts")
        now = rounds(served, part)
        served.open(protocol.Participation(3, 9))  # a bound that was sent, and no replies
        del served
    kept = read(tmp_path / "parts" / SERVED)
    assert kept.rounds[-1]["round"] == 6
    assert (now == told[4:]) == (settings is not BANDED)
    # Each of three has sent a bound that nobody answered, or begun a schedule.
    spent = kept.rounds[-1]["epsilon"], whole.rounds[-1]["epsilon"]
    assert spent[0] > spent[1] if "seed" in settings else spent == (0.0, 0.0)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"settings": 1, "state": {}, "rounds": []}', "\0", DEEP]
)
def test_a_file_that_is_damaged_is_not_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / SERVED).write_text(text)
    with pytest.raises(StateError, match="damaged"):
        PersistentServer(NOISE, tmp_path)
    assert (tmp_path / SERVED).read_text() == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("bound", x) for x in (0.0, -1.0, float("nan"), float("inf"), "1", None, True)],
        *[("scope", x) for x in ("layers", "{}", "[", 3, None)],
        *[("adaptive", 1), ("private", None), ("steps", "no"), ("round", 0), ("round", 1.5)],
        *[("stop", None), ("stop", 0), ("fedclip", 1)],
    ],
)
def test_a_message_comes_through_and_one_that_can_not_be_is_refused(name: str, value: Any) -> None:
    for scope in ("global", ["a.*", "*"], {"head": 0.5, "*": 1.0}):
        sent = SentBound(0.25, False, True, scope, 7, "why", True)
        assert bound_from(json.loads(json.dumps(bound_to(sent)))) == sent
        assert all(isinstance(value, str | int | float | bool) for value in bound_to(sent).values())
    with pytest.raises(ValueError, match="not that of update clipping"):
        bound_from(bound_to(SentBound(1.0)) | {name: value})


def test_one_server_uses_a_folder_and_writes_before_it_releases(tmp_path: Path) -> None:
    served = PersistentServer(NOISE, tmp_path)
    with pytest.raises(OSError, match="give another federation another folder"):
        PersistentServer(NOISE, tmp_path)
    rounds(served, 1)
    (tmp_path / f"{SERVED}.new").mkdir()
    with pytest.raises(OSError, match=SERVED):
        rounds(served, 1)
    served.leave()
    # What was spent is not forgotten by settings without noise.
    with pytest.raises(StateError, match="has spent a privacy budget"):
        PersistentServer({"start_norm": 1.0}, tmp_path)


@pytest.mark.parametrize("settings", [NOISE, {"start_norm": 1.0}, {**NOISE, "learning_rate": 0.0}])
def test_reports_and_accounts_read_the_file(settings: dict[str, Any], tmp_path: Path) -> None:
    served = PersistentServer(settings, tmp_path / "server")
    rounds(served, 3)
    report = read_report(tmp_path)
    assert report.servers == {"server"}
    shown = [row.record for row in report.rows]
    assert [(r.limit, r.steps) for r in shown] == [(r["bound"], 2) for r in served.rounds]
    if settings.get("noise_multiplier"):
        (found,) = read_spent(tmp_path / "server" / SERVED)
        assert found.accountant.epsilon() == served.rounds[-1]["epsilon"] > 0
    else:
        assert "the last limit was" in report.in_words()[0]
        with pytest.raises(ValueError, match="shows no spent"):
            [*read_spent(tmp_path)]


@pytest.mark.parametrize("make", [server_of, client_of, PersistentServer])
def test_settings_and_folders_that_are_refused(make: Any, caplog: Any) -> None:
    with pytest.raises(TypeError, match="did you mean 'noise_multiplier'"):
        make({"noise_multiplyer": 1.0})
    for folder in ("result", "", "../result"):
        # Where a server starts would decide which ledger it reads.
        with pytest.raises(ValueError, match="folder must be an absolute path"):
            PersistentServer({}, folder)
    for settings in ({}, NOISE):
        assert "noise without a folder" not in caplog.text
        PersistentServer(settings)
    assert "noise without a folder" in caplog.text


# -- replies that are added as they arrive: one sum, whatever the order, in constant memory --------
WHOLE = {"w": np.zeros(4), "b": np.zeros(())}
TABLE = {name: 1.0 + i for i, name in enumerate("abcde")}
SETTINGS: dict[str, dict[str, Any]] = {
    "equal": {},
    "steps": {"weights": "steps", "max_steps": 50},
    "table": {"weights": TABLE},
    "capped": {"weights": TABLE, "max_share": 0.3},
    "arc": {"combine": "arc", "n_hostile": 1},
    "trimmed": {"combine": "trimmed", "n_hostile": 1},
    "noise": {"noise_multiplier": 1.0, "expected_clients": 5, **SEED},
}


def five_replies() -> list[Reply]:
    rng = np.random.default_rng(0)
    arrays = [{"w": rng.normal(size=4) / 4, "b": np.array(0.1)} for _ in range(5)]
    return [Reply(a, 1, 1, sender="abcde"[i], steps=3 + 20 * i) for i, a in enumerate(arrays)]


def server(kind: str) -> UpdateServer:
    return server_of({"start_norm": 2.0, "learning_rate": 0.0, **SETTINGS[kind]})


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_comes_twice_late_or_broken_changes_nothing(kind: str) -> None:
    """Nor does the order: adding is closing with all at once."""
    one, other = server(kind), server(kind)
    one.open()
    expected = one.close(five_replies(), WHOLE)
    with pytest.raises(RuntimeError, match="no round is open"):
        other.add(five_replies()[0], WHOLE)
    other.open()
    for reply in reversed(five_replies()):
        assert other.add(reply, WHOLE) == ""
        again = Reply({"w": np.full(4, 0.9), "b": np.array(0.0)}, 1, 0, sender=reply.sender)
        assert other.add(again, WHOLE) == "its sender has replied already"
    found = other.close()
    assert {**found.record, "epsilon": 0, "refused": 0} == {**expected.record, "epsilon": 0}
    assert found.record["refused"] == 5
    for name, array in expected.average.items():
        np.testing.assert_allclose(found.average[name], array, rtol=0, atol=1e-15)
    with pytest.raises(RuntimeError, match="no round is open"):
        other.add(five_replies()[0], WHOLE)
    assert bool(one.aggregation.holds) == (kind in ("capped", "arc", "trimmed"))


def test_a_reply_that_breaks_half_way_counts_as_zeros() -> None:
    """Its first tensor is not in the sum, and the round goes on."""
    found = server("equal")
    found.open()
    found.add(five_replies()[0], WHOLE)
    # An array whose values cannot be read.
    broken: Any = SimpleNamespace(shape=(), dtype=np.dtype(float))
    assert found.add(Reply({"w": np.full(4, 0.5), "b": broken}, sender="z"), WHOLE)
    closed = found.close()
    np.testing.assert_allclose(closed.average["w"], np.asarray(five_replies()[0].arrays["w"]) / 2)
    assert [bool(fault) for fault in closed.faults] == [False, True]


def test_a_round_that_is_not_closed_is_discarded(tmp_path: Path) -> None:
    """Its sum is in no state, in no file, and not in the next round."""
    kept = PersistentServer({"start_norm": 2.0}, tmp_path)
    kept.open()
    before = json.dumps(kept.server.get_state())
    file = kept.path.read_bytes()
    kept.add(five_replies()[0], WHOLE)
    assert json.dumps(kept.server.get_state()) == before
    assert kept.path.read_bytes() == file
    kept.open()
    kept.add(five_replies()[1], WHOLE)
    closed = kept.close()
    assert closed.record["replies"] == 1
    np.testing.assert_array_equal(closed.average["w"], five_replies()[1].arrays["w"])
    kept.leave()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_in_any_order_are_the_same_to_1e_15(dtype: str) -> None:
    """Of a thousand positive terms over ten magnitudes, where plain sums are off by more."""
    rng = np.random.default_rng(1)
    rows = (10.0 ** rng.uniform(-4 if dtype == "float16" else -10, 0, (1000, 20))).astype(dtype)
    sums = []
    for order in (np.arange(1000), np.arange(1000)[::-1], rng.permutation(1000)):
        total = ExactSum()
        for i in order:
            total.add({"w": rows[i]}, 1 / 3)
        sums.append(total.divided(1.0)["w"])
    absolute = np.abs(rows.astype(float)).sum(axis=0) / 3
    for one in sums:
        assert np.max(np.abs(one - sums[0]) / absolute) <= 1e-15


def test_a_round_holds_two_arrays_of_the_models_size() -> None:
    values, clients = 20_000, 200
    found = UpdateServer(AdaptiveBound(1.0))
    model, rng = {"w": np.zeros(values, np.float32)}, np.random.default_rng(0)
    found.open()
    total = np.zeros(values)
    tracemalloc.start()
    try:
        for i in range(clients):
            update = rng.standard_normal(values).astype(np.float32) * np.float32(1e-3)
            found.add(Reply({"w": update}, 1, 1, sender=f"c{i}"), model)
            total += update
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two in float64, one reply, and pieces.
    assert peak < 8 * 8 * values
    np.testing.assert_allclose(found.close().average["w"], total / clients, rtol=1e-6)
