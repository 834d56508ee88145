# SPDX-License-Identifier: Apache-2.0
"""The common part of all rules whose limit follows from the norms seen so far.

::

    limits, seen, skipped = judge(norms, state)
    (while a group has no statistics, `fedclip.rules.start` protects it)
    state                 = observe(seen, state), except for skipped groups

If the current norm is included, ``state = observe(norms, state)`` comes first. A rule has a
threshold, and judges by it, unless it says otherwise, like this::

    ready = there are `warmup` norms, and at least so many as the rule needs; threshold > 0
    limit = threshold                           for a spike, n + eps > threshold
            threshold, and well above n         for any other norm
            warmup_norm                         for a group that is not ready
    limit = min(limit, max_norm)
    seen  = min(n, reach * threshold) | n | nothing of a spike      (feedback)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import CLEAR, Basis, Judgement, State
from fedclip.rules.sharing import Floats, Sketched
from fedclip.rules.start import Start, state_of

TINY = 1.2e-38
"""The smallest normal float32: a divisor in place of 0, on every device."""

S = TypeVar("S", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class History(ABC):
    """A rule that judges each norm by those before it, or by itself as well.

    Its fields, like those of all rules, are parameters of the clipper, under the same names.
    """

    reach: ClassVar[float] = 1.0
    """How many thresholds the statistics learn from a spike, at most."""

    feedback: str
    include_current: bool
    warmup: int
    warmup_norm: float | None
    warmup_factor: float | None
    max_norm: float | None
    eps: float

    @property
    def least(self) -> int:
        """Number of norms of a group before which it is not judged, whatever the warm-up."""
        return 1

    @property
    def basis(self) -> Basis:
        """Where the limits come from; a norm that is included counts before it is judged."""
        fixed = math.inf if self.max_norm is None else self.max_norm
        return Basis(fixed, "count", max(self.warmup, self.least) - self.include_current)

    @property
    def remembered(self) -> int | None:
        """Least number of norms in a sketch of all clients' norms; None for all."""
        return None

    def shared(self) -> History:
        """Return the rule for clients, which judges by the server's state."""
        return self

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        """Return what the server needs from the sketch, if anything."""
        return ()

    @property
    def start(self) -> Start | None:
        """The protection of groups that are not ready, if any."""
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
    def threshold(self, state: State, xp: Arithmetic) -> Array:
        """Return the norm of each group above which a norm is a spike."""

    def ready(self, state: State, scale: Array) -> Array:
        """Return which groups can be judged; a scale of 0 is none to judge by."""
        return (state.count >= max(self.warmup, self.least)) & (scale > 0)

    def judge(self, norms: Array, state: State, xp: Arithmetic) -> Judgement:
        """Return the limits, and what the statistics should learn."""
        threshold = self.threshold(state, xp)
        ready = self.ready(state, threshold)
        spike = ready & (norms + self.eps > threshold)
        limits = limits_of(self, norms, threshold, spike, ready, xp)
        clipped = xp.where(ready, xp.minimum(norms, self.reach * threshold), norms)
        seen = norms if self.feedback == "raw" else clipped
        return Judgement(limits, seen, ready, spike if self.feedback == "none" else None)

    def ceiling(self, state: State) -> Floats:
        """Return the largest norm that the statistics can learn; infinity if there is no bound."""
        threshold = self.threshold(state, NUMPY)
        return self.known(self.reach * threshold, self.ready(state, threshold))

    @abstractmethod
    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        """Return the state after it has learnt one norm of each group."""

    def known(self, highest: Floats, ready: Array) -> Floats:
        """Return the largest norm that the statistics can learn: `highest`, for ready groups."""
        return np.where(ready & (self.feedback != "raw"), highest, math.inf)


def limits_of(
    rule: Any,
    norms: Array,
    threshold: Array,
    spike: Array,
    ready: Array,
    xp: Arithmetic,
    *,
    target: Array | None = None,
    before: Array | float | None = None,
) -> Array:
    """Return the limits of a rule, given which norms are spikes and which groups are ready.

    `target` is the limit of a spike, if not the threshold, and `before` that of a group that is
    not ready, if not `warmup_norm`.
    """
    # Keep the limit of other norms well above them, so that they are not measured again.
    clear = xp.maximum(threshold, CLEAR * (norms + rule.eps if rule.eps else norms))
    judged = xp.where(spike, threshold if target is None else target, clear)
    if before is None:
        before = math.inf if rule.warmup_norm is None else rule.warmup_norm
    limits = xp.where(ready, judged, before)
    return limits if rule.max_norm is None else xp.minimum(limits, rule.max_norm)


def choose(condition: Array, yes: S, no: S, xp: Arithmetic) -> S:
    """Return the state `yes` in the groups where the condition holds, else the state `no`."""
    known = xp.known(condition)
    if known is not None:
        return yes if known else no
    return type(yes)(*xp.choose(condition, yes, no))
