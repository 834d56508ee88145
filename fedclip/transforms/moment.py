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
from fedclip.measures import Float64, Numbers, measure, measure_on_device
from fedclip.measures.l2 import CHUNK, blocks, decode, encode, extremes, square_sums
from fedclip.rules import FIXED, Basis, State
from fedclip.rules.history import TINY
from fedclip.scopes import Groups
from fedclip.transforms.base import Gradient, Outcome, Transform
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
        zero = xp.asarray([0.0], like=arrays[0])[0]
        outputs, centres, largest, fine = list(arrays), {}, [], []
        for members in groups.members:
            pooled = members if self.pooled else ()
            size = sum(math.prod(dense[i].shape) for i in pooled)
            if size >= self.min_size and pooled:
                centres.update(
                    dict.fromkeys(members, _mean_on_device([dense[i] for i in members], xp))
                )
            for i in () if self.pooled else members:
                axes = self._axes(tuple(dense[i].shape))
                if axes is not None:
                    centres[i] = _mean_on_device([dense[i]], xp, axes)
            means = [xp.wide(xp.largest(centres[i])) for i in members if i in centres]
            # What is left alone is looked at for NaN only.
            peak = measure_on_device([dense[i] for i in members], "inf", xp)
            fine.append(xp.isfinite(peak))
            largest.append(xp.max(xp.stack([zero, *means])))
        norms = xp.stack(largest)
        finite = gradient.all_fine(xp.stack(fine))
        for i, centre in centres.items():
            top = LARGEST[xp.dtype(arrays[i])]
            shifted = xp.wide(dense[i]) - centre
            outputs[i] = xp.stored(xp.minimum(xp.maximum(shifted, -top), top), arrays[i])
        outputs = gradient.settled(outputs, xp.stack(fine), finite, on_nonfinite)
        return Outcome(outputs, state, norms, 0.0 * norms, (norms > 0) & finite, finite)


def _mean_on_device(
    parts: Sequence[Array], xp: Backend, axes: tuple[int, ...] | None = None
) -> Array:
    """Return the mean of all elements of dense arrays; of each slice of one, with `axes`."""
    wide = [xp.wide(part) for part in parts if math.prod(part.shape)]
    size = sum(math.prod(part.shape) for part in wide)
    if axes is not None:
        size = math.prod([wide[0].shape[a] for a in axes])
    peak = reduce(xp.maximum, [xp.largest(x, axes) for x in wide])
    # Divide by the maximum: nothing can overflow.
    unit = xp.where(peak > 0, peak, 1.0)
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
        outputs, found, peaks = list(arrays), [], []
        for members in groups.members:
            peak = measure_on_device([dense[i] for i in members], "inf", xp)
            peaks.append(peak)
            sized = [i for i in members if math.prod(dense[i].shape)]
            size = sum(math.prod(dense[i].shape) for i in sized)
            if size < 2:
                found.append(0.0 * peak)
                continue
            unit = xp.where(peak > 0, peak, 1.0)
            wide = {
                i: xp.wide(dense[i]) / xp.cast(unit, xp.dtype(xp.wide(dense[i]))) for i in sized
            }
            # Relative to one of them, equal numbers are 0, and their deviation is.
            origin = xp.joined([wide[sized[0]]])[0]
            wide = {i: x - xp.cast(origin, xp.dtype(x)) for i, x in wide.items()}
            mean = reduce(operator.add, map(xp.total, wide.values())) / size
            wide = {i: x - xp.cast(mean, xp.dtype(x)) for i, x in wide.items()}
            squares = reduce(operator.add, [xp.total(x * x) for x in wide.values()])
            deviation = xp.sqrt(squares / (size - 1))
            divisor = deviation + self.eps / unit + TINY
            for i, x in wide.items():
                outputs[i] = xp.stored(x / xp.cast(divisor, xp.dtype(x)), arrays[i])
            found.append(unit * deviation)
        norms, fine = xp.stack(found), xp.isfinite(xp.stack(peaks))
        finite = gradient.all_fine(fine)
        outputs = gradient.settled(outputs, fine, finite, on_nonfinite)
        limits = 0.0 * norms + 1.0
        return Outcome(outputs, state, norms, limits, (norms > 1.0) & finite, finite)
