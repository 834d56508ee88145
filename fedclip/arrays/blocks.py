# SPDX-License-Identifier: Apache-2.0
r"""Kernels over NumPy views, block by block: square sums, exact norms, extremes, half precision.

::

    square sum(view):  sum over blocks of up to 1024 elements of float64(BLAS dot(block, block))
                       (at most 1024 elements: joined with others, then squared in float64)
    exact norm(views): 2^e * sqrt(sum float64((x / 2^e)^2)),  2^e ~ max |x|

A float32 dot over 1024 elements adds 16 numbers in each of 64 lanes, and then the lanes: at most
22 roundings with those of the products, of which the root halves the effect. So a root of square
sums is within `UNCERTAINTY` of float64 arithmetic, relatively, whatever the number of elements
(one BLAS dot over 10^8 elements is off by 10^-3); in practice it is within 2e-7 for constant
data, 1e-9 for random data. Blocks are shorter where BLAS has fewer lanes.

This file knows views only: no framework, no groups, no limits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise, repeat, starmap
from operator import attrgetter, mul
from typing import Any, NamedTuple

import numpy as np

from fedclip.arrays.base import HostView
from fedclip.arrays.cores import PIECE, each, num_threads

Float64 = np.ndarray[Any, np.dtype[np.float64]]

UNCERTAINTY = 11 * 2.0**-24
"""Largest relative error of the root of a square sum of numbers narrower than float64."""

CHUNK = 1 << 16
"""Number of elements processed at a time, so that they stay in the cache."""


def lanes(dot: Callable[[Any, Any], Any] = np.vdot) -> int:
    """Return in how many lanes a float32 dot product adds up, a power of two up to 64.

    A product of 2^-24 is lost when it is added to 1, so that each number of the first lane shows.
    """
    size = 1024
    values = np.full(size, 2.0**-12, np.float32)
    values[0] = 1.0
    lost = 1 + (size - 1) * 2.0**-24 - float(dot(values, values))
    longest = round(lost * 2.0**24) + 1
    return max(1, min(64, 1 << (size // longest).bit_length() - 1))


# So many elements are added up in at most 16 steps, whatever the processor.
_BLOCK = 16 * lanes()
# Arrays of at most so many elements are joined: to copy one takes half as long as a call for it.
_JOINED = 1024
# With 500 rows or fewer, `np.vecdot` keeps the lock of the interpreter.
_ROWS = 2 * PIECE // _BLOCK
_size, _width, _shape = attrgetter("size"), attrgetter("itemsize"), attrgetter("shape")
_is_contiguous = attrgetter("flags.c_contiguous")


def decode(view: HostView) -> HostView:
    """Return half precision as float32 (uint16 means bfloat16 bits); others unchanged."""
    if view.dtype == np.uint16:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view.astype(np.float32) if view.dtype == np.float16 else view


def encode(values: HostView, dtype: np.dtype[Any], *, towards_zero: bool = False) -> HostView:
    """Return wider floats as `dtype` (uint16 means bfloat16 bits): the inverse of `decode`.

    Round to the nearest, or towards zero, so that no limit is exceeded.
    """
    if dtype == np.uint16:
        single = encode(values, np.dtype(np.float32), towards_zero=towards_zero).view(np.uint32)
        if not towards_zero:
            # Round half to even at the last bit that bfloat16 keeps; finite values do not wrap.
            single = single + (0x7FFF + ((single >> 16) & 1))
        return np.asarray(single >> 16).astype(np.uint16)
    result = values.astype(dtype, copy=False)
    if towards_zero and result.itemsize < values.itemsize:
        # Floats of one sign are ordered like their bits: subtract 1 to step towards zero.
        pattern = result.view(f"u{result.itemsize}")
        pattern -= np.abs(result) > np.abs(values)
    return result


def flat(view: HostView) -> HostView:
    """Return the elements in memory order, so that a transposed array is not copied."""
    return view.reshape(-1) if view.flags.c_contiguous else view.ravel(order="K")


def _chunks(view: HostView) -> Iterator[HostView]:
    """Yield the elements in pieces that stay in the cache, in memory order, decoded."""
    elements = flat(view)
    # Four times as long ones, where nothing is widened, take 17 % less to read twice; the whole at
    # once takes a tenth more (200M numbers of float32).
    size = CHUNK if view.itemsize == 2 else 4 * CHUNK
    return (decode(elements[i : i + size]) for i in range(0, view.size, size))


def peak(view: HostView) -> float:
    """Return the largest absolute element; NaN if there is one, 0 of an empty view."""
    ends = [end for chunk in _chunks(view) for end in (chunk.min(), chunk.max())]
    # max() of Python drops NaN; NumPy's keeps it.
    return float(np.max(np.abs(ends), initial=0.0))


@lru_cache(maxsize=1024)
def _rows(size: int) -> tuple[int, int]:
    """Return number and length of rows of at most one block.

    Prefer a length that leaves no element over: a quiet step of `norm-clip` takes 13 % less ("200
    tensors, 3.7M" of `make bench`).
    """
    # BLAS adds what is left over from its lanes in one more rounding, which these have room for.
    lengths = (_BLOCK, *range(_BLOCK - 32, _BLOCK // 4, -1))
    row = next((n for n in lengths if size % n == 0), _BLOCK)
    return size // row, row


class Layout(NamedTuple):
    """How the square sums of arrays of these sizes are added up: by place in the list."""

    nbytes: tuple[int, ...]
    small: tuple[int, ...]
    """Arrays that are joined."""
    sizes: tuple[int, ...]
    large: dict[int, tuple[int, int]]
    """Arrays that are cut into rows, with number and length of the rows."""
    numbers: tuple[int, ...]
    spans: list[slice]
    """Where the rows of each of these are among those of all."""
    over: dict[int, tuple[int, int]]
    """Those with elements left over: the place among them, and the number of elements in rows."""
    halves: tuple[int, ...]
    dtype: type[np.floating[Any]]
    """The dtype of the square sums of rows."""


def layout_of(views: Sequence[HostView]) -> Layout:
    """Return how the square sums of some views are added up."""
    return _layout((*map(_size, views),), (*map(_width, views),))


@lru_cache(maxsize=256)
def _layout(sizes: tuple[int, ...], widths: tuple[int, ...]) -> Layout:
    pairs = [*enumerate(zip(sizes, widths, strict=True))]
    small = tuple(i for i, (size, width) in pairs if width > 2 and 0 < size <= _JOINED)
    large = {i: _rows(size) for i, (size, width) in pairs if width > 2 and size > _JOINED}
    numbers = tuple(number for number, _ in large.values())
    stops = accumulate(numbers, initial=0)
    in_rows = enumerate(map(math.prod, large.values()))
    over = {i: row for i, row in zip(large, in_rows, strict=True) if row[1] < sizes[i]}
    halves = tuple(i for i, (size, width) in pairs if width == 2 and size)
    spans = [*starmap(slice, pairwise(stops))]
    nbytes = tuple(map(mul, sizes, widths))
    dtype = np.float64 if 8 in {widths[i] for i in large} else np.float32
    joined = tuple(sizes[i] for i in small)
    return Layout(nbytes, small, joined, large, numbers, spans, over, halves, dtype)


def square_sums(views: Sequence[HostView], layout: Layout | None = None) -> list[float]:
    """Return the sum of squares of each view, over all cores; it may over- or underflow.

    `layout` is that of the views, if it is known.
    """
    layout = layout_of(views) if layout is None else layout
    places, sizes = layout.small, layout.sizes
    if len(places) == len(views) > 0:
        joined: list[float] = _joined_sums(views, sizes).tolist()
        return joined
    sums = [0.0] * len(views)
    small = [*map(views.__getitem__, places)]
    if layout.large or layout.halves:
        ends = _add_rows(sums, views, layout)
        places, small = (*places, *ends), [*small, *ends.values()]
        sizes = (*sizes, *map(_size, ends.values()))
    if small:
        for place, total in zip(places, _joined_sums(small, sizes).tolist(), strict=True):
            sums[place] += total
    return sums


def _joined_sums(views: Sequence[HostView], sizes: tuple[int, ...]) -> Float64:
    """Return the sums of squares in float64 of views, or their rows, that are joined first."""
    values = np.concatenate(views, axis=None, dtype=np.float64)
    np.multiply(values, values, out=values)
    sums: Float64 = np.add.reduceat(values, starts(sizes))
    return sums


def _add_rows(sums: list[float], views: Sequence[HostView], layout: Layout) -> dict[int, HostView]:
    """Add the square sums of large arrays, over all cores; return the elements that are left over.

    They are cut into rows of up to one block.
    """
    left_over: dict[int, HostView] = {}
    large = [*map(views.__getitem__, layout.large)]
    if not all(map(_is_contiguous, large)):
        large = [*map(flat, large)]
    for i, (place, number) in layout.over.items():
        view = large[place].reshape(-1)
        left_over[i], large[place] = view[number:], view[:number]
    tables = [*map(np.ndarray.reshape, large, layout.large.values())]
    calls: list[Callable[[], object]] = [
        partial(_add_half, sums, i, views[i]) for i in layout.halves
    ]
    threads, sizes = num_threads(layout.nbytes), layout.numbers
    # One array for all: many small arrays would break up the memory that gradients need.
    dots = np.empty(sum(sizes), layout.dtype)
    into = [*map(dots.__getitem__, layout.spans)]
    if threads < 2:
        # A call for each from Python takes as long as the product of a thousand elements.
        deque(map(np.vecdot, tables, tables, into), 0)
    else:
        for table, size, out in zip(tables, sizes, into, strict=True):
            parts = max(1, size // _ROWS)
            edges = [size * part // parts for part in range(parts + 1)]
            for low, high in pairwise(edges):
                some = table[low:high]
                calls.append(partial(np.vecdot, some, some, out[low:high]))
    each(calls, threads)
    if sizes:
        totals = np.add.reduceat(dots.astype(np.float64), starts(sizes)).tolist()
        for place, total in zip(layout.large, totals, strict=True):
            sums[place] += total
    return left_over


@lru_cache(maxsize=256)
def starts(sizes: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return where each of some pieces begins that follow each other."""
    return np.cumsum((0, *sizes[:-1]), dtype=np.intp)


def _add_half(sums: list[float], i: int, view: HostView) -> None:
    sums[i] = math.fsum(square_sums([chunk])[0] for chunk in _chunks(view))


def exact_norm(views: Sequence[HostView]) -> float:
    """Return the L2 norm in float64, scaled so that nothing overflows or underflows."""
    top = float(np.max([*map(peak, views)], initial=0.0))
    if not top or not math.isfinite(top):
        return top
    exponent = math.frexp(top)[1]
    chunks = (chunk for view in views for chunk in _chunks(view))
    scaled = (np.ldexp(chunk, -exponent, dtype=np.float64) for chunk in chunks)
    root = math.sqrt(math.fsum(square_sums([part])[0] for part in scaled))
    return float(np.ldexp(root, exponent))


def slice_norms(
    views: Sequence[HostView], axes: Sequence[tuple[int, ...]], fast: bool = False
) -> list[Float64]:
    """Return the L2 norms of the slices of each view, which span its `axes`, in float64, flat.

    If it is `fast`, it may be off by `UNCERTAINTY`, relatively, and wrong unless it is finite and
    all sums of squares are above `UNDERFLOW`.

    Squares of narrower floats neither overflow nor underflow in float64, and may be added up in any
    order. Of float64, NumPy adds up contiguous numbers in pairs, and others one after the other,
    which would lose as many digits as there are: the elements of a slice are copied one after the
    other.
    """
    shapes, widths = (*map(_shape, views),), (*map(_width, views),)
    lengths, spans = _small_rows(shapes, widths, (*axes,))
    if not spans:
        return [*map(_slice_norms, views, axes, repeat(fast))]
    roots = np.sqrt(_joined_sums([views[i] for i in spans], lengths))
    pairs = enumerate(zip(views, axes, strict=True))
    return [roots[spans[i]] if i in spans else _slice_norms(*pair, fast) for i, pair in pairs]


@lru_cache(maxsize=256)
def _small_rows(
    shapes: Sequence[tuple[int, ...]], widths: Sequence[int], axes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[int, slice]]:
    """Return the lengths of all rows that are slices of small arrays, and those of each array."""
    lengths: list[int] = []
    spans: dict[int, slice] = {}
    for i, (shape, some) in enumerate(zip(shapes, axes, strict=True)):
        first = len(shape) - len(some)
        is_rows, size = some == (*range(first, len(shape)),), math.prod(shape)
        if widths[i] == 4 and is_rows and 0 < size <= _JOINED:
            number = math.prod(shape[:first])
            spans[i] = slice(len(lengths), len(lengths) + number)
            lengths += [size // number] * number
    return tuple(lengths), spans


def _slice_norms(view: HostView, axes: Sequence[int], fast: bool) -> Float64:
    others = [a for a in range(view.ndim) if a not in axes]
    narrow = view.itemsize < 8
    if narrow and others and view.flags.c_contiguous and others == [*range(len(axes), view.ndim)]:
        # Columns are added up without a copy in another order.
        table = view.reshape(-1, math.prod(view.shape[len(axes) :]))
        wide = (decode(rows).astype(np.float64) for rows in _row_chunks(table))
        return np.asarray(np.sqrt(sum(np.einsum("ij,ij->j", rows, rows) for rows in wide)))
    size = math.prod(view.shape[len(others) :])
    if narrow and size <= CHUNK and others == [*range(len(others))] and view.flags.c_contiguous:
        return _norms_of_rows(view.reshape(-1, size), fast and view.itemsize == 4)
    # Take a few rows of the first dimension at a time, so that no float64 copy of all is made.
    parts = []
    for some in _row_chunks(view):
        rows = decode(some).transpose(*others, *axes).astype(np.float64, order="C")
        rows = rows.reshape(*(some.shape[a] for a in others), -1)
        parts.append(np.sqrt(np.vecdot(rows, rows)) if narrow else _row_norms(rows))
    if 0 in axes and len(parts) > 1:
        return _row_norms(np.stack(parts, -1)).ravel()
    return np.concatenate(parts, axis=None) if len(parts) > 1 else parts[0].ravel()


def _norms_of_rows(table: HostView, fast: bool) -> Float64:
    """Return the norms of rows, in float64; `fast` measures those that blocks fill in float32."""
    size = table.shape[1]
    number, length = _rows(size) if fast and size > _BLOCK // 4 else (1, size)
    if number * length < size:
        fast, number, length = False, 1, size
    rows, most = table.reshape(-1, length), (PIECE if fast else CHUNK) // length
    sums = np.empty(len(rows), np.float32 if fast else np.float64)
    cuts = [slice(start, start + most) for start in range(0, len(rows), most)]
    calls = [partial(_add_squares, rows[cut], sums[cut]) for cut in cuts]
    each(calls, num_threads([table.nbytes]) if len(calls) > 1 else 1)
    wide = sums.astype(np.float64, copy=False)
    return np.asarray(np.sqrt(wide if number == 1 else wide.reshape(-1, number).sum(axis=1)))


def _add_squares(rows: HostView, sums: HostView) -> None:
    wide = decode(rows).astype(sums.dtype, copy=False)
    np.vecdot(wide, wide, sums)


def _row_chunks(view: HostView) -> Iterator[HostView]:
    """Yield some rows of the first dimension at a time, that stay in the cache."""
    number = max(1, CHUNK * len(view) // view.size)
    return (view[start : start + number] for start in range(0, len(view), number))


def _row_norms(rows: Float64) -> Float64:
    """Return the norms along the last dimension."""
    squares = np.square(rows).sum(axis=-1)
    # Squares of narrower floats neither overflow nor underflow in float64.
    if np.all((squares > 1e-280) & (squares < math.inf)):
        return np.asarray(np.sqrt(squares))
    peak = np.abs(rows).max(axis=-1, keepdims=True)
    unit = np.where((peak > 0) & np.isfinite(peak), peak, 1.0)
    return np.asarray(unit[..., 0] * np.sqrt(np.square(rows / unit).sum(axis=-1)))
