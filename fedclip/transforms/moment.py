# SPDX-License-Identifier: Apache-2.0
"""Subtracts means, and divides by standard deviations.

Means, deviations and the arithmetic on each element are in the widest float. A result beyond the
largest finite number of the dtype becomes that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedclip.arrays import LARGEST, Array, Arrays, Backend, with_others
from fedclip.core.measures import sizes_of, spread_of, total
from fedclip.rules import FIXED, Basis, State
from fedclip.transforms.base import Gradient, Outcome, Transform
from fedclip.transforms.slice import has_slices, spanned


@dataclass(frozen=True)
class Centralizing(Transform):
    """Subtract the mean of each group; with `dims`, that of each slice of each tensor."""

    basis: ClassVar[Basis] = FIXED
    dense = True

    dims: tuple[int, ...] | None
    inverse_dims: bool
    min_size: int

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Centre one gradient; the record has the largest mean as norm, and 0 as limit."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        peaks = gradient.finite_peaks()[1]
        places: Sequence[int] = range(len(arrays))
        if self.dims is None:
            # The mean of a group that is too small counts as 0.
            counts = sizes_of(arrays, groups, xp)
            sizes = [n if n and n >= self.min_size else math.inf for n in counts]
            means = total(lambda x, n: x / n, arrays, [xp.asarray(sizes, like=peaks)], groups, xp)
            centres: Arrays = xp.take(means, groups.owners)
        else:
            shapes = [tuple(array.shape) for array in arrays]
            axes = [spanned(len(shape), self.dims, self.inverse_dims) for shape in shapes]
            places = [i for i in places if has_slices(shapes[i], axes[i], self.min_size)]
            centres = [_mean(arrays[i], axes[i], xp) for i in places]
        outputs, norms = [*arrays], 0.0 * peaks

        def shift(values: Array, centre: Array) -> tuple[Array, Array]:
            shifted = values - centre
            top = LARGEST[xp.dtype(shifted)]
            return xp.minimum(xp.maximum(shifted, -top), top), xp.max(abs(centre + 0.0 * shifted))

        if places:
            shifted, largest = xp.mapped(shift, [[arrays[i] for i in places], centres], wide=True)
            outputs = with_others(arrays, places, shifted)
            largest = xp.group_max(largest, [groups.owners[i] for i in places], len(groups))
            norms = xp.maximum(largest, 0.0)
        return Outcome(outputs, state, norms, 0.0 * norms, norms > 0)


def _mean(array: Array, axes: tuple[int, ...], xp: Backend) -> Array:
    """Return the mean of each slice of an array, with the dims that it spans kept as 1."""
    size = math.prod([array.shape[a] for a in axes])
    if xp.dtype(array) != "float64":
        return xp.sum(array, axes) / size
    # By a power of two, so that the sum of the largest numbers does not overflow.
    part = 2.0 ** -size.bit_length()
    return xp.sum(array * part, axes) / (size * part)


@dataclass(frozen=True)
class Standardizing(Transform):
    """Subtract the mean of each group, and divide by its standard deviation + eps."""

    basis: ClassVar[Basis] = FIXED
    dense = True

    eps: float

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Standardise one gradient; the record has the deviation as norm, and 1 as limit."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        peaks = gradient.finite_peaks()[1]
        sizes, unit, means, variances = spread_of(arrays, groups, peaks, xp)
        deviations = xp.sqrt(variances)
        # What is not more than roundings of the mean is the deviation of equal numbers.
        equal = deviations < (2.0**-46 if xp.dtype(peaks) == "float64" else 2.0**-20)
        deviations = unit * deviations
        # Nor is what is too small to be divided by where a device makes no subnormal numbers.
        equal = equal | (deviations < 2.0**-1020)
        deviations = xp.where(equal, 0.0, deviations)
        # One by itself has no deviation, and stays as it is.
        is_single = (sizes < 2) | (peaks == 0)
        divisors = xp.where(equal, math.inf, deviations + self.eps)
        # Halves: the difference of two of the largest numbers overflows.
        centres = xp.where(is_single, 0.0, 0.5 * unit * means)
        divisors = xp.where(is_single, 0.5, 0.5 * divisors)

        def standardise(values: Array, mean: Array, divisor: Array) -> tuple[Array]:
            return ((0.5 * values - mean) / divisor,)

        columns = [arrays, *(xp.take(c, groups.owners) for c in (centres, divisors))]
        (outputs,) = xp.mapped(standardise, columns, wide=True)
        return Outcome(outputs, state, deviations, 0.0 * deviations + 1.0, deviations > 1.0)
