# SPDX-License-Identifier: Apache-2.0
"""What fedclip asks of a framework, and nothing more.

A `Backend` has three faces:

- *host*: zero-copy NumPy views of what lies in this machine's memory (decision 1 of the
  design: on CPU everything is measured through NumPy, whatever the framework);
- *gradients*: the few operations that make a new gradient, out of place, dtype and shape kept;
- *arithmetic*: the operations that rules are written against, which are the backend's own
  methods, so that one rule text runs on host arrays, on a device, and under a compiler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from fedclip.arrays.arena import Arena

__all__ = ["UNDERFLOW", "Arithmetic", "Array", "Backend", "HostView", "Views"]

UNDERFLOW = 2.0**-70
"""Below this sum, float32 squares may have been lost (each at least 2^-126, of up to 2^35)."""

Array: TypeAlias = Any
"""An array of any of the supported frameworks."""

HostView: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""A NumPy view; of bfloat16 data it shows the bits, as uint16 (`fedclip.measures.l2.decode`)."""


_dtype = attrgetter("dtype")
_nbytes = attrgetter("nbytes")
_FLOATS = {np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)}


class Views(list["HostView | None"]):
    """NumPy views of the arrays of a gradient, with what is asked of all of them, asked once.

    An array that is not in host memory has None.

    Attributes
    ----------
    dtypes
        Of the views.
    sizes
        Bytes of each view; 0 for None.
    remote
        Positions of None.
    usual
        Whether these are views of dense arrays of floats that NumPy has: there are no bits to
        show, no rows to merge, and no dtype to refuse.
    """

    __slots__ = ("dtypes", "remote", "sizes", "usual")

    def __init__(self, views: Iterable[HostView | None], *, dense: bool = False) -> None:
        self.extend(views)
        self.remote: Sequence[int] = ()
        try:
            # The usual case without a look at each: a model has hundreds of arrays.
            self.sizes: list[int] = [*map(_nbytes, self)]
            self.dtypes: set[np.dtype[Any]] = {*map(_dtype, self)}
        except AttributeError:
            self.remote = [i for i, view in enumerate(self) if view is None]
            self.sizes = [0 if view is None else view.nbytes for view in self]
            self.dtypes = {view.dtype for view in self if view is not None}
        self.usual = dense and bool(self.dtypes) and self.dtypes <= _FLOATS


class Arithmetic:
    """The operations that rules are written against, elementwise where not said otherwise."""

    asarray: Callable[..., Array]
    """``asarray(values, like=None)``: in the best float the framework has, on like's device."""
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
    """``pick(table, row)``: from each column of (rows, groups) the row that its group names."""

    def put(self, table: Array, row: Array, values: Array) -> Array:
        """Return a table of (rows, groups) with a value put into the row that its group names."""
        return self.where(self._rows(table, row) == row, values, table)

    def ranked(self, table: Array, held: Array, rank: Array) -> tuple[Array, Array]:
        """Return the element of a rank, and the next or it, of the first `held` of each column."""
        ordered = self.sort(self.where(self._rows(table, held) < held, table, math.inf))
        return self.pick(ordered, rank), self.pick(ordered, self.minimum(rank + 1.0, held - 1.0))

    def _rows(self, table: Array, like: Array) -> Array:
        return self.asarray(np.arange(float(table.shape[0]))[:, None], like=like)


class Backend(Arithmetic, ABC):
    """One framework, as fedclip sees it."""

    name: str

    # -- host ---------------------------------------------------------------------------------
    @abstractmethod
    def host(self, arrays: Sequence[Array]) -> Views:
        """Return a NumPy view of each array, or None for one that is not in host memory.

        Sparse arrays answer with their merged values: rows that repeat are added up first,
        because the norm of a sum is not the norm of its parts.
        """

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return arrays with repeated rows merged, in the machine's byte order; most as they are.

        Rows are added up as the framework does it, before they are measured and scaled: of rows
        that are scaled one by one, the rounded sum may be above a limit that their sum keeps.
        """
        return arrays

    def restored(self, output: Array, like: Array) -> Array:
        """Return what has come of a prepared array in the byte order that it had before."""
        return output

    def size(self, array: Array) -> Any:
        """Return the number of elements: an int, or a number that is only traced."""
        return math.prod(array.shape)

    @abstractmethod
    def dtype(self, array: Array) -> str:
        """Return the dtype as "float32", "bfloat16", ..."""

    # -- gradients ----------------------------------------------------------------------------
    @abstractmethod
    def scale(self, arrays: Sequence[Array], factor: float, arena: Arena) -> list[Array]:
        """Return ``array * factor`` for arrays of one dtype: new arrays, same dtype and shape.

        Half precision is multiplied in float32 and rounded once. What is written in host memory
        may be written to the arena, of which all calls of a step have the same.
        """

    @abstractmethod
    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        """Return ``array * factors``, a NumPy array of factors that broadcasts against it."""

    @abstractmethod
    def clip(self, arrays: Sequence[Array], low: float, high: float, arena: Arena) -> list[Array]:
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
        """Return the array itself, or the dense one that a sparse one stands for."""

    @abstractmethod
    def from_host(self, values: HostView, like: Array) -> Array:
        """Return values as an array of the dtype and device of `like`, which is dense.

        The values are of its dtype already, bfloat16 as bits; they may be shared, not copied.
        """

    # -- gradients that stay on their device, or are only traced -------------------------------
    @abstractmethod
    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        """Return the L2 norm of each group of arrays, as one array in the best float there is."""

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

    @abstractmethod
    def stack(self, arrays: Sequence[Array]) -> Array:
        """Return arrays of shape () as one array."""

    @abstractmethod
    def slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Return the L2 norm of each slice that spans `axes`, kept as 1, in the best float."""

    @abstractmethod
    def multiply_slices(self, array: Array, factors: Array) -> Array:
        """Return ``array * factors``, which broadcast against it; same dtype and shape."""

    def rescale(self, arrays: Sequence[Array], factor: Array, keep: Array | None) -> list[Array]:
        """Return ``array * factor`` for arrays of one dtype; zeros if `keep` is false."""
        outputs = self.multiply(arrays, factor)
        return outputs if keep is None else self.keep_if(keep, outputs)
