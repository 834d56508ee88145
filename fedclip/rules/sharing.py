# SPDX-License-Identifier: Apache-2.0
"""The protocol of rules that share one state in a whole federation.

During a round every client judges by the state of the round's start, and only counts its norms.
Between two rounds the server updates the state with the counts of all clients::

    limits, seen = rule.judge(norms, state)        each step of each client
    state        = rule.merge(state, counted)      once a round, on the server

The result does not depend on the order of the norms in a round, which the server does not know. A
round with a single norm changes the state as that norm would on a single machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import Basis, Judgement, State
from fedclip.rules.start import Start

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Sketched(Protocol):
    """The norms of a whole federation, as a sketch."""

    def quantile(self, p: float) -> float:
        """Return a quantile of the norms."""

    def deviation(self, p: float, centre: float) -> float:
        """Return a quantile of the distances of the norms from a centre."""


class Counted(NamedTuple):
    """The counts of all clients in one round; one number for each group."""

    n: Floats
    """Number of norms that were learnt."""
    mean: Floats
    variance: Floats
    """Mean and population variance of the round, for rules that count "moments"."""
    levels: Floats
    """The rule's `levels` of the history, this round included: one row for each number."""
    unclipped: Floats
    """Number of norms of at most the limit, for rules that count "bits"."""


class Shareable(Protocol):
    """A rule that can update its state from counts."""

    @property
    def counters(self) -> tuple[str, ...]:
        """What the clients count: some of "moments", "sketch" and "bits"."""

    @property
    def basis(self) -> Basis:
        """Where the limits come from."""

    def shared(self) -> Shareable:
        """Return the rule for clients, which judges by the server's state."""

    @property
    def remembered(self) -> int | None:
        """Least number of norms in the sketch; None for all."""

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        """Return the numbers that `merge` needs from the history, for rules with a "sketch"."""

    @property
    def start(self) -> Start | None:
        """The protection of groups that are not ready, on each client separately."""

    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first round."""

    def judge(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Judgement:
        """Return the limits, and what the statistics should learn; `start` protects the rest."""

    def merge(self, state: State, counted: Counted) -> State:
        """Return the state after a round; only groups with ``n > 0`` are used."""

    def ceiling(self, state: State) -> Floats:
        """Return the largest norm that a client can have learnt; infinity if there is no bound."""


def pooled(
    count: Floats, mean: Floats, variance: Floats, counted: Counted, least: Floats | float = 0.0
) -> tuple[Floats, Floats, Floats]:
    """Return count, mean and population variance of two sets of norms together.

    The weight of the second set is its share of all norms, but at least `least`.

    Chan, Golub & LeVeque, 1983, "Algorithms for computing the sample variance".
    """
    total = np.maximum(count + counted.n, 1.0)
    share = np.maximum(counted.n / total, least)
    delta = counted.mean - mean
    within = variance + share * (counted.variance - variance)
    return total, mean + share * delta, within + share * (1.0 - share) * delta * delta
