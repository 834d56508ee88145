# SPDX-License-Identifier: Apache-2.0
"""Limits on single elements.

::

    output = min(high, max(low, x)) for each element
             and on the host the array itself if every element lies in [low, high]

Limits are fixed, or a percentile of the same gradient. Rounded inwards to a number of the array's
dtype, they hold exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from fedclip.arrays import LARGEST, Array, Arrays, Backend
from fedclip.rules import FIXED, Basis, State
from fedclip.transforms.base import Gradient, Outcome, Transform

# Number of binary digits of each dtype, and the exponent of its smallest number.
GRID = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}


def inwards(limit: float, dtype: str, up: bool) -> float:
    """Return the nearest number of the dtype that is not below (up) or above the limit."""
    if math.isinf(limit) or not limit:
        return limit
    digits, least = GRID[dtype]
    unit = 2.0 ** max(math.frexp(limit)[1] - digits, least)
    steps = math.ceil(limit / unit) if up else math.floor(limit / unit)
    return max(-LARGEST[dtype], min(steps * unit, LARGEST[dtype]))


def _boxed(
    gradient: Gradient, ends: Arrays, peaks: Array, norms: Array, limits: Array, state: State
) -> Outcome:
    """Return what comes out of a box for each tensor, with columns of lower and upper ends."""
    groups, xp = gradient.groups, gradient.xp

    def clip(x: Array, low: Array, high: Array) -> tuple[Array, Array]:
        output = xp.minimum(xp.maximum(x, low), high)
        return output, xp.max(abs(output - x))

    # All that is nearer to 0 than both ends stays as it is.
    may_change = peaks > xp.minimum(-ends[0], ends[1])
    outputs, moves = xp.mapped(clip, [gradient.arrays, *ends], may_change)
    clipped = xp.group_max(moves, groups.owners, len(groups)) > 0
    return Outcome(outputs, state, norms, limits, clipped)


@dataclass(frozen=True)
class ValueClipping(Transform):
    """A box for each group: ``[low, high]``, in the order of the groups; one side may be open.

    The record has the largest absolute element as norm, and as limit the larger absolute value of
    the finite ends.
    """

    basis: ClassVar[Basis] = FIXED
    runs_on_parts = True

    lows: tuple[float, ...]
    highs: tuple[float, ...]

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient element by element."""
        owners, xp = gradient.groups.owners, gradient.xp
        peaks, norms = gradient.finite_peaks()
        pairs = [*zip(owners, gradient.plan.dtypes, strict=True)]
        lows = [inwards(self.lows[group], dtype, True) for group, dtype in pairs]
        highs = [inwards(self.highs[group], dtype, False) for group, dtype in pairs]
        ends = zip(self.lows, self.highs, strict=True)
        limits = [max([abs(x) for x in end if math.isfinite(x)], default=0.0) for end in ends]
        low, high, limit = (xp.asarray(column, like=peaks) for column in (lows, highs, limits))
        return _boxed(gradient, [low, high], peaks, norms, limit, state)


@dataclass(frozen=True)
class PercentileClipping(Transform):
    """A limit for each group: a percentile of the absolute values of its elements."""

    percentile: Fraction
    linear: bool

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient; the record has the largest absolute element as norm."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        peaks, norms = gradient.finite_peaks()
        limits = xp.joined([self._limit([arrays[i] for i in some], xp) for some in groups.members])
        ends = xp.take(limits, groups.owners)
        wide = xp.asarray([float(d == "float64") for d in gradient.plan.dtypes], like=peaks)
        # In the widest float, but rounded down to float32 numbers for narrower tensors.
        less = ends * (1 - 2.0**-24)
        near, below = (xp.asarray(xp.cast(x, "float32"), like=ends) for x in (ends, less))
        ends = xp.where(wide > 0, ends, xp.where(near > ends, below, near))
        return _boxed(gradient, [-ends, ends], peaks, norms, limits, state)

    def _limit(self, arrays: Arrays, xp: Backend) -> Array:
        """Return the percentile, in an array of shape (1,)."""
        # A number of elements that is known only as the step runs is a float, exact as an int is.
        size = sum([xp.size(array) for array in arrays])
        if isinstance(size, int) and not size:
            return xp.asarray([0.0], like=arrays[0])
        # Use integers: floats miss the position for some sizes.
        steps, divisor = self.percentile.numerator * (size - 1), 100 * self.percentile.denominator
        low = steps // divisor
        table, held, rank = abs(xp.joined(arrays))[:, None], size, low
        if not isinstance(size, int):
            held, rank = (xp.asarray([x], like=table) for x in (size, low))
        first, second = xp.ranked(table, held, rank)
        first = xp.asarray(first, like=table)
        if not self.linear:
            return first
        between = (steps - low * divisor) / divisor
        return first + between * (xp.asarray(second, like=table) - first)
