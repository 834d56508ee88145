# SPDX-License-Identifier: Apache-2.0
"""A limit from the median and the standard deviation of all norms seen so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.history import History
from fedclip.rules.quantiles import Given, Markers, Window
from fedclip.rules.sharing import Counted, Sketched, pooled
from fedclip.rules.start import state_of


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

    counters: ClassVar[tuple[str, ...]] = ("moments", "sketch")

    median: Markers | Window | Given
    std_factor: float
    decay: float | None
    min_std: float

    @property
    def least(self) -> int:
        # The P2 algorithm needs five norms, and the deviation of fewer says little.
        return 5

    def begin(self, groups: int, xp: Arithmetic) -> State:
        zeros = xp.asarray([0.0] * groups)
        moments = {"mean": zeros, "variance": zeros}
        return state_of("Auto", self.median.init(groups, xp), moments)

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        median = self.median.estimate(state, xp)
        few = xp.maximum(state.count - 1.0, 1.0)
        std = xp.sqrt(state.variance * (state.count / few))
        return median + self.std_factor * xp.maximum(std, self.min_std * median)

    @property
    def remembered(self) -> int | None:
        return self.median.size if isinstance(self.median, (Window, Given)) else None

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(0.5),)

    def shared(self) -> Auto:
        return replace(self, median=Given(0.5, self.remembered, least=self.median.least))

    def merge(self, state: State, counted: Counted) -> State:
        keep = 0.0 if self.decay is None else 1.0 - np.power(self.decay, counted.n)
        count, mean, variance = pooled(state.count, state.mean, state.variance, counted, keep)
        return state._replace(level=counted.levels[0], mean=mean, variance=variance, count=count)

    def observe(
        self, seen: Array, state: State, xp: Arithmetic, ready: Array | None = None
    ) -> State:
        count = state.count + 1.0
        delta = seen - state.mean
        # Welford's update, until the past has its final weight.
        weight = xp.inverse(count)
        if self.decay is not None:
            weight = xp.maximum(weight, 1 - self.decay)
        # The square of a norm may be beyond the floats.
        spread = xp.finite((1.0 - weight) * delta * delta)
        old, new = [state.mean, state.variance], [seen, spread]
        mean, variance = xp.lerp(old, new, weight)
        after = self.median.observe(seen, state, xp)
        return after._replace(mean=mean, variance=variance, count=count)
