# SPDX-License-Identifier: Apache-2.0
"""Limits on the norm of each slice of each array, along dimensions.

::

    dims   = the given ones that the array has, negative from the end; or all others (inverse)
    m      = measure of each slice that spans `dims`
    k      = limit / m  where m > limit, else 1              (fedclip.transforms.action)
    output = the array itself where all k = 1, else  k (1 - margin) * array

An array that has none of the dims, or whose slices have fewer than `min_size` elements, is neither
measured nor clipped. A 0-d array counts as one of shape (1,); a sparse array is made dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedclip.arrays import Array, Arrays, Backend, Repeated, with_others
from fedclip.core.measures import SQUARED, Order, slice_measures
from fedclip.rules import FIXED, LEARNT, Basis, State
from fedclip.transforms.action import SCALE_DOWN, Action, Decision
from fedclip.transforms.base import Gradient, Outcome, Transform


def check_dims(*, dims: Any) -> list[int] | None:
    """Return `dims` as a list, or None for whole tensors."""
    if dims is None:
        return None
    allowed = "an int or a list of ints"
    values = dims if isinstance(dims, (list, tuple)) else [dims]
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in values):
        raise TypeError(f"dims must be {allowed}, got {dims!r}")
    if not values or len(set(values)) != len(values):
        raise ValueError(f"dims must be {allowed}, all different, got {dims!r}")
    return list(values)


def check_slices(dims: Any, scope: Any, inverse_dims: bool, min_size: int = 1) -> None:
    """Raise a ValueError if what says which slices to take does not go together."""
    if dims is None and inverse_dims:
        raise ValueError("inverse_dims=True needs dims: all dimensions but which?")
    if dims is None and min_size > 1 and scope != "tensor":
        raise ValueError(f"min_size={min_size} needs dims or scope='tensor', got scope={scope!r}")
    if dims is not None and scope not in ("global", "tensor"):
        raise ValueError(f"dims make each slice a group: scope must be 'tensor', got {scope!r}")


def spanned(ndim: int, dims: tuple[int, ...] | None, inverse: bool) -> tuple[int, ...]:
    """Return the dimensions, of `ndim`, that each slice spans; None means all."""
    if dims is None:
        return tuple(range(ndim))
    real = {d + ndim if d < 0 else d for d in dims} & set(range(ndim))
    return tuple(sorted(set(range(ndim)) - real if inverse else real))


@dataclass(frozen=True)
class SliceClipping(Transform):
    """A limit on the measure of every slice; see `fedclip.transforms.norm.NormClipping`.

    The limit is one for all slices; or one flat array with a limit for each, array by array, where
    the arrays are. `spans` holds the dims that the slices of each array span, where `dims` (see
    `spanned`) does not hold for all arrays.
    """

    dense = True

    limit: float | Array
    dims: tuple[int, ...] | None
    inverse_dims: bool = False
    min_size: int = 1
    ord: Order = 2
    action: Action = SCALE_DOWN
    spans: Sequence[tuple[int, ...]] | None = None

    @cached_property
    def basis(self) -> Basis:
        """Where the limits come from: an array of limits follows from the weights."""
        return FIXED if isinstance(self.limit, float) else LEARNT

    @property
    def runs_on_parts(self) -> bool:
        # What raises a slice has to know its largest element.
        return self.ord == 2 and not self.action.scales_up

    def axes(self, shape: tuple[int, ...], place: int = 0) -> tuple[int, ...] | None:
        """Return the dims that the slices span; None if the array at this place is left alone."""
        shape = shape or (1,)
        if self.spans is None:
            axes = spanned(len(shape), self.dims, self.inverse_dims)
        else:
            axes = self.spans[place]
        # A list, not a generator: torch.compile can follow it.
        size = math.prod([shape[a] for a in axes])
        return axes if axes and size and math.prod(shape) and size >= self.min_size else None

    def measure(self, arrays: Arrays, xp: Backend, ord: Order | None = None) -> Array:
        """Return the measures of all slices, flat; of arrays of which some are not left alone."""
        spans = self.spans_of(arrays)
        some = [arrays[i] if len(arrays[i].shape) else arrays[i][None] for i in spans]
        return slice_measures(some, [*spans.values()], self.ord if ord is None else ord, xp)

    def spans_of(self, arrays: Arrays) -> dict[int, tuple[int, ...]]:
        """Return the dims that the slices span, of the arrays that are not left alone."""
        found = ((i, self.axes(tuple(array.shape), i)) for i, array in enumerate(arrays))
        return {i: axes for i, axes in found if axes is not None}

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient; the record has the norm and limit of the worst slice of a group."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        spans = self.spans_of(arrays)
        # Arrays that are not clipped are only checked for NaN and infinity.
        alone = [i for i in range(len(arrays)) if i not in spans]
        tensors, number = [groups.owners[i] for i in [*spans, *alone]], len(groups)
        shapes = [_counts(tuple(arrays[i].shape), axes) for i, axes in spans.items()]
        many = [*map(math.prod, shapes)]
        measured = [self.measure(arrays, xp)] if spans else []
        peaks = [xp.max_abs([arrays[i] for i in alone])] if alone else []
        flat, times = xp.joined([*measured, *peaks]), [*many, *([1] * len(alone))]
        finite = gradient.finite_norms(xp.group_max(flat, Repeated(tensors, times), number))
        if not spans:
            nothing = 0.0 * finite
            return Outcome([*arrays], state, nothing, nothing + math.inf, nothing > 0)
        norms, owners = measured[0], Repeated(tensors[: len(spans)], many)
        limits = self.limit + 0.0 * norms
        decision = self.action.decide(norms, limits, xp)
        outputs = self._scaled(gradient, decision, spans, shapes)
        # Record the slice that is furthest over its limit, or nearest to it.
        ratios = norms / limits
        most = xp.group_max(ratios, owners, number)
        behind = ratios < xp.take(most, owners)
        worst, bounds = (
            xp.group_max(xp.where(behind, 0.0, x), owners, number) for x in (norms, limits)
        )
        worst = xp.where(most < 0, 0.0, worst)
        free = math.inf if not isinstance(self.limit, float) else self.limit
        bounds = xp.where(most < 0, free, bounds)
        return Outcome(outputs, state, worst, bounds, worst + self.action.eps > bounds)

    def _scaled(
        self,
        gradient: Gradient,
        decision: Decision,
        spans: Mapping[int, tuple[int, ...]],
        shapes: Sequence[tuple[int, ...]],
    ) -> Arrays:
        arrays, xp = gradient.arrays, gradient.xp
        names, outputs = {i: xp.dtype(arrays[i]) for i in spans}, list(arrays)
        peaks = self.measure(arrays, xp, "inf") if self.action.scales_up else None
        for dtype in sorted({*names.values()}):
            # A factor for each slice, as if all arrays had this dtype.
            flat = decision.factors(dtype, self.ord in SQUARED, xp, peaks)
            factors = dict(zip(spans, xp.pieces(flat, shapes), strict=True))
            places = [i for i in spans if names[i] == dtype]
            some = xp.scale([arrays[i] for i in places], [factors[i] for i in places])
            outputs = with_others(outputs, places, some)
        return outputs


def _counts(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the measures of slices, with the axes that they span kept as 1."""
    return tuple(1 if a in axes else n for a, n in enumerate(shape))
