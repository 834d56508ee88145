# SPDX-License-Identifier: Apache-2.0
"""A limit at a multiple of the moving average of the norms seen so far."""

from __future__ import annotations

from dataclasses import dataclass

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import TINY, State, zeros
from fedclip.rules.history import History
from fedclip.rules.moments import one
from fedclip.rules.protection import WarmupGuard
from fedclip.rules.sharing import Counted, Judgement


@dataclass(frozen=True)
class Average:
    """The moving average of drytorch's ``EMACriterion``.

    ::

        mean = that of the first `warmup` norms, 0 without any; then d mean + (1-d) u for each u

    For the N norms of a round of a federation, and their mean m: that of all norms so far, and
    then ``mean <- d^N mean + (1 - d^N) m``.
    """

    decay: float
    warmup: int

    def update(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        """Return the state after one or more norms."""
        count = state.count + counted.n
        late, later = state.count >= self.warmup, self.decay**counted.n
        keep = xp.where(late, later, state.count / count)
        mean = counted.mean + keep * (state.mean - counted.mean)
        return state._replace(mean=mean, count=count)


@dataclass(frozen=True, kw_only=True)
class Ema(History):
    """Limits at `ratio` times the running mean.

    ::

        threshold = ratio * mean
        limit     = threshold                              of a spike x, action "max"
                    mean                                   action "mean"
                    threshold^2 / x                        action "reciprocal"
        u         = min(x, limit) | x | no update on a spike     (feedback)

    With `warmup_factor` the mean does not learn a norm of 0. A group whose norms have all been 0
    stays in warm-up, because a mean of 0 is no scale to judge by.
    """

    counters = ("moments",)

    ratio: float
    action: str
    average: Average

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

    def judge(self, norms: Array, state: State, xp: Arithmetic, guard: WarmupGuard) -> Judgement:
        judged = super().judge(norms, state, xp, guard)
        observed, learns = judged.observed, judged.learns
        if self.feedback != "raw":
            # What comes out is learnt, with fixed limits too.
            observed = self.shortened(norms, judged, xp)
        if self.warmup_factor is not None:
            # It has shortened the first norms; and one of 0 says nothing about the scale.
            observed, learns = (
                xp.where(judged.ready, observed, judged.observed),
                learns & (norms > 0),
            )
        return judged._replace(observed=observed, learns=learns)

    def shortened(self, norms: Array, judged: Judgement, xp: Arithmetic) -> Array:
        """Return the norms after clipping."""
        return xp.minimum(judged.observed, judged.limits)

    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        return self.average.update(state, one(observed), xp)

    def merge(self, state: State, counted: Counted) -> State:
        return self.average.update(state, counted, NUMPY)
