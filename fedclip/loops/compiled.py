# SPDX-License-Identifier: Apache-2.0
"""A clipper in compiled code: its state in tensors, or in variables of a framework."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedclip.arrays import NUMPY, Array, Backend, HostView
from fedclip.clippers.agc import AGC, Axes, Outputs, weights_of
from fedclip.clippers.base import Clipper
from fedclip.core import states
from fedclip.core.records import RoundRecord, StepRecord
from fedclip.core.scopes import Groups
from fedclip.loops import clippers
from fedclip.loops.clippers import Tensors, shapes_of
from fedclip.transforms import DeviceState, Outcome, State, Transform, clip_on_device, device_state

Variable: TypeAlias = Array
Kind: TypeAlias = tuple[type, tuple[int, ...], set[str]]
"""What all states of a clipper for the same groups have in common.

The type of the groups' numbers and the size of each, and the names of each tensor's arrays.
"""


# -- the state before the first step, and after each step ----------------------------------------
class ClipState(NamedTuple):
    """State of a clipper in compiled code: small arrays with separate buffers.

    `metrics` returns them as plain numbers; ``optax.tree.get(state, "norm")`` finds a field in the
    state of a chain.

    Attributes
    ----------
    statistics
        The rule's statistics of past norms: arrays over groups.
    norm
        Norm of each group at the last step, before clipping.
    limit
        Limit of each group at the last step; infinity before the first.
    over
        Whether each group was above its limit at the last step.
    steps
        Number of steps, in this round if `on_round_start` has started one.
    clipped
        Number of steps with a clipped group.
    nonfinite
        Number of steps with NaN or infinity.
    """

    statistics: State
    norm: Array
    limit: Array
    over: Array
    steps: Array
    clipped: Array
    nonfinite: Array


def check_compilable(clipper: Clipper | AGC) -> None:
    """Raise an error for a clipper that cannot be compiled."""
    from fedclip.clippers.own_limit import OwnLimit

    if isinstance(clipper, OwnLimit):
        raise NotImplementedError(
            f"{clipper.name} calls your function with numbers, which compiled code does not have: "
            "clip in eager code (`clip_` in torch, `clip` in TensorFlow), or use ZScoreClip"
        )
    if clipper.on_nonfinite == "raise":
        raise NotImplementedError(
            "on_nonfinite='raise' does not work in compiled code: use 'skip' or 'propagate'"
        )
    if isinstance(clipper, Clipper) and not clipper.runs_on_device:
        raise NotImplementedError(
            f"{clipper.name} works on the host only: clip in eager code, or set runs_on_device"
        )


def kind_of(clipper: Clipper | AGC, groups: Groups) -> Kind:
    """Return the kind of a clipper's states, for `check_state`."""
    transform = _stateful(clipper, groups)
    first = transform.init(groups)
    return type(first), tuple(np.size(c) for c in first), {*transform.array_fields}


def check_state(state: object, groups: int, kind: Kind | None, name: str) -> None:
    """Raise a TypeError if this is not a state of the clipper of this name, in compiled code.

    A state of another number of groups raises a ValueError. Without a kind, only that is checked.
    """
    if not isinstance(state, ClipState):
        raise TypeError(f"update needs the ClipState that init returned, got {state!r:.80}")
    if (count := math.prod(state.norm.shape)) != groups:
        raise ValueError(f"the state is of {count} groups but gradients have {groups}: call init")
    if kind is None:
        return
    numbers, arrays = parts(state.statistics)
    fields = {field for of_tensor in arrays.values() for field in of_tensor}
    if kind != (type(numbers), tuple(math.prod(column.shape) for column in numbers), fields):
        raise TypeError(
            f"the state is another clipper's, or of {name} with other parameters: call init"
        )


def groups_of(clipper: Clipper | AGC, tensors: Tensors) -> Groups:
    """Return the groups of a clipper for tensors by name."""
    return clipper.groups(shapes_of(tensors))


def transform_of(
    clipper: Clipper | AGC,
    groups: Groups,
    weights: Tensors | None,
    backend: Backend,
    outputs: Outputs | None = None,
) -> Transform:
    """Return the transform of a clipper; that of `agc` has the limits for these weights."""
    if isinstance(clipper, Clipper):
        return clipper.transform(groups)
    chosen = weights_of(weights, groups)
    return clipper.transform(chosen, groups, backend, traced=True, outputs=outputs)


def _stateful(clipper: Clipper | AGC, groups: Groups) -> Transform:
    """Return the transform of a clipper, without the limits of `agc`, which has no state."""
    return clipper.build() if isinstance(clipper, AGC) else clipper.transform(groups)


def first_state(clipper: Clipper | AGC, groups: Groups, arrays: Tensors, backend: Backend) -> State:
    """Return the statistics of a first state, on the device of the arrays.

    They are the clipper's, if it has those of all groups. Of the arrays, only dtype, shape and
    device count. If the clipper's state was loaded and is of other groups, this raises a
    ValueError.
    """
    transform, learnt = _stateful(clipper, groups), clipper.known(groups)
    known = learnt if {*groups.labels} <= {*learnt} else {}
    first = states.load(transform.init(groups), known, groups.labels)
    if isinstance(clipper, AGC) or not groups.names:
        return first
    cached = clipper.get_state()["arrays"]
    return device_state(transform, arrays, groups, backend, first, cached)


def parts(statistics: object) -> DeviceState:
    """Return the numbers of the groups, and the arrays of each tensor, if any."""
    return statistics if isinstance(statistics, DeviceState) else DeviceState(statistics, {})


def after(state: ClipState, step: Outcome) -> ClipState:
    """Return the state after a step; a loop carries the same shapes and dtypes along."""
    counts = state.steps + 1, state.clipped + step.clipped.any(), state.nonfinite + ~step.finite
    return ClipState(step.state, step.norms, step.limits, step.clipped, *counts)


def load(
    clipper: Clipper | AGC, statistics: object, labels: Sequence[str], tensors: Tensors
) -> None:
    """Put the statistics of compiled code, of these tensors, into a clipper."""
    if isinstance(clipper, AGC):
        return
    numbers, arrays = parts(statistics)
    learnt = {"groups": states.dump(numbers, labels), "arrays": states.fetched(arrays)}
    clipper.set_state(clipper.get_state() | learnt)
    clipper.owner = clippers.owner_of(clipper, tensors, "")


def last_of(state: ClipState, labels: tuple[str, ...]) -> StepRecord | None:
    """Return the record of the last step from a state; None before the first."""
    # A round may have begun since the last step.
    stepped = int(state.steps) or bool(state.norm.any())
    return StepRecord(labels, state.norm, state.limit, state.over) if stepped else None


def of_state(
    state: ClipState, labels: tuple[str, ...], prefix: str, round_: int = 0
) -> dict[str, float]:
    """Return the plain numbers of `metrics` from a state.

    Compiled code does not count which rule set its limits: these numbers are left out.
    """
    last = last_of(state, labels)
    steps, clipped, nonfinite = map(int, (state.steps, state.clipped, state.nonfinite))
    counts = RoundRecord(round_, steps=steps, clipped=clipped, nonfinite=nonfinite).as_dict()
    numbers = {} if last is None else last.as_dict(prefix)
    unknown = ("fixed", "learnt", "warmup")
    return numbers | {f"{prefix}round/{n}": x for n, x in counts.items() if n not in unknown}


def on_round_start(state: ClipState) -> ClipState:
    """Return the state at the start of a round: its counts are 0, its statistics stay."""
    counts = {name: 0 * getattr(state, name) for name in ("steps", "clipped", "nonfinite")}
    return state._replace(**counts)


# -- variables of a framework --------------------------------------------------------------------
class Operations(NamedTuple):
    """Operations of a framework on its variables, which have ``assign`` and ``numpy``.

    ::

        make(values, name=...)  a variable
        read(variable)          its value, as an array
        take(array, places, axis=...)     the array at these places of an axis
        cast(array, dtype)      the array in another dtype
    """

    make: Callable[..., Variable]
    read: Callable[[Variable], Array]
    take: Callable[..., Array]
    cast: Callable[[Array, object], Array]


class HeldClipper:
    """A clipper with its statistics, counts and last record in as few variables as possible.

    Every variable costs an operation in every step. They start from the clipper's statistics, and
    no step changes the clipper itself.
    """

    def __init__(self, clipper: Clipper | AGC, backend: Backend, operations: Operations) -> None:
        check_compilable(clipper)
        self.clipper, self._backend, self._ops = clipper, backend, operations
        # Counts of steps, clipped and nonfinite ones; norms, limits and which were clipped, of the
        # last step; the fields of the state; and the arrays of tensors.
        self.counts: Variable = np.zeros(3)
        self.last: Variable = _no_step(0)
        self.statistics: Any = ()
        self.arrays: states.Statistics = {}
        self.variables: list[Variable] = []
        self.labels: tuple[str, ...] = ()
        self.round = 0
        self._members = clippers.Members()
        self._weights: Mapping[str, HostView] = {}
        self._outputs: Outputs | None = None

    def build(self, weights: Tensors, optimizer: str = "") -> None:
        """Make the variables, once, for the gradients of these weights."""
        if self.variables:
            return
        clippers.begin(self.clipper, clippers.of_model(weights), optimizer)
        self._outputs = outputs_of(self.clipper, weights)
        # Only their shapes: Keras may fill its variables later, as ``fit`` builds a model.
        self._weights = {n: empty(tuple(w.shape), _wide(w)) for n, w in weights.items()}
        (first, arrays), values = self._first()
        self.variables = [self._ops.make(value, name=name) for name, value in values]
        variables = iter(self.variables)
        self.counts, self.last = next(variables), next(variables)
        self.statistics = type(first)(*(next(variables) for _ in first))
        self.arrays = states.each(arrays, lambda _: next(variables))

    def _first(self) -> tuple[DeviceState, list[tuple[str, HostView]]]:
        """Return the first statistics, and name and first value of each variable."""
        groups = groups_of(self.clipper, self._weights)
        first, arrays = parts(first_state(self.clipper, groups, self._weights, NUMPY))
        self.labels, last = groups.labels, _no_step(len(groups))
        values = [("counts", np.zeros(3, np.int64)), ("norm_limit_clipped", last)]
        values += [(field, np.atleast_1d(column)) for field, column in first._asdict().items()]
        for name, fields in states.fetched(arrays).items():
            values += [(f"{name}/{field}", array) for field, array in fields.items()]
        return DeviceState(first, arrays), values

    def clip(self, gradients: Tensors, weights: Tensors) -> Tensors:
        """Return the clipped gradients, by name, and update the statistics."""
        xp, ops, labels = self._backend, self._ops, self.labels
        groups = groups_of(self.clipper, weights)
        if not groups.names:
            return gradients
        self._members.check(self.clipper, weights, clippers.by_tensor(weights), fixed=True)
        if unknown := [label for label in groups.labels if label not in labels]:
            compiled_for = f"{self.clipper.name} was compiled for the groups {list(labels)}"
            got = f"the gradients also have {unknown}"
            raise ValueError(f"{compiled_for}, but {got}: give all variables at the first step")
        places = [labels.index(label) for label in groups.labels]
        complete, before = groups.labels == labels, [*map(ops.read, self.statistics)]
        known = before if complete else [ops.take(column, places, axis=-1) for column in before]
        state = type(self.statistics)(*known)
        if isinstance(self.clipper, AGC):
            weights = {name: ops.read(weight) for name, weight in weights.items()}
        if self.arrays:
            present_ones = {name: self.arrays[name] for name in groups.names}
            state = DeviceState(state, states.each(present_ones, ops.read))
        transform = transform_of(self.clipper, groups, weights, xp, self._outputs)
        policy = self.clipper.on_nonfinite
        clipped, step = clip_on_device(transform, gradients, groups, xp, state, policy)
        over = xp.where(step.clipped, 1.0, 0.0)
        learnt, arrays = parts(step.state)
        for name, fields in arrays.items():
            for field, value in fields.items():
                variable = self.arrays[name][field]
                variable.assign(ops.cast(value, variable.dtype))
        last = xp.stack([step.norms, step.limits, over])
        columns = [last, *learnt]
        if not complete:
            # A group without a gradient keeps its statistics, and has no norm and no limit.
            old = [xp.asarray(_no_step(len(labels)), like=last), *before]
            present = xp.asarray([float(label in groups.labels) for label in labels]) > 0
            back = [places.index(i) if i in places else 0 for i in range(len(labels))]
            pairs = zip(columns, old, strict=True)
            columns = [xp.where(present, ops.take(new, back, axis=-1), o) for new, o in pairs]
        for column, value in zip((self.last, *self.statistics), columns, strict=True):
            column.assign(value)
        bad = xp.where(step.finite, 0.0, 1.0)
        happened = xp.stack([xp.asarray(1.0, like=bad), xp.max(over), bad])
        self.counts.assign_add(ops.cast(happened, self.counts.dtype))
        return clipped

    def restart(self) -> None:
        """Start again with the clipper's statistics."""
        self.round = 0
        values = self._first()[1] if self.variables else ()
        for variable, (_, value) in zip(self.variables, values, strict=True):
            variable.assign(value)

    def state(self) -> ClipState:
        """Return the numbers of the variables."""
        statistics = type(self.statistics)(*map(_number, self.statistics))
        norms, limits, clipped = _number(self.last)
        return ClipState(statistics, norms, limits, clipped > 0, *_number(self.counts))


class Verbs:
    """The methods of an object that steps with a `HeldClipper`."""

    held: HeldClipper

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step; None before the first."""
        return last_of(self.held.state(), self.held.labels)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger, of the last step and of all steps (``round/...``)."""
        return of_state(self.held.state(), self.held.labels, prefix, self.held.round)

    def on_round_start(self) -> None:
        """Start a round: counts (``round/...`` in `metrics`) are 0, statistics continue."""
        self.held.round += 1
        if self.held.variables:
            self.held.counts.assign(0 * self.held.counts.numpy())

    def get_state(self) -> states.Fields:
        """Return what the clipper's ``get_state`` returns; nothing for `agc`."""
        held, state = self.held, clippers.state_of(self.held.clipper, np.array)
        if state and held.variables:
            state["groups"] = states.dump(held.state().statistics, held.labels)
            state["arrays"] = states.each(held.arrays, lambda v: np.array(v.numpy()))
        return state

    def set_state(self, state: states.Fields) -> None:
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
        clippers.restore(clipper, state, owner)
        held.restart()

    def reset(self) -> None:
        """Forget all steps, and the clipper's statistics, from which they started."""
        self.held.clipper.reset()
        self.held.restart()


def names_of(variables: Iterable[Variable]) -> list[str]:
    """Return the names of variables: Keras' path, or TensorFlow's name; all different."""
    return clippers.unique(getattr(v, "path", None) or v.name.removesuffix(":0") for v in variables)


def _number(variable: Variable) -> HostView:
    return np.asarray(variable.numpy() if hasattr(variable, "numpy") else variable, np.float64)


def _no_step(groups: int) -> HostView:
    """Return norms, limits and which were clipped, for groups before their first step."""
    return np.outer([0.0, np.inf, 0.0], np.ones(groups))


def empty(shape: tuple[int, ...], dtype: Any) -> HostView:
    """Return zeros of this shape and dtype, which take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _wide(variable: Variable) -> str:
    """Return the dtype of NumPy that is at least as wide as that of a variable."""
    return "float64" if "float64" in str(variable.dtype) else "float32"


# -- the outputs of layers of Keras --------------------------------------------------------------
def outputs_of(clipper: Clipper | AGC, variables: Tensors) -> Outputs | None:
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
