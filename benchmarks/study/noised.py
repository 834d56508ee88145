# SPDX-License-Identifier: Apache-2.0
"""Updates of many small clients, averaged with central noise: what a budget leaves of a model.

The digits of `benchmarks.turns`: 300 clients of five records, 60 a round, 100 rounds, delta 1e-3.
The scale of all is the rate of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks import turns
from benchmarks.study.cells import Field, Job, Mechanism
from fedclip.privacy.accounting import noise_multiplier
from fedclip.privacy.planning import plan
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.server import UpdateServer

EPSILONS = {"noise epsilon 2": 2.0, "noise epsilon 8": 8.0}
SLOW, SLOWER = "adaptive, every round, rate / 8", 1 / 8
"""The best rate of the adaptive bound is below the five."""
HOW = ("every round", "turns", "banded")

task = cache(turns.digits)


def _server(bound: float | str, how: str) -> Callable[[float, int], UpdateServer]:
    """Return what makes a server, for a budget and a seed: of a bound, fixed if it is a number."""

    def made(epsilon: float, seed: int) -> UpdateServer:
        of = task()
        apart = 1 if how == "every round" else -(-of.clients // of.per_round)
        settings: dict[str, Any] = {"start_norm": bound}
        z = noise_multiplier(epsilon, of.delta, -(-turns.ROUNDS // apart))
        if isinstance(bound, float):
            settings["learning_rate"] = 0.0
        elif apart > 1:
            clients = of.clients, of.per_round
            z = plan(
                epsilon, of.delta, turns.ROUNDS, clients[0], per_round=clients[1]
            ).noise_multiplier
        if how == "banded":
            settings |= {"noise": "banded", "rounds": turns.ROUNDS}
        return UpdateServer(
            AdaptiveBound(
                noise_multiplier=z,
                expected_clients=of.per_round,
                delta=of.delta,
                max_epsilon=epsilon,
                separation=apart,
                generator="insecure",
                seed=seed,
                **settings,
            )
        )

    return made


def _quiet(bound: float | str) -> Callable[[float, int], UpdateServer]:
    settings: dict[str, Any] = {"learning_rate": 0.0} if isinstance(bound, float) else {}
    return lambda _epsilon, _seed: UpdateServer(AdaptiveBound(start_norm=bound, **settings))


MECHANISMS: Mapping[str, Mechanism] = {
    "fixed 0.3, no noise": Mechanism(_quiet(0.3)),
    "fixed 0.1, every round": Mechanism(_server(0.1, "every round")),
    "fixed 1, every round": Mechanism(_server(1.0, "every round")),
    **{f"fixed 0.3, {how}": Mechanism(_server(0.3, how)) for how in HOW},
    **{f"adaptive, {how}": Mechanism(_server(None, how), default=True) for how in HOW},
    SLOW: Mechanism(_server(None, "every round")),
}


def run(job: Job) -> list[float]:
    """Return the accuracy of each mechanism of a job."""
    found = []
    for name, factor in job.wanted:
        server = MECHANISMS[name].made(EPSILONS[job.trouble], job.seed)
        rate = factor * (SLOWER if name == SLOW else 1.0)
        found.append(turns.accuracy(task(), server, rate, job.seed))
    return found


FIELD = Field(tuple((trouble, "digits") for trouble in EPSILONS), MECHANISMS, run)
