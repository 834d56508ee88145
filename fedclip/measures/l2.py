# SPDX-License-Identifier: Apache-2.0
r"""Exact L2 norms of groups of arrays: one read of the data, one host transfer.

::

    fast(view):   s = sum over blocks of 1024 elements of float64(BLAS dot(block, block))
                  (what has less than 512 elements: all joined, squared in float64)
    norm(group):  s = sum of fast(view);  if s is finite and far from underflow: sqrt(s)
                  else 2^e * sqrt(sum float64((x / 2^e)^2)),  2^e ~ max |x|

Guarantees
----------
- A float32 dot over 1024 elements adds at most 32 numbers in each vector lane, so the norm is
  within ``UNCERTAINTY["float32"]`` = 2^-20 of float64 arithmetic, relatively, whatever the
  number of elements (one BLAS dot over 10^8 elements is off by 10^-3); in practice it is
  within 3e-7 for constant data, 1e-9 for random data.
- Half precision is widened before it is squared: 300 in float16 does not overflow.
- What overflows or underflows when squared is measured again, scaled: 1e20 in float32, 1e200
  in float64 and 1e-30 are right; the fast path stays fast.
- NaN or infinity in the data, and only that (or a norm beyond float64), gives a non-finite norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fedclip.arrays import UNDERFLOW, Array, Backend, HostView, Views
from fedclip.scopes import Groups

__all__ = [
    "CHUNK",
    "UNCERTAINTY",
    "all_finite",
    "blocks",
    "decode",
    "encode",
    "exact_norm",
    "extremes",
    "l2_norms",
    "square_sums",
    "total_square_sum",
]

Float64 = np.ndarray[Any, np.dtype[np.float64]]

Numbers = float | Float64
"""One number for each group; a plain float where there is one group."""

UNCERTAINTY = {
    "float16": 2.0**-20,
    "bfloat16": 2.0**-20,
    "float32": 2.0**-20,
    "float64": 2.0**-46,
}
"""Largest relative error of a norm measured on the fast path, by dtype."""

_BLOCK = 1024
# Below this, squaring an array together with others costs less than a call for it alone.
_SMALL = 512
CHUNK = 1 << 16
"""Number of elements that are worked on together, so that they stay in the cache."""
_WIDE = {np.dtype(np.float32), np.dtype(np.float64)}
_NOTHING = np.zeros(0)
_vdot = np.vdot
_vecdot = np.vecdot


def decode(view: HostView) -> HostView:
    """Return half precision as float32 (uint16 means bfloat16 bits); the rest as it is."""
    if view.dtype == np.uint16:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view.astype(np.float32) if view.dtype == np.float16 else view


def encode(values: HostView, dtype: np.dtype[Any], *, towards_zero: bool = False) -> HostView:
    """Return wider floats as `dtype` (uint16 means bfloat16 bits): the inverse of `decode`.

    Rounded to the nearest; or, so that no limit is exceeded, towards zero.
    """
    if dtype == np.uint16:
        single = encode(values, np.dtype(np.float32), towards_zero=towards_zero).view(np.uint32)
        if not towards_zero:
            # Half a unit of the last place kept, and ties to even; finite values do not wrap.
            single = single + (0x7FFF + ((single >> 16) & 1))
        return np.asarray(single >> 16).astype(np.uint16)
    result = values.astype(dtype, copy=False)
    if towards_zero and result.itemsize < values.itemsize:
        # Floats of one sign are ordered like their bits: one less is one step towards zero.
        result.view(f"u{result.itemsize}")[np.abs(result) > np.abs(values)] -= 1
    return result


def _flat(view: HostView) -> HostView:
    # Order "K" reads memory in its own order: no copy of a transposed array.
    return view.reshape(-1) if view.flags.c_contiguous else view.ravel(order="K")


def blocks(view: HostView) -> Iterator[Float64]:
    """Yield the elements as float64, at most 65,536 at a time; memory order.

    What is yielded may be written to, and holds something else afterwards.
    """
    flat = _flat(view)
    buffer = np.empty(min(flat.size, CHUNK))
    for start in range(0, flat.size, CHUNK):
        piece = decode(flat[start : start + CHUNK])
        block = buffer[: piece.size]
        block[...] = piece
        yield block


def extremes(view: HostView) -> tuple[float, float]:
    """Return the smallest and the largest element; NaN if there is one."""
    flat = _flat(view)
    parts = (decode(flat[i : i + CHUNK]) for i in range(0, flat.size, CHUNK))
    pairs = [(float(b.min()), float(b.max())) for b in parts]
    if len(pairs) == 1:
        return pairs[0]
    # min() and max() of Python drop NaN; NumPy's keep it.
    lows, highs = zip(*pairs, strict=True)
    return float(np.min(lows)), float(np.max(highs))


@lru_cache(maxsize=4096)
def _rows(size: int) -> tuple[tuple[int, int], int]:
    """Return number and length of rows of at most a block, and how many elements are left over.

    There are none left over if that can be had.
    """
    row = next((n for n in range(_BLOCK, _BLOCK // 4, -1) if size % n == 0), _BLOCK)
    return (size // row, row), size % row


class _Pieces(NamedTuple):
    """What is left to do for the squares of some views."""

    sums: list[float]
    """One for each view: its sum of squares, as far as it is known."""
    dots: HostView
    """Sums of squares of the rows of large views, how many rows they have, and their places."""
    counts: list[int]
    rows: list[int]
    tails: list[HostView]
    """What is small, or left over from rows, and the places of those views."""
    rest: list[int]


def _pieces(views: Sequence[HostView], dtypes: set[np.dtype[Any]]) -> _Pieces:
    """Square rows of up to 1024 elements, by BLAS; the views are of these dtypes."""
    widths = {dtype.itemsize for dtype in dtypes}
    halves = 2 in widths
    sums = [0.0] * len(views)
    tables: list[HostView] = []
    tails: list[HostView] = []
    rows: list[int] = []
    rest: list[int] = []
    for place, view in enumerate(views):
        size = view.size
        if halves and view.itemsize == 2:
            sums[place] = _half_square_sum(view)
        elif size >= _BLOCK:
            flat = view if view.flags.c_contiguous else _flat(view)
            shape, left = _rows(size)
            if left:
                flat = flat.reshape(-1)
                tails.append(flat[-left:])
                rest.append(place)
                flat = flat[:-left]
            tables.append(flat.reshape(shape))
            rows.append(place)
        elif size >= _SMALL:
            sums[place] = float(_vdot(view, view))
        elif size:
            tails.append(view)
            rest.append(place)
    counts = [*map(len, tables)]
    # To one array: an array for each would be strewn over memory that gradients want.
    dots = np.empty(sum(counts), np.float64 if 8 in widths else np.float32)
    start = 0
    for table, count in zip(tables, counts, strict=True):
        stop = start + count
        _vecdot(table, table, dots[start:stop])
        start = stop
    return _Pieces(sums, dots, counts, rows, tails, rest)


def square_sums(views: Sequence[HostView]) -> list[float]:
    """Return the sum of squares of each view on the fast path; it may over- or underflow."""
    sums, dots, counts, rows, tails, rest = _pieces(views, {view.dtype for view in views})
    if rows:
        _add_up(dots.astype(np.float64), counts, rows, sums)
    if tails:
        values = np.concatenate(tails, axis=None, dtype=np.float64)
        _add_up(values * values, [tail.size for tail in tails], rest, sums)
    return sums


def total_square_sum(views: Views) -> float:
    """Return the sum of squares of all views, none of them None, on the fast path.

    It may over- or underflow.
    """
    # A plain list: NumPy is slower with a class of ours.
    local: list[HostView] = [*views]
    if len(local) < 2:
        # To the last bit what it is beside others, in a group of its own.
        return sum(square_sums(local))
    # To copy what is small costs less than a call, or a look, for each. Sizes are in bytes: the
    # narrowest of what is wide has 4 for an element, and the widest has 8.
    if max(views.sizes) < 4 * _SMALL and views.dtypes <= _WIDE:
        return _joined_square_sum(local)
    small: list[HostView] = []
    large = local
    if min(views.sizes) < 8 * _SMALL:
        small = [v for v in local if v.size < _SMALL and v.itemsize > 2]
        large = [v for v in local if v.size >= _SMALL or v.itemsize == 2]
    sums, dots, _, _, tails, _ = _pieces(large, views.dtypes)
    small += tails
    if small:
        sums.append(_joined_square_sum(small))
    sums.append(float(dots.sum(dtype=np.float64)))
    return sum(sums)


def _joined_square_sum(views: Sequence[HostView]) -> float:
    values = np.concatenate(views, axis=None, dtype=np.float64)
    return float(values.dot(values))


def _add_up(
    values: Float64, counts: Sequence[int], places: Sequence[int], sums: list[float]
) -> None:
    """Add to each place of `sums` as many of the values, one after another, as are its own."""
    starts = list(accumulate(counts[:-1], initial=0))
    for place, total in zip(places, np.add.reduceat(values, starts).tolist(), strict=True):
        sums[place] += total


def _half_square_sum(view: HostView) -> float:
    flat = _flat(view)
    chunks = (decode(flat[i : i + CHUNK]) for i in range(0, flat.size, CHUNK))
    return sum(square_sums([chunk])[0] for chunk in chunks)


def exact_norm(views: Sequence[HostView]) -> float:
    """Return the L2 norm in float64, scaled so that nothing overflows or underflows."""
    peak = 0.0
    for view in views:
        if view.size:
            low, high = extremes(view)
            largest = max(-low, high)
            if not math.isfinite(largest) or math.isnan(low):
                return math.nan if math.isnan(low + high) else math.inf
            peak = max(peak, largest)
    if peak == 0.0:
        return 0.0
    exponent = math.frexp(peak)[1]
    scaled = (np.ldexp(b, -exponent) for view in views for b in blocks(view))
    total = math.fsum(square_sums([b])[0] for b in scaled)
    root = math.sqrt(total)
    try:
        norm = math.ldexp(root, exponent)
    except OverflowError:
        return math.inf
    # A subnormal result is rounded up: what is scaled by it is then not above its target, and
    # whether it is above a limit, which is a float64 number too, does not change.
    return math.nextafter(norm, math.inf) if math.ldexp(norm, -exponent) < root else norm


def all_finite(views: Sequence[HostView]) -> bool:
    """Whether there is neither NaN nor infinity."""
    # Sums of squares of finite numbers may overflow, and are looked at again if they do.
    return math.isfinite(sum(square_sums(views))) or all(
        np.isfinite(decode(view)).all() for view in views
    )


def l2_norms(arrays: Sequence[Array], views: Views, groups: Groups, backend: Backend) -> Numbers:
    """Return the L2 norm of each group: a float if there is one group, else an array.

    Parameters
    ----------
    arrays
        The arrays of all groups, of one framework.
    views
        Their host views; None for an array that stays on its device.
    groups
        Which arrays share a norm.
    backend
        The framework; measures the arrays without a view.
    """
    remote = views.remote
    if len(groups) == 1:
        total = total_square_sum(Views([v for v in views if v is not None]) if remote else views)
        if remote:
            total += sum(backend.square_sums([arrays[i] for i in remote]))
        if UNDERFLOW <= total < math.inf:
            return math.sqrt(total)
        return _scaled_norm(views, math.sqrt(total))
    squares = square_sums([_NOTHING if view is None else view for view in views])
    if remote:
        found = backend.square_sums([arrays[i] for i in remote])
        for i, value in zip(remote, found, strict=True):
            squares[i] = value
    totals = groups.sums(squares)
    norms: Float64 = np.sqrt(totals)
    sound = (totals >= UNDERFLOW) & (totals < math.inf)
    if not sound.all():
        for group in np.flatnonzero(~sound):
            members = [views[i] for i in groups.members[group]]
            norms[group] = _scaled_norm(members, float(norms[group]))
    return norms


def _scaled_norm(views: Sequence[HostView | None], otherwise: float) -> float:
    local = [view for view in views if view is not None]
    # What lies on a device has been measured there, scaled.
    return exact_norm(local) if len(local) == len(views) else otherwise
