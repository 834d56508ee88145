# SPDX-License-Identifier: Apache-2.0
"""AdaGC: an average that starts from the smallest norm, and a warm-up of all groups together.

Wang et al., 2025, "AdaGC: improving training stability for large language model pretraining",
arXiv:2502.11034.
"""

from __future__ import annotations

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import TINY, State
from fedclip.rules.ema import Average, Ema
from fedclip.rules.sharing import Counted, Judgement


class Smallest(Average):
    """The moving average of AdaGC.

    ::

        mean = the smallest of the first `warmup` norms but 0; then d mean + (1-d) u for each u
    """

    def update(self, state: State, counted: Counted, xp: Arithmetic) -> State:
        after, mean, new = super().update(state, counted, xp), state.mean, counted.mean
        # A norm of 0 would be the smallest for ever, and its group frozen at 0.
        smallest = xp.where((mean > 0) & (new > 0), xp.minimum(mean, new), xp.maximum(mean, new))
        first = (state.count < self.warmup) | (mean == 0)
        return after._replace(mean=xp.where(first, smallest, after.mean))


class JointEma(Ema):
    """During the warm-up `warmup_norm` bounds the L2 norm of all groups together.

    ::

        total = sqrt(sum of x^2 over the groups) + eps
        limit = (x + eps) / total * warmup_norm               of a group in the warm-up
        u     = x * min(1, warmup_norm / total)
    """

    def before(self, norms: Array, xp: Arithmetic) -> Array:
        return None if self.warmup_norm is None else self._shares(norms + self.eps, norms, xp)

    def shortened(self, norms: Array, judged: Judgement, xp: Arithmetic) -> Array:
        observed = judged.observed
        if self.warmup_norm is not None:
            first = xp.minimum(norms, self._shares(norms, norms, xp))
            observed = xp.where(judged.ready, observed, first)
        return xp.minimum(observed, judged.limits)

    def _shares(self, parts: Array, norms: Array, xp: Arithmetic) -> Array:
        peak = xp.maximum(xp.max(norms), TINY)
        total = peak * xp.sqrt(xp.sum((norms / peak) * (norms / peak))) + self.eps
        return parts * (self.warmup_norm / xp.maximum(total, TINY))
