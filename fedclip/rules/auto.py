# SPDX-License-Identifier: Apache-2.0
"""A limit from the median and the standard deviation of all norms seen so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import State, state_of, zeros
from fedclip.rules.history import History
from fedclip.rules.moments import merged, one
from fedclip.rules.quantiles import Quantile
from fedclip.rules.sharing import Counted, Sketched


@dataclass(frozen=True, kw_only=True)
class Auto(History):
    """Limits at a number of standard deviations above the median.

    ::

        threshold = median + std_factor * max(std, min_std * median)

    The standard deviation, n - 1 in the denominator, is of all norms as learnt. Its floor lets a
    constant stream grow: with a limit at the very median, clipped norms would be constant for ever.

    In a federation (`merge`) mean, variance and count are those of all norms of all clients,
    and the median is that of their sketch.
    """

    counters = ("moments", "sketch")

    median: Quantile
    std_factor: float
    decay: float | None
    min_std: float

    @property
    def least(self) -> int:
        # The P2 algorithm needs five norms, and the deviation of fewer says little.
        return 5

    def begin(self, groups: int, xp: Arithmetic) -> State:
        return state_of(self.median.init(groups, xp), zeros(groups, xp, "mean", "variance"))

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        median = self.median.estimate(state, xp)
        few = xp.maximum(state.count - 1.0, 1.0)
        std = xp.sqrt(state.variance * (state.count / few))
        return median + self.std_factor * xp.maximum(std, self.min_std * median)

    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        return self._update(self.median.observe(observed, state, xp), one(observed), xp)

    def _update(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        # Welford's update, until the past has its final weight.
        count = state.count + counted.n
        keep = state.count / count
        if self.decay is not None:
            keep = xp.minimum(keep, self.decay**counted.n)
        return merged(state, counted, keep, keep, xp)._replace(count=count)

    def shared(self) -> Self:
        return replace(super().shared(), median=self.median.given())

    @property
    def remembered(self) -> int | None:
        return self.median.size

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(0.5),)

    def merge(self, state: State, counted: Counted) -> State:
        return self._update(state._replace(level=counted.levels[0]), counted, NUMPY)
