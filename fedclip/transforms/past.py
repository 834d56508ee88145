# SPDX-License-Identifier: Apache-2.0
r"""Limits that follow from an array of the past of each tensor: on single elements, or on norms.

A limit on elements is a pure function of a piece of a gradient, the same piece of the tensor's
past, and numbers that follow from how many gradients the tensor had before::

    numbers              = self.numbers(counts, xp)         for all tensors together
    output, limits, past = self.clipped(values, past, numbers, xp)

Elements do not depend on each other, so a gradient may be cut into any pieces. The past is zero at
first. Outputs lie exactly within the limits, and the past stays finite too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedclip.arrays import LARGEST, NUMPY, Array, Arrays, Backend
from fedclip.core.measures import SQUARED, Order, measure
from fedclip.core.scopes import Groups
from fedclip.core.states import Statistics
from fedclip.rules import CLEAR, NoState, State, zeros
from fedclip.rules.constant import Given
from fedclip.transforms.action import Action
from fedclip.transforms.base import Gradient, Outcome, Transform, by_tensor
from fedclip.transforms.norm import NormClipping

# Names of the arrays kept for each tensor: its past, and the number of its gradients.
PAST = ("past", "count")


class Remembering(Transform):
    """A transform that keeps the past of each tensor; float64 for float64 tensors."""

    array_fields: ClassVar[tuple[str, ...]] = PAST
    dense = True

    def recalled(self, gradient: Gradient) -> Statistics:
        pairs = zip(gradient.groups.names, gradient.arrays, strict=True)
        return {name: _recall(gradient, name, array) for name, array in pairs}

    def begun(self, gradient: Gradient) -> tuple[list[Array], Array]:
        """Return the past of each tensor, at first zeros, and the numbers of their gradients.

        Raises
        ------
        ValueError
            If the past that is kept for a tensor does not have its shape.
        """
        cached = self.recalled(gradient)
        gradient.cached.update(cached)
        each = [cached[name] for name in gradient.groups.names]
        return [k["past"] for k in each], gradient.xp.joined([k["count"] for k in each])


def _recall(gradient: Gradient, name: str, array: Array) -> dict[str, Array]:
    xp, known = gradient.xp, gradient.cached.get(name)
    dtype = "float64" if xp.dtype(array) == "float64" else "float32"
    if known is None:
        return {"past": _zeros(gradient, array, dtype), "count": xp.asarray(0.0, like=array)}
    past, count = (known[field] for field in PAST)
    held, shape = tuple(past.shape), tuple(array.shape)
    if held != shape:
        got = f"the state of {name!r} is of shape {held}, its gradient of {shape}"
        raise ValueError(f"{got}: load the state of this model, or none")
    moves = isinstance(past, np.ndarray) and not gradient.on_host
    if moves:
        past, count = (xp.asarray(x, like=array) for x in (past, count))
    if xp.dtype(past) != dtype:
        if dtype == "float32":
            # A wider gradient may have left numbers that are beyond it.
            past = xp.minimum(xp.maximum(past, -LARGEST[dtype]), LARGEST[dtype])
        past = xp.cast(past, dtype)
    # What is added to zeros of the array is split over devices as the array is.
    return {"past": past + _zeros(gradient, array, dtype) if moves else past, "count": count}


def _zeros(gradient: Gradient, array: Array, dtype: str) -> Array:
    xp = gradient.xp
    wide = xp.cast(array, dtype)
    return xp.where(xp.isfinite(wide), 0.0 * wide, 0.0 * abs(wide) if gradient.on_host else 0.0)


def remember(gradient: Gradient, pasts: Arrays, counts: Array) -> None:
    """Keep new pasts, and numbers of gradients before this one, unless the step is not finite.

    Call it after `finite_norms`.
    """
    names, xp = gradient.groups.names, gradient.xp
    after: Arrays = [*pasts, *xp.pieces(counts + 1.0, [()] * len(names))]
    if not gradient.waits:
        # Nothing of a step that is not finite may stay.
        before = [gradient.cached[name][field] for field in PAST for name in names]
        after = xp.keep_if(gradient.is_finite, after)
        after = xp.choose([gradient.is_finite] * len(after), after, before)
    for i, name in enumerate(names):
        gradient.cached[name] = {"past": after[i], "count": after[len(names) + i]}


class PastClipping(Remembering):
    """A limit for each element, which follows from the element's past."""

    @abstractmethod
    def numbers(self, counts: Array, xp: Backend) -> Arrays:
        """Return numbers for each tensor, given the numbers of its gradients before this one."""

    @abstractmethod
    def clipped(self, values: Array, past: Array, numbers: Arrays, xp: Backend) -> Arrays:
        """Return outputs, limits and the new past."""

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient; the record has the largest element as norm, and the largest limit."""
        groups, xp = gradient.groups, gradient.xp
        owners, number = groups.owners, len(groups)
        _, norms = gradient.finite_peaks()
        pasts, counts = self.begun(gradient)

        def call(values: Array, past: Array, *numbers: Array) -> Arrays:
            output, limits, after = self.clipped(values, past, numbers, xp)
            return output, after, xp.max(limits), xp.max(abs(output - values))

        columns = [gradient.arrays, pasts, *self.numbers(counts, xp)]
        outputs, after, tops, moves = xp.mapped(call, columns)
        remember(gradient, after, counts)
        limits = xp.group_max(tops, owners, number)
        return Outcome(outputs, state, norms, limits, xp.group_max(moves, owners, number) > 0)


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


@dataclass(frozen=True)
class EmaValue(PastClipping):
    r"""Moving average of the absolute values (torchzero's ``ClipValueByEMA``).

    ::

        e = e + (1 - decay) (|g| - e)          starting at start times |g|
        limit = e
    """

    decay: float
    start: float
    debias: bool

    def numbers(self, counts: Array, xp: Backend) -> Arrays:
        first = xp.where(counts == 0, 1.0, 0.0 * counts)
        return first, step_size(self.decay, self.debias, counts)

    def clipped(self, values: Array, past: Array, numbers: Arrays, xp: Backend) -> Arrays:
        first, weight = numbers
        size = abs(values)
        begun = xp.minimum(size * self.start, LARGEST[xp.dtype(size)])
        size = blend(past + first * begun, size, weight)
        return xp.minimum(xp.maximum(values, -size), size), size, size


@dataclass(frozen=True)
class GrowthValue(PastClipping):
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

    def clipped(self, values: Array, past: Array, numbers: Arrays, xp: Backend) -> Arrays:
        free, decay = numbers
        mul, add = (math.inf if x is None else x for x in (self.mul, self.add))
        base = abs(past)
        floor = xp.maximum(base, self.min_value) if self.min_value else base
        added, grown = base + free + add, floor * mul + free
        if not self.min_value:
            # Without a floor a zero could never grow: treat it as not yet seen.
            grown = xp.where(floor == 0, math.inf, grown)
        limits = xp.minimum(added, grown)
        output = xp.minimum(xp.maximum(values, -limits), limits)
        if self.max_decay is None:
            return output, limits, output
        rising = xp.minimum(abs(values), added)
        return output, limits, xp.where(rising < floor / decay, past / self.max_decay, output)


@dataclass(frozen=True)
class AverageClipping(Remembering):
    r"""Clip to, or bring to (`rescale`), the norm of the moving average of the gradient itself.

    ::

        e     = e + (1 - decay) (g - e)                                for each tensor
        size  = norm of e, for each group
        size  = min(size, max(max_growth * size before, min_norm)),    e shrunk accordingly
        limit = size

    The average sees every gradient before it is clipped, the current one included.

    The other fields are parameters of `ema-norm-clip`; `start`, its `init`, is None for the first
    gradient.
    """

    by_norms = True

    decay: float
    ord: Order
    max_growth: float | None
    start: float | None
    min_norm: float | None
    debias: bool
    rescale: bool

    def init(self, groups: Groups) -> State:
        # The norm of the average, and the number of steps, of each group.
        return zeros(len(groups), NUMPY, "norm", "count")

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient to the norm of the average, which it is part of."""
        groups, xp = gradient.groups, gradient.xp
        norms = gradient.finite_norms(measure(gradient.arrays, groups, self.ord, xp))
        pasts, counts = self.begun(gradient)
        begins = xp.where(counts == 0, self.start or 0.0, 0.0 * counts)
        weights = step_size(self.decay, self.debias, counts)
        if self.start is None:
            weights = xp.where(counts == 0, 1.0, weights)

        def learn(values: Array, past: Array, weight: Array, begin: Array) -> tuple[Array, Array]:
            return values, blend(past + begin, values, weight)

        columns = [gradient.arrays, pasts, weights, begins]
        means: Arrays = xp.mapped(learn, columns)[1]
        sizes, first = measure(means, groups, self.ord, xp), state.count == 0
        # Of a step that is not finite nothing may be left.
        sizes = xp.where(xp.isfinite(sizes), sizes, 0.0)
        if self.max_growth is not None:
            # From 0 nothing could grow, so what follows it is a first gradient again.
            before = xp.where(first | (state.norm == 0), sizes, state.norm)
            allowed = xp.maximum(before * self.max_growth, self.min_norm or 0.0)
            factors = xp.where(sizes > allowed, allowed / xp.where(sizes > 0, sizes, 1.0), 1.0)
            factors = xp.sqrt(factors) if self.ord in SQUARED else factors
            means = xp.scale(means, by_tensor(factors, groups, xp))
            sizes = xp.minimum(sizes, allowed)
        if self.ord == 2:
            # Norms close to a limit are measured again: then the limit is, too.
            sizes = xp.recompute_near_limit(sizes, norms, means, groups.members)
        limits = sizes
        if not self.rescale and (self.start is None or self.debias):
            # The average of one gradient is that gradient: rounding its norm must not clip it.
            limits = xp.where(first, xp.maximum(sizes, CLEAR * norms), sizes)
        clipping = NormClipping(Given(limits), self.ord, Action(rescale=self.rescale))
        outcome = clipping.judged(gradient, norms, NoState())
        remember(gradient, means, counts)
        return outcome._replace(state=state._replace(norm=sizes, count=state.count + 1.0))
