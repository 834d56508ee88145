# SPDX-License-Identifier: Apache-2.0
"""A limit at a multiple of the moving average of the norms seen so far.

Wang et al., 2025, "AdaGC: improving training stability for large language model pretraining",
arXiv:2502.11034.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import Judgement, State
from fedclip.rules.history import TINY, Criterion, History, both
from fedclip.rules.sharing import Counted, Floats, pooled
from fedclip.rules.start import Start


class EmaState(NamedTuple):
    """Average of the norms, and how many have been seen."""

    mean: Array
    count: Array


@dataclass(frozen=True, kw_only=True)
class Ema(History):
    """Limits at `ratio` times the running mean.

    ::

        threshold = ratio * mean
        limit     = threshold                              of a spike x, action "max"
                    mean                                   action "mean"
                    threshold^2 / x                        action "reciprocal"
        u         = min(x, limit) | x | no update on a spike     (feedback)

    With `warmup_factor` the mean does not learn a norm of 0. Estimators, for the first `warmup`
    norms, then for each u:

    - "adagc": the smallest u but 0;  mean <- d mean + (1-d) u
    - "drytorch": the mean of the warm-up, without one a start at 0;
      mean <- d mean + (1-d) u

    During warm-up `warmup_norm` is the limit of each group, or (`joint_warmup`) of the L2 norm of
    all groups together, of which each group gets its share. A group whose norms have all been 0
    stays in warm-up, because a mean of 0 is no scale to judge by.

    In a federation, for the N norms of a round and their mean m (`merge`): during warm-up the
    smallest m but 0 ("adagc") or the mean of all norms ("drytorch"); afterwards
    ``mean <- d^N mean + (1 - d^N) m``.
    """

    counters: ClassVar[tuple[str, ...]] = ("moments",)

    ratio: float
    decay: float
    action: str
    estimator: str
    joint_warmup: bool

    def begin(self, groups: int, xp: Arithmetic) -> EmaState:
        zeros = xp.asarray([0.0] * groups)
        return EmaState(zeros, zeros)

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return self.ratio * state.mean

    def criterion(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Criterion:
        return Criterion(
            self.threshold(state, xp),
            self.ready(state, state.mean),
            target=None if self.action == "max" else self._target(norms, state.mean, xp),
            measured=norms if self.eps else None,
        )

    def judge(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Judgement:
        judged = super().judge(norms, state, xp, start)
        ready = judged.ready
        seen, learns = judged.seen, judged.learns
        if self.feedback != "raw" and start is None:
            # What comes out is learnt, with fixed limits too.
            seen = xp.minimum(xp.where(ready, seen, self._joint(norms, xp)[1]), judged.limits)
        elif self.feedback != "raw" and self.max_norm is not None:
            seen = xp.where(ready, xp.minimum(seen, self.max_norm), seen)
        if start is not None:
            # A norm of 0 says nothing about the scale, and would only pull the mean down.
            learns = both(learns, norms > 0)
        return judged._replace(seen=seen, learns=learns)

    def merge(self, state: EmaState, counted: Counted) -> EmaState:
        mean, before = state
        keep = np.power(self.decay, counted.n)
        moved = keep * mean + (1 - keep) * counted.mean
        warming = before < self.warmup
        count, pooled_mean, _ = pooled(before, mean, 0.0 * mean, counted)
        if self.estimator == "adagc":
            smallest = np.where(counted.mean > 0, np.minimum(mean, counted.mean), mean)
            moved = np.where(mean == 0, counted.mean, np.where(warming, smallest, moved))
        elif self.warmup > 0:
            moved = np.where(warming, pooled_mean, moved)
        return EmaState(moved, count)

    def ceiling(self, state: EmaState) -> Floats:
        return self.known(max(self.ratio, 1.0) * state.mean, self.ready(state, state.mean))

    def before(self, norms: Array, xp: Arithmetic) -> Array | float | None:
        return self._joint(norms, xp)[0]

    def _joint(self, norms: Array, xp: Arithmetic) -> tuple[Array | float | None, Array]:
        """Return the limit during warm-up, and the norm after clipping to it."""
        if self.warmup_norm is None or not self.joint_warmup:
            return self.warmup_norm, norms
        peak = xp.maximum(xp.max(norms), TINY)
        total = xp.maximum(peak * xp.sqrt(xp.sum((norms / peak) * (norms / peak))) + self.eps, TINY)
        share = (norms + self.eps) / total
        return share * self.warmup_norm, norms * xp.minimum(self.warmup_norm / total, 1.0)

    def _target(self, norms: Array, mean: Array, xp: Arithmetic) -> Array:
        if self.action == "mean":
            return mean + 0.0 * norms
        threshold = self.ratio * mean
        return threshold * (threshold / xp.maximum(norms, TINY))

    def observe(
        self, seen: Array, state: State, xp: Arithmetic, ready: Array | None = None
    ) -> State:
        mean, count = state.mean, state.count
        delta = seen - mean
        moved = mean + (1 - self.decay) * delta
        warming = count < self.warmup
        if self.estimator == "adagc":
            # A norm of 0 would be the smallest for ever, and its group frozen at 0.
            smallest = xp.where(seen > 0, xp.minimum(mean, seen), mean)
            moved = xp.where(mean == 0, seen, xp.where(warming, smallest, moved))
        elif self.warmup > 0:
            moved = xp.where(warming, mean + delta / (count + 1.0), moved)
        return state._replace(mean=moved, count=count + 1.0)
