# SPDX-License-Identifier: Apache-2.0
"""One file per algorithm: how a limit follows from the norms seen so far.

A rule is pure arithmetic, vectorised over groups, with no Python branch on a value::

    limits, state = rule(norms, state, xp)

`norms` holds one number for each group, `state` is a NamedTuple of such arrays, and `xp` has
the operations of `fedclip.arrays.Arithmetic` (``where, sqrt, minimum, ...``). So the same code
runs on host arrays, on a device without a synchronisation, under ``jax.jit`` and in a
``tf.function``. A rule is a frozen dataclass, whose fields are its hyper-parameters.

A rule never sees NaN or infinity: the caller keeps such steps away from the statistics.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from fedclip.arrays import Arithmetic, Array

CLEAR = 1.0 + 4e-6
"""A norm is surely below this many times itself, whatever its uncertainty."""


class NoState(NamedTuple):
    """State of a rule that has none."""


State = Any
"""A NamedTuple of arrays over groups, the last axis being that of the groups."""


class Basis(NamedTuple):
    """Where limits come from, so that records can tell a fixed limit from a learnt one."""

    fixed: float = math.inf
    """A limit of at least this was fixed before the run; 0 if all are."""
    field: str = ""
    """Field of the state that says how far the warm-up is, if there is one."""
    least: float = 0.0
    """The warm-up is over where that field is at least this."""


FIXED, LEARNT = Basis(0.0), Basis()


class Judgement(NamedTuple):
    """A rule's answer to the norms of one step."""

    limits: Array
    """The limit of each group."""
    seen: Array
    """The norm that the statistics learn from each group."""
    ready: Array
    """The groups that have statistics to judge by."""
    learns: Array | None = None
    """The groups whose statistics learn; None for all."""
    unclipped: Array | None = None
    """1 for a norm of at most the limit, else 0; only from rules that count "bits"."""
    usual: Array | None = None
    """The norm that the protection of the first norms learns; only from rules that have one."""
    over: Array | None = None
    """The groups above their limit, if that is known already."""


class Rule(Protocol):
    """The protocol of rules, as `fedclip.transforms.norm` uses it."""

    def init(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first step."""

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        """Return the limit of each group for this step, and the state after it."""
