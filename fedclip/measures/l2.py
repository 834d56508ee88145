# SPDX-License-Identifier: Apache-2.0
r"""Exact L2 norms of groups of arrays: one read of the data, one host transfer.

::

    fast(view):   s = sum over blocks of up to 1024 elements of float64(BLAS dot(block, block))
                  (arrays of at most 1024 elements: joined, then squared in float64)
    norm(group):  s = sum of fast(view);  if s is finite and far from underflow: sqrt(s)
                  else 2^e * sqrt(sum float64((x / 2^e)^2)),  2^e ~ max |x|

Guarantees
----------
- A float32 dot over 1024 elements adds 16 numbers in each of 64 lanes, and then the lanes: at most
  22 roundings with those of the products, of which the root halves the effect. So the norm is
  within ``UNCERTAINTY["float32"]`` of float64 arithmetic, relatively, whatever the number of
  elements (one BLAS dot over 10^8 elements is off by 10^-3); in practice it is within 2e-7 for
  constant data, 1e-9 for random data. Blocks are shorter where BLAS has fewer lanes.
- Fewer than ``FEW`` elements are squared and added up in float64.
- Half precision is widened before it is squared: 300 in float16 does not overflow.
- If a sum of squares overflows or underflows, the group is scaled and measured again: 1e20 in
  float32, 1e200 in float64 and 1e-30 give the right norm, and the fast path stays fast.
- A norm is non-finite only if the data hold NaN or infinity, or if it is beyond float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from fedclip.arrays import LARGEST, UNDERFLOW, Array, Backend, Form, HostView, Views, backend_of
from fedclip.arrays.cores import PIECE, each, worthwhile
from fedclip.scopes import Groups

Float64 = np.ndarray[Any, np.dtype[np.float64]]

Numbers = float | Float64
"""One number for each group; a plain float where there is one group."""

_SINGLE = 11 * 2.0**-24
UNCERTAINTY = {"float16": _SINGLE, "bfloat16": _SINGLE, "float32": _SINGLE, "float64": 2.0**-46}
"""Largest relative error of a norm measured on the fast path, by dtype."""

FEW = 512
"""Fewer elements are squared and added up in float64, and their norm is exact to its rounding."""


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


_LANES = lanes()
# So many elements are added up in at most 16 steps, whatever the processor.
_BLOCK = 16 * _LANES
# Arrays of at most so many elements are joined: to copy one takes half as long as a call for it.
_JOINED = 1024
# With 500 rows or fewer, `np.vecdot` keeps the lock of the interpreter.
_ROWS = 2 * PIECE // _BLOCK
# In float64, with half as many lanes.
_ALONE = 96 * _LANES
CHUNK = 1 << 16
"""Number of elements processed at a time, so that they stay in the cache."""
_NOTHING = np.zeros(0)


def decode(view: HostView) -> HostView:
    """Return half precision as float32 (uint16 means bfloat16 bits); the rest as it is."""
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
        result.view(f"u{result.itemsize}")[np.abs(result) > np.abs(values)] -= 1
    return result


def narrowed(values: Float64, like: Array) -> Array:
    """Return values as an array of the kind, dtype and device of `like`, which is dense.

    What is too large for the dtype becomes its largest number. For an array that is not of floats
    the result is of the framework's widest ones.
    """
    backend = backend_of(like)
    dtype = backend.dtype(like)
    if not dtype.startswith(("float", "bfloat")):
        return backend.asarray(values, like)
    # NumPy has no bfloat16: `encode` writes its bits as uint16.
    kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    values = np.asarray(np.clip(values, -LARGEST[dtype], LARGEST[dtype]))
    (native,) = backend.prepared([like])
    return backend.restored(backend.from_host(encode(values, kind), native), like)


def _flat(view: HostView) -> HostView:
    # Order "K" follows the memory layout, so that a transposed array is not copied.
    return view.reshape(-1) if view.flags.c_contiguous else view.ravel(order="K")


def blocks(view: HostView) -> Iterator[Float64]:
    """Yield the elements as float64, at most 65,536 at a time, in memory order.

    All blocks share one buffer, which the caller may write to.
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
    # Read each piece twice while it is in the cache. Four times as long ones, where nothing is
    # widened, take 17 % less; the whole at once takes a tenth more (200M numbers of float32).
    size = CHUNK if flat.itemsize == 2 else 4 * CHUNK
    parts = (decode(flat[i : i + size]) for i in range(0, flat.size, size))
    pairs = [(float(b.min()), float(b.max())) for b in parts]
    if len(pairs) == 1:
        return pairs[0]
    # min() and max() of Python drop NaN; NumPy's keep it.
    lows, highs = zip(*pairs, strict=True)
    return float(np.min(lows)), float(np.max(highs))


@lru_cache(maxsize=4096)
def _rows(size: int) -> tuple[tuple[int, int], int]:
    """Return number and length of rows of at most one block, and the number of elements left over.

    Prefer a length that leaves none over: a quiet step of `norm-clip` takes 13 % less ("200
    tensors, 3.7M" of `make bench`), and to remember the answers saves more than that again.
    """
    # BLAS adds what is left over from its lanes in one more rounding, which these have room for.
    lengths = (_BLOCK, *range(_BLOCK - 32, _BLOCK // 4, -1))
    row = next((n for n in lengths if size % n == 0), _BLOCK)
    return (size // row, row), size % row


class _Plan:
    """How to read views of these dtypes and sizes.

    Attributes
    ----------
    halves, small
        Positions of views of half precision, and of those that are joined.
    rows
        Of the others: position, number and length of rows, number of elements left over, and
        the places of the rows among those of all.
    tails
        Positions of those with elements left over.
    count
        The number of rows of all.
    wide
        The dtype of the sums of rows.
    """

    def __init__(self, form: Form) -> None:
        self.halves: list[int] = []
        self.small: list[int] = []
        self.rows: list[tuple[int, tuple[int, int], int, int, int]] = []
        stop = 0
        for place, (dtype, size) in enumerate(form.pairs):
            if size and dtype.itemsize == 2:
                self.halves.append(place)
            elif size > _JOINED:
                shape, left = _rows(size)
                self.rows.append((place, shape, left, stop, stop + shape[0]))
                stop += shape[0]
            else:
                self.small.append(place)
        self.tails = [place for place, _, left, _, _ in self.rows if left]
        self.count = stop
        self.wide = np.float64 if np.dtype(np.float64) in form.dtypes else np.float32


_plan = lru_cache(maxsize=64)(_Plan)


class _Pieces(NamedTuple):
    """Intermediate results of `square_sums`."""

    sums: list[float]
    """Sum of squares of each view, as far as it is known."""
    dots: HostView
    """Sums of squares of the rows of large views."""
    rest: list[HostView]
    """Small views, and elements left over from rows."""


def _pieces(views: Sequence[HostView], sizes: list[int], plan: _Plan) -> _Pieces:
    """Square rows of up to one block with BLAS, over all cores."""
    sums = [0.0] * len(views)
    rest = [views[i] for i in plan.small]
    threads = worthwhile(sizes)
    calls: list[Callable[[], object]] = [partial(_add_half, sums, i, views[i]) for i in plan.halves]
    # One array for all: many small arrays would break up the memory that gradients need.
    dots = np.empty(plan.count, plan.wide)
    for place, shape, left, start, stop in plan.rows:
        view = views[place]
        flat = view if view.flags.c_contiguous else _flat(view)
        if left:
            flat = flat.reshape(-1)
            rest.append(flat[-left:])
            flat = flat[:-left]
        table = flat.reshape(shape)
        if threads < 2:
            np.vecdot(table, table, dots[start:stop])
            continue
        parts = max(1, shape[0] // _ROWS)
        edges = [shape[0] * part // parts for part in range(parts + 1)]
        for low, high in pairwise(edges):
            some, into = table[low:high], dots[start + low : start + high]
            calls.append(partial(np.vecdot, some, some, into))
    if calls:
        each(calls, threads)
    return _Pieces(sums, dots, rest)


def square_sums(views: Sequence[HostView]) -> list[float]:
    """Return the sum of squares of each view on the fast path; it may over- or underflow."""
    form = (views if isinstance(views, Views) else Views(views)).form
    plan = _plan(form)
    sums, dots, rest = _pieces(views, form.sizes, plan)
    if plan.rows:
        starts = [start for _, _, _, start, _ in plan.rows]
        _add_up(dots.astype(np.float64), starts, [place for place, *_ in plan.rows], sums)
    # There is nothing to add for what is empty.
    filled = [(place, v) for place, v in zip(plan.small + plan.tails, rest, strict=True) if v.size]
    if filled:
        places, tails = zip(*filled, strict=True)
        values = np.concatenate(tails, axis=None, dtype=np.float64)
        starts = list(accumulate((tail.size for tail in tails[:-1]), initial=0))
        _add_up(values * values, starts, places, sums)
    return sums


def total_square_sum(views: Views) -> float:
    """Return the sum of squares of all views, none of them None, on the fast path.

    It may over- or underflow.
    """
    local: list[Any] = views
    if len(local) < 2:
        # The same bits as in a scope where this array is one group of several.
        return sum(square_sums(local))
    plan = _plan(views.form)
    # Copying small arrays costs less than one call for each: a quiet step of `norm-clip` takes
    # 43 % less ("20 tensors, 2.7k" of `make bench`).
    if len(plan.small) == len(local):
        return _joined_square_sum(local)
    sums, dots, rest = _pieces(local, views.form.sizes, plan)
    if rest:
        sums.append(_joined_square_sum(rest))
    sums.append(float(dots.sum(dtype=np.float64)))
    return sum(sums)


def _joined_square_sum(views: Sequence[HostView]) -> float:
    # Of a plain list: NumPy takes a sixth longer over a class made from it.
    values = np.concatenate([*views], axis=None, dtype=np.float64)
    if values.size <= _ALONE:
        # A step of `norm-clip` takes 5 % less ("20 tensors, 2.7k" of `make bench`).
        return float(values.dot(values))
    # Few at a time, for the digits. Beyond 10,000 elements OpenBLAS would also use threads of its
    # own, which keep a core busy for milliseconds after the call, and give other bits.
    pieces = (values[i : i + _ALONE] for i in range(0, values.size, _ALONE))
    return sum(float(piece.dot(piece)) for piece in pieces)


def _add_up(
    values: Float64, starts: Sequence[int], places: Sequence[int], sums: list[float]
) -> None:
    """Add values to `sums`: those from ``starts[0]`` on at ``places[0]``, and so on."""
    for place, total in zip(places, np.add.reduceat(values, starts).tolist(), strict=True):
        sums[place] += total


def _add_half(sums: list[float], place: int, view: HostView) -> None:
    flat = _flat(view)
    chunks = (decode(flat[i : i + CHUNK]) for i in range(0, flat.size, CHUNK))
    sums[place] = sum(square_sums([chunk])[0] for chunk in chunks)


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
    return scaled_up(math.sqrt(total), exponent)


def scaled_up(value: float, exponent: int) -> float:
    """Return ``value * 2**exponent``, or infinity; a subnormal result is rounded up.

    What is scaled by it is then not above its target, and whether it is above a limit, which is
    a float64 number too, does not change.
    """
    try:
        result = math.ldexp(value, exponent)
    except OverflowError:
        return math.inf
    return math.nextafter(result, math.inf) if math.ldexp(result, -exponent) < value else result


def all_finite(views: Sequence[HostView]) -> bool:
    """Whether there is neither NaN nor infinity."""
    # A sum of finite squares may overflow: if it does, look at the elements.
    return math.isfinite(sum(square_sums(views))) or all(
        np.isfinite(decode(view)).all() for view in views
    )


def l2_norms(arrays: Sequence[Array], views: Views, groups: Groups, backend: Backend) -> Numbers:
    """Return the L2 norm of each group: a float if there is one group, else an array.

    The backend measures the arrays that have no host view: they stay on their device.
    """
    remote = views.remote
    if len(groups) == 1:
        total = total_square_sum(Views([v for v in views if v is not None]) if remote else views)
        if remote:
            total += sum(backend.square_sums([arrays[i] for i in remote]))
        if UNDERFLOW <= total < math.inf:
            return math.sqrt(total)
        return _scaled_norm(views, math.sqrt(total))
    local: Any = [_NOTHING if v is None else v for v in views] if remote else views
    squares = square_sums(local)
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
    # The backend has measured arrays on a device without overflow.
    return exact_norm(local) if len(local) == len(views) else otherwise
