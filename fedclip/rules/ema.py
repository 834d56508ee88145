# SPDX-License-Identifier: Apache-2.0
"""A limit at so many times the moving average of the norms seen so far.

Wang et al., 2025, "AdaGC: improving training stability for large language model pretraining",
arXiv:2502.11034.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedclip.arrays import Arithmetic, Array
from fedclip.rules.parts import TINY, choose, limits_of

__all__ = ["Ema", "EmaState"]


class EmaState(NamedTuple):
    """Average of the norms, and how many have been seen."""

    mean: Array
    count: Array


@dataclass(frozen=True)
class Ema:
    """Limits at `ratio` times the running mean.

    ::

        threshold = ratio * mean
        limit     = threshold, or x if that is larger      where x <= threshold
                    threshold                              action "max"
                    mean                                   action "mean"
                    threshold^2 / x                        action "reciprocal"
        limit     = min(limit, max_norm)
        u         = min(x, limit) | x | no update on a spike     (feedback)

    Estimators, for the first `warmup` norms and then for each u:

    - "adagc": the smallest u but 0;  mean <- d mean + (1-d) u
    - "drytorch": the mean of the warm-up, without one a start at 0;
      mean <- d mean + (1-d) u

    During warm-up the limit is `warmup_norm`: of each group, or (`joint_warmup`) of the L2 norm
    of all groups together, of which each has its share. A mean of 0 is no scale to judge by, so
    that a group whose norms have all been 0 is still in warm-up.
    """

    ratio: float
    decay: float
    action: str
    feedback: str
    estimator: str
    include_current: bool
    warmup: int
    warmup_norm: float | None
    joint_warmup: bool
    max_norm: float | None
    eps: float

    def init(self, groups: int, xp: Arithmetic) -> EmaState:
        zeros = xp.asarray([0.0] * groups)
        return EmaState(zeros, zeros)

    def __call__(self, norms: Array, state: EmaState, xp: Arithmetic) -> tuple[Array, EmaState]:
        if self.include_current:
            state = self._observe(norms, state, xp)
        ready = (state.count >= max(self.warmup, 1)) & (state.mean > 0)
        threshold = self.ratio * state.mean
        spike = ready & (norms > threshold)
        before, warmed = self._warm(norms, xp)
        limits = limits_of(
            norms,
            threshold,
            spike,
            ready,
            xp,
            target=self._target(norms, state.mean, xp),
            before=before,
            max_norm=self.max_norm,
            eps=self.eps,
        )
        if not self.include_current:
            passed = xp.minimum(xp.where(ready, norms, warmed), limits)
            after = self._observe(norms if self.feedback == "raw" else passed, state, xp)
            state = choose(spike, state, after, xp) if self.feedback == "none" else after
        return limits, state

    def _warm(self, norms: Array, xp: Arithmetic) -> tuple[Array | float, Array]:
        """Return the limit during warm-up, and the norm of what such a step lets through."""
        if self.warmup_norm is None:
            return math.inf, norms
        if not self.joint_warmup:
            return self.warmup_norm, norms
        peak = xp.maximum(xp.max(norms), TINY)
        total = xp.maximum(peak * xp.sqrt(xp.sum((norms / peak) * (norms / peak))) + self.eps, TINY)
        share = (norms + self.eps) / total
        return share * self.warmup_norm, norms * xp.minimum(self.warmup_norm / total, 1.0)

    def _target(self, norms: Array, mean: Array, xp: Arithmetic) -> Array:
        if self.action == "mean":
            return mean + 0.0 * norms
        threshold = self.ratio * mean
        if self.action == "max":
            return threshold
        return threshold * (threshold / xp.maximum(norms, TINY))

    def _observe(self, seen: Array, state: EmaState, xp: Arithmetic) -> EmaState:
        mean, count = state
        delta = seen - mean
        moved = mean + (1 - self.decay) * delta
        warming = count < self.warmup
        if self.estimator == "adagc":
            # A norm of 0 would be the smallest for ever, and its group frozen at 0.
            smallest = xp.where(seen > 0, xp.minimum(mean, seen), mean)
            moved = xp.where(mean == 0, seen, xp.where(warming, smallest, moved))
        elif self.warmup > 0:
            moved = xp.where(warming, mean + delta / (count + 1.0), moved)
        return EmaState(moved, count + 1.0)
