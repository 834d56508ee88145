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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

from fedclip.arrays import Array, Arrays, Backend, Repeated, with_others
from fedclip.arrays.blocks import UNCERTAINTY
from fedclip.core.measures import SQUARED, Order, slice_measures
from fedclip.rules import FIXED, LEARNT, Basis, State
from fedclip.transforms.action import SCALE_DOWN, Action
from fedclip.transforms.base import Gradient, Outcome, Transform

# Both norms and limits may be off.
_CLOSE = 4 * UNCERTAINTY

# Numbers of dimensions of an array, or their lengths.
Axes: TypeAlias = tuple[int, ...]


def check_dims(*, dims: Any) -> list[int]:
    """Return `dims` as a list."""
    values = dims if isinstance(dims, (list, tuple)) else [dims]
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in values):
        raise TypeError(f"dims must be an int or a list of ints, got {dims!r}")
    if not values or len(set(values)) != len(values):
        raise ValueError(f"dims must be an int or a list of different ints, got {dims!r}")
    return list(values)


def check_slices(dims: Any, scope: Any, inverse_dims: bool, min_size: int = 1) -> None:
    """Raise a ValueError if the parameters that choose the slices do not go together."""
    if dims is None and inverse_dims:
        raise ValueError("inverse_dims=True needs dims: give the dims that slices do not span")
    if dims is None and min_size > 1 and scope != "tensor":
        raise ValueError(f"min_size={min_size} needs dims or scope='tensor', got scope={scope!r}")
    if dims is not None and scope not in ("global", "tensor"):
        raise ValueError(f"dims make each slice a group: scope must be 'tensor', got {scope!r}")


def spanned(ndim: int, dims: Axes | None, inverse: bool) -> Axes:
    """Return the dimensions, of `ndim`, that each slice spans; None means all."""
    if dims is None:
        return tuple(range(ndim))
    real = {d + ndim if d < 0 else d for d in dims} & set(range(ndim))
    return tuple(sorted(set(range(ndim)) - real if inverse else real))


def has_slices(shape: Axes, axes: Axes, min_size: int) -> bool:
    """Return whether an array has slices that span these dimensions, of `min_size` elements."""
    # A list, not a generator: torch.compile can follow it.
    return bool(axes) and all(shape) and math.prod([shape[a] for a in axes]) >= min_size


class Layout(NamedTuple):
    """Which slices arrays of some shapes have.

    Attributes
    ----------
    spans : dict
        The dims that the slices span, of each array that is clipped, by place.
    unclipped : list of int
        The places of the other arrays.
    counts : list of tuple
        The shapes of the measures of the slices, in which the dims that they span are 1.
    owners, all_owners : Repeated
        The group of each slice; and, at the end, of each other array.
    """

    spans: dict[int, Axes]
    unclipped: list[int]
    counts: list[Axes]
    owners: Repeated
    all_owners: Repeated


@lru_cache(maxsize=64)
def _layout(
    rule: tuple[Axes | None, bool, int, Sequence[Axes] | None], shapes: Sequence[Axes], owners: Axes
) -> Layout:
    dims, inverse, min_size, spans = rule
    clipped: dict[int, Axes] = {}
    for i, shape in enumerate(shapes):
        sizes = shape or (1,)
        axes = spanned(len(sizes), dims, inverse) if spans is None else spans[i]
        if has_slices(sizes, axes, min_size):
            clipped[i] = axes
    unclipped = [i for i in range(len(shapes)) if i not in clipped]
    pairs = clipped.items()
    counts = [tuple([1 if a in axes else n for a, n in enumerate(shapes[i])]) for i, axes in pairs]
    groups, times = tuple([owners[i] for i in clipped]), (*map(math.prod, counts),)
    others = [owners[i] for i in unclipped]
    all_owners = Repeated((*groups, *others), (*times, *([1] * len(others))))
    return Layout(clipped, unclipped, counts, Repeated(groups, times), all_owners)


@dataclass(frozen=True)
class SliceClipping(Transform):
    """A limit on the measure of every slice; see `fedclip.transforms.norm.NormClipping`.

    The limit is one for all slices; or one flat array with a limit for each, array by array, where
    the arrays are. `spans` holds the dims that the slices of each array span, where `dims` (see
    `spanned`) does not hold for all arrays. `exact_limit` gives limits of which these are not above
    those, but up to twice `UNCERTAINTY` below.
    """

    dense = True

    limit: float | Array
    dims: Axes | None
    inverse_dims: bool = False
    min_size: int = 1
    ord: Order = 2
    action: Action = SCALE_DOWN
    spans: Sequence[Axes] | None = None
    exact_limit: Callable[[], Array] | None = None

    @cached_property
    def basis(self) -> Basis:
        """Where the limits come from: an array of limits follows from the weights."""
        return FIXED if isinstance(self.limit, float) else LEARNT

    @property
    def runs_on_parts(self) -> bool:
        # What raises a slice has to know its largest element.
        return self.ord == 2 and not self.action.scales_up

    def layout(self, shapes: Sequence[Axes], owners: Sequence[int], is_cached: bool) -> Layout:
        """Return which slices arrays of these shapes have; `owners` holds their groups."""
        # torch.compile cannot follow a cache.
        make: Callable[..., Layout] = _layout if is_cached else _layout.__wrapped__
        rule = self.dims, self.inverse_dims, self.min_size, self.spans
        return make(rule, tuple(shapes), tuple(owners))

    def axes(self, shape: Axes) -> Axes | None:
        """Return the dims that the slices of an array span; None if it is not clipped."""
        return self.layout([shape], [0], False).spans.get(0)

    def measure(
        self, arrays: Arrays, layout: Layout, xp: Backend, ord: Order, fast: bool = False
    ) -> Array:
        """Return the measures of all slices, flat; of arrays of which some are clipped."""
        some = [arrays[i] if len(arrays[i].shape) else arrays[i][None] for i in layout.spans]
        return slice_measures(some, [*layout.spans.values()], ord, xp, fast)

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient; the record has the norm and limit of the worst slice of a group."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        shapes, number = [tuple(array.shape) for array in arrays], len(groups)
        layout = self.layout(shapes, groups.owners, is_cached=gradient.on_host)
        parts = [self.measure(arrays, layout, xp, self.ord, fast=True)] if layout.spans else []
        if layout.unclipped:
            # Other arrays are only checked for NaN and infinity.
            parts.append(xp.max_abs([arrays[i] for i in layout.unclipped]))
        flat = parts[0] if len(parts) == 1 else xp.joined(parts)
        largest = xp.group_max(flat, layout.all_owners, number)
        # Sums of these do not overflow.
        finite = gradient.finite_norms(largest, flat * 2.0**-64)
        if not layout.spans:
            zeros = 0.0 * finite
            return Outcome([*arrays], state, zeros, zeros + math.inf, zeros > 0)
        norms, owners = parts[0], layout.owners
        limits = self.limit + 0.0 * norms
        if gradient.on_host and self.ord == 2:
            distances = abs(norms + self.action.eps - limits)
            if (distances <= _CLOSE * limits).any():
                norms = self.measure(arrays, layout, xp, 2)
                limits = 0.0 * norms + (self.exact_limit() if self.exact_limit else self.limit)
        decision = self.action.decide(norms, limits, xp)
        outputs = arrays
        if not (gradient.on_host and not decision.is_scaled.any()):
            kinds, squared = [gradient.plan.dtypes[i] for i in layout.spans], self.ord in SQUARED
            peaks = self.measure(arrays, layout, xp, "inf") if self.action.scales_up else None
            each = decision.factors_of(kinds, layout.counts, squared, xp, peaks)
            factors = [each[dtype][j] for j, dtype in enumerate(kinds)]
            some = xp.scale([arrays[i] for i in layout.spans], factors)
            outputs = with_others(arrays, [*layout.spans], some)
        # Record the slice that is furthest over its limit, or nearest to it.
        ratios = norms / limits
        most = xp.group_max(ratios, owners, number)
        behind = ratios < xp.take(most, owners)
        worst = xp.group_max(xp.where(behind, 0.0, norms), owners, number)
        bounds = xp.group_max(xp.where(behind, 0.0, limits), owners, number)
        # A group without slices.
        usual = self.limit if isinstance(self.limit, float) else math.inf
        worst, bounds = xp.where(most < 0, 0.0, worst), xp.where(most < 0, usual, bounds)
        over = worst + self.action.eps if self.action.eps else worst
        return Outcome(outputs, state, worst, bounds, over > bounds)
