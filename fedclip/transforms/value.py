# SPDX-License-Identifier: Apache-2.0
"""Limits on single elements.

::

    output = the array itself if every element lies in [low, high]
             else min(high, max(low, x)) for each element

Limits are fixed, or a percentile of the same gradient. Round them inwards to a number of the
array's dtype, so that they hold exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from fedclip.arrays import LARGEST, Array, Backend, HostView
from fedclip.measures import Float64, Numbers
from fedclip.measures.l2 import decode, extremes
from fedclip.rules import FIXED, Basis, State
from fedclip.transforms.action import GRID, replaced
from fedclip.transforms.base import Gradient, Outcome, Transform, put


def value_ranges(gradient: Gradient) -> Float64:
    """Return the smallest and the largest element of each array; zeros for an empty one."""
    return np.array([extremes(v) if v.size else (0.0, 0.0) for v in gradient.local()])


def _inwards(limit: float, dtype: str, up: bool) -> float:
    """Return the nearest number of the dtype that is not below (up) or above the limit."""
    # In plain Python, which torch.compile can follow.
    if math.isinf(limit) or not limit:
        return limit
    digits, least = GRID[dtype]
    unit = 2.0 ** max(math.frexp(limit)[1] - digits, least)
    steps = math.ceil(limit / unit) if up else math.floor(limit / unit)
    return max(-LARGEST[dtype], min(steps * unit, LARGEST[dtype]))


# Without it, a step of `value-clip` takes a sixth longer (20 tensors of 50 elements).
_remembered = lru_cache(maxsize=1024)(_inwards)


def towards_zero(values: Array, dtype: str, xp: Backend) -> Array:
    """Return wide values of a device in a dtype, rounded towards zero."""
    near = xp.cast(values, dtype)
    digits, least = GRID[dtype]
    if GRID[xp.dtype(values)][0] <= digits:
        return near
    # Between a half and the whole of the distance from one number of the dtype to the next.
    less = xp.maximum(abs(values) * 2.0**-digits, 0.75 * 2.0**least)
    low = xp.maximum(abs(values) - less, 0.0)
    beyond = abs(xp.cast(near, xp.dtype(values))) > abs(values)
    return xp.where(beyond, xp.cast(xp.where(values < 0, -low, low), dtype), near)


@dataclass(frozen=True)
class ValueClipping(Transform):
    """A box for each group: ``[low, high]``, in the order of the groups; one side may be open."""

    basis: ClassVar[Basis] = FIXED

    lows: tuple[float, ...]
    highs: tuple[float, ...]
    limits: Float64 = field(init=False, repr=False, compare=False)
    """For the record: the larger absolute value of the finite ends of each box."""

    def __post_init__(self) -> None:
        # In plain Python, which torch.compile can follow.
        pairs = zip(self.lows, self.highs, strict=True)
        limits = [max([abs(x) for x in pair if math.isfinite(x)], default=0.0) for pair in pairs]
        object.__setattr__(self, "limits", np.array(limits))

    # -- on the host --------------------------------------------------------------------------
    def measure(self, gradient: Gradient) -> Float64:
        """Return the smallest and the largest element of each array."""
        return value_ranges(gradient)

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient; the record has the largest absolute element as norm."""
        arrays, groups, backend = gradient.arrays, gradient.groups, gradient.backend
        ranges = np.asarray(measured)
        largest = np.zeros(len(groups))
        clipped = np.zeros(len(groups), dtype=bool)
        boxes: dict[int, tuple[str, float, float]] = {}
        for i, group in enumerate(groups.index):
            low, high = self.lows[group], self.highs[group]
            largest[group] = max(largest[group], -ranges[i, 0], ranges[i, 1])
            if ranges[i, 0] < low or ranges[i, 1] > high:
                dtype = backend.dtype(arrays[i])
                boxes[i] = dtype, _remembered(low, dtype, True), _remembered(high, dtype, False)
                clipped[group] = True
        outputs = replaced(
            arrays,
            boxes,
            lambda some, places, box: backend.clip(some, *box[1:], gradient.host(places)),
        )
        return Outcome(outputs if clipped.any() else None, state, largest, self.limits, clipped)

    # -- on a device, or in compiled code -----------------------------------------------------
    @property
    def runs_on_parts(self) -> bool:
        return True

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient element by element, in the framework's own operations."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        lows, highs = xp.group_extremes(arrays, groups.members)
        least = xp.asarray(self.lows, like=arrays[0])
        most = xp.asarray(self.highs, like=arrays[0])
        finite = gradient.finite(lows, highs)
        clipped = ((lows < least) | (highs > most)) & finite
        boxes = {}
        for i, (array, group) in enumerate(zip(arrays, groups.owners, strict=True)):
            dtype = xp.dtype(array)
            low, high = self.lows[group], self.highs[group]
            boxes[i] = dtype, _inwards(low, dtype, True), _inwards(high, dtype, False)
        outputs = replaced(arrays, boxes, lambda some, _, box: xp.clip(some, *box[1:]))
        norms = xp.maximum(-lows, highs)
        outputs = gradient.settled(outputs, xp.isfinite(norms), finite, on_nonfinite)
        limits = xp.asarray(self.limits, like=arrays[0])
        return Outcome(outputs, state, norms, limits, clipped, finite)


@dataclass(frozen=True)
class PercentileClipping(Transform):
    """A limit for each group: a percentile of the absolute values of its elements."""

    percentile: Fraction
    linear: bool

    def measure(self, gradient: Gradient) -> Float64:
        """Return the smallest and the largest element of each array."""
        return value_ranges(gradient)

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient; the record has the largest absolute element as norm."""
        local = gradient.local()
        limits = tuple(self._limit([local[i] for i in m]) for m in gradient.groups.members)
        box = ValueClipping(tuple(-limit for limit in limits), limits)
        return box.step(gradient, measured, state)

    def _limit(self, views: Sequence[HostView]) -> float:
        values = np.concatenate([np.abs(decode(view).ravel()) for view in views])
        if not values.size:
            return 0.0
        # Use integers or fractions: floats miss the position for some sizes.
        position = self.percentile * (values.size - 1) / 100
        low = int(position)
        between = float(position - low) if self.linear else 0.0
        if not between:
            return float(np.partition(values, low)[low])
        pair = np.partition(values, (low, low + 1))[low : low + 2].astype(np.float64)
        return float(pair[0] + between * (pair[1] - pair[0]))

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient, in the framework's own operations."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        norms = xp.group_peaks(arrays, groups.members)
        finite = gradient.finite(norms)
        limits = [self._limit_on_device([arrays[i] for i in m], xp) for m in groups.members]
        outputs, dense, owners = list(arrays), [*map(xp.dense, arrays)], groups.owners
        for places in xp.bundles(dense):
            values = xp.bundle([dense[i] for i in places])
            end = towards_zero(xp.bundle([limits[owners[i]] for i in places]), xp.dtype(values), xp)
            boxed = xp.minimum(xp.maximum(values, -end), end)
            put(outputs, places, xp.store(boxed, [arrays[i] for i in places]))
        outputs = gradient.settled(outputs, xp.isfinite(norms), finite, on_nonfinite)
        bounds = xp.stack([*map(xp.wide, limits)])
        return Outcome(outputs, state, norms, bounds, (norms > bounds) & finite, finite)

    def _limit_on_device(self, arrays: Sequence[Array], xp: Backend) -> Array:
        values = xp.sort(abs(xp.joined(arrays)))
        # A number of elements that is known only as the step runs is a float, exact as an int is.
        size = sum(xp.size(array) for array in arrays)
        if isinstance(size, int) and not size:
            return xp.asarray([0.0], like=arrays[0])[0]
        steps, whole = self.percentile.numerator * (size - 1), 100 * self.percentile.denominator
        low = steps // whole
        first = _at(values, low, xp)
        if not self.linear:
            return first
        least = min if isinstance(low, int) else xp.minimum
        second = xp.wide(_at(values, least(low + 1, size - 1), xp))
        between = (steps - low * whole) / whole
        return xp.wide(first) + between * (second - xp.wide(first))


def _at(values: Array, place: Any, xp: Backend) -> Array:
    """Return the element of a flat array at a place: an int, or an array of shape ()."""
    return (
        values[place] if isinstance(place, int) else xp.pick(values[:, None], xp.stack([place]))[0]
    )
