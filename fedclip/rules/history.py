# SPDX-License-Identifier: Apache-2.0
"""The common part of all rules whose limit follows from the norms seen so far.

::

    limits, seen, learns = judge(norms, state)
    (while a group has no statistics, `fedclip.rules.start` protects it)
    state                = observe(seen, state), in the groups that learn

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.rules import CLEAR, Basis, Judgement, State
from fedclip.rules.sharing import Floats, Sketched
from fedclip.rules.start import Start, state_of

TINY = 1.2e-38
"""The smallest normal float32: a divisor in place of 0, on every device."""

S = TypeVar("S", bound=tuple[Any, ...])


class Criterion(NamedTuple):
    """What the norms of one step are judged by, in each group."""

    threshold: Array
    """A norm above this is a spike."""
    ready: Array
    """The groups that have statistics to judge by."""
    learnt: Array | None = None
    """What the statistics learn from a spike, if not its limit."""
    target: Array | None = None
    """The limit of a spike, if not the threshold."""
    measured: Array | None = None
    """What is compared with the threshold, if not ``norms + eps``."""
    first: Sequence[Array] | None = None
    """The limits of the protected start, if they are known already."""


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

    def __call__(
        self, norms: Array, state: State, xp: Arithmetic, finite: Array | None = None
    ) -> tuple[Array, State]:
        """Return the limits and the state after; the same state if the gradient is not finite."""
        judged, after = self.step(norms, state, xp, finite)
        return judged.limits, after

    def step(
        self, norms: Array, state: State, xp: Arithmetic, finite: Array | None = None
    ) -> tuple[Judgement, State]:
        """Return the judgement, with the limits, and the state after."""
        if self.include_current:
            after = self.observe(norms, state, xp)
            state = updated(state, [(None, after)], xp, finite)
        start, changes = self.start, []
        judged = self.judge(norms, state, xp, start)
        if not self.include_current:
            changes += [(judged.learns, self.observe(judged.seen, state, xp, judged.ready))]
        if start is not None:
            changes += [start.learn(judged.usual, state)]
        return judged, updated(state, changes, xp, finite)

    @abstractmethod
    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the statistics before the first norm."""

    @abstractmethod
    def threshold(self, state: State, xp: Arithmetic) -> Array:
        """Return the norm of each group above which a norm is a spike."""

    def ready(self, state: State, scale: Array) -> Array:
        """Return which groups can be judged; a scale of 0 is none to judge by."""
        return (state.count >= max(self.warmup, self.least)) & (scale > 0)

    def criterion(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Criterion:
        """Return what the norms are judged by, where `start` does not protect."""
        threshold = self.threshold(state, xp)
        learnt = xp.minimum(norms, self.reach * threshold)
        return Criterion(threshold, self.ready(state, threshold), learnt=learnt)

    def judge(
        self, norms: Array, state: State, xp: Arithmetic, start: Start | None = None
    ) -> Judgement:
        """Return the limits, and what the statistics should learn.

        `start` protects the groups that are not ready.
        """
        threshold, ready, learnt, target, measured, first = self.criterion(norms, state, xp, start)
        base = norms + self.eps if self.eps else norms
        # A norm that is included is often the threshold itself.
        exact = measured is None and target is None and not self.include_current
        exact = exact and not xp.measures_again
        raised, aim, learns = threshold, threshold if target is None else target, None
        learnt = aim if learnt is None else learnt
        learnt = norms if self.feedback == "raw" else learnt
        # Without this, a step of `zscore-clip` takes 18 % longer once the group is ready
        # (20 tensors of 50 elements).
        protected = not xp.known(ready)
        if protected:
            if start is not None and first is None:
                first = start.limits(state, xp)
            high, tamed = first or (math.inf, norms)
            raised, learnt = xp.where(ready, threshold, high), xp.where(ready, learnt, tamed)
            aim = raised if target is None else xp.where(ready, target, high)
            if start is not None and not start.raw:
                learns = start.learns(ready, state, xp)
        measured = base if measured is None else measured
        spike = measured > raised
        limits = raised if exact else apart(base, spike, raised, xp, aim)
        before = self.before(norms, xp) if protected else None
        if before is not None:
            limits = xp.where(ready, limits, xp.minimum(limits, before))
        if self.max_norm is not None:
            limits = xp.minimum(limits, self.max_norm)
        over = spike if limits is raised else None
        usual = xp.where(spike, learnt, norms)
        if self.feedback == "none":
            # Groups that are not ready learn from spikes too.
            highest = xp.where(ready, raised, math.inf) if protected else raised
            learns = both(learns, measured <= highest)
        seen = norms if self.feedback == "raw" else usual
        return Judgement(limits, seen, ready, learns, usual=usual, over=over)

    def before(self, norms: Array, xp: Arithmetic) -> Array | float | None:
        """Return the fixed limits of groups that are not ready; None for none."""
        return self.warmup_norm

    def ceiling(self, state: State) -> Floats:
        """Return the largest norm that the statistics can learn; infinity if there is no bound."""
        threshold = self.threshold(state, NUMPY)
        return self.known(self.reach * threshold, self.ready(state, threshold))

    @abstractmethod
    def observe(
        self, seen: Array, state: State, xp: Arithmetic, ready: Array | None = None
    ) -> State:
        """Return the state after it has learnt one norm of each group.

        It says which groups are `ready` by this state, if that is known.
        """

    def known(self, highest: Floats, ready: Array) -> Floats:
        """Return the largest norm that the statistics can learn: `highest`, for ready groups."""
        return np.where(ready & (self.feedback != "raw"), highest, math.inf)


def apart(
    base: Array, spike: Array, threshold: Array, xp: Arithmetic, target: Array | None = None
) -> Array:
    """Return the limits: of spikes the target, which is the threshold unless it is given.

    That of other norms stays well above them, so that they are not measured again.
    """
    clear = xp.maximum(threshold, CLEAR * base)
    return xp.where(spike, threshold if target is None else target, clear)


def both(one: Array | None, other: Array | None) -> Array | None:
    """Return where two conditions hold, of which None always holds."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def updated(
    state: S,
    changes: Sequence[tuple[Array | None, S | Mapping[str, Array]]],
    xp: Arithmetic,
    finite: Array | None = None,
) -> S:
    """Return the state after each change, a state or some fields, in the groups of its condition.

    No condition means all groups. Nothing changes unless the gradient is `finite`.
    """
    conditions, fields = [], {}
    for condition, new in changes:
        known = condition is None or xp.known(condition)
        if known is False:
            continue
        if known and finite is None:
            # The first change may be to all the state; the others are to other fields.
            state = new if isinstance(new, tuple) else state._replace(**new)  # type: ignore
            continue
        values = new._asdict() if isinstance(new, tuple) else new  # type: ignore[attr-defined]
        values = {f: v for f, v in values.items() if v is not getattr(state, f)}
        fields.update(values)
        conditions += [finite if condition is None else condition] * len(values)
    if fields:
        old = [getattr(state, field) for field in fields]
        chosen = xp.choose(conditions, [*fields.values()], old, finite)
        state = state._replace(**dict(zip(fields, chosen, strict=True)))  # type: ignore
    return state
