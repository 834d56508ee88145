# SPDX-License-Identifier: Apache-2.0
"""Running mean and variance of norms; each estimator has its own file.

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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State, zeros
from fedclip.rules.sharing import Counted


@dataclass(frozen=True)
class Moments(ABC):
    """An estimator; the first `warmup` norms, and at least one, have equal weight.

    If it `adds_eps`, that is added to a norm before it is compared with the threshold.
    """

    adds_eps: ClassVar[bool] = False

    decay: float
    warmup: int

    @property
    def first(self) -> int:
        """How many norms have equal weight."""
        return max(self.warmup, 1)

    @abstractmethod
    def share(self, keep: Array) -> Array:
        """Return the share of ``delta^2`` in the variance, after the warm-up."""

    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first norm."""
        return zeros(groups, xp, "mean", "variance", "count")

    def update(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        """Return the state after one or more norms."""
        count, late = state.count + counted.n, state.count >= self.first
        equal, later = state.count / count, self.decay**counted.n
        keep, share = xp.where(late, later, equal), xp.where(late, self.share(later), equal)
        return merged(state, counted, keep, share, xp)._replace(count=count)


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
