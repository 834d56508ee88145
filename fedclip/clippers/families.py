# SPDX-License-Identifier: Apache-2.0
"""Families of clippers: which parameters they share, and what is built from these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fedclip.clippers.base import Clipper
from fedclip.core.measures import MEANS, Order, check_order, degree
from fedclip.core.parameters import boolean, choice, integer, limit, non_negative, parameter
from fedclip.core.scopes import Groups, check_scope, in_table
from fedclip.rules import Rule
from fedclip.rules.constant import Constant
from fedclip.transforms import Action, NormClipping, SliceClipping, Transform
from fedclip.transforms.slice import check_dims, check_slices

_NORMS = [word for word in MEANS if degree(word) == 1]


def _orders(words: Sequence[str]) -> str:
    return "float or {" + ", ".join(f'"{word}"' for word in ("inf", *words)) + "}"


ORD_VAR = parameter(check_order, default=2, kind=_orders(MEANS))
"""Orders with the variance, for limits that are fixed."""
SCOPE_TABLE = parameter(
    partial(check_scope, limits=True),
    default="global",
    kind='{"global", "tensor", "layer"}, list of patterns or table',
)
"""A scope that may be a table of limits."""


def as_tuple(dims: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the parameter `dims` as transforms take it."""
    found = check_dims(dims=dims)
    return None if found is None else tuple(found)


class SlicedClipper(Clipper, register=False):
    """Base of clippers that can treat each slice of a tensor separately."""

    dims: int | Sequence[int] | None = parameter(
        check_dims, default=None, kind="int, list of int or None"
    )
    """Each slice of a tensor is a group, and spans these dimensions; negative ones count from the
    end. Only with the scopes "global" and "tensor", then equal."""
    inverse_dims: bool = parameter(boolean, default=False)
    """Slices span all dimensions except `dims`."""
    min_size: int = parameter(integer, 1, default=1)
    """Skip slices, or with the scope "tensor" tensors, with fewer elements."""


class MeasuredClipper(Clipper, register=False):
    """Base of clippers that measure a norm."""

    ord: Order = parameter(check_order, default=2, kind=_orders(_NORMS))
    """Order of the norm, see `fedclip.core.measures`; 2 is the Euclidean norm."""


class ExactClipper(MeasuredClipper, register=False):
    """Base of clippers that bring a norm to a limit."""

    eps: float = parameter(non_negative, default=0.0)
    """Added to the norm in the factor ``limit / (n + eps)``, >= 0; 0 is exact."""


class FixedClipper(SlicedClipper, ExactClipper, register=False):
    """Base of clippers that bring the norm of a group, or of a slice, to a fixed limit."""

    scope = SCOPE_TABLE
    ord = ORD_VAR

    def _fixed(self, limit: float, action: Action) -> Transform:
        """Return the transform that brings the norms of groups, or of slices, to a fixed limit."""
        check_slices(self.dims, self.scope, self.inverse_dims, self.min_size)
        if self.dims is None and self.min_size == 1:
            return NormClipping(Constant((limit,)), self.ord, action)
        dims = as_tuple(self.dims)
        return SliceClipping(limit, dims, self.inverse_dims, self.min_size, self.ord, action)

    def _by_table(self, groups: Groups, rest: float) -> Transform:
        """Return the transform with the limits of a table in `scope`, if it is one."""
        # A dict, as `check_scope` returns: to ask for a Mapping takes five times as long.
        if not isinstance(self.scope, dict) or not isinstance(self._transform, NormClipping):
            return self._transform
        limits = tuple(in_table(self.scope, label, rest) for label in groups.labels)
        return replace(self._transform, rule=Constant(limits))


class LimitedClipper(ExactClipper, register=False):
    """Base of clippers whose limit follows from past norms."""

    max_norm: float | None = parameter(limit, default=None)
    """Largest limit ever, > 0, in units of the gradient."""
    on_spike: str = parameter(choice, ("clip", "skip"), default="clip")
    """Clip a group above its limit ("clip"), or set it to zero ("skip"); torch and Keras loops then
    skip its step."""

    def with_rule(self, rule: Callable[..., Rule], **own: object) -> NormClipping:
        """Return the transform that brings norms to the limits of a rule.

        The rule gets the clipper's parameters of the same names, except for those given.
        """
        wanted = inspect.signature(rule).parameters
        names = [name for name in wanted if name not in own and name in self.parameters]
        made = rule(**{name: getattr(self, name) for name in names}, **own)
        return NormClipping(made, self.ord, Action(self.eps, skip=self.on_spike == "skip"))
