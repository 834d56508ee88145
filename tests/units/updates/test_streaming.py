# SPDX-License-Identifier: Apache-2.0
"""Replies that are added as they arrive: one sum, whatever the order, in constant memory."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedclip.updates.aggregation import ExactSum
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer
from fedclip.updates.store import PersistentServer, server_of

MODEL = {"w": np.zeros(4), "b": np.zeros(())}
TABLE = {name: 1.0 + i for i, name in enumerate("abcde")}
SETTINGS: dict[str, dict[str, Any]] = {
    "equal": {},
    "steps": {"weights": "steps", "max_steps": 50},
    "table": {"weights": TABLE},
    "capped": {"weights": TABLE, "max_share": 0.3},
    "arc": {"combine": "arc", "n_hostile": 1},
    "trimmed": {"combine": "trimmed", "n_hostile": 1},
    "noise": {"noise_multiplier": 1.0, "expected_clients": 5, "generator": "insecure", "seed": 1},
}


def replies() -> list[Reply]:
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
    expected = one.close(replies(), MODEL)
    with pytest.raises(RuntimeError, match="no round is open"):
        other.add(replies()[0], MODEL)
    other.open()
    for reply in reversed(replies()):
        assert other.add(reply, MODEL) == ""
        again = Reply({"w": np.full(4, 0.9), "b": np.array(0.0)}, 1, 0, sender=reply.sender)
        assert other.add(again, MODEL) == "its sender has replied already"
    found = other.close()
    assert {**found.record, "epsilon": 0, "refused": 0} == {**expected.record, "epsilon": 0}
    assert found.record["refused"] == 5
    for name, array in expected.average.items():
        np.testing.assert_allclose(found.average[name], array, rtol=0, atol=1e-15)
    with pytest.raises(RuntimeError, match="no round is open"):
        other.add(replies()[0], MODEL)
    assert bool(one.aggregation.holds) == (kind in ("capped", "arc", "trimmed"))


def test_a_reply_that_breaks_half_way_counts_as_zeros() -> None:
    """Its first tensor is not in the sum, and the round goes on."""
    found = server("equal")
    found.open()
    found.add(replies()[0], MODEL)
    # An array whose values cannot be read.
    broken: Any = SimpleNamespace(shape=(), dtype=np.dtype(float))
    assert found.add(Reply({"w": np.full(4, 0.5), "b": broken}, sender="z"), MODEL)
    closed = found.close()
    np.testing.assert_allclose(closed.average["w"], np.asarray(replies()[0].arrays["w"]) / 2)
    assert [bool(fault) for fault in closed.faults] == [False, True]


def test_a_round_that_is_not_closed_is_discarded(tmp_path: Path) -> None:
    """Its sum is in no state, in no file, and not in the next round."""
    kept = PersistentServer({"start_norm": 2.0}, tmp_path)
    kept.open()
    before = json.dumps(kept.server.get_state())
    file = kept.path.read_bytes()
    kept.add(replies()[0], MODEL)
    assert json.dumps(kept.server.get_state()) == before
    assert kept.path.read_bytes() == file
    kept.open()
    kept.add(replies()[1], MODEL)
    closed = kept.close()
    assert closed.record["replies"] == 1
    np.testing.assert_array_equal(closed.average["w"], replies()[1].arrays["w"])
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
