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
from fedclip.rules.sharing import Counted, Floats, Judgement, Sketched

__all__ = ["Adaptive", "AdaptiveState", "geometric_update"]


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

    Parameters
    ----------
    limit
        The limit that the norms were compared with.
    unclipped
        Fraction of the norms that were at most the limit, in [0, 1]; noisy ones may be outside.
    quantile
        Fraction that is aimed at.
    rate
        Size of the step, in logarithms.
    min_norm, max_norm
        Bounds of the limit.
    xp
        Arithmetic of `limit` and `unclipped`; that of Python floats if not given.
    """
    moved = limit * xp.exp(-rate * (unclipped - quantile))
    return xp.minimum(xp.maximum(moved, min_norm), max_norm)


class AdaptiveState(NamedTuple):
    """The limit, and how many norms since its last update were below it, and were there."""

    limit: Array
    unclipped: Array
    count: Array


@dataclass(frozen=True)
class Adaptive:
    """Limits that move up while too many norms are above them, and down while too few are.

    ::

        limit      = start_norm, at first
        unclipped += [x + eps <= limit];  count += 1
        after `every` norms:
            limit <- geometric_update(limit, unclipped / count);  unclipped = count = 0

    In a federation (`merge`) a round adds what all clients counted, and makes one update at most.
    """

    counters: ClassVar[tuple[str, ...]] = ("bits",)
    remembered: ClassVar[int | None] = None

    quantile: float
    rate: float
    start_norm: float
    every: int
    min_norm: float
    max_norm: float | None
    eps: float

    def init(self, groups: int, xp: Arithmetic) -> AdaptiveState:
        zeros = xp.asarray([0.0] * groups)
        return AdaptiveState(zeros + self.start_norm, zeros, zeros)

    def __call__(
        self, norms: Array, state: AdaptiveState, xp: Arithmetic
    ) -> tuple[Array, AdaptiveState]:
        limits, seen, _ = self.judge(norms, state, xp)
        return limits, self._move(state, state.unclipped + seen, state.count + 1.0, xp)

    def judge(self, norms: Array, state: AdaptiveState, xp: Arithmetic) -> Judgement:
        below = norms + self.eps <= state.limit
        return Judgement(state.limit, xp.where(below, 1.0, 0.0))

    def shared(self) -> Adaptive:
        return self

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return ()

    def merge(self, state: AdaptiveState, counted: Counted) -> AdaptiveState:
        unclipped, count = state.unclipped + counted.unclipped, state.count + counted.n
        return self._move(state, unclipped, np.maximum(count, 1.0), NUMPY)

    def ceiling(self, state: AdaptiveState) -> Floats:
        return np.ones_like(state.count)

    def _move(
        self, state: AdaptiveState, unclipped: Array, count: Array, xp: Arithmetic
    ) -> AdaptiveState:
        limit = state.limit
        moved = geometric_update(
            limit,
            unclipped / count,
            quantile=self.quantile,
            rate=self.rate,
            min_norm=self.min_norm,
            max_norm=math.inf if self.max_norm is None else self.max_norm,
            xp=xp,
        )
        due = count >= self.every
        # A limit that norms near the end of the floats have pulled up has no next step.
        return AdaptiveState(
            xp.where(due & xp.isfinite(moved), moved, limit),
            xp.where(due, 0.0 * unclipped, unclipped),
            xp.where(due, 0.0 * count, count),
        )
