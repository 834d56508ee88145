# SPDX-License-Identifier: Apache-2.0
"""What fedclip needs from a framework: the arithmetic of rules, and the operations on gradients.

This file names them; `fedclip.arrays.numpy` does them on the host, for the CPU arrays of all
frameworks, and one file each on devices and in compiled code. It knows neither groups of tensors
nor limits.

Numbers of groups, tensors or slices are arrays of one dimension, in the widest float that there
is. No operation changes its inputs, but for a backend that is `in_place`.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

UNDERFLOW = 2.0**-70
"""Below this sum, float32 squares may have been lost (each at least 2^-126, of up to 2^35)."""

LARGEST = {
    "float16": 65504.0,
    "bfloat16": 0xFF * 2.0**120,
    "float32": (2.0**24 - 1) * 2.0**104,
    "float64": sys.float_info.max,
}
"""The largest number of each dtype that fedclip clips."""

HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of half precision, relatively."""

FLOATS = {np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)}
"""The dtypes of views that show numbers, not bits."""

Array: TypeAlias = Any
"""An array of any of the supported frameworks."""

Arrays: TypeAlias = Sequence[Any]
"""One array for each tensor; or one array of numbers, one for each."""

Call: TypeAlias = Callable[..., Any]

HostView: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""A NumPy view; of bfloat16 data it shows the bits, as uint16 (`fedclip.arrays.blocks.decode`)."""


class Repeated(NamedTuple):
    """The owners of numbers of which each tensor has several, one after the other."""

    owners: tuple[int, ...]
    times: tuple[int, ...]


Owners: TypeAlias = Sequence[int] | Repeated
"""The group of each number; of numbers that are not one for each tensor, a `Repeated`."""


def index_of(owners: Owners) -> HostView:
    """Return the group of each number, as an array of NumPy."""
    return _repeated(owners) if isinstance(owners, Repeated) else np.asarray(owners, np.int32)


@lru_cache(maxsize=64)
def _repeated(owners: Repeated) -> HostView:
    return np.repeat(*owners).astype(np.int32)


@cache
def dtype_name(dtype: Any) -> str:
    """Return a dtype as "float32", "bfloat16", ..."""
    # NumPy builds the name at each call, which takes as long as a step over twenty tensors.
    return str(dtype.name)


def with_others(arrays: Arrays, places: Sequence[int], others: Arrays) -> list[Array]:
    """Return arrays with others at some places."""
    result = list(arrays)
    for i, other in zip(places, others, strict=True):
        result[i] = other
    return result


class Arithmetic:
    """The operations that rules use; elementwise unless said otherwise."""

    asarray: Callable[..., Array]
    """``asarray(values, like=None)``: in the widest float of the framework, on like's device."""
    where: Callable[..., Array]
    """``where(condition, x, y)``; numbers broadcast."""
    isfinite: Callable[..., Array]
    """``isfinite(x)``: neither NaN nor infinity."""
    sqrt: Callable[..., Array]
    """``sqrt(x)``; the derivative at 0 is 0."""
    exp: Callable[..., Array]
    minimum: Callable[..., Array]
    """``minimum(x, y)``; `y` may be a number."""
    maximum: Callable[..., Array]
    """``maximum(x, y)``; `y` may be a number."""
    sum: Callable[..., Array]
    """``sum(x, axes=None)`` in the widest float, along axes, kept as 1; of all: of shape ()."""
    max: Callable[..., Array]
    """``max(x, axes=None)`` along axes, kept as 1; of all: of shape ()."""
    stack: Callable[..., Array]
    """``stack(arrays)``: arrays of one shape as the rows of one array."""
    sort: Callable[..., Array]
    """``sort(table)``: each column of (rows, groups) in ascending order."""
    pick: Callable[..., Array]
    """``pick(table, row)``: one value from each column of (rows, groups), at ``row[group]``."""

    def put(self, table: Array, row: Array, values: Array) -> Array:
        """Return the table with ``values[g]`` in row ``row[g]`` of column g, for every group."""
        return self.where(_rows(table, self) == row, values, table)

    def ranked(self, table: Array, held: Any, rank: Any) -> tuple[Array, Array]:
        """Return the element of a rank among the first `held` of each column, and the next one.

        The last element is its own next one. If all elements are held, `rank` may be an int.
        """
        if isinstance(rank, int):
            ordered = self.sort(table)
            return ordered[rank], ordered[min(rank + 1, table.shape[0] - 1)]
        ordered = self.sort(self.where(_rows(table, self) < held, table, math.inf))
        return self.pick(ordered, rank), self.pick(ordered, self.minimum(rank + 1.0, held - 1.0))

    def choose(self, conditions: Arrays, yes: Arrays, no: Arrays) -> Arrays:
        """Return ``where(condition, y, n)`` of each three, which are all finite."""
        return [self.where(c, y, n) for c, y, n in zip(conditions, yes, no, strict=True)]


def _rows(table: Array, xp: Arithmetic) -> Array:
    return xp.asarray(np.arange(float(table.shape[0]))[:, None], like=table)


class Backend(Arithmetic, ABC):
    """One framework, as fedclip sees it."""

    name = ""
    partial = False
    """Whether this process holds parts of the arrays only."""
    in_place = False
    """Whether outputs are written to the arrays themselves."""
    aligned = False
    """Whether it shares only memory that begins at a multiple of 64 bytes."""
    rounds = False
    """Whether fast norms of slices of float32 may be off."""

    # -- arrays -------------------------------------------------------------------------------
    def traced(self, array: Array) -> bool:
        """Return whether an array stands for others, in code that is compiled or batched.

        So does one whose derivatives are recorded. `torch.compile` is not among these: it
        follows the statistics of a clipper.
        """
        return False

    def dtype(self, array: Array) -> str:
        """Return the dtype as "float32", "bfloat16", ..."""
        return dtype_name(array.dtype)

    def size(self, array: Array) -> Any:
        """Return the number of elements: an int, or a traced number in compiled code."""
        return math.prod(array.shape)

    def prepared(self, arrays: Arrays) -> Arrays:
        """Return arrays with repeated rows merged, in the machine's byte order; most unchanged.

        The norm of a sum is not the norm of its parts.
        """
        return arrays

    def dense(self, array: Array) -> Array:
        """Return the array itself, or a sparse one as a dense one."""
        return array

    def values(self, array: Array) -> Array:
        """Return the array itself, or the elements that a sparse one stores."""
        return array

    def restored(self, values: Array, like: Array) -> Array:
        """Return values as an array that is sparse if `like` is."""
        return values

    @abstractmethod
    def views(self, arrays: Arrays) -> Sequence[HostView | None]:
        """Return a NumPy view of each array, or None for one that is not in host memory.

        The view of a sparse array shows its values, of bfloat16 the bits.
        """

    def dense_views(self, arrays: Arrays) -> Sequence[HostView] | None:
        """Return NumPy views of dense arrays in host memory, quickly; None if some are others."""
        known = [view for view in self.views(arrays) if view is not None and view.dtype in FLOATS]
        return known if len(known) == len(arrays) else None

    def to_host(self, array: Array) -> HostView:
        """Return the values as NumPy (bfloat16 as bits), copied from a device if need be."""
        return np.asarray(array)

    @abstractmethod
    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        """Return values, laid out as `views` shows them, as arrays like these.

        A dense `like` may be of another byte order. The arrays may share the values' memory.
        """

    # -- numbers ------------------------------------------------------------------------------
    cast: Callable[..., Array]
    """``cast(x, dtype)``: a dense array in a dtype, given by its name, rounded to the nearest."""

    def narrowed(self, x: Array, dtype: str) -> Array:
        """Return an array in a dtype, rounded towards zero; derivatives are those of the array."""
        raise NotImplementedError

    constant: Callable[[Array], Array]
    """``constant(x)``: numbers on which no derivative depends, such as a unit to divide by."""

    @abstractmethod
    def group_max(self, values: Array, owners: Owners, groups: int) -> Array:
        """Return the largest value of each group; smaller than any number if it has none."""

    @abstractmethod
    def group_sum(self, values: Array, owners: Owners, groups: int) -> Array:
        """Return the sum of the values of each group."""

    def take(self, values: Array, owners: Owners) -> Array:
        """Return for each owner the value of that group."""
        return values[index_of(owners)]

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> Arrays:
        """Return a flat array cut into arrays of these shapes, or that broadcast like them."""
        if not any(shapes):
            # 0-d arrays, which NumPy handles faster than its numbers.
            return [flat[i, ...] for i in range(len(flat))]
        ends = [*accumulate(map(math.prod, shapes))]
        spans = zip([0, *ends], ends, shapes, strict=False)
        return [flat[start:end].reshape(shape) for start, end, shape in spans]

    @abstractmethod
    def joined(self, arrays: Arrays) -> Array:
        """Return all elements of dense arrays as one flat array of the widest dtype among them."""

    # -- measures of gradients ----------------------------------------------------------------
    @abstractmethod
    def group_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        """Return the L2 norm of each group; it may not be finite beyond the float64 numbers."""

    def recompute_near_limit(
        self, norms: Array, limits: Array, arrays: Arrays, members: Sequence[Sequence[int]]
    ) -> Array:
        """Return the norms, on the host measured again in float64 where they are near a limit.

        These very norms come back if there are none.
        """
        return norms

    @abstractmethod
    def max_abs(self, arrays: Arrays) -> Array:
        """Return the largest absolute element of each array; 0 of one without any."""

    def summed(self, call: Call, columns: Sequence[Arrays]) -> Array:
        """Return for each array the sum of ``call(elements, ...)``, in the widest float.

        The columns are those of `mapped`. The elements come in the widest float.
        """
        rows = [[self.cast(x, "float64") for x in row] for _, *row in self._rows(columns)]
        return self.stack([self.sum(call(*row)) for row in rows])

    def _rows(self, columns: Sequence[Arrays]) -> list[tuple[Array, ...]]:
        arrays, *others = columns
        numbers = [()] * len(arrays)
        each = [self.pieces(c, numbers) if hasattr(c, "shape") else c for c in others]
        return [*zip(arrays, map(self.values, arrays), *each, strict=True)]

    def slice_norms(
        self, arrays: Arrays, axes: Sequence[tuple[int, ...]], fast: bool = False
    ) -> Array:
        """Return the L2 norms of the slices of dense arrays as one flat array, array by array.

        A slice spans the axes of its array. If it is `fast`, the host measures within
        `fedclip.arrays.blocks.UNCERTAINTY`, else in float64.
        """
        norms = []
        for array, some in zip(arrays, axes, strict=True):
            wide, unit = self.cast(array, "float64"), None
            # No square of a narrower dtype overflows or underflows.
            if self.dtype(array) == "float64" or self.dtype(wide) != "float64":
                unit = unit_of(self.max(abs(wide), some), self)
                wide = wide / unit
            norm = self.sqrt(self.sum(wide * wide, some))
            norms.append(norm if unit is None else unit * norm)
        return self.joined(norms)

    def joint_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        """Return the L2 norm of each group from all its elements in one array, after a 0."""
        zero = self.asarray([0.0], like=arrays[0])
        joined = [self.joined([zero, *(arrays[i] for i in some)]) for some in members]
        return self.slice_norms(joined, [(0,)] * len(joined))

    # -- new gradients ------------------------------------------------------------------------
    def scale(self, arrays: Arrays, factors: Arrays) -> Arrays:
        """Return ``array * factor`` of each pair, in the dtype and shape of the array.

        A factor is of shape (), or broadcasts against a dense array. On the host, a factor of 1
        gives back the very same array. Half precision is multiplied in float32, and comes out at
        most `HALF_UNIT` above the product, subnormal numbers too.
        """
        pairs = zip(arrays, factors, strict=True)
        columns = [arrays, [raised(k, self.dtype(array)) for array, k in pairs]]
        outputs: Arrays = self.mapped(lambda x, k: (x * k,), columns)[0]
        return outputs

    def mapped(
        self, call: Call, columns: Sequence[Arrays], moved: Array = None, wide: bool = False
    ) -> Sequence[Any]:
        """Return the results of ``call(elements, ...)``, a list of arrays for each result.

        The call is elementwise and returns a tuple. Each column has for each tensor a dense array,
        or a number of shape (); or it is one array of such numbers. The call may be given a piece
        of a tensor, or many tensors at once. Half precision comes as float32, and numbers so that
        they do not widen the elements; if `wide`, all comes in the widest float. The first result
        is an output: it gets the dtype of the array in the first column, rounded towards zero. The
        others stay unchanged, in which numbers (`max` of the elements) are joined by their
        maximum, to one array of numbers.

        On the host, an array that the call does not change comes back itself, and so does one
        where `moved` does not hold, for which the call is not made.
        """
        rows = []
        for array, values, *row in self._rows(columns):
            # What has no dimensions gets one, by which it differs from a number that is returned.
            is_number = not len(values.shape)
            first = self._single(values[None] if is_number else values)
            first = self.cast(first, "float64") if wide else first
            dtype = self.dtype(first)
            inputs = [self._single(x) if len(x.shape) else self.cast(x, dtype) for x in row]
            output, *others = call(first, *inputs)
            joins = [not len(x.shape) for x in others]
            output = self.narrowed(self.cast(output, dtype), self.dtype(values))
            shaped = [x[0] if is_number and len(x.shape) else x for x in (output, *others)]
            rows.append((self.restored(shaped[0], array), shaped[1:], joins))
        outputs, results, joins_of = zip(*rows, strict=True)
        columns = [*zip(*results, strict=True)]
        joined = zip(columns, joins_of[0], strict=True)
        return [outputs, *(self.stack([*map(self.asarray, c)]) if j else c for c, j in joined)]

    def _single(self, array: Array) -> Array:
        return self.cast(array, "float32") if self.dtype(array) in HALF_UNIT else array

    def normal_pairs(self, uniforms: HostView, angles: HostView) -> HostView:
        """Return two rows of standard normal draws, on the host (Box & Muller, 1958).

        Uniforms in (0, 1], which may be overwritten, and angles in radians are float64.
        """
        radius = np.sqrt(-2.0 * np.log(uniforms))
        return np.stack([radius * np.cos(angles), radius * np.sin(angles)])

    def keep_if(self, condition: Array, arrays: Arrays) -> Arrays:
        """Return the arrays, or zeros if the condition, of shape (), does not hold."""
        values = [self.where(condition, self.values(a), 0.0) for a in arrays]
        return [*map(self.restored, values, arrays)]


def widest_of(dtypes: Iterable[str]) -> str:
    """Return the narrowest dtype that holds the numbers of all these."""
    kinds = {*dtypes}
    # Neither kind of half precision holds the other.
    return max(kinds if len(kinds) == 1 else {*kinds, "float32"}, key=[*LARGEST].index)


def raised(factor: Array, dtype: str) -> Array:
    """Return a factor so that products of half precision, rounded towards zero, lose no more.

    They are as far from the exact ones as if they were rounded to the nearest. So are subnormal
    ones, which would be further above. A factor of 1 still changes nothing.
    """
    return factor * (1.0 + HALF_UNIT[dtype]) if dtype in HALF_UNIT else factor


def unit_of(peaks: Array, xp: Backend) -> Array:
    """Return what to divide by so that no square overflows or underflows: mostly the peak.

    Its reciprocal is a normal number, as compilers multiply by that. No derivative depends on it.
    """
    far = 2.0**1000 if xp.dtype(peaks) == "float64" else 2.0**120
    return xp.constant(xp.minimum(xp.maximum(peaks, 1 / far), far))
