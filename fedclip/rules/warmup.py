# SPDX-License-Identifier: Apache-2.0
"""The guard of the warm-up: a median of the last norms, until a rule is ready.

::

    median = of the last 5 norms above 0, the lower one of an even number; before any, infinity
    limit  = factor * median
    learnt = x, or 1.1 * median for a spike, x > limit

The median learns this until the rule is ready, and then what the rule learns. The rule learns
nothing before the median is of 5 norms, or of as many as a shorter warm-up can spare; of 1, if
other clients' norms count too.

Two spikes among five norms do not change the median, and more spikes hardly raise it. The
guard has no scale: norms that are s times as large get limits that are s times as large.
Norms that have risen for good lift the median by a tenth every three steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State

_LEARNT = 1.1
_SLOTS = ("start_1", "start_2", "start_3", "start_4", "start_5")


@dataclass(frozen=True)
class WarmupGuard:
    """Limits at `factor` times the median; the rule learns once that is of `least` norms.

    Its fields are in the state, next to those of the rule. Norms come in at the last and move
    towards the first; 0 is an empty one.
    """

    factor: float
    least: int = 5
    slots: tuple[str, ...] = _SLOTS

    def init(self, groups: int, xp: Arithmetic) -> dict[str, Array]:
        """Return the fields before the first norm."""
        return dict.fromkeys(self.slots, xp.asarray([0.0] * groups))

    def median(self, state: State, xp: Arithmetic) -> Array:
        """Return the median of the last norms; infinity before the first."""
        a, b, c, d, e = (getattr(state, slot) for slot in _SLOTS)
        # The first are empty. With 0 and infinity in turn, the median of five is that of the rest.
        b, d, e = (xp.where(norm <= 0, math.inf, norm) for norm in (b, d, e))
        return xp.sort(xp.stack([a, b, c, d, e]))[2]

    def limits(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, Array]:
        """Return the norm above which a norm is a spike, and what is learnt of a spike."""
        if not self.slots:
            return math.inf, norms
        median = self.median(state, xp)
        return self.factor * median, _LEARNT * median

    def suffices(self, norms: Array, state: State) -> Array:
        """Return the groups whose rule may learn these norms before it is ready."""
        # No norm is below 0.
        return getattr(state, _SLOTS[-self.least]) > 0 if self.least else norms >= 0

    def learn(self, norms: Array, state: State) -> tuple[Array, dict[str, Array]]:
        """Return the groups that learn these norms, which ignore 0, and their fields after."""
        later = [getattr(state, slot) for slot in self.slots[1:]]
        return norms > 0, dict(zip(self.slots, [*later, norms], strict=False))


NO_GUARD = WarmupGuard(math.inf, least=0, slots=())
"""No limit before the rule is ready, which learns all norms unchanged."""
