# SPDX-License-Identifier: Apache-2.0
r"""Limits of single elements that follow from past gradients.

A rule is a pure function of a piece of a gradient, the same piece of the tensor's past, and
numbers that follow from how many gradients the tensor had before::

    numbers              = rule.numbers(counts, xp)         for all tensors together
    output, limits, past = rule(values, past, numbers, xp)

`counts` holds the number of gradients that each tensor had before this one. Elements do not depend
on each other, so a gradient may be cut into any pieces. The past is zero at first. Outputs lie
exactly within the limits, and the past stays finite too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedclip.arrays import LARGEST, Array, Arrays, Backend


def step_size(decay: float, debias: bool, counts: Array) -> Array:
    """Return the weight of a new value in a moving average of `counts` values.

    ``debias`` divides an average that starts at zero by ``1 - decay^t``. This equals starting with
    a plain mean: the weight falls from 1 to ``1 - decay``.
    """
    weight = 1 - decay + 0.0 * counts
    return weight / (1 - decay ** (counts + 1)) if debias else weight


def blend(mean: Array, values: Array, weight: Array) -> Array:
    """Return ``mean + weight (values - mean)``, without overflow of the difference."""
    half = (0.5 * weight) * values - (0.5 * weight) * mean
    return mean + half + half


def _within(values: Array, limits: Array, xp: Backend) -> Array:
    return xp.minimum(xp.maximum(values, -limits), limits)


@dataclass(frozen=True)
class EmaValue:
    r"""Moving average of the absolute values (torchzero's ``ClipValueByEMA``).

    ::

        e = e + (1 - decay) (|g| - e)          starting at init |g|
        limit = e
    """

    decay: float
    init: float
    debias: bool

    def numbers(self, counts: Array, xp: Backend) -> Arrays:
        first = xp.where(counts == 0, 1.0, 0.0 * counts)
        return first, step_size(self.decay, self.debias, counts)

    def __call__(self, values: Array, past: Array, numbers: Arrays, xp: Backend) -> Arrays:
        first, weight = numbers
        size = abs(values)
        begun = xp.minimum(size * self.init, LARGEST[xp.dtype(size)])
        size = blend(past + first * begun, size, weight)
        return _within(values, size, xp), size, size


@dataclass(frozen=True)
class GrowthValue:
    r"""Growth from one output to the next (torchzero's ``ClipValueGrowth``).

    ::

        limit = min(|p| + add, max(|p|, min_value) mul)         p: the output before
        p = the output;  p / max_decay where it fell by more than that
    """

    mul: float | None
    add: float | None
    min_value: float | None
    max_decay: float | None

    def numbers(self, counts: Array, xp: Backend) -> Arrays:
        # Without a past there is no limit, and nothing has fallen.
        free = xp.where(counts == 0, math.inf, 0.0 * counts)
        return free, free + (self.max_decay or math.inf)

    def __call__(self, values: Array, past: Array, numbers: Arrays, xp: Backend) -> Arrays:
        free, decay = numbers
        base, rising = abs(past), abs(values)
        floor = xp.maximum(base, self.min_value) if self.min_value else base
        limits = base + free
        if self.add is not None:
            limits = limits + self.add
            rising = xp.minimum(rising, limits)
        if self.mul is not None:
            grown = floor * self.mul + free
            if not self.min_value:
                # Without a floor a zero could never grow: treat it as not yet seen.
                grown = xp.where(floor == 0, math.inf, grown)
            limits = grown if self.add is None else xp.minimum(limits, grown)
        if self.mul is None and self.add is None:
            limits = base + math.inf
        output = _within(values, limits, xp)
        if self.max_decay is None:
            return output, limits, output
        return output, limits, xp.where(rising < floor / decay, past / self.max_decay, output)
