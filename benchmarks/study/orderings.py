# SPDX-License-Identifier: Apache-2.0
"""Published comparisons, small: do they come out in the same order here.

=============  ====================================================================================
noise left     The noise in the model over 100 rounds, by rounds between a client's turns
               (participation of banded matrix factorizations, arXiv:2306.08153). Score: its root
               mean square, in bounds, for epsilon 2.
attack         Figure 1 of ARC (arXiv:2405.14432): ten honest sites with a digit each, and three
               hostile ones that send the mean gradient with its sign turned, or with labels l as
               9 - l; gradient descent by all records, the trimmed mean after nearest-neighbour
               mixing. Score: accuracy.
spikes         ZClip (arXiv:2504.02507): one gradient in a hundred × 1000. Score: the rounds of 15
               after which the loss on the test records is more than a tenth above the least so far.
=============  ====================================================================================
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import turns
from benchmarks.study.cells import Field, Job, Mechanism
from benchmarks.study.scenes import SOURCES, Scene
from fedclip import ZScoreClip
from fedclip.privacy.accounting import noise_multiplier
from fedclip.updates.aggregation import arc_factors, trimmed_mean
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Participation
from fedclip.updates.server import UpdateServer

Array = np.ndarray[Any, Any]

SEPARATIONS = {f"noise left {b}": b for b in (2, 5, 10, 100)}
VALUES, PER_ROUND = 500, 2


def noise_left(job: Job) -> list[float]:
    """Return the root mean square of the noise in the model of a job's mechanisms."""
    b, client, found = SEPARATIONS[job.trouble], UpdateClient(), []
    for name, _ in job.wanted:
        banded = {"noise": "banded", "rounds": turns.ROUNDS} if name == "banded" else {}
        settings: dict[str, Any] = {"separation": b, "seed": job.seed, **banded}
        z = noise_multiplier(2.0, 1e-3, -(-turns.ROUNDS // b))
        server = UpdateServer(
            AdaptiveBound(
                start_norm=1.0,
                learning_rate=0.0,
                noise_multiplier=z,
                expected_clients=PER_ROUND,
                generator="insecure",
                **settings,
            )
        )
        zeros, rounds = {"w": np.zeros(VALUES)}, []
        for _ in range(turns.ROUNDS):
            sent = server.open(Participation(b, b * PER_ROUND))
            replies = [client.clip(zeros, sent, steps=1) for _ in range(PER_ROUND)]
            rounds.append(server.close(replies, like=zeros).average["w"])
        found.append(float(np.sqrt((np.cumsum(rounds, axis=0) ** 2).mean())))
    return found


ATTACKS = ("attack signs", "attack labels")
HOSTILE, DESCENTS, RATE, STATIC = 3, 100, 0.5, 2.0


def attacked(job: Job) -> list[float]:
    """Return the accuracy of a job's mechanisms."""
    x, labels = _digits(job.data)
    order = np.random.default_rng(job.seed).permutation(len(labels))
    tested, used = np.split(order, [len(order) * 3 // 10])
    sites = [used[labels[used] == digit] for digit in range(10)]
    found = []
    for name, _ in job.wanted:
        weights = np.zeros((x.shape[1], 10))
        for _ in range(DESCENTS):
            honest = [_gradient(x[rows], labels[rows], weights) for rows in sites]
            if job.trouble == ATTACKS[0]:
                sent = -np.mean(honest, axis=0)
            else:
                sent = np.mean(
                    [_gradient(x[rows], 9 - labels[rows], weights) for rows in sites], axis=0
                )
            weights = weights - RATE * MECHANISMS[name].made([*honest, *[sent] * HOSTILE])
        right = np.argmax(x[tested] @ weights, axis=1) == labels[tested]
        found.append(float(right.mean()))
    return found


@cache
def _digits(data: str) -> tuple[Array, Array]:
    task = {"digits": turns.digits, "mnist": turns.mnist}[data]()
    return task.records, task.labels


def _gradient(x: Array, labels: Array, weights: Array) -> Array:
    scores = x @ weights
    share = np.exp(scores - scores.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    return np.asarray(x.T @ (share - np.eye(10)[labels]) / len(labels))


def _trimmed(updates: list[Array]) -> Array:
    whole = trimmed_mean([{"w": update} for update in updates], len(updates), HOSTILE)
    return np.asarray(whole["w"])


def _mixed(updates: list[Array]) -> Array:
    """Return the trimmed mean after each has become the mean of those nearest to it."""
    rows = np.stack([update.ravel() for update in updates])
    far = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    near = np.argsort(far, axis=1)[:, : len(rows) - HOSTILE]
    return _trimmed([mean.reshape(updates[0].shape) for mean in rows[near].mean(axis=1)])


def _clipped(updates: list[Array], static: float | None) -> list[Array]:
    norms = [float(np.linalg.norm(update)) for update in updates]
    factors = arc_factors(norms, HOSTILE)
    if static:
        factors = [min(1.0, static / norm) for norm in norms]
    return [factor * update for factor, update in zip(factors, updates, strict=True)]


Combined = Callable[[list[Array]], Array]


def _after(static: float | None, combined: Combined) -> Combined:
    return lambda updates: combined(_clipped(updates, static))


def _fixed(limit: float) -> Callable[[], dict[str, Any]]:
    return lambda: {"modules": [["norm-clip", {"max_norm": limit}]]}


def _published(**more: Any) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        config = ZScoreClip.preset("zclip").get_config() | more
        return {"modules": [["zscore-clip", config]]}

    return made


MECHANISMS: Mapping[str, Mechanism] = {
    "independent": Mechanism(None, tuned=False),
    "banded": Mechanism(None, tuned=False),
    "no clipping": Mechanism(_mixed, tuned=False),
    "static 2": Mechanism(_after(STATIC, _mixed), tuned=False),
    "arc": Mechanism(_after(None, _mixed), tuned=False),
    "arc, plain mean": Mechanism(
        _after(None, lambda updates: np.mean(updates, axis=0)), tuned=False
    ),
    "trimmed mean alone": Mechanism(_trimmed, tuned=False),
    "none": Mechanism(dict, tuned=False),
    "fixed 1": Mechanism(_fixed(1.0), tuned=False),
    "zclip": Mechanism(_published(), tuned=False),
    "zclip, no fixed limit": Mechanism(_published(max_norm=None), tuned=False),
    "zscore-clip": Mechanism(lambda: {"modules": ["zscore-clip"]}, tuned=False),
}


def spikes(job: Job) -> list[float]:
    """Return how many rounds of each mechanism of a job end far above the least loss so far."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), job.data, "bursts", job.seed)
        for name, _ in job.wanted:
            losses = [loss for loss, _ in scene.losses({"client_opt": MECHANISMS[name].made()})]
            least = np.minimum.accumulate(losses)
            found.append(float(np.sum(np.asarray(losses) > 1.1 * least)))
    return found


def _only(*names: str) -> dict[str, Mechanism]:
    return {name: MECHANISMS[name] for name in names}


ARC = ("no clipping", "static 2", "arc", "arc, plain mean", "trimmed mean alone")
SPIKES = ("none", "fixed 1", "zclip", "zclip, no fixed limit", "zscore-clip")
FIELDS = (
    Field(tuple((b, "zeros") for b in SEPARATIONS), _only("independent", "banded"), noise_left),
    Field(tuple(("spikes", data) for data in SOURCES), _only(*SPIKES), spikes),
    Field(tuple((a, d) for a in ATTACKS for d in ("digits", "mnist")), _only(*ARC), attacked),
)
