# SPDX-License-Identifier: Apache-2.0
"""What a clipper is made of: a transform of one gradient, on the host and on a device."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import Array, Backend, HostView, Views, backend_of
from fedclip.arrays.numpy import bits
from fedclip.measures import Numbers, all_finite
from fedclip.rules import NoState, State
from fedclip.scopes import Groups
from fedclip.states import Statistics
from fedclip.transforms.action import MARGIN

__all__ = ["Bools", "Gradient", "Outcome", "Transform", "clip_on_device"]

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Gradient:
    """One gradient: all that a transform may look at.

    Attributes
    ----------
    arrays : sequence of arrays
        The arrays of all groups, of one framework; never changed in place.
    views : Views
        Their host views; None for an array that stays on its device. Empty in compiled code.
    groups : Groups
        Which arrays share a norm.
    backend : Backend
        The framework.
    kept : dict
        Arrays that the transform keeps of each tensor, by name and field; a step may change it.
    rest : dict
        Tensors of floats that no group has, by name: they are not clipped, but NaN in one of
        them is NaN in the gradient.
    """

    __slots__ = ("arrays", "backend", "groups", "kept", "rest", "views")

    def __init__(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        views: Views | None = None,
        kept: Statistics | None = None,
        rest: Mapping[str, Array] | None = None,
    ) -> None:
        self.arrays, self.groups, self.backend = arrays, groups, backend
        self.views = Views([]) if views is None else views
        self.kept = {} if kept is None else kept
        self.rest = {} if rest is None else rest

    def rest_is_finite(self) -> bool:
        """Whether what is left alone holds neither NaN nor infinity."""
        rest = [*self.backend.prepared([*self.rest.values()])]
        views = self.backend.host(rest)
        return all_finite(_local(rest, views, self.backend))

    def rest_after(self, outcome: Outcome, on_nonfinite: str) -> Mapping[str, Array]:
        """Return what is left alone, as it is; zeros on a device that skips the step."""
        if not self.rest or on_nonfinite != "skip":
            return self.rest
        kept = self.backend.keep_if(outcome.finite, [*self.rest.values()])
        return dict(zip(self.rest, kept, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, and of those that are left alone."""
        return (*self.groups.names, *self.rest)

    def nonfinite(self) -> tuple[int, ...]:
        """Return the positions of what holds NaN or infinity, in `names`."""
        found = map(self.backend.to_host, [*self.arrays, *self.rest.values()])
        return tuple(
            i for i, a in enumerate(found) if not np.isfinite(np.asarray(a, np.float64)).all()
        )

    def finite(self, *measured: Array) -> Array:
        """Whether all that was measured, and what is left alone, is finite; on the device."""
        xp = self.backend
        if self.rest:
            rest = [*self.rest.values()]
            measured += (xp.group_norms(rest, [range(len(rest))]),)
        found = [xp.all(xp.isfinite(numbers)) for numbers in measured]
        return reduce(operator.and_, found)

    def local(self) -> list[HostView]:
        """Return the arrays in host memory; of sparse ones, the merged rows."""
        return _local(self.arrays, self.views, self.backend)

    def dense(self) -> list[HostView]:
        """Return the arrays in host memory, C-contiguous; sparse ones with all their zeros."""
        result = []
        for array, view in zip(self.arrays, self.views, strict=True):
            dense = self.backend.dense(array)
            if dense is not array:
                (view,) = self.backend.host([dense])
            local = bits(self.backend.to_host(dense)) if view is None else view
            result.append(np.asarray(local, order="C"))
        return result

    def from_host(self, i: int, values: HostView) -> Array:
        """Return values in host memory in the place of an array, dense, on its device."""
        return self.backend.from_host(values, self.backend.dense(self.arrays[i]))

    def host_dtype(self, i: int) -> np.dtype[Any]:
        """Return the dtype in which a host view shows an array: bfloat16 as uint16."""
        name = self.backend.dtype(self.arrays[i])
        return np.dtype(np.uint16 if name == "bfloat16" else name)


def _local(arrays: Sequence[Array], views: Views, backend: Backend) -> list[HostView]:
    pairs = zip(arrays, views, strict=True)
    return [bits(backend.to_host(a)) if view is None else view for a, view in pairs]


class Outcome(NamedTuple):
    """What one step did: new arrays, state, and one number a group."""

    outputs: Any
    """A list of arrays; or None, from a step on the host that leaves all as they are."""
    state: State
    norms: Any
    limits: Any
    clipped: Any
    finite: Any = True
    """Whether the gradient is finite; a step on the host is only asked where it is."""


class Transform(ABC):
    """What a clipper does to a gradient.

    A step on the host measures first, so that NaN and infinity never reach `step`. A step on a
    device, or in compiled code, must not branch on a value, and does all in one; a transform
    that has one says so in `runs_on_device`.
    """

    array_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays that are kept of each tensor, if any."""

    def init(self, groups: Groups) -> State:
        """Return the state before the first step: a NamedTuple of arrays over groups."""
        return NoState()

    @abstractmethod
    def measure(self, gradient: Gradient) -> Numbers:
        """Return all that is read off the arrays; finite if, and only if, they are."""

    @abstractmethod
    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient whose measures are finite."""

    @property
    def runs_on_device(self) -> bool:
        """Whether there is a step for devices and compiled code."""
        return False

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient in the framework's own operations.

        `state` is of arrays of the framework, and `on_nonfinite` is "skip" or "propagate": to
        raise, the host would have to wait for the device.

        Raises
        ------
        NotImplementedError
            If the transform works on the host only.
        """
        raise NotImplementedError(
            f"{self} works on the host only; on a device and in compiled code use a clipper "
            "by L2 norms (ord=2) or by values"
        )


def clip_on_device(
    transform: Transform,
    arrays: Mapping[str, Array],
    groups: Groups,
    backend: Backend,
    state: State,
    on_nonfinite: str,
) -> tuple[dict[str, Array], Outcome]:
    """Return the arrays by name, clipped in the framework's own operations, and what was done.

    Where the gradient is not finite, and the policy is "skip", tensors that no group has become
    zero like all others.
    """
    given = [arrays[name] for name in groups.names]
    rest = {n: a for n, a in arrays.items() if n in groups.excluded and is_float(a)}
    gradient = Gradient(backend.prepared(given), groups, backend, rest=rest)
    outcome = transform.device_step(gradient, state, on_nonfinite)
    clipped = {**arrays, **dict(zip(groups.names, outcome.outputs, strict=True))}
    clipped.update(gradient.rest_after(outcome, on_nonfinite))
    return clipped, outcome


def is_float(array: Array) -> bool:
    """Whether an array is of a dtype that can be clipped, and so can hold NaN."""
    return backend_of(array).dtype(array) in MARGIN
