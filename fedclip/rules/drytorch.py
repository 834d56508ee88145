# SPDX-License-Identifier: Apache-2.0
"""The moments of drytorch's ``ZStatCriterion``, from a sample variance on.

::

    mean, variance = mean and sample variance of the first `warmup` norms, 1 for a variance that is
                     0 or unknown; without a warm-up 0 and 1.  Then for each u:
    variance <- d variance + (1-d) (u - mean)^2
    mean     <- d mean + (1-d) u
"""

from __future__ import annotations

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.moments import Moments
from fedclip.rules.sharing import Counted


class Drytorch(Moments):
    """The estimator that learns the distance from the old mean."""

    @property
    def first(self) -> int:
        return self.warmup

    def share(self, keep: Array) -> Array:
        return 1.0 + 0.0 * keep

    def begin(self, groups: int, xp: Arithmetic) -> State:
        state = super().begin(groups, xp)
        return state._replace(variance=state.variance + float(not self.warmup))

    def update(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        after = super().update(state, counted, xp)
        # Keep the population variance until the last norm of the warm-up.
        last = (state.count < self.warmup) & (after.count >= self.warmup)
        sample = after.variance * (after.count / xp.maximum(after.count - 1.0, 1.0))
        sample = xp.where(sample > 0, sample, 1.0 + 0.0 * sample)
        return after._replace(variance=xp.where(last, sample, after.variance))
