# SPDX-License-Identifier: Apache-2.0
"""A limit at a percentile of the norms seen so far.

Seetharaman, Wichern, Pardo & Le Roux, 2020, "AutoClip: adaptive gradient clipping for source
separation networks", arXiv:2007.14469.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.history import History
from fedclip.rules.quantiles import Given, GivenState, Quantile, Window
from fedclip.rules.sharing import Counted, Sketched


@dataclass(frozen=True, kw_only=True)
class Percentile(History):
    """Limits at a running quantile.

    ::

        threshold = quantile

    A spike is learnt as twice the limit. If it were learnt as the limit itself, no norm learnt
    would ever be above the limit, and the limit could not rise. A quantile hardly depends on how
    far above it a norm is, so twice the limit changes little until there is a burst of spikes.

    In a federation (`merge`) the quantile is that of the sketch of all clients' norms.
    """

    counters: ClassVar[tuple[str, ...]] = ("sketch",)
    reach: ClassVar[float] = 2.0

    history: Quantile

    def begin(self, groups: int, xp: Arithmetic) -> State:
        return self.history.init(groups, xp)

    @property
    def least(self) -> int:
        return self.history.least

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return self.history.estimate(state, xp)

    @property
    def remembered(self) -> int | None:
        return self.history.size if isinstance(self.history, (Window, Given)) else None

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(self.history.quantile),)

    def shared(self) -> Percentile:
        history = Given(self.history.quantile, self.remembered, least=self.history.least)
        return replace(self, history=history)

    def merge(self, state: GivenState, counted: Counted) -> GivenState:
        return GivenState(counted.levels[0], state.count + counted.n)

    def observe(
        self, seen: Array, state: State, xp: Arithmetic, ready: Array | None = None
    ) -> State:
        return self.history.observe(seen, state, xp)._replace(count=state.count + 1.0)
