# SPDX-License-Identifier: Apache-2.0
"""Subtracts means, and divides by standard deviations.

Means, deviations and the arithmetic on each element are in the widest float. A result beyond the
largest finite number of the dtype becomes that number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedclip.arrays import LARGEST, Array, Arrays, with_others
from fedclip.core.measures import sizes_of, spread_of, total
from fedclip.rules import FIXED, Basis, State
from fedclip.transforms.base import Gradient, Outcome, Transform
from fedclip.transforms.slice import spanned


@dataclass(frozen=True)
class Centralizing(Transform):
    """Subtract the mean of each slice, tensor, or (`pooled`) group."""

    basis: ClassVar[Basis] = FIXED
    dense = True

    dims: tuple[int, ...] | None
    inverse_dims: bool
    min_size: int
    pooled: bool

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Centre one gradient; the record has the largest mean as norm, and 0 as limit."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        owners, number = groups.owners, len(groups)
        peaks = gradient.finite_norms(xp.group_max(xp.max_abs(arrays), owners, number))

        def shift(values: Array, centre: Array) -> tuple[Array, Array]:
            shifted = values - centre
            top = LARGEST[xp.dtype(shifted)]
            return xp.minimum(xp.maximum(shifted, -top), top), xp.max(abs(centre + 0.0 * shifted))

        places = [i for i in range(len(arrays)) if self._axes(tuple(arrays[i].shape)) is not None]
        if self.pooled:
            columns: list[Arrays] = [arrays, xp.take(self._means(gradient), owners)]
            outputs, largest = xp.mapped(shift, columns, wide=True)
        elif places:
            some = [arrays[i] for i in places]
            columns = [some, [self._mean(x, gradient) for x in some]]
            shifted, largest = xp.mapped(shift, columns, wide=True)
            outputs = with_others(arrays, places, shifted)
            owners = [owners[i] for i in places]
        else:
            outputs, largest = list(arrays), None
        norms = 0.0 * peaks
        if largest is not None:
            norms = xp.maximum(xp.group_max(largest, owners, number), 0.0)
        return Outcome(outputs, state, norms, 0.0 * norms, norms > 0)

    def _axes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        axes = spanned(len(shape), self.dims, self.inverse_dims)
        # Lists, not generators: torch.compile can follow these.
        if not axes or 0 in shape or math.prod([shape[a] for a in axes]) < self.min_size:
            return None
        return axes

    def _mean(self, array: Array, gradient: Gradient) -> Array:
        """Return the mean of each slice of an array, with the dims that it spans kept as 1."""
        axes, xp = self._axes(tuple(array.shape)) or (), gradient.xp
        size = math.prod([array.shape[a] for a in axes])
        if xp.dtype(array) != "float64":
            return xp.sum(array, axes) / size
        # By a power of two, so that the sum of the largest numbers does not overflow.
        part = 2.0 ** -size.bit_length()
        return xp.sum(array * part, axes) / (size * part)

    def _means(self, gradient: Gradient) -> Array:
        """Return the mean of each group; 0 of one that is left alone."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        counts = sizes_of(arrays, groups, xp)
        sizes = [n if n and n >= self.min_size else math.inf for n in counts]
        divisors = xp.asarray(sizes, like=arrays[0])
        return total(lambda x, size: x / size, arrays, [divisors], groups, xp)


@dataclass(frozen=True)
class Standardizing(Transform):
    """Subtract the mean of each group, and divide by its standard deviation + eps."""

    basis: ClassVar[Basis] = FIXED
    dense = True

    eps: float

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Standardise one gradient; the record has the deviation as norm, and 1 as limit."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        owners, number = groups.owners, len(groups)
        peaks = gradient.finite_norms(xp.group_max(xp.max_abs(arrays), owners, number))
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
        columns = [
            xp.where(is_single, 0.0, 0.5 * unit * means),
            xp.where(is_single, 0.5, 0.5 * divisors),
        ]

        def standardise(values: Array, mean: Array, divisor: Array) -> tuple[Array]:
            return ((0.5 * values - mean) / divisor,)

        columns = [arrays, *(xp.take(c, owners) for c in columns)]
        (outputs,) = xp.mapped(standardise, columns, wide=True)
        return Outcome(outputs, state, deviations, 0.0 * deviations + 1.0, deviations > 1.0)
