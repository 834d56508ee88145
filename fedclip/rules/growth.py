# SPDX-License-Identifier: Apache-2.0
"""A limit on how much a norm may grow from one step to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import TINY, Basis, State, zeros


@dataclass(frozen=True)
class Growth:
    """Limits at the norm of the step before, times `mul`, plus `add`.

    ::

        threshold = min(previous * mul, previous + add)         those that are given
        limit     = threshold                                   where x > threshold
                    threshold, at least x + eps                 elsewhere
                    warmup_norm                                 at the first step
        limit     = min(limit, max_norm)
        previous  <- max(min(x, limit), previous / max_decay, min_norm)

    Before the first step `previous` is 0.
    """

    mul: float | None
    add: float | None
    min_norm: float | None
    max_decay: float | None
    warmup_norm: float | None
    max_norm: float | None
    eps: float

    @property
    def basis(self) -> Basis:
        """Where the limits come from: the first norm has none before it."""
        return Basis(math.inf if self.max_norm is None else self.max_norm, "previous", TINY)

    def init(self, groups: int, xp: Arithmetic) -> State:
        return zeros(groups, xp, "previous")

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        """Return the norm of each group above which a norm has grown too much."""
        threshold = math.inf + state.previous
        if self.mul is not None:
            threshold = state.previous * self.mul
        if self.add is not None:
            threshold = xp.minimum(threshold, state.previous + self.add)
        return threshold

    def ready(self, state: State, threshold: Array) -> Array:
        """Return which groups have a norm to compare with."""
        return state.previous > 0

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        previous, threshold = state.previous, self.threshold(state, xp)
        limits = xp.where(norms > threshold, threshold, xp.maximum(threshold, norms + self.eps))
        # No norm can grow from 0: the step after a norm of 0 is a first step again.
        first = math.inf if self.warmup_norm is None else self.warmup_norm
        limits = xp.where(self.ready(state, threshold), limits, first)
        if self.max_norm is not None:
            limits = xp.minimum(limits, self.max_norm)
        after = xp.minimum(norms, limits)
        if self.max_decay is not None:
            after = xp.maximum(after, previous / self.max_decay)
        if self.min_norm is not None:
            after = xp.maximum(after, self.min_norm)
        return limits, state._replace(previous=after)
