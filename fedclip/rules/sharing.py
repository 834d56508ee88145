# SPDX-License-Identifier: Apache-2.0
"""Rules that learn, alone or as one state for a whole federation.

Alone, each step judges the norms and learns them::

    judged = rule.judge(norms, state)
    state  = rule.learn(judged, state)             in the groups that learn

In a federation, every client judges during a round by the state of the round's start, and only
counts its norms. Between two rounds the server updates the state with the counts of all clients::

    judged = rule.judge(norms, state)              each step of each client
    state  = rule.merge(state, counted)            once a round, on the server

The result does not depend on the order of the norms in a round, which the server does not know. A
round with a single norm changes the state as that norm would on a single machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

from fedclip.arrays import Arithmetic, Array, Float64
from fedclip.rules import Basis, State, state_of, updated
from fedclip.rules.warmup import WarmupGuard


class Sketched(Protocol):
    """The norms of a whole federation, as a sketch."""

    def quantile(self, p: float) -> float:
        """Return a quantile of the norms."""

    def deviation(self, p: float, centre: float) -> float:
        """Return a quantile of the distances of the norms from a centre."""


class Judgement(NamedTuple):
    """A rule's answer to the norms of one step; a number for each group.

    Attributes
    ----------
    limits
        The limits.
    observed
        The norms that the statistics learn.
    learns
        The groups whose statistics learn.
    ready
        The groups that have statistics to judge by.
    reference
        The norms that the protection learns.
    unclipped
        1 for a norm of at most the limit, else 0; only from rules that count "bits".
    """

    limits: Array
    observed: Array
    learns: Array
    ready: Array = None
    reference: Array = None
    unclipped: Array = None


class Counted(NamedTuple):
    """The counts of all clients in one round, or a single norm; a number for each group.

    Attributes
    ----------
    n
        Number of norms that were learnt.
    mean, variance
        Mean and population variance of the round, for rules that count "moments".
    levels
        The rule's `levels` of the history, this round included: one row for each number.
    unclipped
        Number of norms of at most the limit, for rules that count "bits".
    """

    n: Array
    mean: Array
    variance: Array
    levels: Array = None
    unclipped: Array = None


class Learning(Protocol):
    """A rule that can update its state from norms, and from counts of norms."""

    @property
    def counters(self) -> tuple[str, ...]:
        """What clients count: some of "moments", "sketch" and "bits"."""

    @property
    def basis(self) -> Basis:
        """Where the limits come from."""

    @property
    def guard(self) -> WarmupGuard:
        """The protection of groups that are not ready, on each client separately."""

    def begin(self, groups: int, xp: Arithmetic) -> State:
        """Return the statistics before the first norm."""

    def judge(self, norms: Array, state: State, xp: Arithmetic, guard: WarmupGuard) -> Judgement:
        """Return the limits, and what the statistics should learn."""

    def learn(self, judged: Judgement, state: State, xp: Arithmetic) -> Mapping[str, Array]:
        """Return the fields after a step, for groups that learn."""

    def merge(self, state: State, counted: Counted) -> State:
        """Return the state after a round; only groups with ``n > 0`` are used."""

    def ceiling(self, state: State) -> Float64:
        """Return the largest norm that a client can have learnt; infinity if there is no bound."""

    def shared(self) -> Self:
        """Return the rule for clients, which judges by the server's state."""
        return self

    @property
    def remembered(self) -> int | None:
        """Least number of norms in the sketch; None for all."""
        return None

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        """Return the numbers that `merge` needs from the history, for rules with a "sketch"."""
        return ()

    def init(self, groups: int, xp: Arithmetic) -> State:
        parts = self.begin(groups, xp), self.guard.init(groups, xp)
        return state_of(*parts, name=type(self).__name__)

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        guard = self.guard
        judged = self.judge(norms, state, xp, guard)
        update = (judged.learns, self.learn(judged, state, xp))
        guarded = guard.learn(judged.reference, state)
        return judged.limits, updated(state, [update, guarded], xp)
