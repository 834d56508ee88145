# SPDX-License-Identifier: Apache-2.0
"""The protocol of transforms: what a clipper does to one gradient, on the host or a device."""

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

__all__ = [
    "Bools",
    "Gradient",
    "Outcome",
    "Transform",
    "check_dtypes",
    "clip_on_device",
    "is_float",
]

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Gradient:
    """One gradient, as a transform sees it.

    Attributes
    ----------
    arrays : sequence of arrays
        The arrays of all groups, of one framework; never changed in place.
    views : Views
        Host views of the arrays; None for an array on a device. Empty in compiled code.
    groups : Groups
        Which arrays share a norm.
    backend : Backend
        The framework.
    kept : dict
        Arrays that the transform keeps for each tensor, by name and field; a step may change it.
    rest : dict
        Excluded tensors of floats, by name: they are not clipped, but NaN in one of them is NaN
        in the gradient.
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
        """Whether the excluded tensors hold neither NaN nor infinity."""
        rest = [*self.backend.prepared([*self.rest.values()])]
        views = self.backend.host(rest)
        return all_finite(_local(rest, views, self.backend))

    def rest_after(self, outcome: Outcome, on_nonfinite: str) -> Mapping[str, Array]:
        """Return the excluded tensors unchanged, or zeros if a device skips the step."""
        if not self.rest or on_nonfinite != "skip":
            return self.rest
        kept = self.backend.keep_if(outcome.finite, [*self.rest.values()])
        return dict(zip(self.rest, kept, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, then of the excluded tensors."""
        return (*self.groups.names, *self.rest)

    def nonfinite(self) -> tuple[int, ...]:
        """Return the positions, in `names`, of tensors that hold NaN or infinity."""
        found = map(self.backend.to_host, [*self.arrays, *self.rest.values()])
        return tuple(
            i for i, a in enumerate(found) if not np.isfinite(np.asarray(a, np.float64)).all()
        )

    def finite(self, *measured: Array) -> Array:
        """Whether all measures and the excluded tensors are finite; an array on the device."""
        xp = self.backend
        if self.rest:
            rest = [*self.rest.values()]
            measured += (xp.group_norms(rest, [range(len(rest))]),)
        found = [xp.all(xp.isfinite(numbers)) for numbers in measured]
        return reduce(operator.and_, found)

    def local(self) -> list[HostView]:
        """Return the arrays in host memory; of a sparse array, its merged rows."""
        return _local(self.arrays, self.views, self.backend)

    def dense(self) -> list[HostView]:
        """Return the arrays in host memory, dense and C-contiguous."""
        result = []
        for array, view in zip(self.arrays, self.views, strict=True):
            dense = self.backend.dense(array)
            if dense is not array:
                (view,) = self.backend.host([dense])
            local = bits(self.backend.to_host(dense)) if view is None else view
            result.append(np.asarray(local, order="C"))
        return result

    def from_host(self, i: int, values: HostView) -> Array:
        """Return host values as a dense array on the device of array i."""
        return self.backend.from_host(values, self.backend.dense(self.arrays[i]))

    def host_dtype(self, i: int) -> np.dtype[Any]:
        """Return the dtype of the host view of array i: uint16 for bfloat16."""
        name = self.backend.dtype(self.arrays[i])
        return np.dtype(np.uint16 if name == "bfloat16" else name)


def _local(arrays: Sequence[Array], views: Views, backend: Backend) -> list[HostView]:
    pairs = zip(arrays, views, strict=True)
    return [bits(backend.to_host(a)) if view is None else view for a, view in pairs]


class Outcome(NamedTuple):
    """What one step did: new arrays, state, and one number for each group."""

    outputs: Any
    """The new arrays; None if a step on the host changed nothing."""
    state: State
    norms: Any
    limits: Any
    clipped: Any
    finite: Any = True
    """Whether the gradient is finite; always True for a step on the host."""


class Transform(ABC):
    """What a clipper does to a gradient.

    On the host, `measure` comes first, so that NaN and infinity never reach `step`. On a device
    and in compiled code, Python must not branch on a value, and `device_step` does everything;
    `runs_on_device` says whether the transform has one.
    """

    array_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays that the transform keeps for each tensor, if any."""

    def init(self, groups: Groups) -> State:
        """Return the state before the first step: a NamedTuple of arrays over groups."""
        return NoState()

    @abstractmethod
    def measure(self, gradient: Gradient) -> Numbers:
        """Return all measures of the arrays; they are finite if, and only if, the arrays are."""

    @abstractmethod
    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient whose measures are finite."""

    @property
    def runs_on_device(self) -> bool:
        """Whether there is a step for devices and compiled code."""
        return False

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient in the framework's own operations.

        `state` holds arrays of the framework. `on_nonfinite` is "skip" or "propagate", not
        "raise": the host would have to wait for the device.

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
    """Return the clipped arrays by name, in the framework's own operations, and the outcome.

    If the gradient is not finite and the policy is "skip", excluded tensors become zero too.
    """
    given = [arrays[name] for name in groups.names]
    rest = {n: a for n, a in arrays.items() if n in groups.excluded and is_float(a)}
    gradient = Gradient(backend.prepared(given), groups, backend, rest=rest)
    outcome = transform.device_step(gradient, state, on_nonfinite)
    clipped = {**arrays, **dict(zip(groups.names, outcome.outputs, strict=True))}
    clipped.update(gradient.rest_after(outcome, on_nonfinite))
    return clipped, outcome


def is_float(array: Array) -> bool:
    """Whether the dtype of an array is a float, which can be clipped and can be NaN."""
    return backend_of(array).dtype(array) in MARGIN


def check_dtypes(clipper: str, names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Raise a TypeError, with the clipper's name, for an array that can not be clipped."""
    for name, array in zip(names, arrays, strict=True):
        dtype = backend_of(array).dtype(array)
        if dtype not in MARGIN:
            raise TypeError(
                f"{clipper} clips {', '.join(MARGIN)}; {name!r} is {dtype}: convert it, or put "
                "its name in exclude"
            )
