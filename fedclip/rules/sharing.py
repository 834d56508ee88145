# SPDX-License-Identifier: Apache-2.0
"""What a rule offers so that one state can serve a whole federation.

Within a round every client judges by the state of the round's start, and only counts what it
sees; between two rounds the state is moved on by what all of them counted together::

    limits, seen = rule.judge(norms, state)        each step of each client
    state        = rule.merge(state, counted)      once a round, on the server

The order in which the norms of a round came is not known, and nothing here depends on it. A
round of a single norm moves a state as that norm would have moved it on a single machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import Judgement, State
from fedclip.rules.start import Start

__all__ = ["Counted", "Floats", "Shareable", "Sketched", "pooled"]

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Sketched(Protocol):
    """Norms of a whole federation, as far as a sketch knows them."""

    def quantile(self, p: float) -> float:
        """Return a quantile of the norms."""

    def deviation(self, p: float, centre: float) -> float:
        """Return a quantile of the distances of the norms from a centre."""


class Counted(NamedTuple):
    """What all clients have seen in one round; one number for each group."""

    n: Floats
    """Number of norms that were learnt."""
    mean: Floats
    variance: Floats
    """Mean and population variance of the round, where the rule asks for "moments"."""
    levels: Floats
    """What the rule has read off the history, this round included: one row for each number."""
    unclipped: Floats
    """Number of norms that were at most the limit, where the rule asks for "bits"."""


class Shareable(Protocol):
    """A rule that knows how its state follows from counts."""

    @property
    def counters(self) -> tuple[str, ...]:
        """What clients count, of "moments", "sketch" and "bits"."""

    def shared(self) -> Shareable:
        """Return the rule that judges by a state that is merged elsewhere."""

    @property
    def remembered(self) -> int | None:
        """Of how many norms the sketch is, at least; None for all."""

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        """Return what `merge` needs to know of the history, where the rule asks for a "sketch"."""

    @property
    def start(self) -> Start | None:
        """What protects groups that are not ready, on each client by itself."""

    @property
    def eps(self) -> float:
        """Added to a norm where it is compared with a limit."""

    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first round."""

    def judge(self, norms: Array, state: State, xp: Arithmetic) -> Judgement:
        """Return the limits, and what is to be learnt."""

    def merge(self, state: State, counted: Counted) -> State:
        """Return the state after a round; only groups with ``n > 0`` are used."""

    def ceiling(self, state: State) -> Floats:
        """Return the most that a client can have learnt from one norm, infinity if anything."""


def pooled(
    count: Floats, mean: Floats, variance: Floats, counted: Counted, least: Floats | float = 0.0
) -> tuple[Floats, Floats, Floats]:
    """Return count, mean and population variance of two sets of norms together.

    The second set has the share of all norms that it is, and `least` at least.

    Chan, Golub & LeVeque, 1983, "Algorithms for computing the sample variance".
    """
    total = np.maximum(count + counted.n, 1.0)
    share = np.maximum(counted.n / total, least)
    delta = counted.mean - mean
    within = variance + share * (counted.variance - variance)
    return total, mean + share * delta, within + share * (1.0 - share) * delta * delta
