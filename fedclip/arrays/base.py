# SPDX-License-Identifier: Apache-2.0
"""The operations that fedclip needs from a framework.

A `Backend` has three parts:

- *host*: zero-copy NumPy views of arrays in this machine's memory. On the CPU, fedclip measures
  the arrays of all frameworks through NumPy;
- *gradients*: the few operations that make a new gradient, out of place, with dtype and shape kept;
- *arithmetic*: the operations that rules use. They are methods of the backend, so that the same
  rule runs on host arrays, on a device, and in compiled code.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

__all__ = [
    "LARGEST",
    "NOWHERE",
    "UNDERFLOW",
    "Arithmetic",
    "Array",
    "Backend",
    "Form",
    "Host",
    "HostView",
    "Outs",
    "Views",
]

UNDERFLOW = 2.0**-70
"""Below this sum, float32 squares may have been lost (each at least 2^-126, of up to 2^35)."""

LARGEST = {
    "float16": 65504.0,
    "bfloat16": 0xFF * 2.0**120,
    "float32": (2.0**24 - 1) * 2.0**104,
    "float64": sys.float_info.max,
}
"""The largest number of each dtype that fedclip clips."""


def units(dtype: str) -> tuple[float, float]:
    """Return the least and the largest number to divide others of this dtype by."""
    far = 2.0**1000 if dtype == "float64" else 2.0**120
    return 1 / far, far


Array: TypeAlias = Any
"""An array of any of the supported frameworks."""

HostView: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""A NumPy view; of bfloat16 data it shows the bits, as uint16 (`fedclip.measures.l2.decode`)."""


Outs: TypeAlias = "Sequence[HostView | None]"
"""For each output of a backend that `writes`, where it may be written to; empty for nowhere.

It is laid out like the host view of the array that the output is for."""


class Host(NamedTuple):
    """Where arrays lie in this machine's memory; nothing if any of them does not."""

    views: Sequence[HostView] = ()
    """The host views of the arrays: to make them again takes a tenth of a step over an MLP."""
    outs: Outs = ()
    """Where what is computed of the arrays may be written to."""


NOWHERE = Host()
"""For arrays on a device, in compiled code, or that change in place."""


_dtype = attrgetter("dtype")
_size = attrgetter("size")
_FLOATS = {np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)}


class Form:
    """What one step mostly has in common with the last: dtypes and sizes of its views.

    What follows from these alone is found once, not at each step: a quiet step of `norm-clip`
    then takes a tenth less ("MLP" and "LSTM" of `make bench`).

    Attributes
    ----------
    key
        The dtypes of the views, then their numbers of elements; None and 0 for one that is not in
        host memory.
    pairs
        Dtype and number of elements of each view.
    count
        The number of elements of all views.
    sizes
        Bytes of each view.
    bytes
        The sum of the sizes.
    dtypes
        The different dtypes.
    floats
        Whether all are NumPy's own float dtypes.
    """

    def __init__(self, key: list[Any]) -> None:
        number = len(key) // 2
        self.key = key
        self.pairs = [*zip(key[:number], key[number:], strict=True)]
        self.count = sum([size for _, size in self.pairs])
        self.sizes = [size * dtype.itemsize if size else 0 for dtype, size in self.pairs]
        self.bytes = sum(self.sizes)
        self.dtypes: set[np.dtype[Any]] = {*key[:number]} - {None}
        self.floats = bool(self.dtypes) and self.dtypes <= _FLOATS


# The last form of each number of arrays. The key of a step is compared with one that is there, as
# to hash it takes several times as long.
_FORMS: dict[int, Form] = {}


class Views(list["HostView | None"]):
    """NumPy views of the arrays of a gradient.

    The list holds None for an array that is not in host memory.

    Attributes
    ----------
    form
        The dtypes and sizes of the views.
    remote
        Positions of None.
    usual
        Whether all views are of dense arrays of NumPy's own float dtypes. Then there is no
        bfloat16 to decode, no row to merge and no dtype to refuse.
    """

    __slots__ = ("form", "remote", "usual")

    def __init__(self, views: Iterable[HostView | None], *, dense: bool = False) -> None:
        self.extend(views)
        self.remote: Sequence[int] = ()
        try:
            # The usual case, without a Python loop: a model has hundreds of arrays.
            key: list[Any] = [*map(_dtype, self), *map(_size, self)]
        except AttributeError:
            self.remote = [i for i, view in enumerate(self) if view is None]
            key = [None if view is None else view.dtype for view in self]
            key += [0 if view is None else view.size for view in self]
        form = _FORMS.get(len(self))
        if form is None or form.key != key:
            form = _FORMS[len(self)] = Form(key)
        self.form = form
        self.usual = dense and form.floats


class Arithmetic:
    """The operations that rules use; elementwise unless said otherwise."""

    measures_again: ClassVar[bool] = False
    """Whether norms close to a limit are measured again, in float64."""

    asarray: Callable[..., Array]
    """``asarray(values, like=None)``: in the widest float of the framework, on like's device."""
    where: Callable[..., Array]
    """``where(condition, x, y)``; numbers broadcast."""
    isfinite: Callable[..., Array]
    """``isfinite(x)``: neither NaN nor infinity."""
    sqrt: Callable[..., Array]
    exp: Callable[..., Array]
    minimum: Callable[..., Array]
    """``minimum(x, y)``; `y` may be a number."""
    maximum: Callable[..., Array]
    """``maximum(x, y)``; `y` may be a number."""
    sum: Callable[..., Array]
    """``sum(x)`` of all groups, of shape ()."""
    max: Callable[..., Array]
    """``max(x)`` of all groups, of shape ()."""
    sort: Callable[..., Array]
    """``sort(table)``: each column of (rows, groups) in ascending order."""
    pick: Callable[..., Array]
    """``pick(table, row)``: one value from each column of (rows, groups), at ``row[group]``."""
    cast: Callable[..., Array]
    """``cast(x, dtype)``, of a dense array; the dtype by its name."""

    def sound(self, x: Array, fine: Array) -> Array:
        """Return `x`, with 0 in the place of NaN and infinity, which are not `fine`."""
        return self.where(fine, x, 0.0)

    def fill(self, x: Array, condition: Array, number: float) -> Array:
        """Return `x` with a number where the condition holds; `x` may be written to."""
        return self.where(condition, number, x)

    def within(self, x: Array, limits: Array) -> Array:
        """Return `x` within plus and minus the limits."""
        return self.minimum(self.maximum(x, -limits), limits)

    def finite(self, x: Array) -> Array:
        """Return `x`, with the largest number of its dtype in the place of infinity."""
        return self.minimum(x, sys.float_info.max)

    def either(self, condition: Array, x: Array) -> Array:
        """Return where the condition holds, or `x`, which is nowhere below 0, is above 0."""
        return condition | (x > 0)

    def known(self, condition: Array) -> bool | None:
        """Return what holds for all groups; None if they differ, on devices and in graphs."""
        return None

    def choose(
        self,
        conditions: Sequence[Array],
        yes: Sequence[Array],
        no: Sequence[Array],
        also: Array | None = None,
    ) -> Sequence[Array]:
        """Return ``where(condition and also, y, n)`` of each three, which are all finite."""
        if also is not None:
            conditions = [also & condition for condition in conditions]
        return [self.where(c, y, n) for c, y, n in zip(conditions, yes, no, strict=True)]

    def median(self, values: Sequence[Array]) -> Array:
        """Return the median of the numbers above 0 of five arrays, elementwise.

        Of two or four it is the lower one in the middle, and of none infinity. Numbers that are
        not above 0 come first.
        """
        if not self.known(values[0] > 0):
            held = [self.where(v > 0, v, math.inf) for v in values]
            low, high = reduce(self.minimum, held), reduce(self.maximum, values)
            # As many at each end leave the median of three; one or three give the lower one.
            ends = (low, high, low, low, low)
            values = [self.where(v > 0, v, end) for v, end in zip(values, ends, strict=True)]
        a, b, c, d, e = values
        low = self.maximum(self.minimum(a, b), self.minimum(c, d))
        high = self.minimum(self.maximum(a, b), self.maximum(c, d))
        return self.maximum(self.minimum(low, high), self.minimum(self.maximum(low, high), e))

    def products(self, pairs: Sequence[tuple[Array, float]]) -> Sequence[Array]:
        """Return ``x * number`` of each pair."""
        return [x * number for x, number in pairs]

    def without(self, x: Array, share: Any) -> Array:
        """Return ``x - share * x``; the share may be a number."""
        return x - share * x

    def add(self, x: Array, y: Array, times: float) -> Array:
        """Return ``x + times * y``."""
        return x + times * y

    def inverse(self, x: Array) -> Array:
        """Return ``1 / x``."""
        return 1.0 / x

    def lerp(self, old: Sequence[Array], new: Sequence[Array], weight: Any) -> Sequence[Array]:
        """Return ``old + weight * (new - old)`` of each pair."""
        return [x + weight * (y - x) for x, y in zip(old, new, strict=True)]

    def ratio(self, x: Array, y: Array, counts: Array) -> Array:
        """Return ``x / y`` where the condition `counts` holds, and elsewhere anything."""
        # JAX can be told to raise where a division makes NaN, though nobody uses it.
        return x / self.where(counts, y, 1.0)

    def full_like(self, x: Array, number: float) -> Array:
        """Return the number for each group."""
        return number + 0.0 * x

    def zero_below(self, x: Array, least: float) -> Array:
        """Return `x`, with 0 in the place of numbers below the least."""
        return self.where(x < least, 0.0, x)

    def put(self, table: Array, row: Array, values: Array) -> Array:
        """Return the table with ``values[g]`` in row ``row[g]`` of column g, for every group."""
        return self.where(self._rows(table, row) == row, values, table)

    def ranked(self, table: Array, held: Array, rank: Array) -> tuple[Array, Array]:
        """Return the element of a rank among the first `held` of each column, and the next one.

        The last element is its own next one.
        """
        ordered = self.sort(self.where(self._rows(table, held) < held, table, math.inf))
        return self.pick(ordered, rank), self.pick(ordered, self.minimum(rank + 1.0, held - 1.0))

    def _rows(self, table: Array, like: Array) -> Array:
        return self.asarray(np.arange(float(table.shape[0]))[:, None], like=like)


class Backend(Arithmetic, ABC):
    """One framework, as fedclip sees it."""

    name: str
    writes: ClassVar[bool] = False
    """Whether outputs can be written to memory that NumPy allocated."""
    partial: ClassVar[bool] = False
    """Whether this process holds parts of the arrays only."""

    # -- host ---------------------------------------------------------------------------------
    @abstractmethod
    def host(self, arrays: Sequence[Array]) -> Views:
        """Return a NumPy view of each array, or None for one that is not in host memory.

        The view of a sparse array shows its merged values: the norm of a sum is not the norm of
        its parts.
        """

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return arrays with repeated rows merged, in the machine's byte order; most as they are.

        Merge repeated rows before scaling: if the rows were scaled one by one, their sum could be
        rounded up to more than the limit.
        """
        return arrays

    def restored(self, output: Array, like: Array) -> Array:
        """Return the output for a prepared array in the byte order of the original array."""
        return output

    def size(self, array: Array) -> Any:
        """Return the number of elements: an int, or a traced number in compiled code."""
        return math.prod(array.shape)

    @abstractmethod
    def dtype(self, array: Array) -> str:
        """Return the dtype as "float32", "bfloat16", ..."""

    def traced(self, array: Array) -> bool:
        """Return whether an array stands for others, in code that is compiled or batched.

        So does one whose derivatives are recorded.

        `torch.compile` is none of these: it follows what a clipper remembers.
        """
        return False

    def reads(self, cls: type) -> bool:
        """Return whether arrays of this class can be clipped at all."""
        return True

    # -- gradients ----------------------------------------------------------------------------
    @abstractmethod
    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        """Return ``array * factor`` for arrays of one dtype: new arrays, same dtype and shape.

        Half precision is multiplied in float32 and rounded once.
        """

    @abstractmethod
    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        """Return ``array * factors``; the factors are a NumPy array that broadcasts against it."""

    @abstractmethod
    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        """Return arrays with each element moved into [low, high]; sparse rows are merged."""

    @abstractmethod
    def zeros_like(self, array: Array) -> Array:
        """Return zeros of the same dtype, shape and device."""

    @abstractmethod
    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        """Return float64 sums of squares of arrays that have no host view, in one transfer."""

    @abstractmethod
    def to_host(self, array: Array) -> HostView:
        """Return the (merged) values as NumPy, copied from a device if need be."""

    @abstractmethod
    def dense(self, array: Array) -> Array:
        """Return the array itself, or a sparse one as a dense one."""

    @abstractmethod
    def from_host(self, values: HostView, like: Array) -> Array:
        """Return values as an array of the dtype and device of `like`, which is dense.

        The values have that dtype already (bfloat16 as bits). The array may share their memory.
        """

    # -- gradients on a device, or traced -----------------------------------------------------
    @abstractmethod
    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        """Return the L2 norm of each group, as one array in the framework's widest float."""

    def parts(self, arrays: Sequence[Array]) -> list[Array]:
        """Return, of a backend that is `partial`, what this process holds of each array."""
        raise NotImplementedError(f"arrays of {self.name} are whole")

    def joined_norms(
        self, arrays: Sequence[Array], norms: Array, members: Sequence[Sequence[int]], power: float
    ) -> Array:
        """Return the p-norm of each group over all processes, from the p-norms of `parts`."""
        raise NotImplementedError(f"arrays of {self.name} are whole")

    def joined_squares(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        """Return a unit for each group, and in it the squared deviations from the mean, summed up.

        They are those over all processes.
        """
        raise NotImplementedError(f"arrays of {self.name} are whole")

    def column(self, numbers: Any, like: Array) -> Array:
        """Return a field of a state: a number for each group, on the device of `like`."""
        return self.asarray(np.atleast_1d(numbers), like=like)

    def of_group(self, numbers: Array, group: int) -> Array:
        """Return the number of one group, as an array of shape ()."""
        return numbers[group]

    @abstractmethod
    def all(self, x: Array) -> Array:
        """Return whether all elements are true, as an array of shape ()."""

    @abstractmethod
    def multiply(self, arrays: Sequence[Array], factor: Array) -> list[Array]:
        """Return ``array * factor`` for arrays of one dtype; the factor is an array of shape ()."""

    @abstractmethod
    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays, or zeros if the condition, of shape (), does not hold."""

    @abstractmethod
    def group_extremes(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        """Return the smallest and the largest element of each group; 0 counts as an element."""

    def group_peaks(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        """Return the largest absolute element of each group; 0 of one without elements."""
        lows, highs = self.group_extremes(arrays, members)
        return self.maximum(-lows, highs)

    @abstractmethod
    def stack(self, arrays: Sequence[Array]) -> Array:
        """Return arrays of shape () as one array."""

    @abstractmethod
    def largest(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        """Return the largest absolute value along `axes`, kept as 1; of all elements: shape ().

        NaN comes out if there is one.
        """

    @abstractmethod
    def total(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        """Return the sum along `axes`, kept as 1, or of all elements, in the widest float."""

    def anchor(self, array: Array) -> Array:
        """Return an element of a dense array, as an array of shape ()."""
        return self.joined([array])[0]

    def total_from_anchor(self, array: Array) -> Array:
        """Return the sum of the differences of a wide array from its anchor."""
        return self.total(array)

    def square_total(self, array: Array) -> Array:
        """Return the sum of squares of elements of the widest float."""
        return self.total(array * array)

    @abstractmethod
    def wide(self, array: Array) -> Array:
        """Return a dense array in the widest float that sums and products need."""

    @abstractmethod
    def joined(self, arrays: Sequence[Array]) -> Array:
        """Return all elements as one flat array of the widest dtype among them."""

    def bundles(self, arrays: Sequence[Array]) -> list[list[int]]:
        """Return the positions of the dense arrays that one operation can work on, together."""
        return [[i] for i in range(len(arrays))]

    def bundle(self, arrays: Sequence[Array]) -> Array:
        """Return the arrays of one bundle, or an array of shape () for each, as one array.

        Arithmetic on it is elementwise; what is reduced to a number becomes a number for each.
        """
        (array,) = arrays
        return array

    def numbers(self, values: Sequence[float], like: Array) -> Any:
        """Return a number for each array of a bundle, as one number."""
        (value,) = values
        return value

    def unbundled(self, array: Array) -> Sequence[Array]:
        """Return the arrays of a bundle."""
        return (array,)

    def store(self, values: Array, likes: Sequence[Array]) -> Sequence[Array]:
        """Return the values of a bundle as the outputs for these arrays, each in its dtype."""
        return [self.stored(v, x) for v, x in zip(self.unbundled(values), likes, strict=True)]

    def stored(self, values: Array, like: Array) -> Array:
        """Return dense values as the output for the array `like`, in its dtype."""
        return self.cast(values, self.dtype(like))

    def slice_norms(self, arrays: Sequence[Array], axes: Sequence[tuple[int, ...]]) -> Array:
        """Return the L2 norms of the slices of dense arrays as one flat array, array by array.

        A slice spans the axes of its array.
        """
        pairs = zip(arrays, axes, strict=True)
        return self.joined([self._slice_norms(array, spanned) for array, spanned in pairs])

    @abstractmethod
    def _slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Return the L2 norm of each slice along `axes`, in the widest float."""

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return a flat array cut into arrays that broadcast like these shapes."""
        result, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape)
            result.append(self.reshape(flat[start:stop], shape))
            start = stop
        return result

    @abstractmethod
    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return the array in another shape."""

    @abstractmethod
    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        """Return ``array * factor`` for each pair of a dense array and what broadcasts against it.

        Half precision is multiplied in float32.
        """

    @abstractmethod
    def repeated(self, numbers: Sequence[int], times: Sequence[int], like: Array) -> Array:
        """Return whole numbers, each so many times, as an index on the device of `like`."""

    @abstractmethod
    def take(self, values: Array, index: Array) -> Array:
        """Return the elements of a flat array at these places."""

    @abstractmethod
    def group_max(self, values: Array, index: Array, groups: int) -> Array:
        """Return the largest value of each group; that of ``values[i]`` is ``index[i]``.

        It is no more than any number for a group without a value.
        """

    def unit(self, peak: Array) -> Array:
        """Return what to divide by so that no square overflows or underflows: mostly the peak.

        Its reciprocal is a normal number, as compilers multiply by that.
        """
        low, high = units(self.dtype(peak))
        return self.minimum(self.maximum(peak, low), high)

    def peak(self, arrays: Sequence[Array]) -> Array:
        """Return the largest absolute value of dense arrays, in the widest float."""
        return reduce(self.maximum, [self.wide(self.largest(array)) for array in arrays])

    def chosen(
        self, condition: Array, yes: Sequence[Array], no: Sequence[Array]
    ) -> Sequence[Array]:
        """Return ``where(condition, y, n)`` of each pair, for one condition of shape ()."""
        return [self.where(condition, y, n) for y, n in zip(yes, no, strict=True)]

    def each(self, function: Callable[[Array], Array], numbers: Sequence[Array]) -> Sequence[Array]:
        """Return ``function(number)``, which is elementwise, of each array of shape ()."""
        return [function(number) for number in numbers]

    def blends(
        self, old: Sequence[Array], new: Sequence[Array], weights: Sequence[Any]
    ) -> Sequence[Array]:
        """Return ``o + weight * (n - o)`` of each three; differences do not overflow."""
        halves = [self.cast(0.5 * w, self.dtype(o)) for w, o in zip(weights, old, strict=True)]
        moves = [h * n - h * o for o, n, h in zip(old, new, halves, strict=True)]
        return [o + move + move for o, move in zip(old, moves, strict=True)]

    def rescale(self, arrays: Sequence[Array], factor: Array, keep: Array | None) -> list[Array]:
        """Return ``array * factor`` for arrays of one dtype; zeros if `keep` is false."""
        outputs = self.multiply(arrays, factor)
        return outputs if keep is None else self.keep_if(keep, outputs)
