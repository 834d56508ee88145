# SPDX-License-Identifier: Apache-2.0
"""Largest L2 norms under limits of any order, rounded up, and how scaling stretches distances."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedclip.core.measures import Order

# The uncertainty of a norm measured in float64, plus a few roundings.
_ROUNDING = 2.0**-44
SINGLE = 2.0**-24
"""Half the distance from 1 to the next number of float32."""
COARSEST = 2.0**-8
"""Relative amount by which rounding elements to the nearest bfloat16 may lengthen an array."""


def outwards(value: float) -> float:
    """Return a number above `value` by more than its rounding error.

    >>> outwards(1.0) > 1.0, outwards(1.0) < 1.0 + 1e-13
    (True, True)
    """
    return value * (1.0 + _ROUNDING)


def root_of_squares(bounds: Iterable[tuple[float, int]]) -> float:
    """Return the L2 norm of (value, count) pairs, rounded up; a single value exactly.

    >>> root_of_squares([(3.0, 1)])
    3.0
    >>> 2.0 <= root_of_squares([(1.0, 4)]) < 2.0 + 1e-12
    True
    """
    terms = [(value, count) for value, count in bounds if count]
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    # Relative to the largest, so that no square overflows or vanishes.
    peak = max((value for value, _ in terms), default=0.0)
    if not 0.0 < peak < math.inf:
        return peak
    return outwards(peak * math.sqrt(math.fsum(n * (v / peak) ** 2 for v, n in terms)))


def l2_of(ord: Order, limit: float, size: int) -> float:
    """Return the largest L2 norm of `size` numbers whose measure is at most `limit`.

    >>> l2_of(2, 0.5, 10), l2_of(1, 0.5, 10)
    (0.5, 0.5)
    >>> 5.0 <= l2_of("inf", 0.5, 100) < 5.0 + 1e-12
    True
    >>> l2_of("std", 0.5, 10)
    inf
    """
    match ord:
        case "inf" | "rms":
            factor = math.sqrt(size)
        case "mad":
            # The worst case: one element holds all of it.
            factor = float(size)
        case "std" | "var":
            return math.inf
        case _:
            p = float(ord)
            factor = 1.0 if p <= 2 else size ** (0.5 - 1.0 / p)
    return limit if factor == 1.0 else outwards(limit * factor)


def stretch(ord: Order, size: int) -> float:
    """Return the most by which scaling `size` numbers down to a limit stretches distances.

    Outside the ball the derivative is a contraction times an oblique projection. The norm of that
    projection is ``|x| |grad n(x)| / n(x)``; the result is an upper bound of it.

    >>> stretch(2, 100), stretch("rms", 100)
    (1.0, 1.0)
    >>> 10.0 <= stretch("inf", 100) < 10.0 + 1e-12
    True
    >>> stretch(0.5, 100)
    inf
    """
    match ord:
        case "rms":
            return 1.0
        case "inf" | "mad":
            power = 0.5
        case "std" | "var":
            return math.inf
        case _:
            p = float(ord)
            if p < 1:
                return math.inf
            power = abs(0.5 - 1.0 / p)
    return 1.0 if power == 0.0 or size == 1 else outwards(size**power)


def slope(rise: float, eps: float) -> float:
    """Return ``rise / eps``, rounded up if it is above 1.

    >>> slope(0.5, 0.5), slope(1.0, 0.0)
    (1.0, inf)
    """
    if rise <= eps:
        return rise / eps
    return outwards(rise / eps) if eps else math.inf


def number(value: float) -> str:
    """Return a number as text, with few digits."""
    return f"{value:.6g}"
