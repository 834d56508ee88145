# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient, and the protocol of transforms: what a clipper does to one gradient.

::

    gradient = Gradient.of(arrays)         one framework and dtypes that can be clipped; repeated
                                           rows merged, the machine's byte order, host views
    measured = gradient.measured(...)      on the host: None if anything is not finite
    outcome  = gradient.outcome(...)       with transform.step(...); or, on a device, all in one:
                                           transform.device_step(...)
    arrays   = gradient.result(...)        in the byte order in which they came
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import Context
from functools import cached_property, reduce
from operator import is_not
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import NOWHERE, NUMPY, Array, Backend, Host, HostView, Memory, Views, backend_of
from fedclip.arrays.numpy import bits
from fedclip.measures import Numbers, all_finite
from fedclip.rules import LEARNT, Basis, NoState, State
from fedclip.scopes import Groups
from fedclip.states import Statistics
from fedclip.transforms.action import DTYPES

Bools = np.ndarray[Any, np.dtype[np.bool_]]

# A context variable tells NumPy how to handle floating-point errors. Call functions in a copy of
# this context, which ignores them: with `np.errstate`, a quiet step of `norm-clip` takes 15 %
# longer ("20 tensors, 2.7k" of `make bench`).
_QUIET = Context()
_QUIET.run(np.seterr, all="ignore")
# Made once: what compiled code looks up while it is traced has to stay as it is.
_NO_VIEWS = Views([])


class Gradient:
    """One gradient, as a transform sees it.

    Attributes
    ----------
    arrays : sequence of arrays
        The arrays of all groups, of one framework, prepared; never changed in place.
    views : Views
        Host views of the arrays; None for an array on a device. Empty in compiled code.
    groups : Groups
        Which arrays share a norm.
    backend : Backend
        The framework.
    kept : dict
        Arrays that the transform keeps for each tensor, by name and field; a step may change it.
    rest : dict
        Excluded tensors of floats or complex numbers, by name: they are not clipped, but NaN in
        one of them is NaN in the gradient.
    memory : Memory or None
        Memory for outputs; None for new memory.
    """

    __slots__ = (
        "_given",
        "arrays",
        "backend",
        "groups",
        "kept",
        "memory",
        "rest",
        "views",
    )

    def __init__(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        views: Views | None = None,
        kept: Statistics | None = None,
        rest: Mapping[str, Array] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.arrays, self.groups, self.backend = arrays, groups, backend
        self.views = _NO_VIEWS if views is None else views
        self.kept = {} if kept is None else kept
        self.rest = {} if rest is None else rest
        self.memory = memory
        self._given: Sequence[Array] = arrays

    @classmethod
    def of(
        cls,
        clipper: str,
        arrays: Mapping[str, Array],
        groups: Groups,
        backend: Backend | None = None,
        kept: Statistics | None = None,
        memory: Memory | None = None,
    ) -> Gradient:
        """Return the gradient of arrays by name, prepared for a transform.

        Raises
        ------
        TypeError
            With the name of the clipper, if an array can not be clipped, or not with the others.
        """
        # Without exclusions, the mapping has the names of the groups, in the same order.
        given, rest = [*arrays.values()], {}
        if groups.excluded:
            given = [arrays[name] for name in groups.names]
            rest = {n: a for n, a in arrays.items() if n in groups.excluded and _can_be_nan(a)}
        if backend is None:
            backend = _backend(groups.names, given or [*rest.values()])
        views, prepared = backend.host(given) if given else _NO_VIEWS, given
        # To ask each array of a usual gradient would take a quarter of a step of `norm-clip`
        # ("20 tensors, 2.7k" of `make bench`).
        if not views.usual:
            _check_dtypes(clipper, groups.names, given)
            prepared = [*backend.prepared(given)]
            if any(map(is_not, prepared, given)):
                views = backend.host(prepared)
        gradient = cls(prepared, groups, backend, views, kept, rest, memory)
        gradient._given = given
        return gradient

    def measured(self, transform: Transform) -> Numbers | None:
        """Return what the transform measures on the host; None if anything is not finite."""
        return _QUIET.copy().run(self._measured, transform)

    def _measured(self, transform: Transform) -> Numbers | None:
        found = transform.measure(self)
        finite = math.isfinite(found) if type(found) is float else np.isfinite(found).all()
        return found if finite and (not self.rest or self.rest_is_finite()) else None

    def outcome(self, transform: Transform, state: State) -> Outcome | None:
        """Return the outcome of a step on the host; None if anything is not finite."""
        return _QUIET.copy().run(self._outcome, transform, state)

    def _outcome(self, transform: Transform, state: State) -> Outcome | None:
        measured = self._measured(transform)
        return None if measured is None else transform.step(self, measured, state)

    def result(
        self, arrays: Mapping[str, Array], outputs: Sequence[Array], rest: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the arrays by name, with the outputs in the byte order in which they came."""
        if self._given is not self.arrays:
            trios = zip(outputs, self.arrays, self._given, strict=True)
            outputs = [g if o is a else self.backend.restored(o, g) for o, a, g in trios]
        if not self.groups.excluded:
            return dict(zip(arrays, outputs, strict=True))
        clipped = dict(arrays)
        clipped.update(zip(self.groups.names, outputs, strict=True))
        clipped.update(rest)
        return clipped

    def host(self, places: Sequence[int]) -> Host:
        """Return where some of the arrays lie, and, of large gradients, their outputs may go."""
        memory, views = self.memory, self.views
        if views.remote or not self.backend.writes:
            return NOWHERE
        some: Any = [views[i] for i in places]
        if memory is None:
            return Host(some, [None] * len(places))
        return Host(some, memory.like(places, views) if memory.serves(views.form.sizes) else ())

    def empty(self, i: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostView:
        """Return an uninitialised array in C order for the output of array i."""
        (out,) = self.host((i,)).outs or (None,)
        if out is None or not out.flags.c_contiguous or out.dtype != dtype:
            return np.empty(shape, dtype)
        return out.reshape(shape)

    def rest_is_finite(self) -> bool:
        """Whether the excluded tensors hold neither NaN nor infinity."""
        if not self.rest:
            return True
        backend = self.backend
        rest = [*backend.prepared(self._real_rest())]
        return _QUIET.copy().run(all_finite, _local(rest, backend.host(rest), backend))

    def _real_rest(self) -> list[Array]:
        """Return the excluded tensors; for one of another dtype, NaN where it is not finite."""
        xp = self.backend
        return [
            a if xp.dtype(a) in DTYPES else xp.where(xp.isfinite(a), 0.0, math.nan)
            for a in self.rest.values()
        ]

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
        found = map(self.backend.to_host, [*self.arrays, *self._real_rest()])
        return tuple(
            i for i, a in enumerate(found) if not np.isfinite(np.asarray(a, np.float64)).all()
        )

    def finite(self, *measured: Array) -> Array:
        """Whether all measures and the excluded tensors are finite; an array on the device."""
        return self.all_fine(*map(self.backend.isfinite, measured))

    def all_fine(self, *fine: Array) -> Array:
        """Whether all these hold, and the excluded tensors are finite; an array on the device."""
        xp = self.backend
        if self.rest:
            rest = [*xp.prepared(self._real_rest())]
            fine += (xp.isfinite(xp.group_norms(rest, [range(len(rest))])),)
        return reduce(operator.and_, map(xp.all, fine))

    def largest(self, numbers: Sequence[Array]) -> Array:
        """Return the largest number of each group, of arrays of shape () for each array."""
        xp = self.backend
        found = [[numbers[i] for i in members] for members in self.groups.members]
        return xp.stack([n[0] if len(n) == 1 else xp.max(xp.stack(n)) for n in found])

    def settled(
        self, outputs: Sequence[Array], fine: Array, finite: Array, on_nonfinite: str
    ) -> list[Array]:
        """Return the outputs of a step on a device, as `on_nonfinite` wants them.

        `fine` says which groups are finite, and `finite` whether all the gradient is. In a step
        that is passed on, the groups that are finite stay as they are, as on the host; rows of
        sparse arrays, and what was clipped in place, stay clipped.
        """
        xp, result = self.backend, list(outputs)
        if on_nonfinite == "skip":
            return xp.keep_if(finite, result)
        factors = xp.where(fine, 1.0, math.nan)
        for group, members in enumerate(self.groups.members):
            for i in members:
                if xp.dense(result[i]) is result[i]:
                    kept = xp.where(finite, result[i], xp.dense(self.arrays[i]))
                    result[i] = xp.stored(kept, self.arrays[i])
                (result[i],) = xp.multiply([result[i]], xp.of_group(factors, group))
        return result

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


def put(column: list[Array], places: Sequence[int], values: Sequence[Array]) -> None:
    """Put values into a list, at these places."""
    for i, value in zip(places, values, strict=True):
        column[i] = value


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

    def kept_on_device(self, gradient: Gradient) -> Statistics:
        """Return the arrays kept for the tensors of a gradient, on its device, by name and field.

        Those in `gradient.kept` may be of the host; a tensor without any gets new ones.
        """
        return {}

    def init(self, groups: Groups) -> State:
        """Return the state before the first step: a NamedTuple of arrays over groups."""
        return NoState()

    @abstractmethod
    def measure(self, gradient: Gradient) -> Numbers:
        """Return all measures of the arrays; they are finite if, and only if, the arrays are."""

    @abstractmethod
    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient whose measures are finite."""

    @cached_property
    def basis(self) -> Basis:
        """Where the limits come from: those of a rule that does not say are learnt."""
        basis: Basis = getattr(getattr(self, "rule", None), "basis", LEARNT)
        return basis

    @property
    def runs_on_device(self) -> bool:
        """Whether there is a step for devices and compiled code."""
        return type(self).device_step is not Transform.device_step

    @property
    def runs_on_parts(self) -> bool:
        """Whether that step needs of the elements only norms and extremes.

        These are found together by processes that hold a part of each array. For other steps,
        each process gets the arrays whole.
        """
        return False

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient in the framework's own operations.

        `state` and `gradient.kept` hold arrays of the framework; the step puts new arrays into
        `kept`. `on_nonfinite` is "skip" or "propagate", not "raise": the host would have to wait
        for the device.

        Raises
        ------
        NotImplementedError
            If the transform works on the host only.
        """
        raise NotImplementedError(f"{self} works on the host only")


class Carried(NamedTuple):
    """The state, in compiled code, of a transform that keeps arrays for each tensor."""

    groups: State
    """A NamedTuple of arrays over groups."""
    arrays: Statistics
    """Arrays by tensor and field."""


def carried(
    transform: Transform,
    arrays: Mapping[str, Array],
    groups: Groups,
    backend: Backend,
    state: State,
    kept: Statistics,
) -> State:
    """Return a state for `clip_on_device`, on the device of the arrays.

    `state` holds the numbers of the groups, and `kept` arrays of the host for tensors that are
    known. Of the arrays, only dtype, shape and device count.
    """
    given = [arrays[name] for name in groups.names]
    if state:
        columns = (backend.asarray(np.atleast_1d(c), like=given[0]) for c in state)
        state = type(state)(*columns)
    if not transform.array_fields:
        return state
    gradient = Gradient(given, groups, backend, kept=dict(kept))
    return Carried(state, transform.kept_on_device(gradient))


def clip_on_device(
    transform: Transform,
    arrays: Mapping[str, Array],
    groups: Groups,
    backend: Backend,
    state: State,
    on_nonfinite: str,
) -> tuple[dict[str, Array], Outcome]:
    """Return the clipped arrays by name, in the framework's own operations, and the outcome.

    If the gradient is not finite and the policy is "skip", excluded tensors become zero too. A
    state of another number of groups raises a ValueError: frameworks would repeat it.
    """
    given = [arrays[name] for name in groups.names]
    rest = {n: a for n, a in arrays.items() if n in groups.excluded and _can_be_nan(a)}
    kept: Statistics = {}
    if transform.array_fields:
        if not isinstance(state, Carried):
            raise TypeError(f"{transform} keeps arrays: its state must be one of `carried`")
        state, kept = state
    if state and tuple(state[0].shape)[-1:] not in ((), (len(groups),)):
        raise ValueError(
            f"the state is of {state[0].shape[-1]} groups of tensors, and this gradient has "
            f"{len(groups)}: give each step the tensors that the state was made for"
        )
    gradient = Gradient(backend.prepared(given), groups, backend, kept=dict(kept), rest=rest)
    outcome = transform.device_step(gradient, state, on_nonfinite)
    clipped = {**arrays, **dict(zip(groups.names, outcome.outputs, strict=True))}
    clipped.update(gradient.rest_after(outcome, on_nonfinite))
    if transform.array_fields:
        outcome = outcome._replace(state=Carried(outcome.state, gradient.kept))
    return clipped, outcome


def _can_be_nan(array: Array) -> bool:
    """Whether an array of this dtype can hold NaN or infinity."""
    dtype = backend_of(array).dtype(array)
    return dtype in DTYPES or dtype.startswith(("complex", "float128"))


def _backend(names: Sequence[str], values: Sequence[Array]) -> Backend:
    backend = backend_of(values[0]) if values else NUMPY
    if len({*map(type, values)}) > 1:
        others = [n for n, v in zip(names, values, strict=False) if backend_of(v) is not backend]
        if others:
            raise TypeError(
                f"tensors of one gradient must be of one framework: {names[0]!r} is of "
                f"{backend.name}, {others[0]!r} is not"
            )
    return backend


def _check_dtypes(clipper: str, names: Sequence[str], arrays: Sequence[Array]) -> None:
    for name, array in zip(names, arrays, strict=True):
        dtype = backend_of(array).dtype(array)
        if dtype not in DTYPES:
            raise TypeError(
                f"{clipper} clips {', '.join(DTYPES)}; {name!r} is {dtype}: convert it, or put "
                "its name in exclude"
            )
