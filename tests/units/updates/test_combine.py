# SPDX-License-Identifier: Apache-2.0
"""A mean that resists hostile clients: ARC and the trimmed mean, after the clip of each update."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.communication import NetworkServerConfig
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector
from federation_helpers import Server, norm
from helpers import each_framework
from laws.test_dtype_shape import ROWS, VALUES, sparse

from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipVotes
from fedclip.testing import to_numpy, to_vector
from fedclip.updates import aggregation as trimmed
from fedclip.updates.aggregation import Combining, trimmed_mean
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import RoundResult
from fedclip.updates.server import UpdateServer

KINDS = ("arc", "trimmed")
ARC = {"combine": "arc", "n_hostile": 1}
CONFIG = {"name": "clipped-averaging", **ARC}

pytestmark = pytest.mark.usefixtures("no_round_left_open")


def by_hand(kind: str, rows: np.ndarray, f: int) -> np.ndarray:
    n = len(rows)
    if kind == "trimmed":
        return np.asarray(np.sort(rows, axis=0)[f : n - f].mean(axis=0))
    norms, rows = np.linalg.norm(rows, axis=1), rows.copy()
    longest = np.argsort(-norms, kind="stable")
    k = math.floor(2 * f * (n - f) / n)
    for i in longest[:k]:
        rows[i] *= norms[longest[k]] / (norms[i] or 1.0)
    return np.asarray(rows.mean(axis=0))


def random_rows(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return updates within 1, with zeros and ties among them, and how many are hostile."""
    n = int(rng.integers(3, 12))
    rows = rng.normal(size=(n, 5)) * rng.lognormal(0, 2, size=(n, 1))
    rows[rng.random(n) < 0.2] = 0.0
    rows[rng.random(n) < 0.2] = rows[0]
    rows[:, rng.random(5) < 0.2] = 0.25
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
    return rows, int(rng.integers(1, (n + 1) // 2))


def combined(kind: str, rows: np.ndarray, f: int) -> np.ndarray:
    updates = [{"w": row} for row in rows]
    return np.asarray(Combining(kind, f).of(updates, len(rows), [1.0] * len(rows), len(rows))["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_what_their_papers_say(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows, f = random_rows(rng)
        np.testing.assert_allclose(combined(kind, rows, f), by_hand(kind, rows, f), atol=1e-15)
        # Of a trimmed mean, no coordinate is beyond those of the others.
        rows[:f] *= 1e6 * rng.normal(size=(f, 5))
        found = combined(kind, rows, f)
        assert kind == "arc" or (found <= rows[f:].max(axis=0) + 1e-12).all()
        assert kind == "arc" or (found >= rows[f:].min(axis=0) - 1e-12).all()


@each_framework()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_of_each_framework_and_dtype(framework: str, dtype: str, monkeypatch: Any) -> None:
    if (framework, dtype) == ("numpy", "bfloat16"):
        pytest.skip("NumPy has no bfloat16")
    monkeypatch.setattr(trimmed, "_TABLE", 35)  # seven coordinates at a time
    rng = np.random.default_rng(1)
    given = [
        to_vector({"w": rng.normal(size=(3, 4, 5)), "b": rng.normal(), "e": np.zeros(0)}, *kind)
        for kind in [(framework, dtype)] * 4 + [(framework, "float32")]
    ]
    values = [to_numpy(vector) for vector in given]
    for kind in KINDS:
        found = Combining(kind, 1).of([v.coefs for v in given], 5, [1.0] * 5, 5)
        rows = np.stack([np.append(v["w"].ravel(), v["b"]).astype(float) for v in values])
        right = by_hand(kind, rows, 1)
        assert {name: mean.dtype for name, mean in found.items()} == dict.fromkeys("wbe", float)
        np.testing.assert_allclose(found["w"], right[:-1].reshape(3, 4, 5), rtol=1e-12)
        np.testing.assert_allclose(found["b"], right[-1], rtol=1e-12)
    if framework in ("torch", "tensorflow"):
        dense = np.zeros((5, 2))
        np.add.at(dense, ROWS, VALUES)
        (mean,) = trimmed_mean([sparse(framework, ROWS, VALUES).coefs] * 4, 5, 1).values()
        np.testing.assert_allclose(mean, dense)


def pull(kind: str, n: int, f: int) -> float:
    return float(eval(Combining(kind, f).pull, {"n": n}))


@pytest.mark.parametrize("kind", KINDS)
def test_no_client_moves_it_by_more_than_is_said(kind: str) -> None:
    """Against zeros in its place; all updates are within a bound of 1."""
    rng = np.random.default_rng(4)
    for _ in range(150):
        rows, f = random_rows(rng)
        without = rows.copy()
        without[0] = 0.0
        moved = np.linalg.norm(combined(kind, rows, f) - combined(kind, without, f))
        assert moved <= pull(kind, len(rows), f) * (1 + 1e-12)
        length, most = np.linalg.norm(combined(kind, rows, f)), len(rows) / (len(rows) - f)
        assert length <= (math.sqrt(most) if kind == "trimmed" else 1.0) * (1 + 1e-12)


def test_what_is_said_is_reached() -> None:
    one, none = [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for kind, others in (("arc", [one, none, none]), ("trimmed", [one, none])):
        rows = np.array([one, *others])
        moved = combined(kind, rows, 1) - combined(kind, np.array([none, *others]), 1)
        assert moved[0] == pytest.approx(pull(kind, len(rows), 1))
    pairs = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]) / math.sqrt(2)
    assert np.linalg.norm(combined("trimmed", pairs, 1)) == pytest.approx(math.sqrt(3 / 2))


def closed(kind: str, updates: list[Any], f: int = 1, **changes: Any) -> RoundResult:
    """Return a round of the core in which the first reply has other fields."""
    server = UpdateServer(AdaptiveBound(1.0), combining=Combining(kind, f))
    sent, client = server.open(), UpdateClient()
    replies = [client.clip({"w": np.array(row)}, sent, steps=1) for row in updates]
    replies[0] = replace(replies[0], **changes)
    return server.close(replies, {"w": np.zeros(2)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_of_too_few_and_a_secure_sum_say_so(kind: str, caplog: Any) -> None:
    found = closed(kind, [[1.0, 0.0]] * 4, f=2)
    assert found.average["w"].tolist() == [0.0, 0.0]
    assert len(set(found.faults)) == 1
    assert "n_hostile = 2 needs more than 4 replies in a round, and there are 4" in found.faults[0]
    assert f"counts as zero: combine = {kind!r} with n_hostile = 2 needs more" in caplog.text
    with pytest.raises(ValueError, match="secure aggregation: the server sees the sum"):
        closed(kind, [[1.0, 0.0]] * 4, clients=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [math.nan, 1e6])
def test_a_refused_reply_counts_as_zeros(kind: str, fault: float) -> None:
    rows = [[0.0, 0.0], *([x / 10, 0.0] for x in range(2, 9))]
    found = closed(kind, rows, f=2, arrays={"w": np.array([0.0, fault])})
    assert [bool(why) for why in found.faults] == [True] + [False] * 7
    np.testing.assert_allclose(found.average["w"], by_hand(kind, np.array(rows), 2), atol=1e-6)


@pytest.mark.parametrize("modules", [["update-clip-server"], []])
def test_a_secure_sum_that_comes_all_the_same_counts_as_zeros(modules: Any, caplog: Any) -> None:
    server = Server(modules, CONFIG | ({} if modules else {"max_norm": 1.0}))
    server.start()
    total = ClippedUpdates(NumpyVector({"w": np.ones(2) / 9}), 4, 4)
    aux = {"update-clip": UpdateClipVotes(4, 4, 1)} if modules else {}
    assert norm(server.finish([TrainReply(1, 1, 0.0, total, aux)])) == 0.0
    assert "counts as zero: combine = 'arc' does not go with secure aggregation" in caplog.text
    if modules:
        assert "does not go with secure aggregation" in server.start()["update-clip"].stop


@pytest.mark.filterwarnings("ignore:Argument 'logger'")
@pytest.mark.parametrize(
    ("secagg", "aggregator", "text"),
    [
        ({}, ARC, "does not go with secure aggregation"),
        (None, {**ARC, "n_hostile": 2}, "needs more than 4 replies in a round, and there are 3"),
        (None, {"weights": {"a": 1.0}}, "weights of clipped-averaging does not name 'b', 'c'"),
        ({}, {"weights": "steps"}, "needs max_steps"),
    ],
)
def test_a_server_refuses_before_the_first_round(secagg: Any, aggregator: Any, text: str) -> None:
    network: Any = NetworkServerConfig("fedclip-websockets", "127.0.0.1", 8765).build_server()
    network.handler.registered_clients |= {name: name for name in "abc"}
    within = Aggregator.from_config({"name": "clipped-averaging", "max_norm": 1.0, **aggregator})
    with pytest.raises(RuntimeError, match=text):
        network._begin(SimpleNamespace(secagg=secagg, metrics=[], fairness=False, aggrg=within))
