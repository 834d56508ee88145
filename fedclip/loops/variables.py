# SPDX-License-Identifier: Apache-2.0
"""A clipper whose statistics are variables of a framework, for compiled code."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedclip.arrays import NUMPY, Array, Backend, HostView
from fedclip.clippers.agc import AGC, Axes, Outputs
from fedclip.clippers.base import Clipper
from fedclip.core import states
from fedclip.core.records import StepRecord
from fedclip.core.states import Fields
from fedclip.loops import compiled
from fedclip.loops.clippers import Members, begin, by_tensor, fitting, shapes_of, unique
from fedclip.loops.compiled import ClipState
from fedclip.transforms import DeviceState, clip_on_device

Variable: TypeAlias = Array


class Operations(NamedTuple):
    """Operations of a framework on its variables, which have ``assign`` and ``numpy``.

    ::

        make(values, name)      a variable
        read(variable)          its value, as an array
        take(array, places)     the array at these places of its last axis
        cast(array, dtype)      the array in another dtype
    """

    make: Callable[[HostView, str], Variable]
    read: Callable[[Variable], Array]
    take: Callable[[Array, Sequence[int]], Array]
    cast: Callable[[Array, object], Array]


class HeldClipper:
    """A clipper with its statistics, counts and last record in as few variables as possible.

    Every variable costs an operation in every step. They start from the clipper's statistics, and
    no step changes the clipper itself.
    """

    def __init__(self, clipper: Clipper | AGC, backend: Backend, operations: Operations) -> None:
        compiled.check_compilable(clipper)
        self.clipper, self._backend, self._ops = clipper, backend, operations
        self.labels: tuple[str, ...] = ()
        # Counts of steps, clipped and nonfinite ones; norms, limits and which were clipped, of the
        # last step; the fields of the state; and the arrays of tensors.
        self.variables: list[Variable] = []
        self.arrays: dict[tuple[str, str], Variable] = {}
        self._columns = self.round = 0
        self._groups: Any = None
        self._members = Members()
        self.type: Any = None
        self._outputs: Outputs | None = None

    def build(self, weights: Mapping[str, Array], optimizer: str = "") -> None:
        """Make the variables, once, for the gradients of these weights."""
        if self.variables:
            return
        begin(self.clipper, model_shapes(weights), optimizer, [*weights.values()])
        self._outputs = outputs_of(self.clipper, weights)
        self._groups = compiled.groups_of(self.clipper, weights)
        # Only their shapes: Keras may fill its variables later, as ``fit`` builds a model.
        shaped = {n: np.zeros(tuple(w.shape), _wide(w)) for n, w in weights.items()}
        first, arrays = compiled.parts(
            compiled.first_state(self.clipper, self._groups, shaped, NUMPY)
        )
        self.labels, self.type = self._groups.labels, type(first)
        values = {
            "counts": np.zeros(3, np.int64),
            "norm_limit_clipped": _no_step(len(self._groups)),
            **{field: np.atleast_1d(column) for field, column in first._asdict().items()},
        }
        self.variables = [self._ops.make(column, name) for name, column in values.items()]
        for name, fields in states.fetched(arrays).items():
            for field, value in fields.items():
                self.arrays[name, field] = self._ops.make(value, f"{name}/{field}")
        self._columns = len(self.variables)
        self.variables += self.arrays.values()

    def clip(
        self, gradients: Mapping[str, Array], weights: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        """Return the clipped gradients, by name, and update the statistics."""
        xp, ops, labels = self._backend, self._ops, self.labels
        groups = compiled.groups_of(self.clipper, weights)
        if not groups.names:
            return gradients
        self._members.check(self.clipper, weights, by_tensor(weights), fixed=True)
        unknown = [label for label in groups.labels if label not in labels]
        if unknown:
            raise ValueError(
                f"{self.clipper.name} was compiled for the groups {list(labels)}, but the "
                f"gradients also have {unknown}: give all variables at the first step"
            )
        counts, *columns = self.variables[: self._columns]
        places = [labels.index(label) for label in groups.labels]
        complete = groups.labels == labels
        before = [ops.read(column) for column in columns[complete:]]
        state = self.type(*(before if complete else (ops.take(b, places) for b in before[1:])))
        if isinstance(self.clipper, AGC):
            weights = {name: ops.read(weight) for name, weight in weights.items()}
        if self.arrays:
            read = {k: ops.read(v) for k, v in self.arrays.items() if k[0] in groups.names}
            state = DeviceState(state, _by_tensor(read))
        transform = compiled.transform_of(self.clipper, groups, weights, xp, self._outputs)
        policy = self.clipper.on_nonfinite
        clipped, step = clip_on_device(transform, gradients, groups, xp, state, policy)
        over = xp.where(step.clipped, 1.0, 0.0)
        learnt, arrays = compiled.parts(step.state)
        for name, fields in arrays.items():
            for field, value in fields.items():
                variable = self.arrays[name, field]
                variable.assign(ops.cast(value, variable.dtype))
        after = [xp.stack([step.norms, step.limits, over]), *learnt]
        if not complete:
            # A group without a gradient keeps its statistics, and has no norm and no limit.
            before[0] = xp.asarray(_no_step(len(labels)), like=after[0])
            present = xp.asarray([float(label in groups.labels) for label in labels]) > 0
            back = [places.index(i) if i in places else 0 for i in range(len(labels))]
            pairs = zip(after, before, strict=True)
            after = [xp.where(present, ops.take(a, back), b) for a, b in pairs]
        for column, value in zip(columns, after, strict=True):
            column.assign(value)
        bad = xp.where(step.finite, 0.0, 1.0)
        happened = xp.stack([xp.asarray(1.0, like=bad), xp.max(over), bad])
        counts.assign_add(ops.cast(happened, counts.dtype))
        return clipped

    def restart(self, arrays: states.Statistics, *, fresh: bool = False) -> None:
        """Start with the clipper's statistics and these arrays, or without any if `fresh`."""
        state = compiled.first_numbers(self.clipper, self._groups, fresh=fresh)
        for (name, field), variable in self.arrays.items():
            nothing = np.zeros_like(variable.numpy())
            variable.assign(arrays.get(name, {}).get(field, nothing))
        for variable, column in zip(self.variables[2 : self._columns], state, strict=True):
            variable.assign(np.atleast_1d(column))
        self.round = 0
        counts, last = self.variables[:2]
        counts.assign(np.zeros_like(counts.numpy()))
        last.assign(_no_step(len(self._groups)))

    def state(self) -> ClipState:
        """Return the numbers of the variables."""
        read = [np.asarray(v.numpy(), np.float64) for v in self.variables[: self._columns]]
        counts, (norms, limits, clipped), *fields = read or [np.zeros(3), _no_step(0)]
        statistics = self.type(*fields) if read else ()
        return ClipState(statistics, norms, limits, clipped > 0, *counts)


class Verbs:
    """The methods of an object that steps with a `HeldClipper`."""

    held: HeldClipper

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step; None before the first."""
        return compiled.last_of(self.held.state(), self.held.labels)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger, of the last step and of all steps (``round/...``)."""
        held = self.held
        return compiled.of_state(held.state(), held.labels, prefix, held.round)

    def on_round_start(self) -> None:
        """Start a round: counts (``round/...`` in `metrics`) are 0, statistics continue."""
        self.held.round += 1
        for counts in self.held.variables[:1]:
            counts.assign(np.zeros_like(counts.numpy()))

    def get_state(self) -> Fields:
        """Return what the clipper's ``get_state`` returns; nothing for `agc`."""
        held, clipper = self.held, self.held.clipper
        if isinstance(clipper, AGC):
            return {}
        state = clipper.get_state()
        if held.variables:
            state["groups"] = states.dump(held.state().statistics, held.labels)
            state["arrays"] = _by_tensor({k: np.array(v.numpy()) for k, v in held.arrays.items()})
        return state

    def set_state(self, state: Fields) -> None:
        """Restore a state that ``get_state`` of this, or of such a clipper, returned.

        Raises
        ------
        StateError
            If it is not a state, or another clipper's.
        """
        held, clipper = self.held, self.held.clipper
        if isinstance(clipper, AGC):
            return
        owner = clipper.owner if held.variables else None
        if owner is not None and not fitting(clipper, state, owner):
            self.reset()
            return
        clipper.set_state(state)
        if held.variables:
            clipper.owner = owner
            held.restart(state["arrays"])

    def reset(self) -> None:
        """Forget all steps, and the loaded state."""
        if self.held.variables:
            self.held.restart({}, fresh=True)
        else:
            # Before the first step, a state that was loaded is in the clipper.
            self.held.clipper.reset()


def names_of(variables: Iterable[Variable]) -> list[str]:
    """Return the names of variables: Keras' path, or TensorFlow's name; all different."""
    return unique(getattr(v, "path", None) or v.name.removesuffix(":0") for v in variables)


def model_shapes(variables: Mapping[str, Variable]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of variables, by name, without the numbers that Keras gives to layers."""
    names = unique(re.sub(r"_\d+(?=/|$)", "", name) for name in variables)
    return dict(zip(names, shapes_of(variables).values(), strict=True))


def _by_tensor(arrays: Mapping[tuple[str, str], Array]) -> states.Statistics:
    by_name: states.Statistics = {}
    for (name, field), value in arrays.items():
        by_name.setdefault(name, {})[field] = value
    return by_name


def _no_step(groups: int) -> HostView:
    """Return norms, limits and which were clipped, for groups before their first step."""
    return np.outer([0.0, np.inf, 0.0], np.ones(groups))


def outputs_of(clipper: Clipper | AGC, variables: Mapping[str, Variable]) -> Outputs | None:
    """Return the axes that hold the outputs of layers, by name; None if the clipper needs none.

    ============================================  ==============================================
    layer of Keras                                axes
    ============================================  ==============================================
    transposed convolution                        the last but one
    depthwise kernel                              the last two
    ``EinsumDense``, as attention has it          those of its equation's output
    a bias                                        all: it is one unit
    any other, and no layer                       the last
    ============================================  ==============================================
    """
    if not isinstance(clipper, AGC) or not clipper.asks_layers:
        return None
    layers: dict[int, Any] = {}
    if "keras" in sys.modules:
        # A variable has no reference to its layer.
        base = sys.modules["keras"].layers.Layer
        alive = [o for o in gc.get_objects() if issubclass(type(o), base)]
        layers = {
            id(v): layer for layer in alive for v in getattr(layer, "_trainable_variables", ())
        }
    return {name: _axes(v, layers.get(id(v))) for name, v in variables.items()}


def _axes(variable: Variable, layer: Any) -> Axes:
    kind, name = type(layer).__name__, getattr(variable, "name", "")
    if layer is None:
        return (-1,)
    if name == "bias":
        return ()
    if name == "depthwise_kernel" or kind.startswith("DepthwiseConv"):
        return (-2, -1)
    if kind.startswith("Conv") and kind.endswith("Transpose"):
        return (-2,)
    if kind == "EinsumDense" and name == "kernel":
        kernel, _, output = layer.equation.partition(",")[2].partition("->")
        return tuple(i for i, letter in enumerate(kernel) if letter in output)
    return (-1,)


def _wide(variable: Variable) -> str:
    """Return the dtype of NumPy that is at least as wide as that of a variable."""
    name = getattr(variable.dtype, "name", variable.dtype)
    return "float64" if name == "float64" else "float32"
