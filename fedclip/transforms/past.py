# SPDX-License-Identifier: Apache-2.0
"""Limits on single elements that follow from the past of each element.

The past of a tensor is one array. `fedclip.rules.elementwise` has the rules that derive limits
from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedclip.arrays import LARGEST, Array, Arrays
from fedclip.core.states import Statistics
from fedclip.rules import State
from fedclip.rules.elementwise import EmaValue, GrowthValue
from fedclip.transforms.base import Gradient, Outcome, Transform

PAST = ("past", "count")
"""Names of the arrays kept for each tensor: its past, and the number of its gradients."""


class Remembering(Transform):
    """A transform that keeps the past of each tensor; float64 for float64 tensors."""

    array_fields: ClassVar[tuple[str, ...]] = PAST
    dense = True

    def recalled(self, gradient: Gradient) -> Statistics:
        pairs = zip(gradient.groups.names, gradient.arrays, strict=True)
        return {name: _recall(gradient, name, array) for name, array in pairs}

    def begun(self, gradient: Gradient) -> tuple[list[Array], Array]:
        """Return the past of each tensor, at first zeros, and the numbers of their gradients.

        Raises
        ------
        ValueError
            If the past that is kept for a tensor does not have its shape.
        """
        cached = self.recalled(gradient)
        gradient.cached.update(cached)
        each = [cached[name] for name in gradient.groups.names]
        return [k["past"] for k in each], gradient.xp.joined([k["count"] for k in each])


def _recall(gradient: Gradient, name: str, array: Array) -> dict[str, Array]:
    xp, known = gradient.xp, gradient.cached.get(name)
    dtype = "float64" if xp.dtype(array) == "float64" else "float32"
    if known is None:
        return {"past": _zeros(gradient, array, dtype), "count": xp.asarray(0.0, like=array)}
    past, count = (known[field] for field in PAST)
    held, shape = tuple(past.shape), tuple(array.shape)
    if held != shape:
        raise ValueError(
            f"the state of {name!r} is of shape {held}, its gradient of {shape}: "
            "load the state of this model, or none"
        )
    moves = isinstance(past, np.ndarray) and not gradient.on_host
    if moves:
        past, count = (xp.asarray(x, like=array) for x in (past, count))
    if xp.dtype(past) != dtype:
        if dtype == "float32":
            # A wider gradient may have left numbers that are beyond it.
            top = LARGEST[dtype]
            past = xp.minimum(xp.maximum(past, -top), top)
        past = xp.cast(past, dtype)
    # What is added to zeros of the array is split over devices as the array is.
    return {"past": past + _zeros(gradient, array, dtype) if moves else past, "count": count}


def _zeros(gradient: Gradient, array: Array, dtype: str) -> Array:
    xp = gradient.xp
    wide = xp.cast(array, dtype)
    return xp.where(xp.isfinite(wide), 0.0 * wide, 0.0 * abs(wide) if gradient.on_host else 0.0)


def remember(gradient: Gradient, pasts: Arrays, counts: Array) -> None:
    """Keep new pasts, and numbers of gradients before this one, for the next step."""
    names = gradient.groups.names
    after = gradient.xp.pieces(counts + 1.0, [()] * len(names))
    trios = zip(names, pasts, after, strict=True)
    gradient.remember({name: {"past": past, "count": count} for name, past, count in trios})


@dataclass(frozen=True)
class PastClipping(Remembering):
    """A limit for each element, which a rule derives from the element's past."""

    rule: EmaValue | GrowthValue

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient; the record has the largest element as norm, and the largest limit."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        owners, number = groups.owners, len(groups)
        _, norms = gradient.finite_peaks()
        pasts, counts = self.begun(gradient)

        def call(values: Array, past: Array, *numbers: Array) -> tuple[Array, ...]:
            output, limits, after = self.rule(values, past, numbers, xp)
            return output, after, xp.max(limits), xp.max(abs(output - values))

        columns = [arrays, pasts, *self.rule.numbers(counts, xp)]
        outputs, after, tops, moves = xp.mapped(call, columns)
        remember(gradient, after, counts)
        limits = xp.group_max(tops, owners, number)
        return Outcome(outputs, state, norms, limits, xp.group_max(moves, owners, number) > 0)
