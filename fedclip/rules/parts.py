# SPDX-License-Identifier: Apache-2.0
"""What the rules on the history of norms have in common.

::

    limit = target                         of a spike
            threshold, and clear of n      of what is none
            before                         while there is nothing to judge by
    limit = min(limit, max_norm)
"""

from __future__ import annotations

from typing import Any, TypeVar

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import CLEAR

__all__ = ["TINY", "choose", "limits_of"]

TINY = 1.2e-38
"""The smallest normal float32: divides where 0 would, on every device."""

S = TypeVar("S", bound=tuple[Any, ...])


def limits_of(
    norms: Array,
    threshold: Array,
    spike: Array,
    ready: Array,
    xp: Arithmetic,
    *,
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
