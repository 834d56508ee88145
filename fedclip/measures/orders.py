# SPDX-License-Identifier: Apache-2.0
r"""The size of a group of arrays, in any order; and of slices along dimensions.

==============  ==============================================  ======
``ord``         measure                                         degree
==============  ==============================================  ======
``p`` > 0       (sum of abs(x)^p)^(1/p); 2 is the L2 norm           1
``"inf"``       max abs(x)                                          1
``"rms"``       square root of the mean of x^2                      1
``"mad"``       mean of abs(x), not centred                         1
``"std"``       standard deviation, n - 1 in the denominator        1
``"var"``       variance, n - 1 in the denominator                  2
==============  ==============================================  ======

The degree says how scaling changes a measure: ``m(k x) = k^degree m(x)``. Multiplying an array by
``(limit / m)^(1 / degree)`` brings its measure to a limit.
Some packages also accept ``"sum"`` and ``0`` (number of non-zeros). They are missing here: a sum
may be negative and would flip the gradient, and scaling does not change a number of non-zeros.
The standard deviation of fewer than two elements counts as 0, so such arrays are not clipped.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from fedclip.arrays import LARGEST, Arithmetic, Array, Backend, HostView
from fedclip.errors import nearest, shown
from fedclip.measures.l2 import (
    CHUNK,
    Float64,
    blocks,
    decode,
    exact_norm,
    extremes,
    scaled_up,
    square_sums,
)

Order = float | str
"""What users write for `ord`."""

# Above this, a float64 sum of squares has lost nothing of importance to underflow.
_TINY = 1e-280
_SMALLEST_NORMAL = float(np.finfo(np.float64).tiny)

MEANS = ("rms", "mad", "std", "var")
"""Orders that are means over all elements, zeros included."""
_WORDS = ("inf", *MEANS)


def check_order(ord: Any) -> Order:
    """Return `ord` if it names a measure; infinity becomes "inf"."""
    allowed = "a number > 0 or one of " + ", ".join(repr(w) for w in _WORDS)
    if isinstance(ord, str):
        if ord not in _WORDS:
            raise ValueError(f"ord must be {allowed}, got {ord!r}{nearest(ord, _WORDS)}")
        return ord
    if isinstance(ord, bool) or not isinstance(ord, (int, float)):
        raise TypeError(f"ord must be {allowed}, got {ord!r} ({type(ord).__name__})")
    if not ord > 0 or (isinstance(ord, int) and ord > LARGEST["float64"]):
        raise ValueError(f"ord must be {allowed}, got {shown(ord)}")
    return "inf" if math.isinf(ord) else ord


def degree(ord: Order) -> int:
    """Return the power d in ``m(k x) = k^d m(x)``."""
    return 2 if ord == "var" else 1


def lowered(ord: Order, target: Any, size: Any, error: float, xp: Arithmetic) -> Any:
    """Return the targets, lowered so that an error in each of `size` elements exceeds none.

    It follows from the triangle inequality of the measure (below order 1, of its power). The
    result is never below 0.
    """
    if ord == "var":
        low = lowered("std", xp.sqrt(target), size, error, xp)
        return low * low
    if ord in ("inf", "rms", "mad"):
        spread = error
    elif ord == "std":
        spread = error * xp.sqrt(size / xp.maximum(size - 1, 1))
    elif float(ord) < 1:
        p = float(ord)
        return xp.maximum(target**p - size * error**p, 0.0) ** (1 / p)
    else:
        spread = error * size ** (1 / float(ord))
    return xp.maximum(target - spread, 0.0)


def measure(views: Sequence[HostView], ord: Order) -> float:
    """Return the measure of all elements of the views together, in float64.

    Non-finite elements, or a measure beyond float64, give NaN or infinity.
    """
    views = [view for view in views if view.size]
    size = sum(view.size for view in views)
    if not size:
        return 0.0
    if ord == 2:
        return exact_norm(views)
    if ord == "rms":
        norm = exact_norm(views)
        mean = norm / math.sqrt(size)
        return math.nextafter(mean, norm) if mean < _SMALLEST_NORMAL else mean
    pairs = [extremes(view) for view in views]
    peak = float(np.max([max(-low, high) for low, high in pairs]))
    low, high = (float(f([p[i] for p in pairs])) for i, f in enumerate((np.min, np.max)))
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.nan if math.isnan(low + high) else math.inf
    if ord == "inf" or peak == 0.0:
        return peak
    # From here on, scale by a power of two near the maximum: nothing can overflow.
    exponent = math.frexp(peak)[1]
    if ord in ("std", "var"):
        if size < 2:
            return 0.0
        mean = math.fsum(float(b.sum()) for b in _scaled(views, exponent)) / size
        squares = math.fsum(square_sums([b - mean])[0] for b in _scaled(views, exponent))
        result = squares / (size - 1)
        if ord == "var":
            return scaled_up(result, 2 * exponent)
        return scaled_up(math.sqrt(result), exponent)
    if ord == "mad":
        return scaled_up(
            math.fsum(float(np.abs(b).sum()) for b in _scaled(views, exponent)) / size, exponent
        )
    # Divide by the maximum itself: high powers of smaller numbers may all underflow.
    power, top = float(ord), math.ldexp(peak, -exponent)
    total = math.fsum(float(((np.abs(b) / top) ** power).sum()) for b in _scaled(views, exponent))
    with np.errstate(over="ignore"):
        return scaled_up(float(np.float64(total) ** (1 / power) * top), exponent)


def measure_on_device(
    parts: Sequence[Array], ord: Order, xp: Backend, axes: tuple[int, ...] | None = None
) -> Array:
    """Return the measure of all elements of dense arrays together, as an array of shape ().

    With `axes`, return that of each slice of a single array, with those axes kept as 1. The
    widest float is that of the framework; NaN and infinity give a measure that is not finite.
    """
    sized = [part for part in parts if math.prod(part.shape)]
    if not sized:
        return xp.asarray([0.0], like=parts[0])[0]
    if ord == "inf" and axes is None:
        return xp.peak(sized)
    wide = [*map(xp.wide, sized)]
    axes_of_one = wide[0].shape if axes is None else [wide[0].shape[a] for a in axes]
    size = math.prod(axes_of_one) + sum(math.prod(part.shape) for part in wide[1:])

    def add(values: Iterable[Array]) -> Array:
        return reduce(operator.add, [xp.total(v, axes) for v in values])

    peak = reduce(xp.maximum, [xp.largest(x, axes) for x in wide])
    if ord == "inf":
        return xp.wide(peak)
    # In this unit nothing can overflow.
    unit = xp.unit(peak)
    scaled = [x / unit for x in wide]
    if ord in ("std", "var"):
        if size < 2:
            return 0.0 * peak
        mean = xp.cast(add(scaled) / size, xp.dtype(unit))
        found = unit * xp.sqrt(add((x - mean) * (x - mean) for x in scaled) / (size - 1))
        return found * found if ord == "var" else found
    if ord == "mad":
        return unit * (add(map(abs, scaled)) / size)
    if ord in (2, "rms"):
        found = unit * xp.sqrt(add(x * x for x in scaled))
        return found / math.sqrt(size) if ord == "rms" else found
    power = float(ord)
    # The power 1 would have no second derivative at 0.
    total = add(abs(x) if power == 1 else abs(x) ** power for x in scaled)
    # A root of 0 has no derivative, though nothing may follow from the norm.
    return unit * xp.where(total == 0, 0.0, xp.where(total == 0, 1.0, total) ** (1 / power))


def _scaled(views: Sequence[HostView], exponent: int) -> Any:
    return (np.ldexp(b, -exponent) for view in views for b in blocks(view))


def _rows(view: HostView, axes: tuple[int, ...]) -> Float64:
    """Return a float64 copy whose last dimension has the elements of a slice.

    NumPy adds up contiguous numbers in pairs, and others one after the other, which would lose
    as many digits as there are.
    """
    kept = [a for a in range(view.ndim) if a not in axes]
    rows = decode(view).transpose(*kept, *axes).astype(np.float64, order="C")
    return rows.reshape(*(view.shape[a] for a in kept), -1)


def _slice_square_sums(view: HostView, axes: tuple[int, ...]) -> Float64:
    # Take a few rows of the first dimension at a time, so that no float64 copy of all is made.
    many = max(1, CHUNK * len(view) // view.size)
    parts = []
    for start in range(0, len(view), many):
        rows = _rows(view[start : start + many], axes)
        parts.append(np.square(rows, out=rows).sum(axis=-1))
    return np.asarray(np.stack(parts, -1).sum(axis=-1) if 0 in axes else np.concatenate(parts))


def slice_measures(view: HostView, axes: tuple[int, ...], ord: Order) -> Float64:
    """Return the measure of each slice that spans `axes`, with those axes kept as 1."""
    measures = _measures_of_rows(view, axes, ord)
    return measures.reshape([1 if a in axes else n for a, n in enumerate(view.shape)])


def _measures_of_rows(view: HostView, axes: tuple[int, ...], ord: Order) -> Float64:
    if ord == 2:
        squares = _slice_square_sums(view, axes)
        # Squares of narrower floats neither overflow nor underflow in float64.
        if view.dtype != np.float64 or ((squares > _TINY) & (squares < math.inf)).all():
            return np.asarray(np.sqrt(squares))
    wide = _rows(view, axes)
    size = wide.shape[-1]
    peak = np.abs(wide).max(axis=-1)
    if ord == "inf":
        return np.asarray(peak)
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.frexp(np.where(np.isfinite(peak) & (peak > 0), peak, 1.0))[1]
        scaled = np.ldexp(wide, -exponent[..., None])
        if ord in ("std", "var"):
            spread = scaled.var(axis=-1, ddof=1) if size > 1 else 0.0 * peak
            if ord == "var":
                return np.asarray(np.ldexp(spread, 2 * exponent))
            return np.asarray(np.ldexp(np.sqrt(spread), exponent))
        if ord == "mad":
            result = np.abs(scaled).mean(axis=-1)
        elif ord in (2, "rms"):
            result = np.sqrt(np.square(scaled).sum(axis=-1))
            if ord == "rms":
                result = result / math.sqrt(size)
        else:
            power = float(ord)
            top = np.ldexp(peak, -exponent)
            top = np.where(top > 0, top, 1.0)
            total = ((np.abs(scaled) / top[..., None]) ** power).sum(axis=-1)
            result = total ** (1 / power) * top
        return np.asarray(np.ldexp(result, exponent))
