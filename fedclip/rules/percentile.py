# SPDX-License-Identifier: Apache-2.0
"""A limit at a percentile of the norms seen so far.

Seetharaman, Wichern, Pardo & Le Roux, 2020, "AutoClip: adaptive gradient clipping for source
separation networks", arXiv:2007.14469.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.history import History
from fedclip.rules.quantiles import Quantile
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

    history: Quantile

    @property
    def least(self) -> int:
        return self.history.least

    def begin(self, groups: int, xp: Arithmetic) -> State:
        return self.history.init(groups, xp)

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return self.history.estimate(state, xp)

    def spike_norms(self, norms: Array, target: Array, xp: Arithmetic) -> Array:
        return xp.minimum(norms, 2.0 * target)

    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        return self.history.observe(observed, state, xp)._replace(count=state.count + 1.0)

    def shared(self) -> Self:
        return replace(super().shared(), history=self.history.given())

    @property
    def remembered(self) -> int | None:
        return self.history.size

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(self.history.quantile),)

    def merge(self, state: State, counted: Counted) -> State:
        return state._replace(level=counted.levels[0], count=state.count + counted.n)
