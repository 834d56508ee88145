# SPDX-License-Identifier: Apache-2.0
"""NumPy: arrays of the host, and the reference for the other frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from fedclip.arrays.base import NOWHERE, Array, Backend, Host, HostView, Outs, Views
from fedclip.arrays.cores import PIECE, each, worthwhile
from fedclip.arrays.memory import aligned, in_memory_order

__all__ = ["NumpyBackend", "bits", "clamp", "dtype_name", "shared", "written"]


def bits(array: HostView) -> HostView:
    """Return bfloat16 as its bits, and any other array as it is."""
    # NumPy has no bfloat16 of its own. Other dtypes that packages add are of the kind "V" too.
    dtype = array.dtype
    return array.view(np.uint16) if dtype.kind == "V" and dtype.itemsize == 2 else array


_ARRAY = {np.ndarray}
_nbytes = attrgetter("nbytes")


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a dtype as "float32", "bfloat16", ..."""
    # NumPy builds the name at each call, which takes as long as a step over twenty tensors.
    return str(dtype.name)


def written(
    call: Callable[..., Any], arrays: Sequence[Array], k: Any, outs: Outs
) -> list[HostView]:
    """Return ``call(array, k, out)``, elementwise, for each array; large ones over all cores.

    Arrays without `outs` are small ones.
    """
    threads = worthwhile([*map(_nbytes, arrays)]) if outs else 1
    if threads < 2:
        results = [*map(call, arrays, repeat(k), *([outs] if outs else []))]
        # NumPy returns a scalar for a 0-d array: make it an array again.
        return results if {*map(type, results)} == _ARRAY else [np.asarray(r) for r in results]
    results, calls = [], []
    for array, out in zip(arrays, outs, strict=True):
        result = np.empty_like(array, subok=False) if out is None else out
        results.append(result)
        source, target = in_memory_order(array), in_memory_order(result)
        if array.size <= PIECE or source is None or target is None:
            calls.append(partial(call, array, k, result))
            continue
        source, target = source.reshape(-1), target.reshape(-1)
        for start in range(0, array.size, PIECE):
            piece = slice(start, start + PIECE)
            calls.append(partial(call, source[piece], k, target[piece]))
    each(calls, threads)
    return results


def shared(call: Callable[..., Any], k: Any, host: Host) -> list[HostView]:
    """Return ``call(view, k)`` for each view, in memory that another framework can share."""
    pairs = zip(host.views, host.outs or repeat(None), strict=False)
    return written(call, host.views, k, [aligned(v) if out is None else out for v, out in pairs])


def _multiply_half(array: HostView, factor: Any, out: HostView | None = None) -> HostView:
    product = np.asarray(np.asarray(array, np.float32) * factor)
    if out is None:
        return product.astype(array.dtype)
    out[...] = product
    return out


def clamp(array: HostView, ends: tuple[Any, Any], out: HostView | None = None) -> HostView:
    """Return an array between two ends of its dtype."""
    # Several times faster than `np.clip`, whose branches are hard to predict.
    result = np.asarray(np.maximum(array, ends[0], out=out))
    return np.asarray(np.minimum(result, ends[1], out=result))


class NumpyBackend(Backend):
    """Arrays and 0-d scalars of NumPy."""

    name = "numpy"
    writes = True
    measures_again = True

    def reads(self, cls: type) -> bool:
        # The mask would be lost.
        return not issubclass(cls, np.ma.MaskedArray)

    def host(self, arrays: Sequence[Array]) -> Views:
        if {*map(type, arrays)} == _ARRAY:
            views = Views(arrays, dense=True)
            if views.usual:
                return views
        return Views([bits(np.asarray(a)) for a in arrays])

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return [a if a.dtype.isnative else np.asarray(a, a.dtype.newbyteorder("=")) for a in arrays]

    def restored(self, output: Array, like: Array) -> Array:
        return output if output.dtype == like.dtype else output.astype(like.dtype)

    def dtype(self, array: Array) -> str:
        return dtype_name(array.dtype)

    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        dtype = arrays[0].dtype
        if dtype.itemsize == 2:
            return written(_multiply_half, arrays, np.float32(factor), self._typed(host, dtype))
        # NumPy handles a 0-d array faster than a scalar, whose type it has to find out.
        return written(np.multiply, arrays, np.asarray(factor, dtype), host.outs)

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        if array.dtype.itemsize == 2:
            return _multiply_half(np.asarray(array), factors.astype(np.float32))
        return np.asarray(array * factors.astype(array.dtype))

    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        dtype = arrays[0].dtype
        ends = dtype.type(low), dtype.type(high)
        return written(clamp, arrays, ends, self._typed(host, dtype))

    @staticmethod
    def _typed(host: Host, dtype: np.dtype[Any]) -> Outs:
        # Host views show bfloat16 as bits.
        return [out if out is None else out.view(dtype) for out in host.outs]

    def zeros_like(self, array: Array) -> Array:
        return np.zeros_like(array, subok=False)

    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        raise NotImplementedError("NumPy arrays always have a host view")

    def to_host(self, array: Array) -> HostView:
        return np.asarray(array)

    def dense(self, array: Array) -> Array:
        return array

    def from_host(self, values: HostView, like: Array) -> Array:
        return values.view(like.dtype)

    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return np.asarray(values, dtype=np.float64)

    where = staticmethod(np.where)
    isfinite = staticmethod(np.isfinite)
    sqrt = staticmethod(np.sqrt)
    exp = staticmethod(np.exp)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)
    sum = staticmethod(np.sum)
    max = staticmethod(np.max)

    def fill(self, x: Array, condition: Array, number: float) -> Array:
        # Arithmetic makes a scalar of a 0-d array.
        result = np.asarray(x)
        np.copyto(result, number, where=condition)
        return result

    def within(self, x: Array, limits: Array) -> Array:
        # In one new array. With `np.clip`, a step of `ema-value-clip` takes a quarter longer (20
        # tensors of 5,000 elements).
        result = np.asarray(np.negative(limits))
        np.maximum(x, result, out=result)
        return np.minimum(result, limits, out=result)

    def known(self, condition: Array) -> bool | None:
        held = np.count_nonzero(condition)
        return bool(held) if held in (0, condition.size) else None

    def sort(self, table: Array) -> Array:
        return np.sort(table, axis=0)

    def pick(self, table: Array, row: Array) -> Array:
        return table[row.astype(np.intp), np.arange(table.shape[1])]

    def put(self, table: Array, row: Array, values: Array) -> Array:
        table = table.copy(order="K")
        table[row.astype(np.intp), np.arange(table.shape[1])] = values
        return table

    def ranked(self, table: Array, held: Array, rank: Array) -> tuple[Array, Array]:
        most, place = int(held[0]), int(rank[0])
        if (held != most).any():
            return super().ranked(table, held, rank)
        # Groups are mostly of one age; to select is a third of the work of sorting.
        parts = np.partition(table[:most], place, axis=0)
        low = parts[place]
        return low, parts[place + 1 :].min(axis=0) if place + 1 < most else low

    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        per = [np.linalg.norm(np.asarray(a, np.float64).ravel()) for a in arrays]
        return np.array([np.linalg.norm([per[i] for i in m]) for m in members])

    def all(self, x: Array) -> Array:
        return np.all(x)

    def multiply(self, arrays: Sequence[Array], factor: Array) -> list[Array]:
        if not arrays:
            return []
        return self.scale(arrays, float(factor))

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        return list(arrays) if condition else [self.zeros_like(a) for a in arrays]

    def group_extremes(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        lows = [np.min(np.asarray(a, np.float64), initial=0.0) for a in arrays]
        highs = [np.max(np.asarray(a, np.float64), initial=0.0) for a in arrays]
        return (
            np.array([np.min([lows[i] for i in m]) for m in members]),
            np.array([np.max([highs[i] for i in m]) for m in members]),
        )

    def stack(self, arrays: Sequence[Array]) -> Array:
        return np.stack(arrays)

    def cast(self, x: Array, dtype: str) -> Array:
        return np.asarray(x).astype(dtype, copy=False)

    def largest(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        return np.abs(array).max(axis=axes, keepdims=axes is not None)

    def total(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        return np.sum(array, axis=axes, keepdims=axes is not None, dtype=np.float64)

    def wide(self, array: Array) -> Array:
        return np.asarray(array, np.float64)

    def joined(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate([np.ravel(a) for a in arrays])

    def _slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        return np.sqrt(np.square(np.asarray(array, np.float64)).sum(axis=axes))

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return array.reshape(shape)

    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        return [self.scale_slices(a, k) for a, k in zip(arrays, factors, strict=True)]

    def repeated(self, numbers: Sequence[int], times: Sequence[int], like: Array) -> Array:
        return np.repeat(numbers, times)

    def take(self, values: Array, index: Array) -> Array:
        return values[index]

    def group_max(self, values: Array, index: Array, groups: int) -> Array:
        result = np.full(groups, -np.inf)
        np.maximum.at(result, index, values)
        return result
