# SPDX-License-Identifier: Apache-2.0
"""A limit at a percentile of the norms seen so far.

Seetharaman, Wichern, Pardo & Le Roux, 2020, "AutoClip: adaptive gradient clipping for source
separation networks", arXiv:2007.14469.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State
from fedclip.rules.parts import limits_of
from fedclip.rules.quantiles import Given, GivenState, Quantile, Window
from fedclip.rules.sharing import Counted, Floats, Judgement

__all__ = ["Percentile"]


@dataclass(frozen=True)
class Percentile:
    """Limits at a running quantile.

    ::

        limit = quantile, or x if that is larger    where x + eps <= quantile
                quantile                            elsewhere
                warmup_norm                         before `warmup` norms, and where it is 0
        limit = min(limit, max_norm)
        u     = min(x, 2 * quantile) | x            (feedback)

    If norms were learnt at the limit itself, none would ever be above a limit, and no limit
    would ever rise. A quantile hardly asks how far above it a norm is, so twice the limit
    changes little, until there is a burst of spikes.

    In a federation (`merge`) the quantile is that of the sketch of all clients' norms.
    """

    counters: ClassVar[tuple[str, ...]] = ("sketch",)

    history: Quantile
    feedback: str
    include_current: bool
    warmup: int
    warmup_norm: float | None
    max_norm: float | None
    eps: float

    def init(self, groups: int, xp: Arithmetic) -> State:
        return self.history.init(groups, xp)

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        if self.include_current:
            state = self._observe(norms, state, xp)
        limits, seen, _ = self.judge(norms, state, xp)
        if not self.include_current:
            state = self._observe(seen, state, xp)
        return limits, state

    def judge(self, norms: Array, state: State, xp: Arithmetic) -> Judgement:
        threshold = self.history.estimate(state, xp)
        ready = (state.count >= max(self.warmup, self.history.least)) & (threshold > 0)
        limits = limits_of(
            norms,
            threshold,
            ready & (norms + self.eps > threshold),
            ready,
            xp,
            target=threshold,
            before=math.inf if self.warmup_norm is None else self.warmup_norm,
            max_norm=self.max_norm,
            eps=self.eps,
        )
        clipped = xp.where(ready, xp.minimum(norms, 2.0 * threshold), norms)
        return Judgement(limits, norms if self.feedback == "raw" else clipped)

    @property
    def sketched(self) -> tuple[float, int | None]:
        size = self.history.size if isinstance(self.history, (Window, Given)) else None
        return self.history.quantile, size

    def shared(self) -> Percentile:
        return replace(self, history=Given(*self.sketched, least=self.history.least))

    def merge(self, state: GivenState, counted: Counted) -> GivenState:
        return GivenState(counted.level, state.count + counted.n)

    def ceiling(self, state: GivenState) -> Floats:
        ready = (state.count >= max(self.warmup, self.history.least)) & (state.level > 0)
        if self.feedback == "raw":
            return np.full_like(state.count, math.inf)
        return np.where(ready, 2.0 * state.level, math.inf)

    def _observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        return self.history.observe(seen, state, xp)._replace(count=state.count + 1.0)
