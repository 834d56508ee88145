# SPDX-License-Identifier: Apache-2.0
"""The path of a gradient, and the protocol of transforms: what a clipper does to one gradient.

::

    gradient = prepare(clipper, arrays, ...)     one framework, dtypes that can be clipped; repeated
                                                 rows merged; NumPy views on the host
    outcome  = transform.step(gradient, state)   measure, ask the rule
    outcome  = finish(gradient, outcome)         multiply; arrays of the framework
    arrays   = gradient.result(arrays, outcome)  by name

What does not change between gradients of the same names, shapes and dtypes is in a `Plan`, which
`prepare` makes once. A step is one text for the host, for devices and for compiled code: it works
on `gradient.arrays` by the operations of `gradient.xp`. `fedclip.arrays` knows what a framework can
do; each transform knows its limit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from functools import cached_property
from operator import attrgetter, is_not
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import NUMPY, Array, Arrays, Backend, Memory, backend_of, with_others
from fedclip.arrays.base import FLOATS
from fedclip.arrays.blocks import Layout, decode, encode, layout_of
from fedclip.arrays.numpy import NumpyBackend, bits
from fedclip.core.scopes import Groups
from fedclip.core.states import Statistics
from fedclip.rules import LEARNT, Basis, NoState, State
from fedclip.transforms.action import DTYPES

# A context variable tells NumPy how to handle floating-point errors. Steps run in a copy of this
# context, which ignores them: with `np.errstate`, a step of `norm-clip` takes 15 % longer.
_QUIET = Context()
_QUIET.run(np.seterr, all="ignore")
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class NotFiniteError(Exception):
    """A step that is not taken, because the host has seen NaN or infinity."""


class Outcome(NamedTuple):
    """What one step did: new arrays, state, and one number for each group.

    Attributes
    ----------
    outputs : sequence of arrays
        The new arrays; on the host the very same array where nothing changes.
    finite : bool or array
        Whether the gradient is finite; always True for a step on the host.
    factors : sequence of arrays or None
        Factors by which `finish` multiplies the gradient's arrays, which are the outputs.
    """

    outputs: Arrays
    state: State
    norms: Array
    limits: Array
    clipped: Array
    finite: Array = True
    factors: Arrays | None = None


class Plan(NamedTuple):
    """What gradients of the same names, shapes and dtypes have in common.

    Attributes
    ----------
    backend : Backend
        The framework.
    dtypes : tuple of str
        The dtype of each array.
    form : tuple
        Backend, classes, dtypes and shapes of the arrays; empty for arrays on a device.
    is_empty : bool
        Whether no array has elements.
    keeps_memory : bool
        Whether new arrays are written to memory that the clipper keeps.
    layout : Layout
        How the squares of arrays on the host are added up.
    """

    groups: Groups
    backend: Backend
    dtypes: tuple[str, ...]
    form: tuple[Any, ...] = ()
    is_empty: bool = False
    keeps_memory: bool = False
    layout: Layout | None = None


class Gradient:
    """One gradient, as a transform sees it.

    Attributes
    ----------
    plan : Plan
        What it has in common with gradients of the same names, shapes and dtypes.
    arrays : sequence of arrays
        The arrays of all groups: NumPy views on the host, else of the framework; dense if the
        transform needs dense ones. A step never changes them.
    groups : Groups
        Which arrays share a norm.
    xp : Backend
        The operations on the arrays, and on numbers of groups.
    on_host : bool
        Whether the arrays are NumPy views.
    cached : dict
        Arrays that the transform keeps for each tensor, by name and field.
    is_finite : bool or array
        Whether the gradient is finite, after `finite_norms`; on a device, an array.
    waits : bool
        Whether a step that is not finite is not taken: the host looks, and may wait for a device.
    excluded : dict
        Excluded tensors of floats or complex numbers, by name: they are not clipped, but NaN in
        one of them is NaN in the gradient.
    """

    def __init__(
        self,
        plan: Plan,
        arrays: Arrays,
        native: Arrays,
        inputs: Arrays,
        excluded: Mapping[str, Array],
        xp: Backend | None = None,
    ) -> None:
        self.plan, self.groups, self.arrays = plan, plan.groups, arrays
        # The same with repeated rows merged, of the framework; and as the caller gave them.
        self.native, self.inputs, self.excluded = native, inputs, excluded
        self.xp = xp or plan.backend
        self.on_host = self.waits = xp is not None
        self.cached: Statistics = {}
        self._excluded_after: Mapping[str, Array] = {}
        self._norms: Array = None
        self.is_finite: Array = True

    # -- what a transform asks for ------------------------------------------------------------
    def finite_norms(self, norms: Array, parts: Array = None) -> Array:
        """Return the norms of the groups; zeros if anything in the gradient is not finite.

        A norm has to be finite if, and only if, all elements of its group are. If one is not, a
        step on the host ends here. A device adds up `parts` instead, if that is quicker.
        """
        xp = self.xp
        total = sum(norms.tolist()) if self.on_host else xp.sum(norms if parts is None else parts)
        if self.excluded and not self.on_host:
            total = total + xp.sum(_excluded_norm(self.excluded.values(), xp))
        # NaN is not below anything.
        self._norms, self.is_finite = norms, total < math.inf
        if not self.waits:
            return xp.where(self.is_finite, norms, 0.0)
        if not self.is_finite or (self.on_host and self.excluded and not self.excluded_is_finite()):
            raise NotFiniteError
        return norms

    def finite_peaks(self) -> tuple[Array, Array]:
        """Return the largest absolute element of each tensor, and of each group.

        Those of the groups are treated as `finite_norms` treats norms.
        """
        peaks = self.xp.max_abs(self.arrays)
        largest = self.xp.group_max(peaks, self.groups.owners, len(self.groups))
        return peaks, self.finite_norms(largest)

    # -- what a clipper asks for --------------------------------------------------------------
    def replaced(self, on_nonfinite: str) -> Arrays:
        """Return the outputs of a step that is not taken: zeros, or NaN in each group with NaN."""
        outputs, xp = list(self.arrays), self.xp
        if on_nonfinite == "skip":
            self._skip_excluded(False)
            return _returned(self, xp.keep_if(False, outputs))
        # If no norm is known to be at fault, all are.
        norms = np.zeros(len(self.groups)) if self._norms is None else self._norms
        fine = np.isfinite(norms)
        fine = fine if not fine.all() or self.excluded else ~fine
        factors = by_tensor(np.where(fine, 1.0, math.nan), self.groups, xp)
        return _returned(self, xp.scale(outputs, factors))

    def _skip_excluded(self, finite: Array) -> None:
        """Set excluded tensors to zero if the step is not finite."""
        values = self.plan.backend.keep_if(finite, [*self.excluded.values()])
        self._excluded_after = dict(zip(self.excluded, values, strict=True))

    def result(self, arrays: Mapping[str, Array], outputs: Arrays) -> Mapping[str, Array]:
        """Return the outputs and the excluded tensors by name; `arrays` if nothing has changed."""
        after = self._excluded_after
        if outputs is self.inputs and not after:
            return arrays
        clipped = dict(zip(self.groups.names, outputs, strict=True))
        return {**arrays, **clipped, **after} if self.groups.excluded else clipped

    # -- where it is not finite ---------------------------------------------------------------
    def excluded_is_finite(self) -> bool:
        """Whether the excluded tensors hold neither NaN nor infinity; the host waits for them."""
        return all(_is_finite(a, self.plan.backend) for a in self.excluded.values())

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names of the tensors that hold NaN or infinity, the excluded ones last."""
        tensors = {**dict(zip(self.groups.names, self.native, strict=True)), **self.excluded}
        return tuple(n for n, array in tensors.items() if not _is_finite(array, self.plan.backend))


# -- prepare -------------------------------------------------------------------------------------
def prepare(
    clipper: str,
    arrays: Mapping[str, Array],
    groups: Groups,
    transform: Transform,
    backend: Backend | None = None,
    *,
    memory: Memory | None = None,
    plan: Plan | None = None,
) -> Gradient:
    """Return the gradient of arrays by name, prepared for a transform.

    The plan of the last gradient is used again if it fits; see `Gradient.plan`.

    Raises
    ------
    TypeError
        With the name of the clipper, if an array cannot be clipped, or not with the others.
    """
    are_all, names = groups.names == tuple(arrays), groups.names
    inputs: Arrays = [*arrays.values()] if are_all else [*map(arrays.__getitem__, names)]
    excluded = _floats_among(arrays, groups.excluded) if groups.excluded else {}
    types = {*map(type, inputs)}
    if backend is None and plan is not None and plan.form and plan.form[1] == types:
        backend = plan.backend
    elif backend is None:
        backend = _backend(groups.names, inputs or [*excluded.values()])
    native, copied = inputs, False
    views: Any = backend.dense_views(inputs)
    if views is None:
        native = _prepared(inputs, transform, backend)
        _check_dtypes(clipper, groups.names, inputs)
        views = backend.views(native)
        if any(view is None for view in views):
            # Sparse arrays, arrays on devices, and those of dtypes that NumPy lacks.
            if transform.runs_on_parts if backend.partial else transform.runs_on_device:
                return _native(groups, backend, native, inputs, excluded)
            views, copied = [_fetched(a, backend) for a in native], True
    xp = NumpyBackend(backend, views)
    form = backend, types, [*map(_dtype, views)], [*map(_shape, views)]
    if plan is None or plan.groups is not groups or plan.form != form:
        if not {*form[2]} <= FLOATS:
            _check_dtypes(clipper, groups.names, inputs)
        layout, is_empty = layout_of(views), not any(view.size for view in views)
        keeps = memory is not None and not backend.in_place and memory.serves(layout.nbytes)
        plan = Plan(groups, backend, _names(views, xp), form, is_empty, keeps, layout)
    xp.memory, xp.layout = memory if plan.keeps_memory else None, plan.layout
    xp.in_place = xp.in_place and not copied
    return Gradient(plan, views, native, inputs, excluded, xp)


def _native(
    groups: Groups, backend: Backend, native: Arrays, inputs: Arrays, excluded: Mapping[str, Array]
) -> Gradient:
    """Return a gradient that stays where it is."""
    plan = Plan(groups, backend, _names(native, backend))
    return Gradient(plan, native, native, inputs, excluded)


def _names(arrays: Arrays, xp: Backend) -> tuple[str, ...]:
    return tuple([xp.dtype(array) for array in arrays])


def _prepared(inputs: Arrays, transform: Transform, backend: Backend) -> Arrays:
    arrays = backend.prepared(inputs)
    return [*map(backend.dense, arrays)] if transform.dense else arrays


def _fetched(array: Array, backend: Backend) -> Array:
    """Return a copy, in host memory, of what a view would show."""
    values, is_bfloat = bits(backend.to_host(array)), backend.dtype(array) == "bfloat16"
    return encode(decode(values), np.dtype(np.uint16)) if is_bfloat else values


def _floats_among(arrays: Mapping[str, Array], names: frozenset[str]) -> dict[str, Array]:
    """Return the arrays of some names, except those of dtypes without NaN and infinity."""
    dtypes = {n: backend_of(a).dtype(a) for n, a in arrays.items() if n in names}
    others = ("complex", "float128")
    return {n: arrays[n] for n, d in dtypes.items() if d in DTYPES or d.startswith(others)}


def _backend(names: Sequence[str], values: Arrays) -> Backend:
    backend = backend_of(values[0]) if values else NUMPY
    for name, value in zip(names, values, strict=False):
        if backend_of(value) is not backend:
            got = f"{names[0]!r} is of {backend.name}, {name!r} is not"
            raise TypeError(f"tensors of one gradient must be of one framework: {got}")
    return backend


def _check_dtypes(clipper: str, names: Sequence[str], arrays: Arrays) -> None:
    for name, array in zip(names, arrays, strict=True):
        dtype = backend_of(array).dtype(array)
        if dtype not in DTYPES:
            got = f"{name!r} is {dtype}: convert it, or put its name in exclude"
            raise TypeError(f"{clipper} clips {', '.join(DTYPES)}; {got}")


# -- step and finish -----------------------------------------------------------------------------
def take_step(
    transform: Transform, gradient: Gradient, state: State, on_nonfinite: str = "skip"
) -> Outcome:
    """Return the outcome of a step, with outputs of the framework.

    Raises
    ------
    NotFiniteError
        On the host, and on devices if `on_nonfinite` is "raise", where the host has to wait for
        them, if anything in the gradient is not finite. Nothing has changed then.
    """
    if gradient.on_host:
        quiet = _QUIET.copy()
        return quiet.run(finish, gradient, quiet.run(transform.step, gradient, state))
    gradient.waits = on_nonfinite == "raise"
    outcome = transform.step(gradient, state)
    if gradient.waits:
        return finish(gradient, outcome)
    return _finish_unseen(gradient, outcome, state, on_nonfinite, not transform.by_norms)


def finish(gradient: Gradient, outcome: Outcome) -> Outcome:
    """Multiply, and return the outcome with outputs of the framework."""
    outputs, state, norms, limits, clipped, finite, factors = outcome
    if factors is not None:
        outputs = gradient.xp.scale(gradient.arrays, factors)
    # Arrays of NumPy are their own views.
    if gradient.on_host and gradient.arrays is not gradient.inputs:
        outputs = _returned(gradient, outputs)
    elif outputs is not gradient.inputs and not any(map(is_not, outputs, gradient.inputs)):
        outputs = gradient.inputs
    return Outcome(outputs, state, norms, limits, clipped, finite)


def _returned(gradient: Gradient, outputs: Arrays) -> Arrays:
    """Return outputs of the host as arrays of the framework; the very same where unchanged."""
    native, backend = gradient.native, gradient.plan.backend
    # What was made dense to change it in place is new.
    inputs = native if gradient.xp.in_place else gradient.inputs
    if outputs is gradient.arrays:
        return inputs
    changed = [*map(is_not, outputs, gradient.arrays)]
    if not any(changed):
        return inputs
    if all(changed):
        return backend.from_host(outputs, native)
    places = [i for i, is_new in enumerate(changed) if is_new]
    made = backend.from_host([outputs[i] for i in places], [native[i] for i in places])
    return with_others(inputs, places, made)


def _finish_unseen(
    gradient: Gradient, outcome: Outcome, state: State, on_nonfinite: str, moves_others: bool
) -> Outcome:
    """Finish a step of which the host does not know whether it is finite.

    `moves_others`: a step that is not finite may have changed groups that are.

    In a step that is passed on, the groups that are finite stay unchanged, as on the host; rows of
    sparse arrays, and what was clipped in place, stay clipped.
    """
    xp, finite = gradient.xp, gradient.is_finite
    after = type(state)(*xp.choose([finite] * len(state), outcome.state, state))
    # Records know by the norm that a step was not finite. No norm of 0 is over a limit.
    norms, clipped = gradient._norms, outcome.clipped
    if moves_others:
        norms, clipped = xp.where(finite, outcome.norms, math.nan), clipped & finite
    outputs = outcome.outputs
    if outcome.factors is not None:
        outputs = xp.scale(gradient.arrays, outcome.factors)
    if outputs is not gradient.arrays:
        if on_nonfinite == "skip":
            outputs = xp.keep_if(finite, list(outputs))
        else:
            outputs = _passed_on(gradient, list(outputs), moves_others)
    if gradient.excluded and on_nonfinite == "skip":
        gradient._skip_excluded(finite)
    return Outcome(outputs, after, norms, outcome.limits, clipped, finite)


def _passed_on(gradient: Gradient, outputs: list[Array], moves_others: bool) -> Arrays:
    xp = gradient.xp
    if moves_others and not xp.in_place:
        dense = [i for i, array in enumerate(outputs) if xp.dense(array) is array]
        new, old = [outputs[i] for i in dense], [gradient.arrays[i] for i in dense]
        chosen = xp.choose([gradient.is_finite] * len(dense), new, old)
        outputs = with_others(outputs, dense, chosen)
    # NaN and infinity make NaN.
    return xp.scale(outputs, by_tensor(1.0 + 0.0 * gradient._norms, gradient.groups, xp))


def by_tensor(numbers: Array, groups: Groups, xp: Backend) -> list[Array]:
    """Return for each tensor the number of its group."""
    each = xp.pieces(numbers, [()] * len(groups.labels))
    return [*map(each.__getitem__, groups.owners)]


def _is_finite(array: Array, backend: Backend) -> bool:
    # A sum of repeated rows may overflow.
    (array,) = backend.prepared([array])
    return bool(np.isfinite(decode(bits(backend.to_host(array)))).all())


def _excluded_norm(arrays: Iterable[Array], xp: Backend) -> Array:
    """Return one norm that is finite if excluded tensors are; of any dtype that can be NaN."""
    # Of another dtype, only whether it is finite.
    usual = [(a, xp.dtype(a) in DTYPES) for a in arrays]
    real = [a if is_usual else xp.where(xp.isfinite(a), 0.0, math.nan) for a, is_usual in usual]
    return xp.group_norms(xp.prepared(real), [range(len(real))])


# -- transforms ----------------------------------------------------------------------------------
class Transform(ABC):
    """The step of a clipper on one gradient.

    Attributes
    ----------
    array_fields : tuple of str
        Names of the arrays that the transform keeps for each tensor, if any.
    dense : bool
        Whether it needs sparse arrays as dense ones.
    by_norms : bool
        Whether norms decide everything: `Gradient.finite_norms` gives zeros if not finite.
    runs_on_device : bool
        Whether its step runs on devices and in compiled code; if not, the host fetches arrays.
    runs_on_parts : bool
        Whether its step needs of elements only what `Backend` measures of each of them. Processes
        that hold a part of each array measure that together. For other steps, each process gets
        the arrays whole.
    """

    array_fields: ClassVar[tuple[str, ...]] = ()
    dense: Any = False
    by_norms = False
    runs_on_device = True
    runs_on_parts: Any = False

    def init(self, groups: Groups) -> State:
        """Return the state before the first step: a NamedTuple of arrays over groups."""
        return NoState()

    @abstractmethod
    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient.

        Call ``gradient.finite_norms`` first, so that nothing is learnt from NaN. On a device and
        in compiled code, Python must not branch on a value.
        """

    def recalled(self, gradient: Gradient) -> Statistics:
        """Return the arrays kept for the tensors of a gradient, where it is, by name and field.

        Those in `gradient.cached` may be of the host; a tensor without any gets new ones.
        """
        return {}

    @cached_property
    def basis(self) -> Basis:
        """Where the limits come from: those of a rule that does not say are learnt."""
        basis: Basis = getattr(getattr(self, "rule", None), "basis", LEARNT)
        return basis


# -- compiled code -------------------------------------------------------------------------------
class DeviceState(NamedTuple):
    """The state, in compiled code, of a transform that keeps arrays by tensor and field."""

    groups: State
    arrays: Statistics


def device_state(
    transform: Transform,
    arrays: Mapping[str, Array],
    groups: Groups,
    backend: Backend,
    state: State,
    cached: Statistics,
) -> State:
    """Return a state for `clip_on_device`, on the device of the arrays.

    `state` holds the numbers of the groups, and `cached` arrays of the host for tensors that are
    known. Of the arrays, only dtype, shape and device count.
    """
    inputs = [arrays[name] for name in groups.names]
    state = type(state)(*(backend.asarray(np.atleast_1d(c), like=inputs[0]) for c in state))
    if not transform.array_fields:
        return state
    gradient = _native(groups, backend, inputs, inputs, {})
    gradient.cached.update(cached)
    return DeviceState(state, transform.recalled(gradient))


def clip_on_device(
    transform: Transform,
    arrays: Mapping[str, Array],
    groups: Groups,
    backend: Backend,
    state: State,
    on_nonfinite: str,
) -> tuple[dict[str, Array], Outcome]:
    """Return the clipped arrays by name, in the framework's own operations, and the outcome.

    If the gradient is not finite and the policy is "skip", excluded tensors become zero too. The
    state has to be of as many groups: frameworks would repeat another.
    """
    state, cached = state if transform.array_fields else (state, {})
    native = _prepared([arrays[name] for name in groups.names], transform, backend)
    excluded = _floats_among(arrays, groups.excluded) if groups.excluded else {}
    gradient = _native(groups, backend, native, native, excluded)
    gradient.cached.update(cached)
    outcome = take_step(transform, gradient, state, on_nonfinite)
    clipped = dict(zip(groups.names, outcome.outputs, strict=True))
    if transform.array_fields:
        outcome = outcome._replace(state=DeviceState(outcome.state, gradient.cached))
    return {**arrays, **clipped, **gradient._excluded_after}, outcome
