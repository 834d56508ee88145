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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedclip.arrays import LARGEST, NUMPY, Array, Backend
from fedclip.measures import (
    MEANS,
    Float64,
    Numbers,
    Order,
    all_finite,
    degree,
    lowered,
    measure_on_device,
    slice_measures,
)
from fedclip.rules import FIXED, LEARNT, Basis, State
from fedclip.transforms.action import (
    FLOOR,
    SCALE_DOWN,
    SUBNORMAL,
    Action,
    Decision,
    margin,
    most_factor,
)
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
    slices; or, on a device, one flat array of all limits. `span` returns the dims that a slice
    spans, given the shape of the array, for choices that `dims` (see `spanned`) can not express.
    """

    limit: float | tuple[Any, ...] | Array
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
        # A list, not a generator: torch.compile can follow it.
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
            shape = _counts(tuple(array.shape) or (1,), axes)
            norms = measures[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
            limit: Any = self.limit[i] if isinstance(self.limit, tuple) else self.limit
            group = groups.index[i]
            ratios = norms / limit if shared is None else norms
            most = ratios.argmax()
            if ratios.flat[most] > excess[group]:
                excess[group], worst[group] = ratios.flat[most], norms.flat[most]
                limits[group] = limit.flat[most] if shared is None else shared
            decision = self.action.decide(norms, limit, NUMPY)
            # To look for factors only here halves a quiet step with `dims` (20 tensors).
            if not np.count_nonzero(decision.moved):
                continue
            factors = self._factors(decision, norms, gradient, i)
            if (factors != 1.0).any():
                outputs[i] = self._scale(backend.dense(array), factors, backend)
        changed = any(new is not old for new, old in zip(outputs, arrays, strict=True))
        clipped = worst + self.action.eps > limits
        return Outcome(outputs if changed else None, state, worst, limits, clipped)

    def _factors(self, decision: Decision, norms: Float64, gradient: Gradient, i: int) -> Float64:
        """Return a factor for each slice of an array, within what the dtype can represent."""
        dtype = gradient.backend.dtype(gradient.arrays[i])
        # Cap a ratio beyond float64 at the largest float64; a subnormal one is rounded by much.
        k = np.minimum(decision.ratio(NUMPY), LARGEST["float64"])
        k = np.where(k < sys.float_info.min, np.nextafter(k, 0.0), k)
        if np.any(decision.target < FLOOR[dtype]):
            reached = k * norms
            size = math.prod(gradient.arrays[i].shape) // norms.size
            low = lowered(self.ord, reached, size, SUBNORMAL[dtype], NUMPY)
            k = np.where(reached > 0, low / np.where(reached > 0, reached, 1.0), 1.0) * k
        k = k ** (1.0 / degree(self.ord))
        far = self.ord not in MEANS and np.all(decision.target <= LARGEST[dtype])
        if self.action.raises and not far:
            view = np.atleast_1d(gradient.dense()[i])
            axes = self.axes(view.shape)
            peaks = slice_measures(view, axes or (), "inf")
            k = np.minimum(k, LARGEST[dtype] / np.where(peaks > 0, peaks, 1.0))
        return np.where(decision.moved & (k != 1.0), k * (1.0 - margin(dtype, exact=True)), 1.0)

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
    def _spans(self, arrays: Sequence[Array]) -> dict[int, tuple[int, ...]]:
        """Return the dims that the slices span, of the arrays that are not left alone."""
        found = ((i, self.axes(tuple(array.shape))) for i, array in enumerate(arrays))
        return {i: axes for i, axes in found if axes is not None}

    def measure_on_device(
        self, arrays: Sequence[Array], xp: Backend, ord: Order | None = None
    ) -> Array:
        """Return the measures of all slices of all arrays, of which there are some, flat."""
        spans, ord = self._spans(arrays), self.ord if ord is None else ord
        sliced = [_matrix(arrays[i], xp) for i in spans]
        if ord == 2:
            return xp.slice_norms(sliced, [*spans.values()])
        pairs = zip(sliced, spans.values(), strict=True)
        parts = [measure_on_device([array], ord, xp, axes) for array, axes in pairs]
        return xp.wide(xp.joined(parts))

    @property
    def runs_on_parts(self) -> bool:
        # What raises a group has to know its largest element.
        return self.ord == 2 and not self.action.raises

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient slice by slice, in the framework's own operations."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        spans = self._spans(arrays)
        # Arrays that are not clipped are only checked for NaN and infinity.
        alone = [array for i, array in enumerate(arrays) if i not in spans]
        measured = [xp.group_norms(alone, [range(len(alone))])] if alone else []
        outputs = list(arrays)
        if not spans:
            nowhere = xp.asarray([0.0] * len(groups), like=arrays[0])
            finite = gradient.finite(*measured)
            outputs = gradient.settled(outputs, nowhere + 1.0 > 0, finite, on_nonfinite)
            return Outcome(outputs, state, nowhere, nowhere + math.inf, nowhere > 0, finite)
        norms = self.measure_on_device(arrays, xp)
        finite = gradient.finite(norms, *measured)
        limits = self.limit
        if isinstance(limits, tuple):
            # Those of weights on the host.
            found = np.concatenate([np.ravel(limits[i]) for i in spans])
            limits = xp.asarray(found, like=arrays[0])
        limits = limits + 0.0 * norms
        matrices = {i: _matrix(arrays[i], xp) for i in spans}
        shapes = [_counts(tuple(matrix.shape), spans[i]) for i, matrix in matrices.items()]
        many = [*map(math.prod, shapes)]
        names = {i: xp.dtype(array) for i, array in matrices.items()}
        for dtype in sorted({*names.values()}):
            k = self._factors_on_device(norms, limits, matrices, many, dtype, xp)
            wide = "float64" if dtype == "float64" else "float32"
            factors = dict(zip(spans, xp.pieces(xp.cast(k, wide), shapes), strict=True))
            some = [i for i in spans if names[i] == dtype]
            products = xp.multiply_slices([matrices[i] for i in some], [factors[i] for i in some])
            for i, product in zip(some, products, strict=True):
                outputs[i] = product if len(arrays[i].shape) else product[0]
        # NaN in one slice is NaN in the group.
        whole = norms if on_nonfinite == "skip" else xp.group_norms(arrays, groups.members)
        outputs = gradient.settled(outputs, xp.isfinite(whole), finite, on_nonfinite)
        # Record the slice that is furthest over its limit, or nearest to it.
        index = xp.repeated([groups.owners[i] for i in spans], many, arrays[0])
        ratios = norms / limits
        most = xp.group_max(ratios, index, len(groups))
        behind = ratios < xp.take(most, index)
        worst, bounds = (
            xp.group_max(xp.where(behind, 0.0, values), index, len(groups))
            for values in (norms, limits)
        )
        # Records know by the norm that a step was not finite.
        worst = xp.where(finite, xp.where(most < 0, 0.0, worst), math.nan)
        bounds = xp.where(most < 0, math.inf, bounds)
        over = (worst + self.action.eps > bounds) & finite
        return Outcome(outputs, state, worst, bounds, over, finite)

    def _factors_on_device(
        self,
        norms: Array,
        limits: Array,
        matrices: dict[int, Array],
        many: Sequence[int],
        dtype: str,
        xp: Backend,
    ) -> Array:
        """Return a factor for each slice, as if all arrays had this dtype."""
        # Frameworks add up float32, and half precision, in float64.
        sizes = [0]
        if dtype in ("float16", "float64"):
            pairs = zip(matrices.values(), many, strict=True)
            sizes = [math.prod(m.shape) // n for m, n in pairs for _ in range(n)]
        decision = self.action.decide(norms, limits, xp)
        k = decision.factors(norms, sizes, dtype, xp, self.ord, dtype == "float16")
        if not self.action.raises:
            return k
        peaks = self.measure_on_device([*matrices.values()], xp, "inf")
        return xp.minimum(k, most_factor(peaks, dtype, xp))


def _matrix(array: Array, xp: Backend) -> Array:
    """Return an array as a dense one of at least one dimension."""
    return xp.dense(array) if len(array.shape) else array[None]


def _counts(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the measures of slices, with the axes that they span kept as 1."""
    return tuple(1 if a in axes else n for a, n in enumerate(shape))
