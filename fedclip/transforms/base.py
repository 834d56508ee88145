# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient, and the protocol of transforms: what a clipper does to one gradient.

::

    gradient = Gradient.of(arrays)             one framework and dtypes that can be clipped;
                                               repeated rows merged; NumPy views on the host
    outcome  = gradient.clipped(transform)     with transform.step(gradient, state)
    arrays   = gradient.result(outcome)        of the framework, by name

`Gradient.of` decides once where the arrays live. A step is one text for the host, for devices and
for compiled code: it works on `gradient.arrays` by the operations of `gradient.xp`. What a
framework can do, `fedclip.arrays` knows; what a limit is, each transform.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import Context
from functools import cached_property
from operator import attrgetter, is_not
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import (
    NUMPY,
    Array,
    Arrays,
    Backend,
    HostView,
    Memory,
    NumpyBackend,
    backend_of,
    on_host,
    with_others,
)
from fedclip.arrays.blocks import decode, encode
from fedclip.arrays.numpy import FLOATS, bits
from fedclip.core.scopes import Groups
from fedclip.core.states import Statistics
from fedclip.rules import LEARNT, Basis, NoState, State
from fedclip.transforms.action import DTYPES

# A context variable tells NumPy how to handle floating-point errors. Call functions in a copy of
# this context, which ignores them: with `np.errstate`, a quiet step of `norm-clip` takes 15 %
# longer ("20 tensors, 2.7k" of `make bench`).
_QUIET = Context()
_QUIET.run(np.seterr, all="ignore")
_dtype = attrgetter("dtype")


class NotFiniteError(Exception):
    """A step that is not taken, as the host has seen NaN or infinity."""


class Outcome(NamedTuple):
    """What one step did: new arrays, state, and one number for each group."""

    outputs: Arrays
    """The new arrays; on the host the very same array where nothing changes."""
    state: State
    norms: Array
    limits: Array
    clipped: Array
    finite: Array = True
    """Whether the gradient is finite; always True for a step on the host."""


class Gradient:
    """One gradient, as a transform sees it.

    Attributes
    ----------
    arrays : sequence of arrays
        The arrays of all groups: NumPy views on the host, else of the framework; dense if the
        transform wants them so. A step never changes them.
    groups : Groups
        Which arrays share a norm.
    xp : Backend
        The operations on the arrays, and on numbers of groups.
    backend : Backend
        The framework.
    on_host : bool
        Whether the arrays are NumPy views.
    kept : dict
        Arrays that the transform keeps for each tensor, by name and field; see `remember`.
    rest : dict
        Excluded tensors of floats or complex numbers, by name: they are not clipped, but NaN in
        one of them is NaN in the gradient.
    """

    def __init__(
        self,
        arrays: Arrays,
        groups: Groups,
        backend: Backend,
        rest: Mapping[str, Array] | None = None,
        views: Sequence[HostView] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.arrays, self.groups = arrays, groups
        self.backend = self.xp = backend
        # What came in, and the same with repeated rows merged.
        self._given = self._native = arrays
        # Whether a step that is not finite is not taken: the host looks, and may wait for a device.
        self.on_host = self.waits = views is not None
        if views is not None:
            self.arrays, self.xp = views, NumpyBackend(backend, views, memory)
        self.kept: Statistics = {}
        self.rest = {} if rest is None else rest
        self._norms: Array = None
        self._finite: Array = True

    @classmethod
    def of(
        cls,
        clipper: str,
        arrays: Mapping[str, Array],
        groups: Groups,
        transform: Transform,
        backend: Backend | None = None,
        memory: Memory | None = None,
    ) -> Gradient:
        """Return the gradient of arrays by name, prepared for a transform.

        Raises
        ------
        TypeError
            With the name of the clipper, if an array can not be clipped, or not with the others.
        """
        given, rest = _split(arrays, groups)
        if backend is None:
            backend = _backend(groups.names, given or [*rest.values()])
        native = _prepared(given, transform, backend)
        views: Any = backend.views(native)
        copied = False
        try:
            # To ask each array of a usual gradient would take a quarter of a step of `norm-clip`
            # ("20 tensors, 2.7k" of `make bench`).
            usual = {*map(_dtype, views)} <= FLOATS
        except AttributeError:
            # Some are not in host memory.
            usual = False
            runs = transform.runs_on_parts if backend.partial else transform.runs_on_device
            copied = not runs
            views = [_fetched(a, backend) for a in native] if copied else None
        if not usual:
            _check_dtypes(clipper, groups.names, given)
        gradient = cls(native, groups, backend, rest, views, memory)
        gradient._given = given
        if copied:
            gradient.xp.in_place = False
        return gradient

    # -- what a transform asks for ------------------------------------------------------------
    def sound(self, norms: Array) -> Array:
        """Return the norms of the groups; zeros if anything in the gradient is not finite.

        A norm has to be finite if, and only if, all elements of its group are. If one is not, a
        step on the host ends here.
        """
        xp = self.xp
        total = sum(norms.tolist()) if self.on_host else xp.sum(norms)
        if self.rest and not self.on_host:
            total = total + xp.sum(_rest_norms(self.rest, xp))
        # NaN is not below anything.
        self._norms, self._finite = norms, total < math.inf
        if not self.waits:
            return xp.where(self._finite, norms, 0.0)
        if not self._finite or (self.on_host and not self.rest_is_finite()):
            raise NotFiniteError
        return norms

    def remember(self, after: Statistics) -> None:
        """Keep arrays of this step, by name and field, unless it is not finite; after `sound`."""
        if not self.waits:
            flat = [(name, field) for name, fields in after.items() for field in fields]
            # What is not finite would be left of it.
            new = self.xp.keep_if(self._finite, [after[name][field] for name, field in flat])
            old = [self.kept[name][field] for name, field in flat]
            values = self.xp.choose([self._finite] * len(flat), new, old)
            after = {name: {} for name in after}
            for (name, field), value in zip(flat, values, strict=True):
                after[name][field] = value
        self.kept.update(after)

    # -- what a clipper asks for --------------------------------------------------------------
    def clipped(self, transform: Transform, state: State, on_nonfinite: str = "skip") -> Outcome:
        """Return the outcome of a step, with outputs of the framework.

        Raises
        ------
        NotFiniteError
            On the host, and on devices if `on_nonfinite` is "raise", where the host has to wait
            for them, if anything in the gradient is not finite. Nothing has changed then.
        """
        if self.on_host:
            outcome = _QUIET.copy().run(transform.step, self, state)
            return Outcome(self._returned(outcome.outputs), *outcome[1:])
        self.waits = on_nonfinite == "raise"
        outcome = transform.step(self, state)
        if self.waits:
            return outcome
        xp, finite = self.xp, self._finite
        after = outcome.state
        if after:
            after = type(after)(*xp.choose([finite] * len(state), after, state))
        # Records know by the norm that a step was not finite. No norm of 0 is over a limit.
        norms, clipped, moved = self._norms, outcome.clipped, not transform.by_norms
        if moved:
            norms, clipped = xp.where(finite, outcome.norms, math.nan), clipped & finite
        outputs = outcome.outputs
        if outputs is not self.arrays:
            outputs = self._settled(outputs, on_nonfinite, moved)
        return Outcome(outputs, after, norms, outcome.limits, clipped, finite)

    def unchanged(self) -> tuple[Arrays, Mapping[str, Array]]:
        """Return outputs and excluded tensors of a step that changes nothing."""
        return self._given, self.rest

    def replaced(self, on_nonfinite: str) -> tuple[Arrays, Mapping[str, Array]]:
        """Return outputs and excluded tensors in the place of a step that was not taken."""
        outputs, xp, backend = list(self.arrays), self.xp, self.backend
        if on_nonfinite == "skip":
            rest = backend.keep_if(False, [*self.rest.values()])
            zeros = self._returned(xp.keep_if(False, outputs))
            return zeros, dict(zip(self.rest, rest, strict=True))
        # If no norm is known to be at fault, all are.
        norms = np.zeros(len(self.groups)) if self._norms is None else on_host(self._norms)
        fine = np.isfinite(norms)
        fine = fine if not fine.all() or self.rest else ~fine
        factors = by_tensor(np.where(fine, 1.0, math.nan), self.groups, xp)
        return self._returned(xp.scale(outputs, factors)), self.rest

    def _returned(self, outputs: Sequence[HostView]) -> Arrays:
        """Return outputs of the host as arrays of the framework; the very same where unchanged."""
        # What was made dense to change it in place is new.
        given = self._native if self.xp.in_place else self._given
        changed = [*map(is_not, outputs, self.arrays)]
        if not any(changed):
            return given
        if self.arrays is given:
            # Arrays of NumPy are their own views.
            return outputs
        if all(changed):
            return self.backend.from_host(outputs, self._native)
        new = [i for i, is_new in enumerate(changed) if is_new]
        made = self.backend.from_host([outputs[i] for i in new], [self._native[i] for i in new])
        return with_others(given, new, made)

    def _settled(self, outputs: Arrays, on_nonfinite: str, moved: bool) -> Arrays:
        """Return the outputs of a step on a device, as `on_nonfinite` wants them.

        `moved` says whether a step that is not finite may have changed other groups.

        In a step that is passed on, the groups that are finite stay as they are, as on the host;
        rows of sparse arrays, and what was clipped in place, stay clipped.
        """
        xp, result = self.xp, list(outputs)
        if on_nonfinite == "skip":
            return xp.keep_if(self._finite, result)
        dense = [i for i, array in enumerate(result) if xp.dense(array) is array]
        if moved and not xp.in_place:
            new, old = [result[i] for i in dense], [self.arrays[i] for i in dense]
            result = with_others(result, dense, xp.choose([self._finite] * len(dense), new, old))
        # NaN and infinity make NaN.
        return xp.scale(result, by_tensor(1.0 + 0.0 * self._norms, self.groups, xp))

    def result(
        self, arrays: Mapping[str, Array], outputs: Arrays, rest: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        """Return the outputs and the excluded tensors by name; `arrays` if nothing has changed."""
        if outputs is self._given and rest is self.rest:
            return arrays
        clipped = dict(zip(self.groups.names, outputs, strict=True))
        return {**arrays, **clipped, **rest} if self.groups.excluded else clipped

    def rest_after(self, outcome: Outcome, on_nonfinite: str) -> Mapping[str, Array]:
        """Return the excluded tensors unchanged, or zeros if a device skips the step."""
        if not self.rest or on_nonfinite != "skip" or self.waits:
            return self.rest
        kept = self.backend.keep_if(outcome.finite, [*self.rest.values()])
        return dict(zip(self.rest, kept, strict=True))

    # -- where it is not finite ---------------------------------------------------------------
    def rest_is_finite(self) -> bool:
        """Whether the excluded tensors hold neither NaN nor infinity; the host waits for them."""
        return all(_is_finite(a, self.backend) for a in self.rest.values())

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names of the tensors that hold NaN or infinity, the excluded ones last."""
        given = {**dict(zip(self.groups.names, self._native, strict=True)), **self.rest}
        return tuple(name for name, a in given.items() if not _is_finite(a, self.backend))


def by_tensor(numbers: Array, groups: Groups, xp: Backend) -> list[Array]:
    """Return for each tensor the number of its group."""
    each = xp.pieces(numbers, [()] * len(groups))
    return [each[group] for group in groups.owners]


def _prepared(given: Arrays, transform: Transform, backend: Backend) -> Arrays:
    arrays = backend.prepared(given)
    return [*map(backend.dense, arrays)] if transform.dense else arrays


def _fetched(array: Array, backend: Backend) -> HostView:
    """Return a copy, in host memory, of what a view would show."""
    found = bits(backend.to_host(array))
    return encode(found, np.dtype(np.uint16)) if backend.dtype(array) == "bfloat16" else found


def _is_finite(array: Array, backend: Backend) -> bool:
    # A sum of repeated rows may overflow.
    (array,) = backend.prepared([array])
    values = decode(bits(backend.to_host(array)))
    # A sum of finite numbers may overflow: if it does, look at the elements.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _rest_norms(rest: Mapping[str, Array], xp: Backend) -> Array:
    """Return one norm that is finite if excluded tensors are; of any dtype that can be NaN."""
    # Of another dtype, only whether it is finite.
    real = [
        a if xp.dtype(a) in DTYPES else xp.where(xp.isfinite(a), 0.0, math.nan)
        for a in rest.values()
    ]
    return xp.group_norms(xp.prepared(real), [range(len(real))])


def _split(arrays: Mapping[str, Array], groups: Groups) -> tuple[Arrays, Mapping[str, Array]]:
    """Return the arrays of the groups, and the excluded ones that can hold NaN or infinity."""
    left = groups.excluded
    rest = {n: a for n, a in arrays.items() if n in left and _can_be_nan(a)} if left else {}
    return [arrays[name] for name in groups.names], rest


class Transform(ABC):
    """What a clipper does to a gradient."""

    array_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays that the transform keeps for each tensor, if any."""
    dense: Any = False
    """Whether it needs sparse arrays as dense ones."""
    by_norms = False
    """Whether norms alone decide, of which `Gradient.sound` gives zeros for a step not finite."""
    runs_on_device = True
    """Whether its step runs on devices and in compiled code; if not, the host fetches arrays."""
    runs_on_parts: Any = False
    """Whether its step needs of elements only what `Backend` finds of them, each by itself.

    This is found together by processes that hold a part of each array. For other steps, each
    process gets the arrays whole.
    """

    def init(self, groups: Groups) -> State:
        """Return the state before the first step: a NamedTuple of arrays over groups."""
        return NoState()

    @abstractmethod
    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient.

        ``gradient.sound`` of the norms comes first, so that nothing is learnt from NaN. On a
        device and in compiled code, Python must not branch on a value.
        """

    def recalled(self, gradient: Gradient) -> Statistics:
        """Return the arrays kept for the tensors of a gradient, where it is, by name and field.

        Those in `gradient.kept` may be of the host; a tensor without any gets new ones.
        """
        return {}

    @cached_property
    def basis(self) -> Basis:
        """Where the limits come from: those of a rule that does not say are learnt."""
        basis: Basis = getattr(getattr(self, "rule", None), "basis", LEARNT)
        return basis


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
    gradient = Gradient(given, groups, backend)
    gradient.kept.update(kept)
    return Carried(state, transform.recalled(gradient))


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
    given, rest = _split(arrays, groups)
    gradient = Gradient(_prepared(given, transform, backend), groups, backend, rest)
    gradient.kept.update(kept)
    outcome = gradient.clipped(transform, state, on_nonfinite)
    clipped = {**arrays, **dict(zip(groups.names, outcome.outputs, strict=True))}
    clipped.update(gradient.rest_after(outcome, on_nonfinite))
    if transform.array_fields:
        outcome = outcome._replace(state=Carried(outcome.state, gradient.kept))
    return clipped, outcome


def _can_be_nan(array: Array) -> bool:
    """Whether an array of this dtype can hold NaN or infinity."""
    dtype = backend_of(array).dtype(array)
    return dtype in DTYPES or dtype.startswith(("complex", "float128"))


def _backend(names: Sequence[str], values: Arrays) -> Backend:
    backend = backend_of(values[0]) if values else NUMPY
    if len({*map(type, values)}) > 1:
        others = [n for n, v in zip(names, values, strict=False) if backend_of(v) is not backend]
        if others:
            raise TypeError(
                f"tensors of one gradient must be of one framework: {names[0]!r} is of "
                f"{backend.name}, {others[0]!r} is not"
            )
    return backend


def _check_dtypes(clipper: str, names: Sequence[str], arrays: Arrays) -> None:
    for name, array in zip(names, arrays, strict=True):
        dtype = backend_of(array).dtype(array)
        if dtype not in DTYPES:
            raise TypeError(
                f"{clipper} clips {', '.join(DTYPES)}; {name!r} is {dtype}: convert it, or put "
                "its name in exclude"
            )
