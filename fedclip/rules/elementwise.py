# SPDX-License-Identifier: Apache-2.0
r"""Limits of single elements that follow from past gradients.

A rule is a pure function of a piece of a gradient, the same piece of the tensor's past, and the
number of gradients that the tensor had before::

    output, limits, past = rule(values, past, count, xp)

Elements do not depend on each other, so a gradient may be cut into any pieces. Values are finite,
or the caller drops the result. Outputs lie exactly within the limits, and the past stays finite
too. On the host the count is a float, and on a device an array of shape ().
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from fedclip.arrays import LARGEST, Array, Backend


class ElementRule(Protocol):
    """The protocol of these rules, as `fedclip.transforms.past.PastClipping` uses it."""

    def __call__(
        self, values: Array, past: Array, count: Any, xp: Backend
    ) -> tuple[Array, Array, Array]:
        """Return outputs, limits and the new past; `past` is zero if `count` is 0."""


def step_size(decay: float, debias: bool, count: Any) -> Any:
    """Return the weight of a new value in a moving average of `count` values.

    ``debias`` divides an average that starts at zero by ``1 - decay^t``. This equals starting with
    a plain mean: the weight falls from 1 to ``1 - decay``.
    """
    return (1 - decay) / (1 - decay ** (count + 1)) if debias else 1 - decay


def blend(mean: Array, values: Array, weight: Any) -> Array:
    """Return ``mean + weight (values - mean)``, without overflow of the difference."""
    half = (0.5 * weight) * values - (0.5 * weight) * mean
    return mean + half + half


def at_first(count: Any, yes: float, no: float, values: Array, xp: Backend) -> Any:
    """Return `yes` if the count is 0, else `no`; on a device in the dtype of the values."""
    if isinstance(count, float):
        return no if count else yes
    return like_values(xp.where(count == 0, yes, no), values, xp)


def like_values(number: Any, values: Array, xp: Backend) -> Any:
    """Return a number, or one on a device in the dtype of the values."""
    return number if isinstance(number, float) else xp.cast(number, xp.dtype(values))


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

    def __call__(
        self, values: Array, past: Array, count: Any, xp: Backend
    ) -> tuple[Array, Array, Array]:
        size = abs(values)
        if not isinstance(count, float):
            # The past is zero before the first.
            past = past + at_first(count, 1.0, 0.0, values, xp) * self._begun(size, xp)
        elif not count:
            past = self._begun(size, xp)
        weight = like_values(step_size(self.decay, self.debias, count), values, xp)
        # On the host, in the memory of `size`: new memory takes half as long again.
        size -= past
        size *= weight
        size += past
        return xp.within(values, size), size, size

    def _begun(self, size: Array, xp: Backend) -> Array:
        return xp.minimum(size * self.init, LARGEST[xp.dtype(size)])


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

    def __call__(
        self, values: Array, past: Array, count: Any, xp: Backend
    ) -> tuple[Array, Array, Array]:
        if isinstance(count, float) and not count:
            return values, past + math.inf, values
        base, rising = abs(past), abs(values)
        floor = xp.maximum(base, self.min_value) if self.min_value else base
        limits = None
        if self.add is not None:
            limits = base + self.add
            rising = xp.minimum(rising, limits)
        if self.mul is not None:
            grown = floor * self.mul
            if not self.min_value:
                # Without a floor a zero could never grow: treat it as not yet seen.
                grown = xp.fill(grown, floor == 0, math.inf)
            limits = grown if limits is None else xp.minimum(limits, grown)
        if limits is None:
            limits = base + math.inf
        if not isinstance(count, float):
            limits = limits + at_first(count, math.inf, 0.0, values, xp)
        output = xp.within(values, limits)
        if self.max_decay is None:
            return output, limits, output
        # Without a past, floor is 0 or `min_value`, and nothing has fallen.
        fallen = rising < floor / at_first(count, math.inf, self.max_decay, values, xp)
        return output, limits, xp.where(fallen, past / self.max_decay, output)
