# SPDX-License-Identifier: Apache-2.0
"""A limit from the mean and the standard deviation of the norms seen so far.

Kumar et al., 2025, "ZClip: adaptive spike mitigation for LLM pre-training", arXiv:2504.02507.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.history import TINY, Criterion, History
from fedclip.rules.sharing import Counted, Floats, pooled
from fedclip.rules.start import Start


class ZScoreState(NamedTuple):
    """Mean and variance of the norms, and how many have been seen."""

    mean: Array
    variance: Array
    count: Array


@dataclass(frozen=True, kw_only=True)
class ZScore(History):
    """Limits at a number of standard deviations above the running mean.

    ::

        std       = max(sqrt(variance), min_std * mean)
        z         = (x - mean) / (std + std_eps)
        threshold = mean + z_max * (std + std_eps)
        limit     = mean + z_max * std                        of a spike, action "max"
                    mean                                      action "mean"
                    factor * (mean + z_max^2/z * std)         action "reciprocal"
        u         = min(x, limit before max_norm) | x | no update on a spike     (feedback)

    The estimator "smartclip" takes x + eps for x in the comparison.

    Estimators, for the first `warmup` norms and then for each u:

    - "zclip": mean and population variance of the warm-up;
      mean <- d mean + (1-d) u;  variance <- d variance + (1-d) (u - new mean)^2
    - "drytorch": mean and sample variance of the warm-up, 1 where that is 0 or unknown;
      variance <- d variance + (1-d) (u - old mean)^2, then the mean
    - "smartclip": no separate start, mean = x at first;
      variance <- d (variance + (1-d) (u - old mean)^2), then the mean

    In a federation, for the N norms of a round, their mean m and population variance V, and
    with ``D = d^N`` (`merge`): during warm-up the same of all norms so far; afterwards

    - all: mean <- D mean + (1-D) m
    - "zclip": variance <- D variance + (1-D) (V + (m - new mean)^2)
    - "drytorch": variance <- D variance + (1-D) (V + (m - old mean)^2)
    - "smartclip": variance <- D variance + (1-D) V + D (1-D) (m - old mean)^2
    """

    counters: ClassVar[tuple[str, ...]] = ("moments",)

    z_max: float
    decay: float
    action: str
    estimator: str
    factor: float
    std_eps: float
    min_std: float

    def begin(self, groups: int, xp: Arithmetic) -> ZScoreState:
        zeros = xp.asarray([0.0] * groups)
        return ZScoreState(zeros, zeros + (1.0 if self._starts_at_one else 0.0), zeros)

    @property
    def _starts_at_one(self) -> bool:
        # drytorch without a warm-up starts its moving averages at mean 0 and variance 1.
        return self.estimator == "drytorch" and self.warmup == 0

    def ready(self, state: State, scale: Array) -> Array:
        # There are no statistics to judge the first norm by, unless it is included itself.
        return state.count >= max(self.warmup, self.least)

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return self._above(state.mean, self._std(state, xp), xp)

    def _above(self, mean: Array, std: Array, xp: Arithmetic) -> Array:
        return xp.add(mean, std + self.std_eps if self.std_eps else std, self.z_max)

    def criterion(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Criterion:
        ready, first, floor = self.ready(state, state.mean), None, None
        if self.min_std and start is not None and not xp.known(ready):
            *first, floor = start.limits(state, xp, [(state.mean, self.min_std)])
        std = self._std(state, xp, floor)
        threshold = self._above(state.mean, std, xp)
        target = measured = None
        if self.action != "max" or self.std_eps:
            target = self._target(norms, state.mean, std, xp)
        if self.eps and self.estimator != "smartclip":
            measured = norms
        return Criterion(threshold, ready, target=target, measured=measured, first=first)

    def merge(self, state: ZScoreState, counted: Counted) -> ZScoreState:
        mean, variance, before = state
        keep = np.power(self.decay, counted.n)
        delta = counted.mean - mean
        moved = keep * mean + (1 - keep) * counted.mean
        if self.estimator == "smartclip":
            spread = counted.variance + keep * delta * delta
        elif self.estimator == "drytorch":
            spread = counted.variance + delta * delta
        else:
            spread = counted.variance + (counted.mean - moved) ** 2
        spread = keep * variance + (1 - keep) * spread
        count, first_mean, first = pooled(before, mean, variance, counted)
        warming = before < max(self.warmup, 1)
        if self.estimator == "smartclip":
            warming = before == 0
        elif self._starts_at_one:
            warming = np.zeros_like(warming)
        if self.estimator == "drytorch":
            sample = first * (count / np.maximum(count - 1.0, 1.0))
            sample = np.where(sample > 0, sample, 1.0)
            first = np.where(count >= self.warmup, sample, first)
        return ZScoreState(
            np.where(warming, first_mean, moved), np.where(warming, first, spread), count
        )

    def ceiling(self, state: ZScoreState) -> Floats:
        threshold = self.threshold(state, NUMPY)
        return self.known(max(self.factor, 1.0) * threshold, self.ready(state, threshold))

    def _std(self, state: State, xp: Arithmetic, floor: Array | None = None) -> Array:
        std = xp.sqrt(state.variance)
        if not self.min_std:
            return std
        return xp.maximum(std, self.min_std * state.mean if floor is None else floor)

    def _target(self, norms: Array, mean: Array, std: Array, xp: Arithmetic) -> Array:
        if self.action == "mean":
            return mean + 0.0 * norms
        if self.action == "max":
            return xp.add(mean, std, self.z_max)
        # Without a spike the z-score may be 0 or negative; the value is then not used.
        excess = xp.maximum(norms - mean, TINY)
        return self.factor * (mean + self.z_max**2 * (std + self.std_eps) / excess * std)

    def observe(
        self, seen: Array, state: State, xp: Arithmetic, ready: Array | None = None
    ) -> State:
        d, count, delta = self.decay, state.count + 1.0, seen - state.mean
        # `variance <- (1 - weight) variance + weight (1 - drop) delta^2`, in all estimators.
        drop: Any = {"zclip": 1.0 - d * d, "drytorch": 0.0, "smartclip": 1.0 - d}[self.estimator]
        weight: Any = 1 - d
        first = 1 if self.estimator == "smartclip" else max(self.warmup, 1)
        if not self._starts_at_one:
            # Welford's update; `variance` is the variance of the norms so far.
            late, even = ready, xp.inverse(count)
            if late is None or first != max(self.warmup, self.least):
                late = state.count >= first
            weight, drop = xp.where(late, weight, even), xp.where(late, drop, even)
        # The square of a norm may be beyond the floats.
        square = xp.finite(delta * delta)
        old, new = [state.mean, state.variance], [seen, xp.without(square, drop)]
        mean, variance = xp.lerp(old, new, weight)
        if self.estimator == "drytorch" and self.warmup:
            # Keep the population variance until the last norm of the warm-up.
            sample = variance * (count / xp.maximum(count - 1.0, 1.0))
            sample = xp.where(sample > 0, sample, 1.0 + 0.0 * sample)
            variance = xp.where(count == self.warmup, xp.finite(sample), variance)
        return state._replace(mean=mean, variance=variance, count=count)
