# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient that is clipped element by element.

::

    output = the array itself if every element lies in [low, high]
             else min(high, max(low, x)) for each element

Limits are rounded inwards to a number of the array's dtype, so that they hold exactly. They are
fixed, or follow from the gradient itself, or from the past of each element (an array that is
kept in host memory, see `fedclip.rules.elementwise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from fedclip.arrays import Arena, Array, Backend, HostView, Views
from fedclip.arrays.numpy import bits
from fedclip.measures.l2 import CHUNK, Float64, Numbers, decode, encode, extremes
from fedclip.rules import NoState
from fedclip.rules.elementwise import ElementRule
from fedclip.scopes import Groups
from fedclip.states import Statistics
from fedclip.transforms.norm import Outcome, replaced

__all__ = [
    "PAST",
    "PastClipping",
    "PercentileClipping",
    "ValueClipping",
    "dense_views",
    "host_dtype",
    "recall",
]

PAST = ("past", "count")
"""Names of the arrays kept of each tensor: its past, and the number of its gradients."""


def host_dtype(backend: Backend, array: Array) -> np.dtype[Any]:
    """Return the dtype in which a host view shows the array: bfloat16 as uint16."""
    name = backend.dtype(array)
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def dense_views(arrays: Sequence[Array], views: Views, backend: Backend) -> list[HostView]:
    """Return the arrays in host memory, C-contiguous; sparse ones with all their zeros."""
    result = []
    for array, view in zip(arrays, views, strict=True):
        dense = backend.dense(array)
        if dense is not array:
            (view,) = backend.host([dense])
        local = bits(backend.to_host(dense)) if view is None else view
        result.append(np.asarray(local, order="C"))
    return result


def _local(arrays: Sequence[Array], views: Views, backend: Backend) -> list[HostView]:
    """Return the arrays in host memory; of sparse ones, the merged rows."""
    return [
        bits(backend.to_host(a)) if v is None else v for a, v in zip(arrays, views, strict=True)
    ]


def _ranges(arrays: Sequence[Array], views: Views, backend: Backend) -> Float64:
    """Return the smallest and the largest element of each array; zeros for an empty one."""
    local = _local(arrays, views, backend)
    return np.array([extremes(v) if v.size else (0.0, 0.0) for v in local])


def recall(name: str, view: HostView, kept: Statistics) -> dict[str, Any]:
    """Return what is kept of a tensor, zeros if nothing is; float64 for float64 tensors.

    Raises
    ------
    ValueError
        If what is kept does not have the tensor's shape.
    """
    wide = np.dtype(np.float64 if view.dtype == np.float64 else np.float32)
    if name not in kept:
        return {"past": np.zeros(view.shape, wide), "count": np.zeros(())}
    past, count = (kept[name][field] for field in PAST)
    if past.shape != view.shape or count.shape != ():
        raise ValueError(
            f"the state of {name!r} is of shape {past.shape}, its gradient of {view.shape}: "
            "load the state of this model, or none"
        )
    return {"past": past.astype(wide, order="C", copy=False), "count": count}


@lru_cache(maxsize=1024)
def _inwards(limit: float, dtype: np.dtype[Any], up: bool) -> float:
    """Return the nearest number of the dtype that is not below (up) or above the limit."""
    near = encode(np.array([limit]), dtype, towards_zero=True)
    if float(decode(near)[0]) != limit and (limit > 0) == up:
        near.view(f"u{near.itemsize}")[...] += 1
    return float(decode(near)[0])


@dataclass(frozen=True)
class ValueClipping:
    """A box for each group: ``[low, high]``, in the order of the groups."""

    array_fields: ClassVar[tuple[str, ...]] = ()

    lows: tuple[float, ...]
    highs: tuple[float, ...]

    def init(self, groups: Groups) -> NoState:
        """Return the state, of which there is none."""
        return NoState()

    def measure(
        self,
        arrays: Sequence[Array],
        views: Views,
        groups: Groups,
        backend: Backend,
    ) -> Float64:
        """Return the smallest and the largest element of each array."""
        return _ranges(arrays, views, backend)

    def step(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        measured: Numbers,
        state: NoState,
        views: Views,
        kept: Statistics,
    ) -> Outcome:
        """Clip one gradient; for the record, a norm is the largest absolute element."""
        ranges = np.asarray(measured)
        largest = np.zeros(len(groups))
        clipped = np.zeros(len(groups), dtype=bool)
        boxes: dict[int, tuple[np.dtype[Any], float, float]] = {}
        for i, group in enumerate(groups.index):
            low, high = self.lows[group], self.highs[group]
            largest[group] = max(largest[group], -ranges[i, 0], ranges[i, 1])
            if ranges[i, 0] < low or ranges[i, 1] > high:
                dtype = host_dtype(backend, arrays[i])
                boxes[i] = dtype, _inwards(low, dtype, True), _inwards(high, dtype, False)
                clipped[group] = True
        arena = Arena(views.sizes)
        outputs = replaced(arrays, boxes, lambda some, box: backend.clip(some, *box[1:], arena))
        limits = np.maximum(np.negative(self.lows), self.highs)
        return Outcome(outputs if clipped.any() else None, state, largest, limits, clipped)


@dataclass(frozen=True)
class PercentileClipping:
    """A limit for each group: a percentile of the absolute values of its elements."""

    array_fields: ClassVar[tuple[str, ...]] = ()

    percentile: Fraction
    linear: bool

    def init(self, groups: Groups) -> NoState:
        """Return the state, of which there is none."""
        return NoState()

    def measure(
        self,
        arrays: Sequence[Array],
        views: Views,
        groups: Groups,
        backend: Backend,
    ) -> Float64:
        """Return the smallest and the largest element of each array."""
        return _ranges(arrays, views, backend)

    def step(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        measured: Numbers,
        state: NoState,
        views: Views,
        kept: Statistics,
    ) -> Outcome:
        """Clip one gradient; for the record, a norm is the largest absolute element."""
        local = _local(arrays, views, backend)
        limits = tuple(self._limit([local[i] for i in members]) for members in groups.members)
        box = ValueClipping(tuple(-limit for limit in limits), limits)
        return box.step(arrays, groups, backend, measured, state, views, kept)

    def _limit(self, views: Sequence[HostView]) -> float:
        values = np.concatenate([np.abs(decode(view).ravel()) for view in views])
        if not values.size:
            return 0.0
        # In integers (or fractions), as floats miss the position for some sizes.
        position = self.percentile * (values.size - 1) / 100
        low = int(position)
        between = float(position - low) if self.linear else 0.0
        if not between:
            return float(np.partition(values, low)[low])
        pair = np.partition(values, (low, low + 1))[low : low + 2].astype(np.float64)
        return float(pair[0] + between * (pair[1] - pair[0]))


@dataclass(frozen=True)
class PastClipping:
    """A limit for each element, from what a rule keeps of that element's past."""

    array_fields: ClassVar[tuple[str, ...]] = PAST

    rule: ElementRule

    def init(self, groups: Groups) -> NoState:
        """Return the state of the groups, of which there is none."""
        return NoState()

    def measure(
        self,
        arrays: Sequence[Array],
        views: Views,
        groups: Groups,
        backend: Backend,
    ) -> Float64:
        """Return the largest absolute element of each group."""
        ranges = _ranges(arrays, views, backend)
        return np.array([np.abs(ranges[list(members)]).max() for members in groups.members])

    def step(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        measured: Numbers,
        state: NoState,
        views: Views,
        kept: Statistics,
    ) -> Outcome:
        """Clip one gradient; for the record, norm and limit are the largest of all elements."""
        local = dense_views(arrays, views, backend)
        # All at once, so that nothing is changed if one of them does not fit.
        memories = [recall(n, view, kept) for n, view in zip(groups.names, local, strict=True)]
        arena = Arena([view.nbytes for view in local])
        outputs = list(arrays)
        limits = np.zeros(len(groups))
        clipped = np.zeros(len(groups), dtype=bool)
        for i, (name, view, memory) in enumerate(zip(groups.names, local, memories, strict=True)):
            kept[name] = memory
            output, top = self._clip(view, memory, host_dtype(backend, arrays[i]), arena)
            group = groups.index[i]
            limits[group] = max(limits[group], top)
            if output is not None:
                outputs[i] = backend.from_host(output, backend.dense(arrays[i]))
                clipped[group] = True
        largest = np.asarray(measured)
        return Outcome(outputs if clipped.any() else None, state, largest, limits, clipped)

    def _clip(
        self, view: HostView, memory: dict[str, Any], dtype: np.dtype[Any], arena: Arena
    ) -> tuple[HostView | None, float]:
        """Return the output, None if nothing is clipped, and the largest limit."""
        flat, past, count = view.reshape(-1), memory["past"].reshape(-1), float(memory["count"])
        output: HostView | None = None
        top = 0.0
        # A piece stays in the cache while it is worked on, so that memory is read once.
        for start in range(0, flat.size, CHUNK):
            piece = slice(start, start + CHUNK)
            values = decode(flat[piece])
            result, limits, after = self.rule(values, past[piece], count)
            top = max(top, float(limits.max()))
            past[piece] = after
            if output is None and (result != values).any():
                output = arena.empty(flat.shape, dtype)
                output[:start] = encode(decode(flat[:start]), dtype)
            if output is not None:
                output[piece] = encode(result, dtype, towards_zero=True)
        memory["count"] = np.asarray(count + 1)
        return None if output is None else output.reshape(view.shape), top
