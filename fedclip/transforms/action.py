# SPDX-License-Identifier: Apache-2.0
"""Turns norms and limits into factors.

::

    over   = n + eps > limit
    moved  = over; or n > 0 (rescale); or over or 0 < n < min_norm
    target = limit; or min(limit, min_norm) where n < min_norm; or 0 (skip)
    k      = target / (n + eps) (1 - margin)   where moved, else 1

The margin covers the uncertainty of the norm, and the rounding of factor and products. A target
below `LEAST` gives zeros, and so does a factor that is too small a number for its digits. If
products may exceed the dtype's range, the factor is capped. This file knows neither tensors nor
frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedclip.arrays import HALF_UNIT, LARGEST, Arithmetic, Array, Arrays, Backend
from fedclip.core.parameters import LEAST

# Distance that a clipped array keeps below its limit, relatively.
MARGIN = {
    # Of the norm 11 roundings of float32 (`fedclip.arrays.blocks`), and four of limit / norm, the
    # factor and the product; half precision rounds the product again.
    "float16": 15 * 2.0**-24 + HALF_UNIT["float16"],
    "bfloat16": 15 * 2.0**-24 + HALF_UNIT["bfloat16"],
    "float32": 15 * 2.0**-24,
    # No float is wider, and a framework may add up many numbers one after the other.
    "float64": 2.0**-40,
}

# The dtypes that are clipped.
DTYPES = tuple(MARGIN)


class _Floats(Arithmetic):
    """The arithmetic of one float of Python: that of an array of one takes ten times as long."""

    where = staticmethod(lambda condition, x, y: x if condition else y)
    sqrt, minimum, maximum = math.sqrt, min, max
    cast = staticmethod(np.array)
    pieces = staticmethod(lambda number, shapes: [number])


_FLOATS: Any = _Floats()


class Decision(NamedTuple):
    """What happens to each group, or slice.

    Attributes
    ----------
    over : array of bool
        Whether it is over its limit.
    is_scaled : array of bool
        Whether it is scaled, by ``target / base``.
    """

    over: Array
    is_scaled: Array
    target: Array
    base: Array

    def factors(self, dtype: str, squared: bool, xp: Backend, peaks: Array | None = None) -> Array:
        """Return the factor for the tensors of a dtype, 1 where not moved; half ones' in float32.

        `squared`: the measure scales with the square of the factor. `peaks`, the largest elements,
        keep products within the dtype; None if no factor is above 1.
        """
        wide, far = ("float64", 1022) if dtype == "float64" else ("float32", 126)
        margin, least, largest = 1.0 - MARGIN[dtype], 2.0**-far, LARGEST[dtype]
        below = margin * margin if squared else margin
        # The division comes last: XLA would repeat what follows it for each element.
        target = self.target * below
        is_small = target < xp.maximum(self.base * least, LEAST * below)
        target = xp.where(self.is_scaled, xp.where(is_small, 0.0, target), 1.0)
        k = target / xp.where(self.is_scaled, self.base, 1.0)
        k = xp.sqrt(k) if squared else k
        if peaks is not None:
            # No factor may leave the range of float32 either, in which products are made.
            most = margin * largest / xp.maximum(peaks, largest * least)
            k = xp.where(self.is_scaled, xp.minimum(k, most), 1.0)
        return xp.cast(k, wide)

    def factors_of(
        self, dtypes: Sequence[str], shapes: Sequence[Any], squared: bool, xp: Backend, peaks: Any
    ) -> dict[str, Arrays]:
        """Return for each of these dtypes the factors of all, in pieces of some shapes."""
        decision, columns = self, {}
        if isinstance(self.over, np.ndarray) and self.over.size == 1:
            decision, xp = Decision(*map(np.ndarray.item, self)), _FLOATS
            peaks = None if peaks is None else peaks.item()
        for dtype in dict.fromkeys(dtypes):
            columns[dtype] = xp.pieces(decision.factors(dtype, squared, xp, peaks), shapes)
        return columns


@dataclass(frozen=True)
class Action:
    """What happens to a group, or slice, with a given norm and limit.

    Attributes
    ----------
    eps
        Added to the norm; 1e-6 does what torch does, 0 is exact.
    min_norm
        Scale a group below this norm, but not zero, up to it.
    rescale
        Bring every group to its limit, those below it too (normalisation).
    skip
        Set a group over its limit to zero, instead of scaling it.
    scales_up
        Whether a group may be scaled up.
    """

    eps: float = 0.0
    min_norm: float | None = None
    rescale: bool = False
    skip: bool = False
    scales_up: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales_up", self.rescale or self.min_norm is not None)

    def decide(self, norms: Array, limits: Array, xp: Arithmetic) -> Decision:
        """Decide on finite norms."""
        base, over = norms, norms > limits
        if self.eps:
            base = norms + self.eps
            over = (base > limits) & (norms > 0)
        is_scaled, target = over, limits
        if self.rescale:
            is_scaled = norms > 0
        elif self.min_norm is not None:
            low = (norms < self.min_norm) & (norms > 0)
            is_scaled, target = over | low, xp.where(low, xp.minimum(limits, self.min_norm), limits)
        if self.skip:
            target = 0.0 * norms
        return Decision(over, is_scaled, target, base)


# Scale down groups over their limit, and leave the others unchanged.
SCALE_DOWN = Action()
