# SPDX-License-Identifier: Apache-2.0
"""What the rules have in common whose limit follows from the norms seen so far.

::

    limits, seen, skipped = judge(norms, state)
    (protected while there is nothing to judge by: `fedclip.rules.start`)
    state                 = observe(seen, state), but for the groups that are skipped

or, where the current norm is included, ``state = observe(norms, state)`` first. And of a limit::

    limit = target                         of a spike
            threshold, and clear of n      of what is none
            warmup_norm                    while there is nothing to judge by
    limit = min(limit, max_norm)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import CLEAR, Judgement, State
from fedclip.rules.sharing import Floats
from fedclip.rules.start import Start, state_of

__all__ = ["TINY", "History", "choose", "limits_of"]

TINY = 1.2e-38
"""The smallest normal float32: divides where 0 would, on every device."""

S = TypeVar("S", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class History(ABC):
    """A rule that judges each norm by those before it, or by itself too.

    Attributes
    ----------
    feedback
        What is learnt of a spike: "clipped", "raw" or "none".
    include_current
        Whether a norm is learnt before it is judged.
    warmup, warmup_norm
        Number of norms before which there is nothing to judge by, and the limit until then.
    warmup_factor
        Limit until then, in medians of what has been seen; None for none.
    max_norm
        Limit at every step.
    eps
        Added to the norm where it is compared with a limit.
    """

    feedback: str
    include_current: bool
    warmup: int
    warmup_norm: float | None
    warmup_factor: float | None
    max_norm: float | None
    eps: float

    @cached_property
    def start(self) -> Start | None:
        """What protects groups that are not ready, if anything."""
        if self.warmup_factor is None:
            return None
        return Start(self.warmup_factor, raw=self.feedback == "raw")

    def init(self, groups: int, xp: Arithmetic) -> State:
        statistics = self.begin(groups, xp)
        if self.start is None:
            return statistics
        return state_of(type(self).__name__, statistics, self.start.init(groups, xp))

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        if self.include_current:
            state = self.observe(norms, state, xp)
        judged = self.judge(norms, state, xp)
        after = state
        if self.start is not None:
            judged, after = self.start.step(judged, norms, self.eps, state, xp)
        if self.include_current:
            return judged.limits, after
        learnt = self.observe(judged.seen, after, xp)
        if judged.skipped is not None:
            learnt = choose(judged.skipped, after, learnt, xp)
        return judged.limits, learnt

    @abstractmethod
    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the statistics before the first norm."""

    @abstractmethod
    def judge(self, norms: Array, state: State, xp: Arithmetic) -> Judgement:
        """Return the limits, and what is to be learnt."""

    @abstractmethod
    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        """Return the state after it has learnt one norm of each group."""

    def limits(
        self,
        norms: Array,
        threshold: Array,
        spike: Array,
        ready: Array,
        xp: Arithmetic,
        *,
        target: Array,
        before: Array | float | None = None,
    ) -> Array:
        """Return the limits; `before` is that of groups that are not ready, if it is special."""
        if before is None:
            before = math.inf if self.warmup_norm is None else self.warmup_norm
        return limits_of(
            norms, threshold, spike, ready, xp, target, before, self.max_norm, self.eps
        )

    def known(self, highest: Floats, ready: Array) -> Floats:
        """Return the most that can be learnt of one norm: `highest`, where a group is ready."""
        return np.where(ready & (self.feedback != "raw"), highest, math.inf)


def limits_of(
    norms: Array,
    threshold: Array,
    spike: Array,
    ready: Array,
    xp: Arithmetic,
    target: Array,
    before: Array | float,
    max_norm: float | None,
    eps: float,
) -> Array:
    """Return the limits, once it is known what is a spike and which groups are ready."""
    # What is no spike is clear of its limit, and need not be measured again to be sure.
    judged = xp.where(spike, target, xp.maximum(threshold, CLEAR * (norms + eps)))
    limits = xp.where(ready, judged, before)
    return limits if max_norm is None else xp.minimum(limits, max_norm)


def choose(condition: Array, yes: S, no: S, xp: Arithmetic) -> S:
    """Return the state `yes` in the groups where the condition holds, else the state `no`."""
    return type(yes)(*(xp.where(condition, y, n) for y, n in zip(yes, no, strict=True)))
