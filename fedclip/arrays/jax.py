# SPDX-License-Identifier: Apache-2.0
"""JAX: arrays on devices, and traced values under jit; on the CPU it only makes NumPy's views.

It knows neither groups of tensors nor limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fedclip.arrays import base, blocks
from fedclip.arrays.base import Array, Arrays, Backend, HostView, Owners, widest_of
from fedclip.arrays.numpy import bits

# Float64 for a few lines, also where a session has none: the context under its name of today, or
# that of before.
float64: Any = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]

# XLA adds up to 62 float32 one after the other in arrays of fewer elements than this, and at most
# 20 in larger ones up to a million, or to 4,096 of slices that span neighbouring dimensions
# (tests/laws/test_bound.py).
_TREE = 1 << 12
_LONG = 1 << 20
_SLICE = 1 << 12


@cache
def _only_cpu() -> bool:
    # Asking an array for its devices takes as long as making a view of it.
    return set(jax.extend.backend.backends()) == {"cpu"}


def _widest() -> Any:
    return jax.dtypes.canonicalize_dtype(float)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _towards_zero(x: Array, dtype: str) -> Array:
    narrow = x.astype(dtype)
    if narrow.dtype.itemsize >= x.dtype.itemsize:
        return narrow
    # Floats of one sign are ordered like their bits: subtract 1 to step towards zero.
    pattern = jax.lax.bitcast_convert_type(narrow, f"uint{8 * narrow.dtype.itemsize}")
    over = jnp.abs(narrow.astype(x.dtype)) > jnp.abs(x)
    return jax.lax.bitcast_convert_type(pattern - over.astype(pattern.dtype), narrow.dtype)


@_towards_zero.defjvp
def _(dtype: str, given: Any, changes: Any) -> tuple[Array, Array]:
    return _towards_zero(given[0], dtype), changes[0].astype(dtype)


def _adds_up(array: Array, axes: tuple[int, ...], most: int) -> bool:
    """Return whether XLA adds up slices of up to `most` float32 with few roundings."""
    fits = array.size >= _TREE and math.prod([array.shape[a] for a in axes[1:]]) <= most
    is_narrow = array.dtype.itemsize <= 4
    return bool(is_narrow and fits and axes == (*range(axes[0], axes[-1] + 1),))


def _square_sums(array: Array, axes: tuple[int, ...], most: int, quick: bool) -> Array:
    """Return the sums of squares of slices, flat; if `quick`, added up in float32, else float64."""
    # Of more than `most`, their rows.
    long = math.prod([array.shape[a] for a in axes]) > most
    squares = jnp.square(array.astype(jnp.float32 if quick else float))
    sums = jnp.sum(squares, axes[1:] if long else axes, keepdims=True)
    return _flat(jnp.sum(sums.astype(float), axes) if long else sums)


def _square_sum(array: Array) -> Array:
    """Return the sum of squares of an array, in float64."""
    axes = tuple(range(array.ndim))
    return _square_sums(array, axes, _LONG, _adds_up(array, axes, _LONG))[0].astype(float)


def _in_range(sums: Array) -> Array:
    """Return whether no sum of squares has overflowed, or lost much by underflow."""
    return jnp.all((sums >= base.UNDERFLOW) & (sums < jnp.inf))


def _sqrt(x: Array) -> Array:
    """Return the square root; that of 0 has the derivative 0, as nothing follows from it."""
    nothing = x == 0
    return jnp.where(nothing, 0.0, jnp.sqrt(jnp.where(nothing, 1.0, x)))


def _flat(array: Array) -> Array:
    """Return all elements of an array, which every device gets if the array is split."""
    sharding: Any = getattr(jax.typeof(array), "sharding", None)
    # Over explicit axes of a mesh, an array keeps its shape.
    if sharding is not None and any(axis is not None for axis in sharding.spec):
        functions: Any = jax.sharding
        array = functions.reshard(array, NamedSharding(sharding.mesh, type(sharding.spec)()))
    return array.ravel()


def _varying(array: Array) -> frozenset[Any]:
    """Return the axes of a `shard_map` along which an array differs, if JAX tracks them."""
    kind = jax.typeof(array)
    tracked = getattr(kind, "manual_axis_type", None)
    axes: frozenset[Any] = getattr(kind if tracked is None else tracked, "vma", frozenset())
    return axes if tracked is None else frozenset(tracked.varying)


def _at(values: Array, places: HostView) -> Array:
    """Return the values at these places, a table of rising numbers."""
    flat = places.ravel()
    if flat.size and flat[-1] - flat[0] == flat.size - 1:
        # XLA takes less time for neighbours.
        return values[flat[0] : flat[-1] + 1].reshape(places.shape)
    return values[places]


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
    aligned = rounds = True

    def __init__(self, axes: tuple[str, ...] = ()) -> None:
        self._axes = axes

    # -- arrays -------------------------------------------------------------------------------
    def traced(self, array: Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def views(self, arrays: Arrays) -> Sequence[HostView | None]:
        return [self._view(a) for a in arrays]

    def _view(self, array: Array) -> HostView | None:
        if self.traced(array):
            return None
        local = _only_cpu() or all(d.platform == "cpu" for d in array.sharding.device_set)
        return bits(np.asarray(array)) if local else None

    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        typed = [v.view(x.dtype) for v, x in zip(values, likes, strict=True)]
        places = [x.sharding if x.committed else None for x in likes]
        # One call for all takes a tenth as long as one for each.
        if all(place is places[0] or place == places[0] for place in places):
            return list(jax.device_put(typed, places[0]))
        return [jax.device_put(v, place) for v, place in zip(typed, places, strict=True)]

    # -- arithmetic ---------------------------------------------------------------------------
    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return jnp.asarray(values, dtype=float)

    where = staticmethod(jnp.where)
    isfinite = staticmethod(jnp.isfinite)
    sqrt = staticmethod(_sqrt)
    exp = staticmethod(jnp.exp)
    minimum = staticmethod(jnp.minimum)
    maximum = staticmethod(jnp.maximum)

    def sum(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        # A float32 sum over millions of elements loses digits.
        widest = _widest()
        with float64(True):
            return jnp.sum(x, axes, float, keepdims=axes is not None).astype(widest)

    def max(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        if not math.prod(x.shape):
            return jnp.zeros((), x.dtype)
        return jnp.max(x, axes, keepdims=axes is not None)

    stack = staticmethod(jnp.stack)

    sort = staticmethod(partial(jnp.sort, axis=0))

    def pick(self, table: Array, row: Array) -> Array:
        # Round: fused arithmetic may give 1.9999999999999998 for a whole number.
        return table[jnp.rint(row).astype(int), jnp.arange(table.shape[1])]

    # -- numbers ------------------------------------------------------------------------------
    def cast(self, x: Array, dtype: str) -> Array:
        # Without x64 there is no float64: the widest float is the one to ask for.
        return x.astype(jax.dtypes.canonicalize_dtype(dtype))

    constant = staticmethod(jax.lax.stop_gradient)
    narrowed = staticmethod(_towards_zero)

    def group_max(self, values: Array, owners: Owners, groups: int) -> Array:
        if isinstance(owners, base.Repeated):
            # On the CPU, XLA takes as long for one number of a segment as for hundreds of a part,
            # and as long for one part as for all of the same length.
            alike: dict[int, list[int]] = {}
            for i, number in enumerate(owners.times):
                alike.setdefault(number, []).append(i)
            starts = blocks.starts(owners.times)[:, None]
            tables = [_at(values, starts[some] + np.arange(n)) for n, some in alike.items()]
            values = jnp.concatenate([jnp.max(t, axis=1, initial=-jnp.inf) for t in tables])
            owners = [owners.owners[i] for some in alike.values() for i in some]
        if sorted(owners) == [*range(groups)]:
            return values[np.argsort(owners)]
        return jax.ops.segment_max(values, base.index_of(owners), groups)

    def group_sum(self, values: Array, owners: Owners, groups: int) -> Array:
        return jax.ops.segment_sum(values, base.index_of(owners), groups)

    def joined(self, arrays: Arrays) -> Array:
        widest = widest_of(map(self.dtype, arrays))
        return jnp.concatenate([_flat(a).astype(widest) for a in arrays])

    # -- measures of gradients ----------------------------------------------------------------
    def group_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        widest = _widest()
        scaled = partial(self._scaled_norms, arrays, members)
        with float64(True):
            squares = [*map(_square_sum, arrays)]
            sums = self._group_sums(squares, arrays, members)
            # Measure again, relative to the maximum, if a sum has overflowed or underflowed.
            return jax.lax.cond(_in_range(sums), lambda: _sqrt(sums), scaled).astype(widest)

    def _scaled_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        peaks = [*map(self._peak, arrays)]
        tops = [jnp.max(jnp.stack([peaks[i] for i in some])) for some in members]
        units = [base.unit_of(top, self) for top in tops]
        of = {i: unit for some, unit in zip(members, units, strict=True) for i in some}
        squares = [_square_sum(a.astype(float) / of[i]) for i, a in enumerate(arrays)]
        return jnp.stack(units) * _sqrt(self._group_sums(squares, arrays, members))

    def _group_sums(
        self, numbers: Arrays, arrays: Arrays, members: Sequence[Sequence[int]]
    ) -> Array:
        """Return the sum of each group's numbers, one of each array, over all shards."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for i, array in enumerate(arrays):
            alike.setdefault(self._axes_of(array), []).append(i)
        zero = jnp.zeros((), float)
        parts = []
        for axes, chosen in alike.items():
            rows = [[numbers[i] for i in group if i in chosen] for group in members]
            part = jnp.stack([sum(row, zero) for row in rows])
            parts.append(_over(jax.lax.psum, part, axes))
        return sum(parts[1:], parts[0])

    def _axes_of(self, array: Array) -> tuple[str, ...]:
        """Return the axes of a `shard_map` along which an array is split."""
        # If JAX tracks no axes, no array seems to vary, not even the index of the shard.
        if not self._axes or not _varying(jax.lax.axis_index(self._axes)):
            return self._axes
        varying = _varying(array)
        return tuple(axis for axis in self._axes if axis in varying)

    def _peak(self, array: Array) -> Array:
        peak = jnp.max(jnp.abs(array), initial=0.0).astype(float)
        return _over(jax.lax.pmax, peak, self._axes_of(array))

    def max_abs(self, arrays: Arrays) -> Array:
        return jnp.stack([*map(self._peak, arrays)])

    def slice_norms(
        self, arrays: Arrays, axes: Sequence[tuple[int, ...]], fast: bool = False
    ) -> Array:
        widest = _widest()
        with float64(True):
            if any(x.dtype.itemsize > 4 for x in arrays):
                return super().slice_norms(arrays, axes).astype(widest)
            pairs = [*zip(arrays, axes, strict=True)]
            quick = [fast and _adds_up(*pair, _SLICE) for pair in pairs]
            sums = [_square_sums(*pair, _SLICE, q) for pair, q in zip(pairs, quick, strict=True)]
            found = jnp.concatenate(sums).astype(float)

            def checked() -> Array:
                exact = [partial(_square_sums, *pair, _SLICE, False) for pair in pairs]
                known = [partial(part.astype, float) for part in sums]
                # Each by itself: a unit that is not in use has no gradient.
                parts = map(jax.lax.cond, map(_in_range, sums), known, exact)
                return jnp.concatenate([*parts])

            usual = [part for part, q in zip(sums, quick, strict=True) if q]
            if usual:
                found = jax.lax.cond(_in_range(jnp.concatenate(usual)), lambda: found, checked)
            return _sqrt(found).astype(widest)
