# SPDX-License-Identifier: Apache-2.0
"""One file per algorithm: how a limit follows from the norms seen so far.

A rule is pure arithmetic, vectorised over groups, with no Python branch on a value::

    limits, state = rule(norms, state, xp)

`norms` holds one number for each group, `state` is a NamedTuple of such arrays, and `xp` offers
the operations of `fedclip.arrays.Arithmetic` (``where, sqrt, minimum, ...``). The same text thus
runs on host arrays, on a device without a synchronisation, under ``jax.jit`` and in a
``tf.function``. Its hyper-parameters are the fields of a frozen dataclass.

A rule never sees NaN or infinity: who calls it keeps such steps away from the statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from fedclip.arrays import Arithmetic, Array

__all__ = ["CLEAR", "Judgement", "NoState", "Rule", "State"]


CLEAR = 1.0 + 4e-6
"""Times a norm: a limit that the norm is below, whatever its uncertainty."""


class NoState(NamedTuple):
    """State of a rule that has none."""


State = Any
"""A NamedTuple of arrays over groups, the last axis being that of the groups."""


class Judgement(NamedTuple):
    """What a rule says of the norms of one step."""

    limits: Array
    """The limit of each group."""
    seen: Array
    """What statistics learn from each group."""
    ready: Array
    """The groups that there is something to judge by."""
    skipped: Array | None = None
    """The groups from which they learn nothing; None where there are none of that kind."""
    unclipped: Array | None = None
    """1 where a norm is at most the limit, else 0; of a rule that counts "bits"."""


class Rule(Protocol):
    """What `fedclip.transforms.norm` asks of a rule."""

    def init(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first step."""

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        """Return the limit of each group for this step, and the state after it."""
