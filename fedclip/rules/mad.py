# SPDX-License-Identifier: Apache-2.0
"""A limit from the median and the median absolute deviation of past norms."""

from __future__ import annotations

from dataclasses import dataclass

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State, state_of, zeros
from fedclip.rules.percentile import Percentile
from fedclip.rules.sharing import Counted, Sketched

_NORMAL = 1.4826
"""Times the median absolute deviation: the standard deviation of normal numbers."""


@dataclass(frozen=True, kw_only=True)
class Mad(Percentile):
    """Limits at a number of median absolute deviations above the median.

    ::

        spread    = 1.4826 * median of abs(x_i - median)     of the last `window` norms x_i
        threshold = median + mad_factor * max(spread, min_mad * median)

    Fewer than half of the norms that are held, however large, move neither median nor spread far;
    once they are more than half, they are what is usual. Norms are learnt at up to twice the
    threshold, so that this does not take many windows.

    In a federation (`merge`) both are read off the sketch of all clients' norms, which knows the
    distances of the norms from their median too.
    """

    mad_factor: float
    min_mad: float

    def begin(self, groups: int, xp: Arithmetic) -> State:
        # On clients of a federation, the server gives the median and the spread.
        state = super().begin(groups, xp)
        return state if self.is_local else state_of(state, zeros(groups, xp, "spread"))

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        median = self.history.estimate(state, xp)
        if self.is_local:
            away = state._replace(window=abs(state.window - median))
            spread = self.history.estimate(away, xp)
        else:
            spread = state.spread
        return median + self.mad_factor * xp.maximum(_NORMAL * spread, self.min_mad * median)

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        median = sketch.quantile(0.5)
        return median, sketch.deviation(0.5, median)

    def merge(self, state: State, counted: Counted) -> State:
        level, spread = counted.levels
        return state._replace(level=level, spread=spread, count=state.count + counted.n)
