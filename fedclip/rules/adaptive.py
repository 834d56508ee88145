# SPDX-License-Identifier: Apache-2.0
"""A limit that tracks a quantile of the norms by a geometric rule.

Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
clipping", arXiv:1905.03871.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array, Float64
from fedclip.rules import TINY, Basis, State, updated, zeros
from fedclip.rules.sharing import Counted, Judgement, Learning, Sketched
from fedclip.rules.warmup import NO_GUARD, WarmupGuard


def geometric_update(
    limit: Array, unclipped: Array, *, quantile: float, rate: float, xp: Arithmetic = NUMPY
) -> Array:
    """Return the limit after one update.

    ::

        limit <- limit * exp(-rate * (unclipped - quantile))

    `unclipped` is the fraction of the norms that were at most the limit; with noise it may be
    outside of [0, 1].
    """
    return limit * xp.exp(-rate * (unclipped - quantile))


@dataclass(frozen=True)
class Adaptive(Learning):
    """Limits that move up while too many norms are above them, and down while too few are.

    ::

        limit      = start_norm; without one, the median of the first five norms
        unclipped += [x + eps <= limit];  count += 1          of norms but 0
        after `every` norms:
            limit <- geometric_update(limit, unclipped / count), in [min_norm, max_norm]
            unclipped = count = 0

    A limit of 0 is not known yet. In a federation (`merge`) a round adds up the counts of all
    clients, and makes at most one update. Without `start_norm`, the first limit is the quantile of
    the first round, from a sketch of the norms; until then each client's median protects.
    """

    remembered: ClassVar[int | None] = 1

    quantile: float
    rate: float
    start_norm: float | None
    every: int
    min_norm: float | None
    max_norm: float | None
    warmup_factor: float
    eps: float

    @property
    def counters(self) -> tuple[str, ...]:
        return ("bits",) if self.start_norm is not None else ("bits", "sketch")

    @property
    def basis(self) -> Basis:
        """Where the limits come from: the first one is known once it is above 0."""
        return Basis(self._most, "limit", TINY)

    @property
    def guard(self) -> WarmupGuard:
        return WarmupGuard(self.warmup_factor) if self.start_norm is None else NO_GUARD

    def begin(self, groups: int, xp: Arithmetic) -> State:
        state = zeros(groups, xp, "limit", "unclipped", "count")
        return state._replace(limit=state.limit + (self.start_norm or 0.0))

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        """Return the limit of each group."""
        return state.limit

    def ready(self, state: State, threshold: Array) -> Array:
        """Return which groups have a limit."""
        return state.limit > 0

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        limits, after = super().__call__(norms, state, xp)
        if self.start_norm is None:
            begun = (state.limit <= 0) & self.guard.suffices(norms, after)
            first = self._bounded(self.guard.median(after, xp), xp)
            after = after._replace(limit=xp.where(begun, first, after.limit))
        return limits, after

    def judge(self, norms: Array, state: State, xp: Arithmetic, guard: WarmupGuard) -> Judgement:
        threshold, base = self.threshold(state, xp), norms + self.eps
        ready = self.ready(state, threshold)
        first, warmup_norms = guard.limits(norms, state, xp)
        limits = xp.minimum(xp.where(ready, threshold, first), self._most)
        reference = xp.where(ready | (base <= first), norms, warmup_norms)
        learns = (norms > 0) & (ready | guard.suffices(norms, state))
        below = xp.where(base <= state.limit, 1.0, 0.0)
        # Without a start from the norms, a client learns nothing else of them.
        observed = reference if self.start_norm is None else below
        return Judgement(limits, observed, learns, ready, reference, below)

    def learn(self, judged: Judgement, state: State, xp: Arithmetic) -> Mapping[str, Array]:
        return self._update(state, judged.unclipped, 1.0, xp)

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(self.quantile),)

    def merge(self, state: State, counted: Counted) -> State:
        first = self._bounded(counted.levels[0], NUMPY)
        known = (state.limit > 0, self._update(state, counted.unclipped, counted.n, NUMPY))
        return updated(state._replace(limit=first), [known], NUMPY)

    def ceiling(self, state: State) -> Float64:
        # Of a norm it is learnt whether it was below the limit, and at the start its size too.
        return np.full_like(state.count, math.inf if self.start_norm is None else 1.0)

    @property
    def _most(self) -> float:
        return math.inf if self.max_norm is None else self.max_norm

    def _bounded(self, limit: Array, xp: Arithmetic) -> Array:
        return xp.minimum(xp.maximum(limit, self.min_norm or TINY), self._most)

    def _update(self, state: State, unclipped: Array, n: Array, xp: Arithmetic) -> dict[str, Array]:
        unclipped, count = state.unclipped + unclipped, state.count + n
        share = unclipped / xp.maximum(count, 1.0)
        limit = geometric_update(state.limit, share, quantile=self.quantile, rate=self.rate, xp=xp)
        limit, due = self._bounded(limit, xp), count >= self.every
        return {
            # Not near the largest float, where the next step would overflow.
            "limit": xp.where(due & (limit < math.inf), limit, state.limit),
            "unclipped": xp.where(due, 0.0, unclipped),
            "count": xp.where(due, 0.0, count),
        }
