# SPDX-License-Identifier: Apache-2.0
"""Limits on the norm of each slice of each array, along dimensions.

::

    dims   = the given ones that the array has, negative from the end; or all others (inverse)
    m      = measure of each slice that spans `dims`
    k      = limit / m  where m > limit, else 1              (fedclip.transforms.action)
    output = the array itself where all k = 1, else  k (1 - margin) * array

An array that has none of the dims, or whose slices have fewer than `min_size` elements, is neither
measured nor clipped. A 0-d array counts as one of shape (1,); a sparse array is made dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedclip.arrays import NUMPY, Array, Backend
from fedclip.measures import (
    MEANS,
    Float64,
    Numbers,
    Order,
    all_finite,
    degree,
    lowered,
    slice_measures,
)
from fedclip.rules import FIXED, LEARNT, Basis, State
from fedclip.transforms.action import FLOOR, LARGEST, MARGIN, SCALE_DOWN, SUBNORMAL, Action
from fedclip.transforms.base import Gradient, Outcome, Transform


def check_dims(*, dims: Any) -> list[int] | None:
    """Return `dims` as a list, or None for whole tensors."""
    if dims is None:
        return None
    allowed = "an int or a list of ints"
    values = dims if isinstance(dims, (list, tuple)) else [dims]
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in values):
        raise TypeError(f"dims must be {allowed}, got {dims!r}")
    if not values or len(set(values)) != len(values):
        raise ValueError(f"dims must be {allowed}, all different, got {dims!r}")
    return list(values)


def check_slices(dims: Any, scope: Any, inverse_dims: bool, min_size: int = 1) -> None:
    """Raise a ValueError if what says which slices to take does not go together."""
    if dims is None and inverse_dims:
        raise ValueError("inverse_dims=True needs dims: all dimensions but which?")
    if dims is None and min_size > 1 and scope != "tensor":
        raise ValueError(f"min_size={min_size} needs dims or scope='tensor', got scope={scope!r}")
    if dims is not None and scope not in ("global", "tensor"):
        raise ValueError(f"dims make each slice a group: scope must be 'tensor', got {scope!r}")


def spanned(ndim: int, dims: tuple[int, ...] | None, inverse: bool) -> tuple[int, ...]:
    """Return the dimensions, of `ndim`, that each slice spans; None means all."""
    if dims is None:
        return tuple(range(ndim))
    real = {d + ndim if d < 0 else d for d in dims} & set(range(ndim))
    return tuple(sorted(set(range(ndim)) - real if inverse else real))


@dataclass(frozen=True)
class SliceClipping(Transform):
    """A limit on the measure of every slice; see `fedclip.transforms.norm.NormClipping`.

    The limit is one for all slices; or, for each array, an array with a limit for each of its
    slices. `span` returns the dims that a slice spans, given the shape of the array, for choices
    that `dims` (see `spanned`) can not express.
    """

    limit: float | tuple[Any, ...]
    dims: tuple[int, ...] | None
    inverse_dims: bool = False
    min_size: int = 1
    ord: Order = 2
    action: Action = SCALE_DOWN
    span: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None

    @cached_property
    def basis(self) -> Basis:
        """Where the limits come from: an array of limits follows from the weights."""
        return LEARNT if isinstance(self.limit, tuple) else FIXED

    def axes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the dims that the slices span; None if the array is left alone."""
        shape = shape or (1,)
        if self.span is None:
            axes = spanned(len(shape), self.dims, self.inverse_dims)
        else:
            axes = self.span(shape)
        # A list, which torch.compile can follow.
        size = math.prod([shape[a] for a in axes])
        return axes if axes and size and math.prod(shape) and size >= self.min_size else None

    # -- on the host --------------------------------------------------------------------------
    def measure(self, gradient: Gradient) -> Float64:
        """Return the measures of all slices of all arrays, one after the other."""
        parts = [np.zeros(0)]
        for local in gradient.dense():
            axes = self.axes(local.shape)
            if axes is not None:
                parts.append(slice_measures(np.atleast_1d(local), axes, self.ord).ravel())
            elif not all_finite([local]):
                # This array is not clipped, but NaN in it is NaN in the gradient.
                parts.append(np.array([math.nan]))
        return np.concatenate(parts)

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient; the record has the norm and limit of the worst slice of a group."""
        arrays, groups, backend = gradient.arrays, gradient.groups, gradient.backend
        measures = np.asarray(measured)
        outputs = list(arrays)
        worst = np.zeros(len(groups))
        shared = None if isinstance(self.limit, tuple) else self.limit
        limits = np.full(len(groups), math.inf if shared is None else shared)
        excess = np.full(len(groups), -1.0)
        start = 0
        for i, array in enumerate(arrays):
            axes = self.axes(tuple(array.shape))
            if axes is None:
                continue
            shape = tuple(1 if a in axes else n for a, n in enumerate(tuple(array.shape) or (1,)))
            norms = measures[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
            limit = self.limit[i] if isinstance(self.limit, tuple) else np.full(shape, self.limit)
            group = groups.index[i]
            ratios = norms / limit if shared is None else norms
            most = np.unravel_index(np.argmax(ratios), shape)
            if ratios[most] > excess[group]:
                excess[group] = ratios[most]
                worst[group], limits[group] = norms[most], limit[most]
            factors = self._factors(norms, limit, gradient, i)
            if (factors != 1.0).any():
                outputs[i] = self._scale(backend.dense(array), factors, backend)
        changed = any(new is not old for new, old in zip(outputs, arrays, strict=True))
        clipped = worst + self.action.eps > limits
        return Outcome(outputs if changed else None, state, worst, limits, clipped)

    def _factors(self, norms: Float64, limit: Float64, gradient: Gradient, i: int) -> Float64:
        """Return a factor for each slice of an array, within what the dtype can represent."""
        dtype = gradient.backend.dtype(gradient.arrays[i])
        decision = self.action.decide(norms, limit, NUMPY)
        # Cap a ratio beyond float64 at the largest float64; a subnormal one is rounded by much.
        k = np.minimum(decision.ratio(NUMPY), np.finfo(np.float64).max)
        k = np.where(k < np.finfo(np.float64).tiny, np.nextafter(k, 0.0), k)
        if np.any(decision.target < FLOOR[dtype]):
            reached = k * norms
            size = math.prod(gradient.arrays[i].shape) // norms.size
            low = lowered(self.ord, reached, size, SUBNORMAL[dtype])
            k = np.where(reached > 0, low / np.where(reached > 0, reached, 1.0), 1.0) * k
        k = k ** (1.0 / degree(self.ord))
        far = self.ord not in MEANS and np.all(decision.target <= LARGEST[dtype])
        if self.action.raises and not far:
            view = np.atleast_1d(gradient.dense()[i])
            axes = self.axes(view.shape)
            peaks = slice_measures(view, axes or (), "inf")
            k = np.minimum(k, LARGEST[dtype] / np.where(peaks > 0, peaks, 1.0))
        return np.where(decision.moved & (k != 1.0), k * (1.0 - MARGIN[dtype]), 1.0)

    @staticmethod
    def _scale(array: Array, factors: Any, backend: Backend) -> Array:
        factors = factors.reshape(factors.shape if tuple(array.shape) else ())
        # Multiply in two steps if a factor would leave the normal range of float32.
        exponents = np.frexp(factors)[1]
        if np.abs(exponents).max() >= 120:
            half = exponents // 2
            array = backend.scale_slices(array, np.ldexp(1.0, half))
            factors = np.ldexp(factors, -half)
        return backend.scale_slices(array, factors)

    # -- on a device, or in compiled code -----------------------------------------------------
    @property
    def runs_on_device(self) -> bool:
        """Whether there is a step for devices: for the L2 norm."""
        return self.ord == 2

    @property
    def runs_on_parts(self) -> bool:
        return self.ord == 2

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient slice by slice, in the framework's own operations.

        The limit may be a tuple of arrays of the framework, one for each array.
        """
        if not self.runs_on_device:
            return super().device_step(gradient, state, on_nonfinite)
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        axes = [self.axes(tuple(array.shape)) for array in arrays]
        alone = [array for array, spanned in zip(arrays, axes, strict=True) if spanned is None]
        sliced = {i: spanned for i, spanned in enumerate(axes) if spanned is not None}
        tables = [arrays[i] if len(arrays[i].shape) else arrays[i][None] for i in sliced]
        found = xp.slices_norms(tables, [*sliced.values()]) if sliced else []
        norms = dict(zip(sliced, found, strict=True))
        # Arrays that are not clipped are only checked for NaN and infinity.
        others = [xp.group_norms(alone, [range(len(alone))])] if alone else []
        finite = gradient.finite(*norms.values(), *others)
        outputs = list(arrays)
        worst = [xp.asarray([0.0], like=arrays[0])[0] for _ in groups.labels]
        limits = [xp.asarray([math.inf], like=arrays[0])[0] for _ in groups.labels]
        # Not `groups.index`: torch.compile can not follow what comes from NumPy.
        group_of = {i: group for group, members in enumerate(groups.members) for i in members}
        for i, sizes in norms.items():
            array, group = arrays[i], group_of[i]
            limit = (self.limit[i] if isinstance(self.limit, tuple) else self.limit) + 0.0 * sizes
            count = math.prod(array.shape) // math.prod(sizes.shape)
            k = self.action.decide(sizes, limit, xp).factors(sizes, [count], xp.dtype(array), xp)
            if on_nonfinite == "propagate":
                k = xp.where(xp.isfinite(sizes), k, float("nan") * sizes)
            output = xp.multiply_slices(array if len(array.shape) else array[None], k)
            outputs[i] = output if len(array.shape) else output[0]
            # Record the slice that is furthest over its limit, or nearest to it.
            ratios = sizes / limit
            excess = xp.max(ratios)
            ahead = excess > worst[group] / limits[group]
            largest = xp.max(xp.where(ratios < excess, 0.0, sizes))
            worst[group] = xp.where(ahead, largest, worst[group])
            limits[group] = xp.where(ahead, largest / excess, limits[group])
        if on_nonfinite == "skip":
            outputs = xp.keep_if(finite, outputs)
        # Records know by the norm that a step was not finite.
        sizes, bounds = xp.where(finite, xp.stack(worst), math.nan), xp.stack(limits)
        return Outcome(outputs, state, sizes, bounds, (sizes > bounds) & finite, finite)
