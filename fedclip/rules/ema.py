# SPDX-License-Identifier: Apache-2.0
"""A limit at a multiple of the moving average of the norms seen so far.

With the estimator "adagc", and the warm-up of all groups together, it is that of AdaGC: Wang et
al., 2025, "AdaGC: improving training stability for large language model pretraining",
arXiv:2502.11034.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import TINY, State, zeros
from fedclip.rules.history import History
from fedclip.rules.moments import one
from fedclip.rules.sharing import Counted, Judgement
from fedclip.rules.warmup import WarmupGuard


@dataclass(frozen=True, kw_only=True)
class Ema(History):
    """Limits at `ratio` times the running mean.

    ::

        threshold = ratio * mean
        limit     = threshold                              of a spike x, action "max"
                    mean                                   action "mean"
                    threshold^2 / x                        action "reciprocal"
        u         = min(x, limit) | x | no update on a spike     (feedback)
        mean      = that of the first `warmup` norms, 0 without any; with the estimator "adagc"
                    the smallest of them but 0; then d mean + (1-d) u for each u

    For the N norms of a round of a federation, and their mean m: that of all norms so far, and
    then ``mean <- d^N mean + (1 - d^N) m``.

    With the `warmup_scope` "global", `warmup_norm` bounds the L2 norm of all groups together::

        total = sqrt(sum of x^2 over the groups) + eps
        limit = (x + eps) / total * warmup_norm               of a group in the warm-up
        u     = x * min(1, warmup_norm / total)

    With `warmup_factor` the mean does not learn a norm of 0. A group whose norms have all been 0
    stays in warm-up, because a mean of 0 is no scale to judge by.
    """

    counters = ("moments",)

    ratio: float
    decay: float
    action: str
    estimator: str
    warmup_scope: str

    def begin(self, groups: int, xp: Arithmetic) -> State:
        return zeros(groups, xp, "mean", "count")

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return self.ratio * state.mean

    def compared(self, norms: Array) -> Array:
        return norms

    def target(self, norms: Array, threshold: Array, state: State, xp: Arithmetic) -> Array:
        if self.action == "mean":
            return state.mean
        if self.action == "max":
            return threshold
        return threshold * (threshold / xp.maximum(norms, TINY))

    def before(self, norms: Array, xp: Arithmetic) -> Array:
        if self.warmup_norm and self.warmup_scope == "global":
            return self._shares(norms + self.eps, norms, xp)
        return self.warmup_norm

    def _shares(self, parts: Array, norms: Array, xp: Arithmetic) -> Array:
        """Return the parts that groups have of `warmup_norm`."""
        peak = xp.maximum(xp.max(norms), TINY)
        total = peak * xp.sqrt(xp.sum((norms / peak) * (norms / peak))) + self.eps
        return parts * (self.warmup_norm / xp.maximum(total, TINY))

    def judge(self, norms: Array, state: State, xp: Arithmetic, guard: WarmupGuard) -> Judgement:
        judged = super().judge(norms, state, xp, guard)
        observed, learns = judged.observed, judged.learns
        if self.feedback != "raw":
            # What comes out is learnt, with fixed limits too.
            if self.warmup_norm and self.warmup_scope == "global":
                first = xp.minimum(norms, self._shares(norms, norms, xp))
                observed = xp.where(judged.ready, observed, first)
            observed = xp.minimum(observed, judged.limits)
        if self.warmup_factor is not None:
            # It has shortened the first norms; and one of 0 says nothing about the scale.
            observed = xp.where(judged.ready, observed, judged.observed)
            learns = learns & (norms > 0)
        return judged._replace(observed=observed, learns=learns)

    def _after(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        """Return the state after one or more norms."""
        count, mean, new = state.count + counted.n, state.mean, counted.mean
        late, later = state.count >= self.warmup, self.decay**counted.n
        keep = xp.where(late, later, state.count / count)
        after = new + keep * (mean - new)
        if self.estimator == "adagc":
            # A norm of 0 would be the smallest for ever, and its group frozen at 0.
            smallest = xp.where(
                (mean > 0) & (new > 0), xp.minimum(mean, new), xp.maximum(mean, new)
            )
            first = (state.count < self.warmup) | (mean == 0)
            after = xp.where(first, smallest, after)
        return state._replace(mean=after, count=count)

    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        return self._after(state, one(observed), xp)

    def merge(self, state: State, counted: Counted) -> State:
        return self._after(state, counted, NUMPY)
