# SPDX-License-Identifier: Apache-2.0
"""One file per algorithm: how a limit follows from the norms seen so far.

A rule is pure arithmetic, vectorised over groups, with no Python branch on a value::

    limits, state = rule(norms, state, xp)

`norms` holds one number for each group, `state` is a NamedTuple of such arrays, and `xp` has
the operations of `fedclip.arrays.Arithmetic` (``where, sqrt, minimum, ...``). So the same code
runs on host arrays, on a device without a synchronisation, under ``jax.jit`` and in a
``tf.function``. A rule is a frozen dataclass, whose fields are its hyper-parameters.

A rule never sees NaN or infinity: the caller keeps such steps away from the statistics. Norms are
between 1e-30 and 1e30, or 0; of others, statistics stay finite.
"""

from __future__ import annotations

import copyreg
import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

from fedclip.arrays import Arithmetic, Array

CLEAR = 1.0 + 4e-6
"""A norm is surely below this many times itself, whatever its uncertainty."""

TINY = 1.2e-38
"""The smallest normal float32: a divisor in place of 0, on every device."""


State = Any
"""A NamedTuple of arrays over groups, the last axis being that of the groups."""


class NoState(NamedTuple):
    """State of a rule that has none."""


class Basis(NamedTuple):
    """Where limits come from, so that records can tell a fixed limit from a learnt one.

    Attributes
    ----------
    fixed
        A limit of at least this was fixed before the run; 0 if all are.
    field
        Field of the state that says how far the warm-up is, if there is one.
    least
        The warm-up is over where that field is at least this.
    """

    fixed: float = math.inf
    field: str = ""
    least: float = 0.0


FIXED, LEARNT = Basis(0.0), Basis()


class Rule(Protocol):
    """The protocol of rules, as `fedclip.transforms.norm` uses it."""

    def init(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first step."""

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        """Return the limit of each group for this step, and the state after it."""


def zeros(groups: int, xp: Arithmetic, *fields: str) -> State:
    """Return a state of these fields, all 0."""
    return state_of(dict.fromkeys(fields, xp.asarray([0.0] * groups)))


def state_of(*parts: State | Mapping[str, Array], name: str = "State") -> State:
    """Return one state with the fields of all parts; the name tells a rule's from another's."""
    fields: dict[str, Array] = {}
    for part in parts:
        fields.update(part if isinstance(part, Mapping) else part._asdict())
    return _type(name, tuple(fields))(*fields.values())


@cache
def _type(name: str, fields: tuple[str, ...]) -> Any:
    make: Any = namedtuple
    made = make(name, fields)
    # Pickle does not find a class that was made here by its name.
    copyreg.pickle(made, lambda state: (partial(state_of, name=name), (state._asdict(),)))
    return made


def known(rule: Any, state: State, xp: Arithmetic) -> dict[str, Array]:
    """Return the statistics of a rule by name, without those of its protection.

    A rule with a `threshold` adds it, infinity until there is one, and whether it is `ready`.
    """
    fields = {f: getattr(state, f) for f in state._fields if not f.startswith("start_")}
    if not hasattr(rule, "threshold"):
        return fields
    threshold = rule.threshold(state, xp)
    ready = rule.ready(state, threshold)
    return fields | {"threshold": xp.where(ready, threshold, math.inf), "ready": ready}


def updated(
    state: State, changes: Sequence[tuple[Array, Mapping[str, Array]]], xp: Arithmetic
) -> State:
    """Return the state with new values of some fields, in the groups of each change's condition."""
    conditions, fields = [], {}
    for condition, new in changes:
        changed = {name: value for name, value in new.items() if value is not getattr(state, name)}
        conditions += [condition] * len(changed)
        fields.update(changed)
    if not fields:
        return state
    old = [getattr(state, name) for name in fields]
    chosen = xp.choose(conditions, [*fields.values()], old)
    return state._replace(**dict(zip(fields, chosen, strict=True)))
