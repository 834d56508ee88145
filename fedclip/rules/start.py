# SPDX-License-Identifier: Apache-2.0
"""The protection of a group until it has enough statistics: a median of its last norms.

::

    median    = of the last 5 norms above 0, the lower one of an even number
    spike     = x > factor * median                 from the second norm on
    limit     = factor * median                     while the rule has no statistics
    learnt    = x, or 1.1 * median for a spike      by the median, and by the rule
                nothing by the rule                 before the median is of 5 norms;
                                                    of 1, if other clients' norms count too
    learnt    = what the rule learns                by the median, once the rule has statistics

Two spikes among five norms do not change the median, and more spikes hardly raise it. The
protection has no scale: norms that are s times as large get limits that are s times as large.
Norms that have risen for good lift the median by a tenth every three steps.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State

FULL = 5
"""Number of norms in the median."""

_LEARNT = 1.1
_SLOTS = ("start_1", "start_2", "start_3", "start_4", "start_5")


@cache
def _type(name: str, fields: tuple[str, ...]) -> Any:
    make: Any = namedtuple
    kind = make(f"{name}State", fields)
    # Pickle finds no class that was made here by its name.
    kind.__reduce__ = lambda state: (_made, (name, fields, tuple(state)))
    return kind


def _made(name: str, fields: tuple[str, ...], values: tuple[Array, ...]) -> Any:
    return _type(name, fields)(*values)


def state_of(name: str, statistics: State, *more: Mapping[str, Array]) -> State:
    """Return a state with the fields of the statistics, and more."""
    fields = statistics._asdict()
    for part in more:
        fields.update(part)
    return _type(name, tuple(fields))(**fields)


@dataclass(frozen=True)
class Start:
    """Protection of the first norms; its fields are in the state next to those of the rule.

    The limit is `factor` times the median. The rule learns no norm before the median is of `least`
    norms, or every norm as it is with `raw`.
    """

    factor: float
    raw: bool = False
    least: int = FULL

    def init(self, groups: int, xp: Arithmetic) -> dict[str, Array]:
        """Return the protection's own fields before the first norm."""
        return dict.fromkeys(_SLOTS, xp.asarray([0.0] * groups))

    def median(self, state: State, xp: Arithmetic) -> Array:
        """Return the median of the last norms; infinity before the first."""
        return xp.median([getattr(state, slot) for slot in _SLOTS])

    def limits(
        self, state: State, xp: Arithmetic, more: Sequence[tuple[Array, float]] = ()
    ) -> Sequence[Array]:
        """Return the norm above which a norm is a spike, and what is learnt from a spike.

        Then come `more` products of an array and a number, which cost no operation of their own.
        """
        median = self.median(state, xp)
        return xp.products([(median, self.factor), (median, _LEARNT), *more])

    def learns(self, ready: Array, state: State, xp: Arithmetic) -> Array:
        """Return the groups whose rule learns the next norm: those that are ready, and others.

        The others have enough norms in the median.
        """
        # Norms come in at the last slot and move towards the first; 0 is an empty slot.
        return xp.either(ready, getattr(state, _SLOTS[FULL - self.least]))

    def learn(self, norms: Array, state: State) -> tuple[Array, dict[str, Array]]:
        """Return the groups that learn these norms, which ignore 0, and their fields after."""
        later = [getattr(state, slot) for slot in _SLOTS[1:]]
        return norms > 0, dict(zip(_SLOTS, [*later, norms], strict=True))
