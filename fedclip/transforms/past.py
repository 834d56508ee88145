# SPDX-License-Identifier: Apache-2.0
"""Limits on single elements that follow from the past of each element.

The past of a tensor is one array, in host memory. `fedclip.rules.elementwise` has the rules that
derive limits from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedclip.arrays import HostView
from fedclip.measures import Float64, Numbers
from fedclip.measures.l2 import CHUNK, decode, encode
from fedclip.rules import State
from fedclip.rules.elementwise import ElementRule
from fedclip.states import Statistics
from fedclip.transforms.base import Gradient, Outcome, Transform
from fedclip.transforms.value import value_ranges

PAST = ("past", "count")
"""Names of the arrays kept for each tensor: its past, and the number of its gradients."""


def recall(gradient: Gradient, local: Sequence[HostView]) -> list[dict[str, Any]]:
    """Return the arrays kept for each tensor, at first zeros; float64 for float64 tensors.

    A step writes to them in place.

    Raises
    ------
    ValueError
        If an array kept for a tensor does not have its shape; then nothing has changed.
    """
    names = gradient.groups.names
    found = [_recall(n, v, gradient.kept) for n, v in zip(names, local, strict=True)]
    gradient.kept.update(zip(names, found, strict=True))
    return found


def _recall(name: str, view: HostView, kept: Statistics) -> dict[str, Any]:
    wide = np.dtype(np.float64 if view.dtype == np.float64 else np.float32)
    if name not in kept:
        return {"past": np.zeros(view.shape, wide), "count": np.zeros(())}
    past, count = (kept[name][field] for field in PAST)
    if past.shape != view.shape or count.shape != ():
        raise ValueError(
            f"the state of {name!r} is of shape {past.shape}, its gradient of {view.shape}: "
            "load the state of this model, or none"
        )
    if wide.itemsize < past.itemsize:
        # A wider gradient may have left numbers that are beyond float32.
        top = float(np.finfo(np.float32).max)
        past = np.asarray(np.clip(past, -top, top))
    return {"past": past.astype(wide, order="C", copy=False), "count": count}


@dataclass(frozen=True)
class PastClipping(Transform):
    """A limit for each element, which a rule derives from the element's past."""

    array_fields: ClassVar[tuple[str, ...]] = PAST

    rule: ElementRule

    def measure(self, gradient: Gradient) -> Float64:
        """Return the largest absolute element of each group."""
        ranges = value_ranges(gradient)
        return np.array(
            [np.abs(ranges[list(members)]).max() for members in gradient.groups.members]
        )

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient; the record has the largest element as norm, and the largest limit."""
        groups, local = gradient.groups, gradient.dense()
        memories = recall(gradient, local)
        outputs = list(gradient.arrays)
        limits = np.zeros(len(groups))
        clipped = np.zeros(len(groups), dtype=bool)
        for i, (view, memory) in enumerate(zip(local, memories, strict=True)):
            output, top = self._clip(gradient, i, view, memory)
            group = groups.index[i]
            limits[group] = max(limits[group], top)
            if output is not None:
                outputs[i] = gradient.from_host(i, output)
                clipped[group] = True
        largest = np.asarray(measured)
        return Outcome(outputs if clipped.any() else None, state, largest, limits, clipped)

    def _clip(
        self, gradient: Gradient, i: int, view: HostView, memory: dict[str, Any]
    ) -> tuple[HostView | None, float]:
        """Return the output, None if nothing is clipped, and the largest limit."""
        dtype = gradient.host_dtype(i)
        flat, past, count = view.reshape(-1), memory["past"].reshape(-1), float(memory["count"])
        output: HostView | None = None
        top = 0.0
        # Work on pieces that stay in the cache, so that memory is read once: 40 % faster, and five
        # times with `growth-value-clip` (two tensors of 1M elements).
        for start in range(0, flat.size, CHUNK):
            piece = slice(start, start + CHUNK)
            values = decode(flat[piece])
            result, limits, after = self.rule(values, past[piece], count)
            top = max(top, float(limits.max()))
            past[piece] = after
            if output is None and (result != values).any():
                output = gradient.empty(i, flat.shape, dtype)
                output[:start] = encode(decode(flat[:start]), dtype)
            if output is not None:
                output[piece] = encode(result, dtype, towards_zero=True)
        memory["count"] = np.asarray(count + 1)
        return None if output is None else output.reshape(view.shape), top
