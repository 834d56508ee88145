# SPDX-License-Identifier: Apache-2.0
"""NumPy: the host. It clips NumPy's arrays, and those of all frameworks in this machine's memory.

A `NumpyBackend` made for one gradient works on views of its arrays, of whatever framework: in
blocks that stay in the cache, over all cores, into memory that the clipper keeps. It knows dtypes
and memory, but neither groups of tensors nor limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from fedclip.arrays.base import UNDERFLOW, Array, Backend, HostView
from fedclip.arrays.blocks import (
    CHUNK,
    UNCERTAINTY,
    decode,
    encode,
    exact_norm,
    extremes,
    slice_norms,
    square_sums,
)
from fedclip.arrays.cores import PIECE, each, worthwhile
from fedclip.arrays.memory import Memory, aligned, in_memory_order

__all__ = ["NumpyBackend", "bits", "dtype_name"]

FLOATS = {np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)}
"""The dtypes of views that show numbers as they are."""

_ARRAY, _dtype = {np.ndarray}, attrgetter("dtype")
_CLOSE = 2 * UNCERTAINTY


def bits(array: HostView) -> HostView:
    """Return bfloat16 as its bits, and any other array as it is."""
    # NumPy has no bfloat16 of its own. Other dtypes that packages add are of the kind "V" too.
    dtype = array.dtype
    return array.view(np.uint16) if dtype.kind == "V" and dtype.itemsize == 2 else array


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a dtype as "float32", "bfloat16", ..."""
    # NumPy builds the name at each call, which takes as long as a step over twenty tensors.
    return str(dtype.name)


class NumpyBackend(Backend):
    """Arrays and 0-d scalars of NumPy; or views of arrays of any framework.

    Parameters
    ----------
    native
        The framework that the views are of; None for NumPy's own arrays.
    views
        The views of one gradient, whose outputs may be written to the `memory`.
    memory
        What a clipper keeps from step to step; None for new memory.
    """

    name = "numpy"

    def __init__(
        self,
        native: Backend | None = None,
        views: Sequence[HostView] = (),
        memory: Memory | None = None,
    ) -> None:
        self._native, self._views, self._memory = native, views, memory
        self._places: dict[int, int] = {}
        self.in_place = native is not None and native.in_place
        self.aligned = native is not None and native.aligned

    # -- arrays -------------------------------------------------------------------------------
    def reads(self, cls: type) -> bool:
        # The mask would be lost.
        return not issubclass(cls, np.ma.MaskedArray)

    def dtype(self, array: Array) -> str:
        if self._native is not None and array.dtype == np.uint16:
            return "bfloat16"
        return dtype_name(array.dtype)

    def views(self, arrays: Sequence[Array]) -> Sequence[HostView | None]:
        if {*map(type, arrays)} <= _ARRAY and {*map(_dtype, arrays)} <= FLOATS:
            return arrays
        return [bits(np.asarray(a, a.dtype.newbyteorder("="))) for a in arrays]

    def to_host(self, array: Array) -> HostView:
        return np.asarray(array)

    def from_host(self, values: Sequence[HostView], likes: Sequence[Array]) -> Sequence[Array]:
        return [
            v.view(x.dtype) if v.dtype == np.uint16 else v.astype(x.dtype, copy=False)
            for v, x in zip(values, likes, strict=True)
        ]

    # -- arithmetic ---------------------------------------------------------------------------
    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return np.asarray(values, dtype=np.float64)

    where = staticmethod(np.where)
    isfinite = staticmethod(np.isfinite)
    sqrt = staticmethod(np.sqrt)
    exp = staticmethod(np.exp)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)
    stack = staticmethod(np.array)

    def sum(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        wide = x if self._native is None else decode(x)
        return np.sum(wide, axis=axes, keepdims=axes is not None, dtype=np.float64)

    def max(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        return np.max(x, axis=axes, keepdims=axes is not None) if np.size(x) else np.float64(0.0)

    def sort(self, table: Array) -> Array:
        return np.sort(table, axis=0)

    def pick(self, table: Array, row: Array) -> Array:
        return table[row.astype(np.intp), np.arange(table.shape[1])]

    def put(self, table: Array, row: Array, values: Array) -> Array:
        table = table.copy(order="K")
        table[row.astype(np.intp), np.arange(table.shape[1])] = values
        return table

    def ranked(self, table: Array, held: Any, rank: Any) -> tuple[Array, Array]:
        most, place = int(np.ravel(held)[0]), int(np.ravel(rank)[0])
        if np.any(held != most) or np.any(rank != place):
            return super().ranked(table, held, rank)
        # Groups are mostly of one age; to select is a third of the work of sorting.
        parts = np.partition(table[:most], place, axis=0)
        low = parts[place]
        return low, parts[place + 1 :].min(axis=0) if place + 1 < most else low

    # -- numbers ------------------------------------------------------------------------------
    def cast(self, x: Array, dtype: str) -> Array:
        return (x if self._native is None else decode(x)).astype(dtype, copy=False)

    def group_max(
        self, values: Array, owners: Sequence[int], groups: int, times: Sequence[int] | None = None
    ) -> Array:
        result = np.full(groups, -np.inf)
        np.maximum.at(result, owners if times is None else np.repeat(owners, times), values)
        return result

    def group_sum(
        self, values: Array, owners: Sequence[int], groups: int, times: Sequence[int] | None = None
    ) -> Array:
        index = owners if times is None else np.repeat(owners, times)
        return np.bincount(index, weights=values, minlength=groups)

    def take(
        self, values: Array, owners: Sequence[int], times: Sequence[int] | None = None
    ) -> Array:
        return values[owners if times is None else np.repeat(owners, times)]

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> Sequence[Array]:
        stops = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        starts = [0, *stops[:-1]]
        return [
            flat[start:stop].reshape(shape)
            for start, stop, shape in zip(starts, stops, shapes, strict=True)
        ]

    def joined(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate([np.ravel(decode(a)) for a in arrays])

    # -- measures of gradients ----------------------------------------------------------------
    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        each_sum = square_sums(arrays).tolist()
        sums = [math.fsum([each_sum[i] for i in some]) for some in members]
        # If a sum has overflowed or underflowed, the group is scaled and measured again: 1e20 in
        # float32, 1e200 in float64 and 1e-30 give the right norm.
        norms = [
            math.sqrt(total)
            if UNDERFLOW <= total < math.inf
            else exact_norm([arrays[i] for i in some])
            for total, some in zip(sums, members, strict=True)
        ]
        return np.array(norms)

    def sharpened(
        self,
        norms: Array,
        limits: Array,
        arrays: Sequence[Array],
        members: Sequence[Sequence[int]],
    ) -> Array:
        result = norms
        # Not of the limits, which may be infinite.
        for group in np.flatnonzero(np.abs(norms - limits) <= _CLOSE * norms).tolist():
            some = [arrays[i] for i in members[group]]
            # Arrays of float64 have been measured in float64 already.
            if any(view.itemsize < 8 for view in some):
                result = norms.copy() if result is norms else result
                result[group] = exact_norm(some)
        return result

    def peaks(self, arrays: Sequence[Array]) -> Array:
        return np.abs([extremes(a) for a in arrays]).max(axis=1)

    def summed(self, call: Callable[..., Array], columns: Sequence[Sequence[Array]]) -> Array:
        sums = np.zeros(len(columns[0]))
        for i, row in enumerate(zip(*columns, strict=True)):
            for _, some in _parts(row, wide=True):
                sums[i] += np.sum(call(*some))
        return sums

    def slice_norms(self, arrays: Sequence[Array], axes: Sequence[tuple[int, ...]]) -> Array:
        return np.concatenate([slice_norms(a, some) for a, some in zip(arrays, axes, strict=True)])

    # -- new gradients ------------------------------------------------------------------------
    def scale(self, arrays: Sequence[Array], factors: Sequence[Array]) -> Sequence[Array]:
        # Mostly there is one factor for all.
        different = {id(k): k for k in factors}
        ones = {key for key, k in different.items() if (k == 1.0).all()}
        places = [i for i, k in enumerate(factors) if id(k) not in ones]
        if not places:
            return arrays
        outputs, some = list(arrays), [arrays[i] for i in places]
        results = self._outputs(some)
        pairs = [(a, factors[i]) for a, i in zip(some, places, strict=True)]
        for i, result in zip(places, _multiplied(pairs, results), strict=True):
            outputs[i] = result
        return outputs

    def mapped(
        self,
        call: Callable[..., Any],
        columns: Sequence[Sequence[Array]],
        moved: Array | None = None,
        wide: bool = False,
    ) -> Sequence[Any]:
        rows = []
        for i, row in enumerate(zip(*columns, strict=True)):
            left = moved is not None and not moved[i]
            rows.append(self._mapped(call, row, left, wide))
        results = [*zip(*rows, strict=True)]
        return [np.array(r) if type(r[0]) is float else r for r in results]

    def _mapped(
        self, call: Callable[..., Any], row: Sequence[Array], left: bool, wide: bool
    ) -> tuple[Any, ...]:
        given = row[0]
        output: HostView | None = None
        others: list[Any] = []
        for piece, some in _parts(row, wide=wide, nothing=left):
            result, *more = call(*some)
            if left:
                return given, *(x if np.ndim(x) else float(x) for x in more)
            if piece.start == 0:
                # What is shaped like the elements is kept, and numbers are joined.
                others = [np.empty(given.size, x.dtype) if np.ndim(x) else -math.inf for x in more]
            for j, x in enumerate(more):
                if np.ndim(x):
                    others[j][piece] = x.reshape(-1)
                else:
                    others[j] = max(others[j], float(x))
            if output is None and result is not some[0] and (result != some[0]).any():
                (output,) = self._outputs([given], flat=True)
                output[: piece.start] = given.reshape(-1)[: piece.start]
            if output is not None:
                output[piece] = encode(result.reshape(-1), given.dtype, towards_zero=True)
        shaped = [x.reshape(given.shape) if np.ndim(x) else x for x in others]
        if output is None:
            return given, *shaped
        output = output.reshape(given.shape)
        if self.in_place and not np.may_share_memory(output, given):
            given[...] = output
        return given if self.in_place else output, *shaped

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> Sequence[Array]:
        if condition:
            return arrays
        if self.in_place:
            for array in arrays:
                array[...] = 0
            return arrays
        return [np.zeros_like(a, subok=False) for a in arrays]

    def _outputs(self, arrays: Sequence[Array], *, flat: bool = False) -> list[HostView]:
        """Return where to write the outputs for some arrays, laid out like them, or `flat`."""
        outs: Sequence[HostView | None] = [None] * len(arrays)
        if self.in_place:
            outs = [a if not flat or a.flags.c_contiguous else None for a in arrays]
        elif self._memory is not None:
            self._places = self._places or {id(v): i for i, v in enumerate(self._views)}
            places = [self._places.get(id(a), -1) for a in arrays]
            if min(places) >= 0 and self._memory.serves([v.nbytes for v in self._views]):
                outs = self._memory.like(places, self._views)
        return [self._output(a, out, flat) for a, out in zip(arrays, outs, strict=True)]

    def _output(self, array: HostView, out: HostView | None, flat: bool) -> HostView:
        if out is not None and (not flat or out.flags.c_contiguous):
            return out.reshape(-1) if flat else out
        like = array.reshape(-1) if flat else array
        if self.aligned and in_memory_order(like) is not None:
            return aligned(like)
        return np.empty_like(like, subok=False)


def _parts(
    row: Sequence[Any], *, wide: bool = False, nothing: bool = False
) -> Iterator[tuple[slice, list[Any]]]:
    """Yield pieces of the dense arrays of a row that stay in the cache, decoded.

    Numbers become floats of Python, which do not widen what they meet. What is empty is one piece.
    An array that something broadcasts against is one piece too.
    """
    first = row[0]
    columns = [
        np.asarray(x).item() if np.size(x) == 1 and np.shape(x) != first.shape else x for x in row
    ]
    if any(type(x) is not float and x.shape != first.shape for x in columns):
        yield slice(0, first.size), _decoded(columns, wide)
        return
    columns = [x if type(x) is float else x.reshape(-1) for x in columns]
    size = 0 if nothing else first.size
    for start in range(0, size or 1, CHUNK):
        piece = slice(start, min(start + CHUNK, size))
        yield piece, _decoded([x if type(x) is float else x[piece] for x in columns], wide)


def _decoded(columns: Sequence[Any], wide: bool) -> list[Any]:
    """Return arrays in float32 or wider, or all in float64; numbers stay as they are."""
    some: list[Any] = [x if type(x) is float else decode(x) for x in columns]
    if not wide:
        return some
    return [x if type(x) is float else x.astype(np.float64, copy=False) for x in some]


def _multiplied(
    pairs: Sequence[tuple[Array, Array]], outs: Sequence[HostView]
) -> Sequence[HostView]:
    """Return ``array * factor`` of each pair, in these outputs; large ones over all cores."""
    threads = worthwhile([a.nbytes for a, _ in pairs])
    calls: list[Callable[[], object]] = []
    for (array, k), out in zip(pairs, outs, strict=True):
        call: Callable[..., object] = np.multiply
        if array.dtype.itemsize == 2:
            call, k = _multiply_half, np.asarray(k, np.float32)
        else:
            # NumPy handles a 0-d array faster than a scalar, whose type it has to find out.
            k = np.asarray(k, array.dtype)
        step = PIECE if call is np.multiply else CHUNK
        source, target = in_memory_order(array), in_memory_order(out)
        if k.ndim or array.size <= step or source is None or target is None:
            calls.append(partial(call, array, k, out))
            continue
        source, target = source.reshape(-1), target.reshape(-1)
        for start in range(0, array.size, step):
            piece = slice(start, start + step)
            calls.append(partial(call, source[piece], k, target[piece]))
    each(calls, threads)
    return outs


def _multiply_half(array: HostView, factor: HostView, out: HostView) -> None:
    product = np.asarray(decode(array) * factor)
    if array.dtype == np.float16:
        # Below its smallest number, half precision has no digits that a margin could cover.
        product = np.asarray(np.trunc(product * 2.0**24) * 2.0**-24)
    out[...] = encode(product, array.dtype)
