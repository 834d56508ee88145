# SPDX-License-Identifier: Apache-2.0
"""NumPy: the host. It clips NumPy's arrays, and those of all frameworks in this machine's memory.

A `NumpyBackend` made for one gradient works on views of its arrays, of whatever framework: in
blocks that stay in the cache, over all cores, into memory that the clipper keeps. It knows dtypes
and memory, but neither groups of tensors nor limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from fedclip.arrays import base, blocks
from fedclip.arrays.base import Array, Arrays, Backend, Call, HostView, Owners, Repeated
from fedclip.arrays.cores import PIECE, THREADED, each, num_threads
from fedclip.arrays.memory import Memory, aligned, in_memory_order

_ARRAY, _dtype, _nbytes = {np.ndarray}, attrgetter("dtype"), attrgetter("nbytes")
_BITS = np.dtype(np.uint16)
_CLOSE = 2 * blocks.UNCERTAINTY
_LEAST = math.sqrt(base.UNDERFLOW)


def bits(array: HostView) -> HostView:
    """Return bfloat16 as its bits, and any other array unchanged."""
    # NumPy has no bfloat16 of its own. Other dtypes that packages add are of the kind "V" too.
    dtype = array.dtype
    return array.view(np.uint16) if dtype.kind == "V" and dtype.itemsize == 2 else array


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
    rounds = True

    def __init__(
        self,
        native: Backend | None = None,
        views: Sequence[HostView] = (),
        memory: Memory | None = None,
    ) -> None:
        self._native, self._views, self.memory = native, views, memory
        self.layout: blocks.Layout | None = None
        # The place of each view, by identity, if memory is kept; found at the first output.
        self._places: dict[int, int] | None = None
        self.in_place = native is not None and native.in_place
        self.aligned = native is not None and native.aligned

    # -- arrays -------------------------------------------------------------------------------
    def dtype(self, array: Array) -> str:
        is_bits = self._native is not None and array.dtype == _BITS
        return "bfloat16" if is_bits else base.dtype_name(array.dtype)

    def dense_views(self, arrays: Arrays) -> Sequence[HostView] | None:
        usual = {*map(type, arrays)} <= _ARRAY and {*map(_dtype, arrays)} <= base.FLOATS
        return arrays if usual else None

    def views(self, arrays: Arrays) -> Sequence[HostView | None]:
        return [bits(np.asarray(a, a.dtype.newbyteorder("="))) for a in arrays]

    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        return [
            v if v.dtype == x.dtype else v.view(x.dtype) if v.dtype == _BITS else v.astype(x.dtype)
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
        return blocks.decode(x).sum(axes, np.float64, keepdims=axes is not None)

    def max(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        return np.max(x, axis=axes, keepdims=axes is not None) if np.size(x) else np.float64(0.0)

    sort = staticmethod(partial(np.sort, axis=0))

    def pick(self, table: Array, row: Array) -> Array:
        return table[row.astype(np.intp), np.arange(table.shape[1])]

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
        wide = x if x.itemsize > 2 else blocks.decode(x)
        return wide.astype(dtype, copy=False)

    def constant(self, x: Array) -> Array:
        return x

    def group_max(self, values: Array, owners: Owners, groups: int) -> Array:
        if isinstance(owners, Repeated) and all(owners.times):
            values = np.maximum.reduceat(values, blocks.starts(owners.times))
            owners = owners.owners
            if [*owners] == [*range(groups)]:
                return values
        result = np.full(groups, -np.inf)
        np.maximum.at(result, base.index_of(owners), values)
        return result

    def group_sum(self, values: Array, owners: Owners, groups: int) -> Array:
        return np.bincount(base.index_of(owners), weights=values, minlength=groups)

    def joined(self, arrays: Arrays) -> Array:
        return np.concatenate([np.ravel(blocks.decode(a)) for a in arrays])

    # -- measures of gradients ----------------------------------------------------------------
    def group_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        layout = self.layout if arrays is self._views else None
        each_sum, norms = blocks.square_sums(arrays, layout), []
        for some in members:
            total = math.fsum(map(each_sum.__getitem__, some))
            # If a sum has overflowed or underflowed, the group is scaled and measured again: 1e20
            # in float32, 1e200 in float64 and 1e-30 give the right norm.
            if base.UNDERFLOW <= total < math.inf:
                norms.append(math.sqrt(total))
            else:
                norms.append(blocks.exact_norm([arrays[i] for i in some]))
        return np.array(norms)

    def recompute_near_limit(
        self, norms: Array, limits: Array, arrays: Arrays, members: Sequence[Sequence[int]]
    ) -> Array:
        result = norms
        # Not of the limits, which may be infinite. Floats are faster than arrays of a few numbers.
        pairs = enumerate(zip(norms.tolist(), limits.tolist(), strict=True))
        for group in [g for g, (norm, limit) in pairs if abs(norm - limit) <= _CLOSE * norm]:
            some = [arrays[i] for i in members[group]]
            # Arrays of float64 have been measured in float64 already.
            if any(view.itemsize < 8 for view in some):
                result = norms.copy() if result is norms else result
                result[group] = blocks.exact_norm(some)
        return result

    def max_abs(self, arrays: Arrays) -> Array:
        return np.array([*map(blocks.peak, arrays)])

    def summed(self, call: Call, columns: Sequence[Arrays]) -> Array:
        sums = np.zeros(len(columns[0]))
        for i, row in enumerate(zip(*columns, strict=True)):
            for _, some in _parts(row, wide=True):
                sums[i] += np.sum(call(*some))
        return sums

    def slice_norms(
        self, arrays: Arrays, axes: Sequence[tuple[int, ...]], fast: bool = False
    ) -> Array:
        parts = blocks.slice_norms(arrays, axes, fast)
        norms = np.concatenate(parts)
        if not fast or _in_range(norms):
            return norms
        places = [i for i, part in enumerate(parts) if not _in_range(part)]
        again = blocks.slice_norms([arrays[i] for i in places], [axes[i] for i in places])
        return np.concatenate(base.with_others(parts, places, again))

    # -- new gradients ------------------------------------------------------------------------
    def scale(self, arrays: Arrays, factors: Arrays) -> Arrays:
        if len({*map(id, factors)}) == 1:
            # Mostly there is one factor for all.
            return arrays if _is_one(factors[0]) else self._products(arrays, factors)
        distinct = dict(zip(map(id, factors), factors, strict=True))
        ones = {key for key, k in distinct.items() if _is_one(k)}
        if not ones:
            return self._products(arrays, factors)
        if len(ones) == len(distinct):
            return arrays
        places = [i for i, k in enumerate(factors) if id(k) not in ones]
        some = self._products([arrays[i] for i in places], [factors[i] for i in places])
        return base.with_others(arrays, places, some)

    def _products(self, arrays: Arrays, factors: Arrays) -> Arrays:
        outs, sizes = self._outputs(arrays), [*map(_nbytes, arrays)]
        threads = num_threads(sizes) if sum(sizes) >= THREADED else 1
        if threads < 2 and [*map(_dtype, arrays)] == [*map(_dtype, factors)]:
            products = map(np.multiply, arrays, factors, outs)
            # NumPy makes scalars of 0-d arrays.
            return [*products] if self.in_place else [*map(np.asarray, products)]
        pairs = zip(arrays, outs, strict=True)
        made = [np.empty_like(a) if out is None else out for a, out in pairs]
        calls: list[Call] = []
        for array, k, out in zip(arrays, factors, made, strict=True):
            half = array.itemsize == 2
            k = np.asarray(base.raised(k, self.dtype(array)), np.float32 if half else array.dtype)
            call: Call = _multiply_half if half else np.multiply
            parts = [(array, out)] if k.ndim else _cut(array, out, blocks.CHUNK if half else PIECE)
            calls += [partial(call, source, k, target) for source, target in parts]
        each(calls, threads)
        return made

    def mapped(
        self, call: Call, columns: Sequence[Arrays], moved: Array = None, wide: bool = False
    ) -> Arrays:
        unchanged = [False] * len(columns[0]) if moved is None else [not m for m in moved]
        rows = zip(zip(*columns, strict=True), unchanged, strict=True)
        results = zip(*[self._mapped(call, *row, wide) for row in rows], strict=True)
        return [np.array(r) if type(r[0]) is float else r for r in results]

    def _mapped(self, call: Call, row: Arrays, is_unchanged: bool, wide: bool) -> tuple[Any, ...]:
        array = row[0]
        output: HostView | None = None
        others: list[Array] = []
        for piece, some in _parts(row, wide=wide, nothing=is_unchanged):
            result, *more = call(*some)
            if is_unchanged:
                return array, *(x if np.ndim(x) else float(x) for x in more)
            if piece.start == 0:
                # What is shaped like the elements is kept, and numbers are joined.
                others = [np.empty(array.size, x.dtype) if np.ndim(x) else -math.inf for x in more]
            for j, x in enumerate(more):
                if np.ndim(x):
                    others[j][piece] = x.reshape(-1)
                else:
                    others[j] = max(others[j], float(x))
            if output is None and result is not some[0] and (result != some[0]).any():
                (output,) = self._outputs([array])
                if output is None or not output.flags.c_contiguous:
                    output = np.empty(array.size, array.dtype)
                output = output.reshape(-1)
                output[: piece.start] = array.reshape(-1)[: piece.start]
            if output is not None:
                output[piece] = blocks.encode(result.reshape(-1), array.dtype, towards_zero=True)
        shaped = [x.reshape(array.shape) if np.ndim(x) else x for x in others]
        result = array if output is None else output.reshape(array.shape)
        if self.in_place and not np.may_share_memory(result, array):
            array[...] = result
        return array if self.in_place else result, *shaped

    def keep_if(self, condition: Array, arrays: Arrays) -> Arrays:
        if condition:
            return arrays
        if not self.in_place:
            return [np.zeros_like(a, subok=False) for a in arrays]
        for array in arrays:
            array[...] = 0
        return arrays

    def _outputs(self, arrays: Arrays) -> Sequence[HostView | None]:
        """Return where to write the outputs for some arrays, laid out like them; None for new."""
        if self.in_place:
            return arrays
        outs: Sequence[HostView | None] = [None] * len(arrays)
        if self.memory is not None:
            if self._places is None:
                self._places = {id(v): i for i, v in enumerate(self._views)}
            places = [self._places.get(id(a), -1) for a in arrays]
            if min(places) >= 0:
                outs = self.memory.like(places, self._views)
        if not self.aligned:
            return outs
        pairs = zip(arrays, outs, strict=True)
        return [aligned(a) if o is None and in_memory_order(a) is not None else o for a, o in pairs]


def _in_range(norms: HostView) -> bool:
    """Return whether no sum of squares has overflowed, or lost much by underflow."""
    return bool(_LEAST <= norms.min() <= norms.max() < math.inf)


def _is_one(factor: HostView) -> bool:
    # To compare one number takes a tenth of the time.
    return factor.item(0) == 1.0 and (not factor.ndim or bool((factor == 1.0).all()))


def _parts(
    row: Arrays, *, wide: bool = False, nothing: bool = False
) -> Iterator[tuple[slice, list[Array]]]:
    """Yield pieces of the dense arrays of a row that stay in the cache, decoded.

    Numbers become floats of Python, which do not widen what they meet. An empty array is one piece.
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
    for start in range(0, size or 1, blocks.CHUNK):
        piece = slice(start, min(start + blocks.CHUNK, size))
        yield piece, _decoded([x if type(x) is float else x[piece] for x in columns], wide)


def _decoded(columns: Arrays, wide: bool) -> list[Array]:
    """Return arrays in float32 or wider, or all in float64; numbers stay unchanged."""
    some: list[Array] = [x if type(x) is float else blocks.decode(x) for x in columns]
    return [x if type(x) is float else np.asarray(x, np.float64) for x in some] if wide else some


def _cut(array: HostView, out: HostView, step: int) -> Iterator[tuple[HostView, HostView]]:
    """Yield pieces of both, in the order of memory; both whole if they have gaps."""
    source, target = in_memory_order(array), in_memory_order(out)
    if source is None or target is None:
        yield array, out
        return
    source, target = source.reshape(-1), target.reshape(-1)
    for start in range(0, array.size, step):
        yield source[start : start + step], target[start : start + step]


def _multiply_half(array: HostView, factor: HostView, out: HostView) -> None:
    product = np.asarray(blocks.decode(array) * factor)
    out[...] = blocks.encode(product, array.dtype, towards_zero=True)
