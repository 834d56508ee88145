# SPDX-License-Identifier: Apache-2.0
"""A clipper whose statistics are variables of a framework, for compiled code."""

from __future__ import annotations

import gc
import re
import sys
import weakref
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
from fedclip.loops.clippers import unique
from fedclip.loops.owner import begin, fitting
from fedclip.transforms import Carried, clip_on_device

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
        # last step; the fields of the state; and the arrays that are kept for tensors.
        self.variables: list[Variable] = []
        self.kept: dict[tuple[str, str], Variable] = {}
        self._columns = self.round = 0
        self._groups: Any = None
        self._known: Known = {}
        self.type: Any = None
        self._outputs: Outputs | None = None

    def build(self, weights: Mapping[str, Array], optimizer: str = "") -> None:
        """Make the variables, once, for the gradients of these weights."""
        if self.variables:
            return
        begin(self.clipper, shapes_of(weights), optimizer, [*weights.values()])
        self._outputs = outputs_of(self.clipper, weights)
        self._groups = compiled.groups_of(self.clipper, weights)
        # Not the values: Keras may fill its variables later, as ``fit`` builds a model.
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
                self.kept[name, field] = self._ops.make(value, f"{name}/{field}")
        self._columns = len(self.variables)
        self.variables += self.kept.values()

    def clip(
        self, gradients: Mapping[str, Array], weights: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        """Return the clipped gradients, by name, and learn from them."""
        xp, ops, labels = self._backend, self._ops, self.labels
        groups = compiled.groups_of(self.clipper, weights)
        if not groups.names:
            return gradients
        check_known(self.clipper, self._known, weights)
        unknown = [label for label in groups.labels if label not in labels]
        if unknown:
            raise ValueError(
                f"{self.clipper.name} was compiled for the groups {list(labels)}, and the "
                f"gradients have {unknown} besides"
            )
        counts, *columns = self.variables[: self._columns]
        places = [labels.index(label) for label in groups.labels]
        whole = groups.labels == labels
        before = [ops.read(column) for column in columns[whole:]]
        state = self.type(*(before if whole else (ops.take(b, places) for b in before[1:])))
        if isinstance(self.clipper, AGC):
            weights = {name: ops.read(weight) for name, weight in weights.items()}
        if self.kept:
            own = {k: ops.read(v) for k, v in self.kept.items() if k[0] in groups.names}
            state = Carried(state, _by_tensor(own))
        transform = compiled.transform_of(self.clipper, groups, weights, xp, self._outputs)
        policy = self.clipper.on_nonfinite
        clipped, step = clip_on_device(transform, gradients, groups, xp, state, policy)
        over = xp.where(step.clipped, 1.0, 0.0)
        learnt, arrays = compiled.parts(step.state)
        for name, fields in arrays.items():
            for field, value in fields.items():
                variable = self.kept[name, field]
                variable.assign(ops.cast(value, variable.dtype))
        after = [xp.stack([step.norms, step.limits, over]), *learnt]
        if not whole:
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
        """Begin with the clipper's statistics and these arrays, or without any if it is fresh."""
        state = compiled.first_numbers(self.clipper, self._groups, fresh=fresh)
        for (name, field), variable in self.kept.items():
            nothing = np.zeros_like(variable.numpy())
            variable.assign(arrays.get(name, {}).get(field, nothing))
        for variable, column in zip(self.variables[2 : self._columns], state, strict=True):
            variable.assign(np.atleast_1d(column))
        self.round = 0
        counts, last = self.variables[:2]
        counts.assign(np.zeros_like(counts.numpy()))
        last.assign(_no_step(len(self._groups)))

    def numbers(self) -> list[HostView]:
        """Return counts, the last step's norms, limits and clips, and the fields of the state."""
        return [np.asarray(v.numpy(), np.float64) for v in self.variables[: self._columns]]


class Verbs:
    """The verbs of what steps with a clipper that has `held`."""

    held: HeldClipper

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step; None before the first."""
        held = self.held
        if not held.variables:
            return None
        counts, (norms, limits, clipped), *_ = held.numbers()
        # A round may have begun since.
        if not counts[0] and not norms.any():
            return None
        return StepRecord(held.labels, norms, limits, clipped > 0)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger, of the last step and of all steps (``round/...``)."""
        held, last = self.held, self.last
        counts = held.numbers()[0] if held.variables else (0, 0, 0)
        every = compiled.counted(counts, f"{prefix}round/", held.round)
        return every if last is None else last.as_dict(prefix) | every

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
            state["groups"] = states.dump(held.type(*held.numbers()[2:]), held.labels)
            state["arrays"] = _by_tensor({k: np.array(v.numpy()) for k, v in held.kept.items()})
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
        if owner is not None and fitting(clipper, state, owner) is None:
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
            # Before the first step, a state that was loaded is the clipper's own.
            self.held.clipper.reset()


Known: TypeAlias = dict[str, "weakref.ref[Any]"]
"""The variables that a clipper has seen, by name."""


def shapes_of(variables: Mapping[str, Variable]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of variables, by name, without the numbers that Keras gives to layers."""
    names = unique(re.sub(r"_\d+(?=/|$)", "", name) for name in variables)
    return {n: tuple(v.shape) for n, v in zip(names, variables.values(), strict=True)}


def check_known(clipper: Clipper | AGC, known: Known, variables: Mapping[str, Variable]) -> None:
    """Note variables; raise a ValueError if a clipper has seen others, of another model."""
    others = [n for n, v in variables.items() if n in known and known[n]() is not v]
    if others or (known and known.keys().isdisjoint(variables)):
        raise ValueError(
            f"this {clipper.name} clips {_few(known)}, and would take the norms of "
            f"{_few(others or variables)} of another model for theirs: give each model a clipper "
            "of its own"
        )
    known.update({n: weakref.ref(v) for n, v in variables.items() if n not in known})


def _by_tensor(kept: Mapping[tuple[str, str], Array]) -> states.Statistics:
    found: states.Statistics = {}
    for (name, field), value in kept.items():
        found.setdefault(name, {})[field] = value
    return found


def _no_step(groups: int) -> HostView:
    """Return norms, limits and which were clipped of groups that no step had: no limit."""
    return np.outer([0.0, np.inf, 0.0], np.ones(groups))


def outputs_of(clipper: Clipper | AGC, variables: Mapping[str, Variable]) -> Outputs | None:
    """Return the axes that hold the outputs of layers, by name; None if the clipper asks for none.

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
        # A variable does not know its layer.
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


def _few(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")


def _wide(variable: Variable) -> str:
    """Return the dtype of NumPy that is at least as wide as that of a variable."""
    name = getattr(variable.dtype, "name", variable.dtype)
    return "float64" if name == "float64" else "float32"
