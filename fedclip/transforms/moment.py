# SPDX-License-Identifier: Apache-2.0
"""Subtracts means, and divides by standard deviations.

Means, deviations and the arithmetic on each element are in float64. A result beyond the largest
finite number of the dtype becomes that number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from fedclip.arrays import LARGEST, Array, Backend, HostView
from fedclip.measures import Float64, Numbers, measure
from fedclip.measures.l2 import CHUNK, blocks, decode, encode, extremes, square_sums
from fedclip.rules import FIXED, Basis, State
from fedclip.rules.history import TINY
from fedclip.scopes import Groups
from fedclip.transforms.base import Gradient, Outcome, Transform, put
from fedclip.transforms.slice import spanned

# A float64 sum of finite elements may overflow; the sum of elements 2^64 times smaller does not.
_DOWN = 64
_HIGH = 1e300


def _mean(views: Sequence[HostView]) -> float:
    """Return the mean of all elements; not finite if one of them is not."""
    size = sum(view.size for view in views)
    if not size:
        return 0.0
    total = sum(float(b.sum()) for view in views for b in blocks(view))
    if math.isfinite(total):
        return total / size
    total = sum(float(np.ldexp(b, -_DOWN).sum()) for view in views for b in blocks(view))
    return math.ldexp(total / size, _DOWN)


def _slice_means(view: HostView, axes: tuple[int, ...]) -> Float64:
    """Return the mean of each slice that spans `axes`, with those axes kept as 1."""
    wide = decode(view)
    size = math.prod(view.shape[a] for a in axes)
    total = np.sum(wide, axis=axes, keepdims=True, dtype=np.float64)
    if not np.isfinite(total).all():
        smaller = np.ldexp(wide.astype(np.float64), -_DOWN)
        return np.asarray(np.ldexp(smaller.sum(axis=axes, keepdims=True) / size, _DOWN))
    return np.asarray(total / size)


def _shifted(gradient: Gradient, i: int, view: HostView, centre: Any) -> HostView:
    """Return ``view - centre`` for array i."""
    wide, dtype = decode(view), gradient.host_dtype(i)
    result = gradient.empty(i, view.shape, wide.dtype)
    # The ufunc computes in float64 piece by piece, without an array of float64.
    np.subtract(wide, centre, out=result, dtype=np.float64, casting="same_kind")
    top = float(decode(np.array([0x7F7F], np.uint16))[0])
    if dtype != np.uint16:
        top = float(np.finfo(dtype).max)
    # With smaller centres, every difference rounds to a finite number.
    if np.abs(centre).max() > top * 2.0**-55:
        np.clip(result, -top, top, out=result)
    return encode(result, dtype)


@dataclass(frozen=True)
class Centralizing(Transform):
    """Subtract the mean of each slice, tensor, or (`pooled`) group."""

    basis: ClassVar[Basis] = FIXED

    dims: tuple[int, ...] | None
    inverse_dims: bool
    min_size: int
    pooled: bool

    def measure(self, gradient: Gradient) -> Float64:
        """Return the means of the groups, or of the slices of all arrays, one after the other."""
        local = gradient.dense()
        if self.pooled:
            return np.array([_mean([local[i] for i in m]) for m in gradient.groups.members])
        parts = [np.zeros(0)]
        for view in local:
            axes = self._axes(view.shape)
            # Take one mean of an array that is left alone too, to find NaN in it.
            parts.append(np.array([_mean([view])]) if axes is None else _slice_means(view, axes))
        return np.concatenate([part.ravel() for part in parts])

    def _axes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        axes = spanned(len(shape), self.dims, self.inverse_dims)
        # Lists, not generators: torch.compile can follow these.
        if not axes or 0 in shape or math.prod([shape[a] for a in axes]) < self.min_size:
            return None
        return axes

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Centre one gradient; the record has the largest mean as norm, and 0 as limit."""
        groups, local = gradient.groups, gradient.dense()
        outputs = list(gradient.arrays)
        largest = np.zeros(len(groups))
        for i, centre in enumerate(self._centres(local, groups, np.asarray(measured))):
            peak = np.abs(centre).max(initial=0.0)
            largest[groups.index[i]] = max(largest[groups.index[i]], peak)
            if peak > 0:
                result = _shifted(gradient, i, local[i], centre)
                outputs[i] = gradient.from_host(i, result)
        changed = largest > 0
        limits = np.zeros(len(groups))
        return Outcome(outputs if changed.any() else None, state, largest, limits, changed)

    def _centres(
        self, local: Sequence[HostView], groups: Groups, means: Float64
    ) -> list[np.ndarray[Any, Any]]:
        """Return what to subtract from each array: zero if it is left alone."""
        if self.pooled:
            sizes = [sum(local[i].size for i in m) for m in groups.members]
            large = np.array(sizes) >= self.min_size
            return [np.asarray(means[g] if large[g] else 0.0) for g in groups.index]
        result = []
        start = 0
        for view in local:
            axes = self._axes(view.shape)
            if axes is None:
                result.append(np.zeros(()))
                start += 1
                continue
            shape = tuple(1 if a in axes else n for a, n in enumerate(view.shape))
            size = math.prod(shape)
            result.append(means[start : start + size].reshape(shape))
            start += size
        return result

    # -- on a device, or in compiled code -----------------------------------------------------
    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Centre one gradient, in the framework's own operations."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        dense = [*map(xp.dense, arrays)]
        outputs, centres = list(arrays), self._centres_on_device(dense, groups, xp)
        peaks = xp.group_peaks(dense, groups.members)
        # A zero that follows from the data is mapped, and split over devices, as they are.
        largest = [xp.of_group(xp.minimum(peaks, 0.0), 0)] * len(arrays)
        some = [*centres]
        for chosen in xp.bundles([dense[i] for i in some]):
            places = [some[j] for j in chosen]
            values = xp.bundle([dense[i] for i in places])
            centre = xp.bundle([centres[i] for i in places])
            put(largest, places, xp.unbundled(xp.wide(xp.largest(centre))))
            top = LARGEST[xp.dtype(values)]
            shifted = xp.minimum(xp.maximum(xp.wide(values) - centre, -top), top)
            put(outputs, places, xp.store(shifted, [arrays[i] for i in places]))
        # What is left alone is looked at for NaN only.
        fine = xp.isfinite(peaks)
        norms, finite = gradient.largest(largest), gradient.all_fine(fine)
        outputs = gradient.settled(outputs, fine, finite, on_nonfinite)
        return Outcome(outputs, state, norms, 0.0 * norms, (norms > 0) & finite, finite)

    def _centres_on_device(
        self, dense: Sequence[Array], groups: Groups, xp: Backend
    ) -> dict[int, Array]:
        """Return what to subtract from each array; nothing for one that is left alone."""
        if not self.pooled:
            spans = {i: self._axes(tuple(array.shape)) for i, array in enumerate(dense)}
            return {
                i: _mean_on_device([dense[i]], xp, a) for i, a in spans.items() if a is not None
            }
        centres = {}
        for members in groups.members:
            size = sum(math.prod(dense[i].shape) for i in members)
            if size >= self.min_size and size:
                mean = _mean_on_device([dense[i] for i in members], xp)
                centres.update(dict.fromkeys(members, mean))
        return centres


def _mean_on_device(
    parts: Sequence[Array], xp: Backend, axes: tuple[int, ...] | None = None
) -> Array:
    """Return the mean of all elements of dense arrays; of each slice of one, with `axes`."""
    parts = [part for part in parts if math.prod(part.shape)]
    size = sum(math.prod(part.shape) for part in parts)
    if axes is not None:
        size = math.prod([parts[0].shape[a] for a in axes])
    totals = [xp.total(part, axes) for part in parts]
    if all(
        LARGEST[xp.dtype(x)] > LARGEST[xp.dtype(p)] * 2.0**_DOWN
        for x, p in zip(totals, parts, strict=True)
    ):
        return reduce(operator.add, totals) / size
    wide = [*map(xp.wide, parts)]
    peak = reduce(xp.maximum, [xp.largest(x, axes) for x in wide])
    # In this unit nothing can overflow.
    unit = xp.unit(peak)
    total = reduce(operator.add, [xp.total(x / unit, axes) for x in wide])
    return xp.cast(total / size, xp.dtype(unit)) * unit


@dataclass(frozen=True)
class Standardizing(Transform):
    """Subtract the mean of each group, and divide by its standard deviation + eps."""

    basis: ClassVar[Basis] = FIXED

    eps: float

    def measure(self, gradient: Gradient) -> Float64:
        """Return mean and standard deviation of each group."""
        local = gradient.dense()
        return np.array([self._moments([local[i] for i in m]) for m in gradient.groups.members])

    @staticmethod
    def _moments(views: Sequence[HostView]) -> tuple[float, float]:
        ranges = [extremes(view) for view in views if view.size]
        low = float(np.min([r[0] for r in ranges], initial=math.inf))
        high = float(np.max([r[1] for r in ranges], initial=-math.inf))
        size = sum(view.size for view in views)
        if size < 2 or low == high:
            # The mean of equal numbers is that number; a computed sum may be rounded.
            return (low, 0.0) if size else (0.0, 0.0)
        mean = _mean(views)
        centred = (np.subtract(b, mean, out=b) for view in views for b in blocks(view))
        variance = sum(square_sums([b])[0] for b in centred) / (size - 1)
        if 1e-280 < variance < math.inf:
            return mean, math.sqrt(variance)
        return mean, measure(views, "std")

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Standardise one gradient; the record has the deviation as norm, and 1 as limit."""
        groups, local = gradient.groups, gradient.dense()
        means, deviations = np.asarray(measured).T
        outputs = list(gradient.arrays)
        for mean, deviation, members in zip(means, deviations, groups.members, strict=True):
            if sum(local[i].size for i in members) < 2 or not (mean or deviation):
                continue
            for i in members:
                result = gradient.empty(i, local[i].shape, gradient.host_dtype(i))
                self._write(local[i], mean, deviation, result)
                outputs[i] = gradient.from_host(i, result)
        changed = any(new is not old for new, old in zip(outputs, gradient.arrays, strict=True))
        limits = np.ones(len(groups))
        return Outcome(outputs if changed else None, state, deviations, limits, deviations > limits)

    def _write(self, view: HostView, mean: float, deviation: float, output: HostView) -> None:
        if not deviation:
            output[...] = 0
            return
        flat = output.reshape(-1)
        # Near the largest float, a difference may overflow; a quarter of it does not.
        scale = 0.25 if deviation > _HIGH else 1.0
        # Mean and deviation of subnormals are rounded by up to half of the smallest one each.
        mean, divisor = scale * mean, scale * deviation + scale * self.eps + 2.0**-1073
        for i, block in enumerate(blocks(view)):
            if scale < 1.0:
                np.multiply(block, scale, out=block)
            np.subtract(block, mean, out=block)
            np.divide(block, divisor, out=block)
            flat[i * CHUNK : i * CHUNK + block.size] = encode(block, output.dtype)

    # -- on a device, or in compiled code -----------------------------------------------------
    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Standardise one gradient, in the framework's own operations."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        dense = [*map(xp.dense, arrays)]
        sized = [[i for i in m if math.prod(dense[i].shape)] for m in groups.members]
        sizes = [float(sum(math.prod(dense[i].shape) for i in m)) for m in sized]
        outputs = list(arrays)
        peaks, found = ([xp.asarray([0.0], like=arrays[0])[0]] * len(groups) for _ in range(2))
        for some in _alike(dense, sized, sizes, xp):
            # The arrays of one group, or as one array those of many groups of one each.
            rows = [*zip(*[sized[g] for g in some], strict=True)]
            parts = [xp.bundle([dense[i] for i in row]) for row in rows]
            peak = xp.peak(parts)
            put(peaks, some, xp.unbundled(peak))
            if sizes[some[0]] < 2:
                continue
            size = xp.numbers([sizes[g] for g in some], like=arrays[0])
            unit = xp.unit(peak)
            wide = [xp.wide(part) for part in parts]
            wide = [x / xp.cast(unit, xp.dtype(x)) for x in wide]
            # Relative to one of them, equal numbers are 0, and their deviation is.
            origin = xp.wide(xp.anchor(parts[0])) / unit
            wide = [x - xp.cast(origin, xp.dtype(x)) for x in wide]
            mean = reduce(operator.add, map(xp.total_from_anchor, wide)) / size
            wide = [x - xp.cast(mean, xp.dtype(x)) for x in wide]
            squares = reduce(operator.add, map(xp.square_total, wide))
            deviation = xp.sqrt(squares / (size - 1.0))
            # A quotient by a subnormal number is NaN in torch, and one by 0 has no derivative.
            divisor = deviation + (self.eps / unit if self.eps else 0.0) + TINY
            divisor = xp.where(deviation == 0, math.inf, divisor)
            for row, x in zip(rows, wide, strict=True):
                results = x / xp.cast(divisor, xp.dtype(x))
                put(outputs, row, xp.store(results, [arrays[i] for i in row]))
            put(found, some, xp.unbundled(unit * deviation))
        # Records know by the norm that a step was not finite.
        fine = xp.isfinite(xp.stack(peaks))
        norms, finite = xp.where(fine, xp.stack(found), math.nan), gradient.all_fine(fine)
        outputs = gradient.settled(outputs, fine, finite, on_nonfinite)
        limits = 0.0 * norms + 1.0
        return Outcome(outputs, state, norms, limits, (norms > 1.0) & finite, finite)


def _alike(
    dense: Sequence[Array], sized: Sequence[Sequence[int]], sizes: Sequence[float], xp: Backend
) -> list[list[int]]:
    """Return the groups that have elements: one by one, or those of one array each in bundles.

    Groups of a single element, which has no deviation, are among themselves.
    """
    result = [[g] for g, members in enumerate(sized) if len(members) > 1]
    for lone in (True, False):
        alike = [g for g, m in enumerate(sized) if len(m) == 1 and (sizes[g] == 1) is lone]
        bundles = xp.bundles([dense[sized[g][0]] for g in alike])
        result += [[alike[j] for j in bundle] for bundle in bundles]
    return result
