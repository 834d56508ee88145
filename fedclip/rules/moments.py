# SPDX-License-Identifier: Apache-2.0
"""Running mean and variance of norms, by the estimators of three packages.

::

    keep     = count / (count + 1)                      for the first norms, of equal weight
               decay                                    for each later one
    delta    = u - mean
    mean     <- keep mean + (1 - keep) u
    variance <- keep variance + (1 - keep) share delta^2

The `share` is `keep` for the first norms, which is Welford's update, and the estimator's later.
For the N norms of a round of a federation, their mean m and population variance V (Chan, Golub &
LeVeque, 1983, "Algorithms for computing the sample variance")::

    keep     = count / (count + N), or decay^N
    delta    = m - mean
    mean     <- keep mean + (1 - keep) m
    variance <- keep variance + (1 - keep) (V + share delta^2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State, zeros
from fedclip.rules.sharing import Counted


@dataclass(frozen=True)
class Moments:
    """The estimator of ZClip (arXiv:2504.02507): it learns the distance from the new mean.

    ::

        mean, variance = those of the first `warmup` norms; then for each u:
        mean     <- d mean + (1-d) u
        variance <- d variance + (1-d) (u - mean)^2                 with the new mean

    The distance from the new mean is d times that from the old one.
    If it `adds_eps`, that is added to a norm before it is compared with the threshold.
    """

    adds_eps: ClassVar[bool] = False

    decay: float
    warmup: int

    @property
    def first(self) -> int:
        """How many norms, and at least one, have equal weight."""
        return max(self.warmup, 1)

    def share(self, keep: Array) -> Array:
        """Return the share of ``delta^2`` in the variance, after the warm-up."""
        return keep * keep

    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first norm."""
        return zeros(groups, xp, "mean", "variance", "count")

    def update(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        """Return the state after one or more norms."""
        count, late = state.count + counted.n, state.count >= self.first
        equal, later = state.count / count, self.decay**counted.n
        keep, share = xp.where(late, later, equal), xp.where(late, self.share(later), equal)
        return merged(state, counted, keep, share, xp)._replace(count=count)


class Drytorch(Moments):
    """The estimator of drytorch's ``ZStatCriterion``: it learns the distance from the old mean.

    ::

        mean, variance = mean and sample variance of the first `warmup` norms, 1 for a variance that
                         is 0 or unknown; without a warm-up 0 and 1.  Then for each u:
        variance <- d variance + (1-d) (u - mean)^2
        mean     <- d mean + (1-d) u
    """

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


class Smartclip(Moments):
    """The estimator of smartclip's ``ZScoreClip``: averages of norms and squares, without a start.

    ::

        mean     = u at first
        variance <- d (variance + (1-d) (u - mean)^2)
        mean     <- d mean + (1-d) u

    In exact arithmetic the variance is that of smartclip, the average of u^2 without the square of
    that of u; but nothing cancels.
    """

    adds_eps: ClassVar[bool] = True

    @property
    def first(self) -> int:
        return 1

    def share(self, keep: Array) -> Array:
        return keep


ESTIMATORS = {"zclip": Moments, "drytorch": Drytorch, "smartclip": Smartclip}
"""The estimators by the names of `zscore-clip`."""


def one(norms: Array) -> Counted:
    """Return the counts of a single norm of each group."""
    return Counted(1.0, norms, 0.0)


def merged(state: State, counted: Counted, keep: Array, share: Array, xp: Arithmetic) -> State:
    """Return the mean and the variance after some norms, as above."""
    delta = counted.mean - state.mean
    square = share * delta * delta + counted.variance
    # The square of a norm may be beyond the floats: then the variance stays.
    square = xp.where(square < math.inf, square, state.variance)
    variance = square + keep * (state.variance - square)
    return state._replace(mean=counted.mean - keep * delta, variance=variance)
