# SPDX-License-Identifier: Apache-2.0
"""JAX: arrays on any device, and traced values under jit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedclip.arrays.base import NOWHERE, UNDERFLOW, Array, Backend, Host, HostView, Views
from fedclip.arrays.numpy import bits, dtype_name, shared

__all__ = ["JaxBackend"]

# Float64 for a few lines, also where a session has none: the context under its name of today, or
# that of before.
float64: Any = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]

# XLA adds up to 62 float32 one after the other in arrays of fewer elements than this, and at most
# 20 in larger ones up to a million (tests/test_digits.py).
_TREE = 1 << 12
_LONG = 1 << 20
_JOINED = 1 << 24
# Above this mean number of elements, XLA writes arrays faster one by one than all together.
_LARGE = 1 << 18
# XLA runs fewer than a thousand floating point operations in the calling thread; waking another
# thread takes longer. With few elements in all, it is worth splitting them into such small calls.
_CHEAP = 999
_FEW = 1 << 14


@jax.jit
def _multiply_all(arrays: list[Array], factor: Array) -> list[Array]:
    # Compiled once for the shapes of a model: one dispatch instead of one for each array.
    return [_multiply(a, factor) for a in arrays]


@jax.jit
def _multiply_one(array: Array, factor: Array) -> Array:
    return _multiply(array, factor)


def _at_least_single(array: Array) -> Any:
    """Return the dtype of an array, or float32; a session may forbid JAX to promote dtypes."""
    return array.dtype if array.dtype.itemsize > 4 else jnp.float32


def _multiply(array: Array, factor: Array) -> Array:
    if array.dtype.itemsize == 2:
        return (array.astype(jnp.float32) * factor).astype(array.dtype)
    return array * jnp.asarray(factor, array.dtype)


@cache
def _only_cpu() -> bool:
    # Asking an array for its devices takes as long as making a view of it.
    return set(jax.extend.backend.backends()) == {"cpu"}


def _bins(arrays: Sequence[Array], most: int) -> list[list[Array]]:
    """Return the arrays in lists of at most `most` elements, or of one larger array."""
    bins: list[list[Array]] = [[]]
    held = 0
    for array in arrays:
        size = math.prod(array.shape)
        if bins[-1] and held + size > most:
            bins.append([])
            held = 0
        bins[-1].append(array)
        held += size
    return bins


def _wide(array: Array) -> Array:
    """Return an array in a dtype in which XLA adds it up with few roundings."""
    shape = array.shape
    narrow = math.prod(shape) >= _TREE and math.prod(shape[1:] or shape) <= _LONG
    return array.astype(_at_least_single(array) if narrow else float)


def _sum_of_squares(wide: Array) -> Array:
    """Return the sum of squares of a wide array; the sums of long ones' rows are in float64."""
    long = math.prod(wide.shape) > _LONG
    sums = jnp.sum(jnp.square(wide), axis=tuple(range(1, wide.ndim)) if long else None)
    return jnp.sum(sums.astype(float))


def _sqrt(x: Array) -> Array:
    """Return the square root; that of 0 has the derivative 0, as nothing follows from it."""
    nothing = x == 0
    return jnp.where(nothing, 0.0, jnp.sqrt(jnp.where(nothing, 1.0, x)))


def _is_split(array: Array) -> bool:
    """Return whether an array is split over explicit axes of a mesh, so that it keeps its shape."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    return sharding is not None and any(axis is not None for axis in sharding.spec)


def _flat(array: Array) -> Array:
    """Return all elements of an array, which every device gets if the array is split."""
    if _is_split(array):
        spec: Any = PartitionSpec
        sharding: Any = jax.sharding
        whole = NamedSharding(jax.typeof(array).sharding.mesh, spec())
        array = sharding.reshard(array, whole)
    return array.ravel()


def _varying(array: Array) -> frozenset[Any]:
    """Return the axes of a `shard_map` along which an array differs, if JAX tracks them."""
    kind = jax.typeof(array)
    tracked = getattr(kind, "manual_axis_type", None)
    found: frozenset[Any] = getattr(kind if tracked is None else tracked, "vma", frozenset())
    return found if tracked is None else frozenset(tracked.varying)


def _over(reduce: Any, array: Array, axes: tuple[str, ...]) -> Array:
    return reduce(array, axes) if axes else array


class JaxBackend(Backend):
    """Arrays of JAX.

    Parameters
    ----------
    axes
        Names of the axes of a `shard_map` along which arrays are split: norms are of the whole.
    """

    name = "jax"
    writes = True

    def __init__(self, axes: tuple[str, ...] = ()) -> None:
        self._axes = axes

    def traced(self, array: Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def reads(self, cls: type) -> bool:
        # Sparse arrays and descriptions of shapes are none.
        return hasattr(cls, "at")

    def host(self, arrays: Sequence[Array]) -> Views:
        if _only_cpu():
            # A traced value has no data.
            with suppress(jax.errors.TracerArrayConversionError):
                found = [np.asarray(a) for a in arrays]
                views = Views(found, dense=True)
                return views if views.usual else Views(map(bits, found))
        return Views([self._view(a) for a in arrays])

    def _view(self, array: Array) -> HostView | None:
        if isinstance(array, jax.core.Tracer):
            return None
        on_cpu = all(device.platform == "cpu" for device in array.sharding.device_set)
        return bits(np.asarray(array)) if on_cpu else None

    def dtype(self, array: Array) -> str:
        return dtype_name(array.dtype)

    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        first = arrays[0].sharding
        together = all(a.sharding is first or a.sharding == first for a in arrays)
        size = sum([math.prod(a.shape) for a in arrays])
        large = size >= _LARGE * len(arrays)
        if host.outs and large and together and self._may_write(arrays):
            # XLA takes new memory at each step, which costs more than the product.
            products = shared(np.multiply, np.float32(factor), host)
            return list(jax.device_put(products, first if arrays[0].committed else None))
        if not together or large:
            # A compiled call can not span several devices.
            return [_multiply_one(a, factor) for a in arrays]
        parts = _bins(arrays, _CHEAP) if size < _FEW else [list(arrays)]
        return [product for part in parts for product in _multiply_all(part, factor)]

    @staticmethod
    def _may_write(arrays: Sequence[Array]) -> bool:
        """Return whether JAX can share the memory of NumPy's products, and change nothing."""
        first = arrays[0]
        return len(first.sharding.device_set) == 1 and all(
            a.dtype == np.float32 and not a.weak_type and a.committed is first.committed
            for a in arrays
        )

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        return _multiply(array, jnp.asarray(factors, _at_least_single(array)))

    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        return [jnp.clip(a, low, high) for a in arrays]

    def zeros_like(self, array: Array) -> Array:
        return jnp.zeros_like(array)

    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        # Without x64 there is no float64: divide by the maximum on the device, and multiply by
        # its square on the host, in float64.
        pairs = [self._scaled_square_sum(a) for a in arrays]
        return [float(s) * float(p) ** 2 for s, p in jax.device_get(pairs)]

    def _scaled_square_sum(self, array: Array) -> tuple[Array, Array]:
        """Return the sum of the squares of ``array / unit``, and the unit."""
        wide = array.astype(_at_least_single(array))
        unit = self.unit(jnp.max(jnp.abs(wide), initial=0.0))
        return self._sum(jnp.square(wide / unit)), unit

    @staticmethod
    def _sum(array: Array, axes: tuple[int, ...] | None = None) -> Array:
        # A float32 sum over millions of elements loses digits.
        widest = jax.dtypes.canonicalize_dtype(float)
        with float64(True):
            return jnp.sum(array, axes, float, keepdims=axes is not None).astype(widest)

    def to_host(self, array: Array) -> HostView:
        return np.asarray(array)

    def dense(self, array: Array) -> Array:
        return array

    def from_host(self, values: HostView, like: Array) -> Array:
        return jax.device_put(values.view(like.dtype), like.sharding)

    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return jnp.asarray(values, dtype=float)

    where = staticmethod(jnp.where)
    isfinite = staticmethod(jnp.isfinite)
    sqrt = staticmethod(_sqrt)
    exp = staticmethod(jnp.exp)
    minimum = staticmethod(jnp.minimum)
    maximum = staticmethod(jnp.maximum)
    sum = staticmethod(jnp.sum)
    max = staticmethod(jnp.max)

    def finite(self, x: Array) -> Array:
        return jnp.minimum(x, jnp.finfo(x.dtype).max)  # type: ignore[no-untyped-call]

    def unit(self, peak: Array) -> Array:
        # Nothing depends on the unit, and the square of its reciprocal may overflow.
        return super().unit(jax.lax.stop_gradient(peak))

    def sort(self, table: Array) -> Array:
        return jnp.sort(table, axis=0)

    def pick(self, table: Array, row: Array) -> Array:
        # Round: fused arithmetic may give 1.9999999999999998 for a whole number.
        return table[jnp.rint(row).astype(int), jnp.arange(table.shape[1])]

    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        widest = jax.dtypes.canonicalize_dtype(float)
        with float64(True):
            return self._group_norms(arrays, members).astype(widest)

    def _group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        small = sum(math.prod(a.shape) for a in arrays) < _FEW
        if small and not self._axes and not any(map(_is_split, arrays)):
            # One operation for each group, not for each array.
            wide = [a.ravel().astype(float) for a in arrays]
            joined = [jnp.concatenate([wide[i] for i in group]) for group in members]
            sums = jnp.stack([jnp.sum(jnp.square(j)) for j in joined])
        else:
            squares = [_sum_of_squares(_wide(a)) for a in arrays]
            sums = self._group_sums(squares, arrays, members)
        # Measure again, relative to the maximum, if a sum has overflowed or underflowed.
        sound = jnp.all((sums >= UNDERFLOW) & (sums < jnp.inf))
        return jax.lax.cond(sound, lambda: _sqrt(sums), lambda: self._scaled_norms(arrays, members))

    def _group_sums(
        self, numbers: Sequence[Array], arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> Array:
        """Return the sum of each group's numbers, one of each array, over all shards."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for i, array in enumerate(arrays):
            alike.setdefault(self._axes_of(array), []).append(i)
        zero = jnp.zeros((), float)
        found = []
        for axes, chosen in alike.items():
            rows = [[numbers[i] for i in group if i in chosen] for group in members]
            part = jnp.stack([sum(row, zero) for row in rows])
            found.append(_over(jax.lax.psum, part, axes))
        return sum(found[1:], found[0])

    def _axes_of(self, array: Array) -> tuple[str, ...]:
        """Return the axes of a `shard_map` along which an array is split."""
        # If JAX tracks no axes, no array seems to vary, not even the index of the shard.
        if not self._axes or not _varying(jax.lax.axis_index(self._axes)):
            return self._axes
        varying = _varying(array)
        return tuple(axis for axis in self._axes if axis in varying)

    def _scaled_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        if self._axes or any(map(_is_split, arrays)):
            return self._scaled_norms_of_shards(arrays, members)
        norms = []
        for group in members:
            # Under jit each operation of a branch costs time even if the branch is not taken, so
            # join arrays. Join few at a time: the memory is reserved for both branches.
            bins = _bins([arrays[i].ravel() for i in group], _JOINED)
            pairs = [self._scaled_square_sum(jnp.concatenate(some)) for some in bins]
            units = jnp.stack([unit for _, unit in pairs]).astype(float)
            sums = jnp.stack([s for s, _ in pairs]).astype(float)
            top = jnp.max(units)
            norms.append(top * _sqrt(jnp.sum(sums * jnp.square(units / top))))
        return jnp.stack(norms)

    def _scaled_norms_of_shards(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> Array:
        wide = [*map(_wide, arrays)]
        peaks = [self._peak(a) for a in wide]
        tops = [self.unit(jnp.max(jnp.stack([peaks[i] for i in group]))) for group in members]
        of = {i: top for group, top in zip(members, tops, strict=True) for i in group}
        squares = [_sum_of_squares(a / of[i]) for i, a in enumerate(wide)]
        return jnp.stack(tops).astype(float) * _sqrt(self._group_sums(squares, arrays, members))

    def _peak(self, array: Array) -> Array:
        peak = jnp.max(jnp.abs(array), initial=0.0)
        return _over(jax.lax.pmax, peak, self._axes_of(array))

    def all(self, x: Array) -> Array:
        return jnp.all(x)

    def multiply(self, arrays: Sequence[Array], factor: Array) -> list[Array]:
        # Without the barrier, the compiler computes the factor again for each array.
        factor = jax.lax.optimization_barrier(factor)  # type: ignore[no-untyped-call]
        return [_multiply(a, factor) for a in arrays]

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        condition = jax.lax.optimization_barrier(condition)  # type: ignore[no-untyped-call]
        return [jnp.where(condition, a, jnp.zeros_like(a)) for a in arrays]

    def group_extremes(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        lows = [jnp.min(a, initial=0.0).astype(float) for a in arrays]
        highs = [jnp.max(a, initial=0.0).astype(float) for a in arrays]
        return (
            jnp.stack([jnp.min(jnp.stack([lows[i] for i in m])) for m in members]),
            jnp.stack([jnp.max(jnp.stack([highs[i] for i in m])) for m in members]),
        )

    def stack(self, arrays: Sequence[Array]) -> Array:
        return jnp.stack(arrays)

    def cast(self, x: Array, dtype: str) -> Array:
        # Without x64 there is no float64: the widest float is the one to ask for.
        return x.astype(jax.dtypes.canonicalize_dtype(dtype))

    def largest(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        if axes is None:
            return self._peak(array)
        return jnp.max(jnp.abs(array), axis=axes, keepdims=True)

    def total(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        return self._sum(array, axes)

    def wide(self, array: Array) -> Array:
        return array.astype(_at_least_single(array))

    def joined(self, arrays: Sequence[Array]) -> Array:
        return jnp.concatenate([*map(_flat, arrays)])

    def _slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        widest = jax.dtypes.canonicalize_dtype(float)
        with float64(True):
            wide = array.astype(float)
            unit = self.unit(jnp.max(jnp.abs(wide), axis=axes, keepdims=True))
            norms = unit * _sqrt(jnp.sum(jnp.square(wide / unit), axis=axes, keepdims=True))
            return norms.astype(widest)

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return array.reshape(shape)

    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        return [_multiply(a, k) for a, k in zip(arrays, factors, strict=True)]

    def repeated(self, numbers: Sequence[int], times: Sequence[int], like: Array) -> Array:
        return jnp.asarray(np.repeat(numbers, times))

    def take(self, values: Array, index: Array) -> Array:
        return values[index]

    def group_max(self, values: Array, index: Array, groups: int) -> Array:
        return jax.ops.segment_max(values, index, groups)
