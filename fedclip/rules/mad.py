# SPDX-License-Identifier: Apache-2.0
"""A limit from the median and the median absolute deviation of past norms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.history import History
from fedclip.rules.quantiles import Window
from fedclip.rules.sharing import Counted, Sketched

_NORMAL = 1.4826
"""Times the median absolute deviation: the standard deviation of normal numbers."""


class MadGivenState(NamedTuple):
    """Median and median absolute deviation as somebody else knows them, and of how many norms."""

    level: Array
    spread: Array
    count: Array


@dataclass(frozen=True, kw_only=True)
class Mad(History):
    """Limits at so many median absolute deviations above the median.

    ::

        spread    = 1.4826 * median of abs(x_i - median)     of the last `window` norms x_i
        threshold = median + mad_factor * max(spread, min_mad * median)

    Fewer than half of the norms that are held, however large, move neither median nor spread far;
    once they are more than half, they are what is usual. Norms are learnt at up to twice the
    threshold, so that this does not take many windows.

    In a federation (`merge`) both are read off the sketch of all clients' norms, which knows the
    distances of the norms from their median too.
    """

    counters: ClassVar[tuple[str, ...]] = ("sketch",)
    reach: ClassVar[float] = 2.0

    mad_factor: float
    window: int
    min_mad: float
    given: bool = False

    @property
    def _middle(self) -> Window:
        return Window(0.5, self.window)

    @property
    def remembered(self) -> int | None:
        return self.window

    def begin(self, groups: int, xp: Arithmetic) -> State:
        if not self.given:
            return self._middle.init(groups, xp)
        zeros = xp.asarray([0.0] * groups)
        return MadGivenState(zeros, zeros, zeros)

    def observe(
        self, seen: Array, state: State, xp: Arithmetic, ready: Array | None = None
    ) -> State:
        return self._middle.observe(seen, state, xp)._replace(count=state.count + 1.0)

    def shared(self) -> Mad:
        return replace(self, given=True)

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        median = sketch.quantile(0.5)
        return median, sketch.deviation(0.5, median)

    def merge(self, state: MadGivenState, counted: Counted) -> MadGivenState:
        return MadGivenState(counted.levels[0], counted.levels[1], state.count + counted.n)

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        if self.given:
            median, spread = state.level, state.spread
        else:
            median = self._middle.estimate(state, xp)
            away = state._replace(window=abs(state.window - median))
            spread = self._middle.estimate(away, xp)
        return median + self.mad_factor * xp.maximum(_NORMAL * spread, self.min_mad * median)
