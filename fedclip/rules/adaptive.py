# SPDX-License-Identifier: Apache-2.0
"""A limit that tracks a quantile of the norms by a geometric rule.

Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
clipping", arXiv:1905.03871.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import NUMBER, NUMPY, Arithmetic, Array
from fedclip.rules import Basis, Judgement, State
from fedclip.rules.history import TINY, apart, updated
from fedclip.rules.sharing import Counted, Floats, Sketched
from fedclip.rules.start import Start, state_of


def geometric_update(
    limit: Array,
    unclipped: Array,
    *,
    quantile: float,
    rate: float,
    min_norm: float = 0.0,
    max_norm: float = math.inf,
    xp: Arithmetic = NUMBER,
) -> Array:
    """Return the limit after one update.

    ::

        limit <- clamp(limit * exp(-rate * (unclipped - quantile)), min_norm, max_norm)

    `unclipped` is the fraction of the norms that were at most the limit; with noise it may be
    outside of [0, 1]. `xp` is the arithmetic of both, that of Python floats by default.
    """
    moved = limit * xp.exp(-rate * (unclipped - quantile))
    return xp.minimum(xp.maximum(moved, min_norm), max_norm)


class AdaptiveState(NamedTuple):
    """The limit, and the numbers of norms since its last update: those below it, and all."""

    limit: Array
    unclipped: Array
    count: Array


@dataclass(frozen=True)
class Adaptive:
    """Limits that move up while too many norms are above them, and down while too few are.

    ::

        limit      = start_norm; without one, the median of the first five norms
        unclipped += [x + eps <= limit];  count += 1          of norms but 0
        after `every` norms:
            limit <- geometric_update(limit, unclipped / count);  unclipped = count = 0

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
        return Basis(math.inf if self.max_norm is None else self.max_norm, "limit", TINY)

    @property
    def start(self) -> Start | None:
        """The protection of groups that have no limit yet."""
        return Start(self.warmup_factor) if self.start_norm is None else None

    def begin(self, groups: int, xp: Arithmetic) -> AdaptiveState:
        zeros = xp.asarray([0.0] * groups)
        return AdaptiveState(zeros + (self.start_norm or 0.0), zeros, zeros)

    def init(self, groups: int, xp: Arithmetic) -> State:
        limits = self.begin(groups, xp)
        if self.start is None:
            return limits
        return state_of("Adaptive", limits, self.start.init(groups, xp))

    def __call__(
        self, norms: Array, state: State, xp: Arithmetic, finite: Array | None = None
    ) -> tuple[Array, State]:
        judged = self.judge(norms, state, xp, self.start)
        unclipped, count = state.unclipped + judged.unclipped, state.count + 1.0
        moved = self._move(state, unclipped, count, xp)
        changes = [(judged.learns, moved._asdict())]
        if self.start is not None:
            changes += [self.start.learn(judged.usual, state)]
        after = updated(state, changes, xp, finite)
        if self.start is not None and not xp.known(judged.ready):
            begun = (state.limit <= 0) & (after.start_1 > 0)
            first = self._bounded(self.start.median(after, xp), xp)
            after = after._replace(limit=xp.where(begun, first, after.limit))
        return judged.limits, after

    def judge(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Judgement:
        ready, base = state.limit > 0, norms + self.eps if self.eps else norms
        below = xp.where(base <= state.limit, 1.0, 0.0)
        limits, usual, learns = state.limit, norms, norms > 0
        if not xp.known(ready):
            limits = xp.where(ready, limits, math.inf if self.max_norm is None else self.max_norm)
            if start is not None:
                first, tamed = start.limits(state, xp)
                spike = base > first
                protected = apart(base, spike, first, xp)
                limits = xp.where(ready, limits, xp.minimum(limits, protected))
                usual = xp.where(ready, norms, xp.where(spike, tamed, norms))
                learns = learns & start.learns(ready, state, xp)
        seen = below if self.start is None else usual
        return Judgement(limits, seen, ready, learns, below, usual)

    def shared(self) -> Adaptive:
        return self

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(self.quantile),)

    def merge(self, state: AdaptiveState, counted: Counted) -> AdaptiveState:
        unclipped, count = state.unclipped + counted.unclipped, state.count + counted.n
        moved = self._move(state, unclipped, np.maximum(count, 1.0), NUMPY)
        first = AdaptiveState(self._bounded(counted.levels[0], NUMPY), 0.0 * count, 0.0 * count)
        return updated(first, [(state.limit > 0, moved)], NUMPY)

    def ceiling(self, state: AdaptiveState) -> Floats:
        # Of a norm it is learnt whether it was below the limit, and without a start its size too.
        return np.full_like(state.count, 1.0 if self.start is None else math.inf)

    def _bounded(self, limit: Array, xp: Arithmetic) -> Array:
        high = math.inf if self.max_norm is None else self.max_norm
        return xp.minimum(xp.maximum(limit, self.min_norm or TINY), high)

    def _move(self, state: State, unclipped: Array, count: Array, xp: Arithmetic) -> AdaptiveState:
        limit = state.limit
        moved = geometric_update(
            limit,
            unclipped / count,
            quantile=self.quantile,
            rate=self.rate,
            min_norm=self.min_norm or TINY,
            max_norm=math.inf if self.max_norm is None else self.max_norm,
            xp=xp,
        )
        due = count >= self.every
        # Keep a limit near the largest float, where the next step would overflow.
        return AdaptiveState(
            xp.where(due & xp.isfinite(moved), moved, limit),
            xp.where(due, 0.0 * unclipped, unclipped),
            xp.where(due, 0.0 * count, count),
        )
