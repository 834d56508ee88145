# SPDX-License-Identifier: Apache-2.0
"""The parameters that several clippers share, and the transforms that are built from these.

A clipper is a `Clipper` with some of these parts: ``class GrowthClip(PastLimit, Clipper)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedclip.core import parameters
from fedclip.core.measures import Order, check_order
from fedclip.core.parameters import Configured, parameter
from fedclip.core.scopes import Groups, Scope, check_scope, in_table
from fedclip.rules import Rule
from fedclip.rules.constant import Constant
from fedclip.transforms import Action, NormClipping, SliceClipping, Transform
from fedclip.transforms.slice import check_dims, check_slices

_ORDERS = 'float or {"inf", "rms", "mad", "std"'
ORD_VAR = parameter(check_order, default=2, kind=f'{_ORDERS}, "var"}}')
"""Orders with the variance, for limits that are fixed."""
SCOPE_TABLE = parameter(
    partial(check_scope, limits=True),
    default="global",
    kind='{"global", "tensor", "layer"}, list of patterns or table',
)
"""A scope that may be a table of limits."""


def as_tuple(dims: Any) -> tuple[int, ...] | None:
    """Return the parameter `dims` as transforms take it."""
    return None if dims is None else tuple(dims)


class Sliced(Configured):
    """Base of clippers that can treat each slice of a tensor separately."""

    dims: int | Sequence[int] | None = parameter(
        check_dims, default=None, kind="int, list of int or None"
    )
    """Each slice of a tensor is a group, and spans these dimensions; negative ones count from the
    end. Only with the scopes "global" and "tensor", then equal."""
    inverse_dims: bool = parameter(parameters.boolean, default=False)
    """Slices span all dimensions except `dims`."""
    min_size: int = parameter(parameters.integer, 1, default=1)
    """Skip slices, or with the scope "tensor" tensors, with fewer elements."""


class Measured(Configured):
    """The parameter of clippers that measure a norm."""

    ord: Order = parameter(check_order, default=2, kind=f"{_ORDERS}}}")
    """Order of the norm, see `fedclip.core.measures`; 2 is the Euclidean norm."""


class Exact(Measured):
    """The parameters of clippers that bring a norm to a limit."""

    eps: float = parameter(parameters.non_negative, default=0.0)
    """Added to the norm in the factor ``limit / (n + eps)``, >= 0; 0 is exact."""


class FixedLimit(Sliced, Exact):
    """The parameters of clippers that bring the norm of a group, or slice, to a fixed limit."""

    scope: Scope = SCOPE_TABLE
    ord = ORD_VAR

    def with_limit(self, limit: float, action: Action) -> Transform:
        """Return the transform that brings the norms of groups, or of slices, to a fixed limit."""
        check_slices(self.dims, self.scope, self.inverse_dims, self.min_size)
        if self.dims is None and self.min_size == 1:
            return NormClipping(Constant((limit,)), self.ord, action)
        dims = as_tuple(self.dims)
        return SliceClipping(limit, dims, self.inverse_dims, self.min_size, self.ord, action)

    def with_table(self, transform: Transform, groups: Groups, others: float) -> Transform:
        """Return the transform with the limits of a table in `scope`, if it is one.

        `others` is the limit of groups that are not in the table.
        """
        if not isinstance(self.scope, Mapping) or not isinstance(transform, NormClipping):
            return transform
        limits = tuple(in_table(self.scope, label, others) for label in groups.labels)
        return replace(transform, rule=Constant(limits))


class PastLimit(Exact):
    """The parameters of clippers with a limit that follows from past norms."""

    max_norm: float | None = parameter(parameters.limit, default=None)
    """Largest limit ever, > 0, in units of the gradient."""
    on_spike: str = parameter(parameters.choice, ("clip", "skip"), default="clip")
    """Clip a group above its limit ("clip"), or set it to zero ("skip"); torch and Keras loops then
    skip its step."""

    def with_rule(self, rule: Callable[..., Rule], **changes: object) -> NormClipping:
        """Return the transform that brings norms to the limits of a rule.

        The rule gets the clipper's parameters of the same names, except for those in `changes`.
        """
        fields = inspect.signature(rule).parameters
        names = [name for name in fields if name not in changes and name in self.parameters]
        made = rule(**{name: getattr(self, name) for name in names}, **changes)
        return NormClipping(made, self.ord, Action(self.eps, skip=self.on_spike == "skip"))


class Warmup(Configured):
    """The parameters of clippers with statistics of the norms themselves."""

    include_current: bool = parameter(parameters.boolean, default=False)
    """Learn a norm before judging it; needs ``feedback="raw"``."""
    warmup: int = parameter(parameters.integer, 0, default=20)
    """Norms, >= 0, before the statistics set the limit; they never limit the first one. Shared:
    norms of all clients count, except the first of each."""
    warmup_norm: float | None = parameter(parameters.limit, default=None)
    """Fixed limit during the warm-up, > 0, in units of the gradient."""
    warmup_factor: float | None = parameter(parameters.at_least_one, default=2.25)
    """Limit during the warm-up, in medians of the last five norms, >= 1. Spikes are learnt as 1.1
    medians; the first five norms only fill the median. None: no limit; norms are learnt
    unclipped."""

    def __post_init__(self) -> None:
        """Check that a norm is learnt as it was seen."""
        feedback = getattr(self, "feedback", "clipped")
        if self.include_current and feedback != "raw":
            raise ValueError(f"include_current=True needs feedback='raw', got {feedback!r}")
        super().__post_init__()
