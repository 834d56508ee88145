# SPDX-License-Identifier: Apache-2.0
"""The common part of all rules whose limit follows from the norms seen so far.

::

    threshold, target, spike_norms = of the rule           where it is ready
                                of its protection     elsewhere
    spike  = n + eps > threshold
    limit  = target                                   for a spike, mostly the threshold
             threshold, at least n + eps              for any other norm
    limit  = min(limit, warmup_norm)                  where the rule is not ready
    limit  = min(limit, max_norm)
    reference = spike_norms                                  for a spike, mostly the target
             n                                        for any other norm
    observed = reference | n | nothing of a spike           (feedback)
    state  = observe(observed, state)                     in the groups that learn

A rule is ready after `warmup` norms, or as many as it needs, if its threshold is above 0. Until
then `fedclip.rules.warmup` protects, if there is a `warmup_factor`: its median alone learns
the first norms, which are part of the warm-up. If the current norm is included,
``state = observe(n, state)`` comes first.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array, Float64
from fedclip.rules import Basis, State
from fedclip.rules.sharing import Judgement, Learning
from fedclip.rules.warmup import NO_GUARD, WarmupGuard


@dataclass(frozen=True, kw_only=True)
class History(Learning):
    """A rule that judges each norm by those before it, and optionally by that norm too.

    Its fields, like those of all rules, are parameters of the clipper, under the same names.
    """

    feedback: str
    include_current: bool
    warmup: int
    warmup_norm: float | None
    warmup_factor: float | None
    max_norm: float | None
    eps: float
    is_local: bool = True
    """Whether the state is of this machine alone, or else of a federation."""

    # -- what a rule says ---------------------------------------------------------------------
    @abstractmethod
    def threshold(self, state: State, xp: Arithmetic) -> Array:
        """Return the norm of each group above which a norm is a spike."""

    @abstractmethod
    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        """Return the state after it has learnt one norm of each group, and counted it."""

    # -- what it may say ----------------------------------------------------------------------
    @property
    def least(self) -> int:
        """Number of norms of a group before which it is not judged, whatever the warm-up."""
        return 1

    def ready(self, state: State, threshold: Array) -> Array:
        """Return which groups can be judged; with a threshold of 0 a group cannot."""
        return (state.count >= self.needed) & (threshold > 0)

    def compared(self, norms: Array) -> Array:
        """Return what is compared with the threshold."""
        return norms + self.eps

    def target(self, norms: Array, threshold: Array, state: State, xp: Arithmetic) -> Array:
        """Return the limit of a spike."""
        return threshold

    def spike_norms(self, norms: Array, target: Array, xp: Arithmetic) -> Array:
        """Return what the statistics learn from a spike."""
        return target

    def before(self, norms: Array, xp: Arithmetic) -> Array:
        """Return the fixed limits of groups that are not ready; None for none."""
        return self.warmup_norm

    # -- what follows -------------------------------------------------------------------------
    @property
    def needed(self) -> int:
        """Number of norms that a group has learnt when its warm-up is over.

        A server does not know which norms its clients leave to their protection.
        """
        return max(self.warmup, self.least) - (self._left_to_guard if self.is_local else 0)

    @property
    def _left_to_guard(self) -> int:
        if self.warmup_factor is None or self.feedback == "raw":
            return 0
        return min(5, max(self.warmup - self.least, 0)) if self.is_local else 5

    @property
    def basis(self) -> Basis:
        """Where the limits come from; a norm that is included counts before it is judged."""
        fixed = math.inf if self.max_norm is None else self.max_norm
        return Basis(fixed, "count", self.needed - self.include_current)

    @property
    def guard(self) -> WarmupGuard:
        if self.warmup_factor is None:
            return NO_GUARD
        return WarmupGuard(self.warmup_factor, least=self._left_to_guard)

    def shared(self) -> Self:
        return replace(self, is_local=False)

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        if self.include_current:
            state = self.observe(norms, state, xp)
        return super().__call__(norms, state, xp)

    def learn(self, judged: Judgement, state: State, xp: Arithmetic) -> Mapping[str, Array]:
        return {} if self.include_current else self.observe(judged.observed, state, xp)._asdict()

    def judge(self, norms: Array, state: State, xp: Arithmetic, guard: WarmupGuard) -> Judgement:
        adaptive, base = self.threshold(state, xp), norms + self.eps if self.eps else norms
        ready = self.ready(state, adaptive)
        target = self.target(norms, adaptive, state, xp)
        spike_norms = self.spike_norms(norms, target, xp)
        first, warmup_norms = guard.limits(norms, state, xp)
        threshold = xp.where(ready, adaptive, first)
        target = xp.where(ready, target, first)
        spike_norms = xp.where(ready, spike_norms, warmup_norms)

        spike = self.compared(norms) > threshold
        limits = xp.where(spike, target, xp.maximum(threshold, base))
        if (before := self.before(norms, xp)) is not None:
            limits = xp.where(ready, limits, xp.minimum(limits, before))
        if self.max_norm is not None:
            limits = xp.minimum(limits, self.max_norm)

        reference = xp.where(spike, spike_norms, norms)
        observed = norms if self.feedback == "raw" else reference
        learns = ready | guard.suffices(norms, state)
        if self.feedback == "none":
            learns = learns & ~(ready & spike)
        return Judgement(limits, observed, learns, ready, reference)

    def ceiling(self, state: State) -> Float64:
        threshold = self.threshold(state, NUMPY)
        bounded = self.ready(state, threshold) & (self.feedback != "raw")
        return np.where(bounded, self.spike_norms(threshold + math.inf, threshold, NUMPY), math.inf)
