# SPDX-License-Identifier: Apache-2.0
"""A limit from the median and the standard deviation of all norms seen so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import State, state_of, zeros
from fedclip.rules.moments import merged, one
from fedclip.rules.percentile import Percentile
from fedclip.rules.sharing import Counted


@dataclass(frozen=True, kw_only=True)
class Auto(Percentile):
    """Limits at a number of standard deviations above the median, which is the `history`.

    ::

        threshold = median + std_factor * max(std, min_std * median)

    The standard deviation, n - 1 in the denominator, is of all norms as learnt. Its floor lets a
    constant stream grow: with a limit at the very median, clipped norms would be constant for ever.
    A spike is learnt as the limit.

    In a federation (`merge`) mean, variance and count are those of all norms of all clients,
    and the median is that of their sketch.
    """

    counters: ClassVar[tuple[str, ...]] = ("moments", "sketch")

    std_factor: float
    decay: float | None
    min_std: float

    def begin(self, groups: int, xp: Arithmetic) -> State:
        return state_of(super().begin(groups, xp), zeros(groups, xp, "mean", "variance"))

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        median = super().threshold(state, xp)
        few = xp.maximum(state.count - 1.0, 1.0)
        std = xp.sqrt(state.variance * (state.count / few))
        return median + self.std_factor * xp.maximum(std, self.min_std * median)

    def spike_norms(self, norms: Array, target: Array, xp: Arithmetic) -> Array:
        return target

    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        return self._moved(self.history.observe(observed, state, xp), one(observed), xp)

    def _moved(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        # Welford's update, until the past has its final weight.
        count = state.count + counted.n
        keep = state.count / count
        if self.decay is not None:
            keep = xp.minimum(keep, self.decay**counted.n)
        return merged(state, counted, keep, keep, xp)._replace(count=count)

    def merge(self, state: State, counted: Counted) -> State:
        return self._moved(state._replace(level=counted.levels[0]), counted, NUMPY)
