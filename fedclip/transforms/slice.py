# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient whose groups are slices of each array along dimensions.

::

    dims   = those of the array, negative ones counted from the end; or all but those (inverse)
    m      = measure of each slice that spans `dims`
    k      = limit / m  where m > limit, else 1     (or as `min_norm` and `rescale` say)
    output = the array itself where all k = 1, else  k (1 - margin) * array

An array without any of the dims, or whose slices have fewer than `min_size` elements, is left
alone and not measured. A 0-d array counts as one of shape (1,), a sparse one as the dense one
that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedclip.arrays import Array, Backend, Views
from fedclip.measures import Order, degree, slice_measures
from fedclip.measures.l2 import Float64, Numbers
from fedclip.rules import NoState
from fedclip.scopes import Groups, check_scope
from fedclip.states import Statistics
from fedclip.transforms.norm import MARGIN, Outcome
from fedclip.transforms.value import dense_views

__all__ = ["SliceClipping", "check_dims", "spanned"]


def check_dims(dims: Any, scope: Any, inverse_dims: bool, min_size: int) -> list[int] | None:
    """Return `dims` as a list, or None for whole tensors, if it goes with the rest."""
    if dims is None:
        if inverse_dims:
            raise ValueError("inverse_dims=True needs dims: all dimensions but which?")
        if min_size > 1 and scope != "tensor":
            raise ValueError(
                f"min_size={min_size} needs dims or scope='tensor', got scope={scope!r}"
            )
        return None
    allowed = "an int or a list of ints"
    values = dims if isinstance(dims, (list, tuple)) else [dims]
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in values):
        raise TypeError(f"dims must be {allowed}, got {dims!r}")
    if not values or len(set(values)) != len(values):
        raise ValueError(f"dims must be {allowed}, all different, got {dims!r}")
    if check_scope(scope, limits=True) not in ("global", "tensor"):
        raise ValueError(f"dims make each slice a group: scope must be 'tensor', got {scope!r}")
    return list(values)


def spanned(ndim: int, dims: tuple[int, ...] | None, inverse: bool) -> tuple[int, ...]:
    """Return the dimensions, of `ndim`, that each slice spans; None means all."""
    if dims is None:
        return tuple(range(ndim))
    real = {d + ndim if d < 0 else d for d in dims} & set(range(ndim))
    return tuple(sorted(set(range(ndim)) - real if inverse else real))


@dataclass(frozen=True)
class SliceClipping:
    """A limit on the measure of every slice; see `fedclip.transforms.norm.NormClipping`.

    Attributes
    ----------
    limit
        One for all slices; or an array for each array, with a limit for each of its slices.
    span
        The dims that slices of an array of some shape span, where `dims` can not say it.
    """

    array_fields: ClassVar[tuple[str, ...]] = ()

    limit: float | tuple[Float64, ...]
    dims: tuple[int, ...] | None
    inverse_dims: bool = False
    min_size: int = 1
    ord: Order = 2
    eps: float = 0.0
    min_norm: float | None = None
    rescale: bool = False
    span: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None

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
        """Return the measures of all slices of all arrays, one after the other."""
        parts = [np.zeros(0)]
        for local in dense_views(arrays, views, backend):
            axes = self.axes(local.shape)
            if axes is not None:
                parts.append(slice_measures(np.atleast_1d(local), axes, self.ord).ravel())
        return np.concatenate(parts)

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
        """Clip one gradient; for the record, the norm of an array is that of its worst slice."""
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
            factors = self._factors(norms, limit)
            if (factors != 1.0).any():
                factors[factors != 1.0] *= 1.0 - MARGIN[backend.dtype(array)]
                outputs[i] = self._scale(backend.dense(array), factors, backend)
        changed = any(new is not old for new, old in zip(outputs, arrays, strict=True))
        clipped = worst + self.eps > limits
        return Outcome(outputs if changed else None, state, worst, limits, clipped)

    def axes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the dims that the slices span; None if the array is left alone."""
        shape = shape or (1,)
        if self.span is None:
            axes = spanned(len(shape), self.dims, self.inverse_dims)
        else:
            axes = self.span(shape)
        size = math.prod(shape[a] for a in axes)
        return axes if axes and size and math.prod(shape) and size >= self.min_size else None

    def _factors(self, norms: Float64, limit: Float64) -> Float64:
        k = np.where(norms + self.eps > limit, limit / (norms + self.eps), 1.0)
        if self.rescale:
            k = limit / (norms + self.eps)
        elif self.min_norm is not None:
            k = np.where(norms < self.min_norm, np.minimum(self.min_norm, limit) / norms, k)
        # A ratio beyond float64 is as large as it can be.
        k = np.where(norms > 0, np.minimum(k, np.finfo(np.float64).max), 1.0)
        result: Float64 = k ** (1.0 / degree(self.ord))
        return result

    @staticmethod
    def _scale(array: Array, factors: Any, backend: Backend) -> Array:
        # In two steps where a factor would leave the normal range of float32.
        exponents = np.frexp(factors)[1]
        if np.abs(exponents).max() >= 120:
            half = exponents // 2
            array = backend.scale_slices(array, np.ldexp(1.0, half).reshape(factors.shape))
            factors = np.ldexp(factors, -half)
        shape = factors.shape if tuple(array.shape) else ()
        return backend.scale_slices(array, factors.reshape(shape))
