# SPDX-License-Identifier: Apache-2.0
"""A clipper in compiled code: the state before the first step, and after each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedclip.arrays import Array, Backend
from fedclip.clippers.agc import AGC, Outputs, weights_of
from fedclip.clippers.base import Clipper
from fedclip.core import states
from fedclip.core.records import RoundRecord, StepRecord
from fedclip.core.scopes import Groups
from fedclip.loops.clippers import owner_of, shapes_of
from fedclip.transforms import DeviceState, Outcome, SliceClipping, State, Transform, device_state


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
            "clip in eager code (`clip_` or `attach` in torch, `clip` in TensorFlow), or use "
            "another clipper, such as ZScoreClip"
        )
    if clipper.on_nonfinite == "raise":
        raise NotImplementedError(
            "on_nonfinite='raise' does not work in compiled code, which cannot wait for the "
            "device: use 'skip' or 'propagate'"
        )
    if isinstance(clipper, Clipper) and not clipper.runs_on_device:
        raise NotImplementedError(
            f"{clipper.name} works on the host only: use it in eager code, or set runs_on_device "
            "in its transform"
        )


class Kind(NamedTuple):
    """What all states of a clipper for the same groups have in common.

    The number of groups, the type of their numbers and the size of each, and the names of the
    arrays of each tensor.
    """

    groups: int
    fields: type
    sizes: tuple[int, ...]
    arrays: tuple[str, ...]


def kind_of(clipper: Clipper | AGC, groups: Groups) -> Kind:
    """Return the kind of a clipper's states, for `check_state`."""
    first = first_numbers(clipper, groups, fresh=True)
    arrays = () if isinstance(clipper, AGC) else clipper.transform(groups).array_fields
    return Kind(len(groups), type(first), tuple(np.size(c) for c in first), arrays)


def check_state(state: object, kind: Kind | None, name: str) -> None:
    """Raise a TypeError if this is not a state of the clipper of this name, in compiled code.

    A state of another number of groups raises a ValueError. Without a kind, any state passes.
    """
    if not isinstance(state, ClipState):
        raise TypeError(f"update needs the ClipState that init returned, got {state!r:.80}")
    if kind is None:
        return
    groups = math.prod(state.norm.shape)
    if groups != kind.groups:
        raise ValueError(
            f"the state is of {groups} groups of tensors, but these gradients have {kind.groups}: "
            "give init and update the same tensors"
        )
    numbers, arrays = parts(state.statistics)
    sizes = tuple(math.prod(column.shape) for column in numbers)
    carries = isinstance(state.statistics, DeviceState)
    fits = type(numbers) is kind.fields and sizes == kind.sizes and carries == bool(kind.arrays)
    if not fits or any({*fields} != {*kind.arrays} for fields in arrays.values()):
        raise TypeError(
            f"the state is another clipper's, or of {name} with other parameters: give update "
            f"the state that init, or the last update, of this {name} returned"
        )


def groups_of(clipper: Clipper | AGC, tensors: Mapping[str, Array]) -> Groups:
    """Return the groups of a clipper for tensors by name."""
    return clipper.groups(shapes_of(tensors))


def transform_of(
    clipper: Clipper | AGC,
    groups: Groups,
    weights: Mapping[str, Array] | None,
    backend: Backend,
    outputs: Outputs | None = None,
) -> Transform:
    """Return the transform of a clipper; that of `agc` has the limits for these weights."""
    if isinstance(clipper, Clipper):
        return clipper.transform(groups)
    return clipper.transform(
        weights_of(weights, groups), groups, backend, traced=True, outputs=outputs
    )


def first_numbers(clipper: Clipper | AGC, groups: Groups, *, fresh: bool = False) -> State:
    """Return the numbers of a first state: the clipper's statistics if it has those of all groups.

    A `fresh` state has no statistics. If the clipper's state was loaded and is of other groups,
    this raises a ValueError.
    """
    if isinstance(clipper, AGC):
        return SliceClipping((), None).init(groups)
    learnt = {} if fresh else clipper.known(groups)
    first = clipper.transform(groups).init(groups)
    return states.load(first, learnt if {*groups.labels} <= {*learnt} else {}, groups.labels)


def first_state(
    clipper: Clipper | AGC, groups: Groups, tensors: Mapping[str, Array], backend: Backend
) -> State:
    """Return the statistics of a first state, on the device of the tensors, with their arrays.

    Of the tensors, only dtype, shape and device count.
    """
    first = first_numbers(clipper, groups)
    if isinstance(clipper, AGC) or not groups.names:
        return first
    arrays = clipper.get_state()["arrays"]
    return device_state(clipper.transform(groups), tensors, groups, backend, first, arrays)


def parts(statistics: object) -> DeviceState:
    """Return the numbers of the groups, and the arrays of each tensor, if any."""
    return statistics if isinstance(statistics, DeviceState) else DeviceState(statistics, {})


def after(state: ClipState, step: Outcome) -> ClipState:
    """Return the state after a step; a loop carries the same shapes and dtypes along."""
    return ClipState(
        step.state,
        step.norms,
        step.limits,
        step.clipped,
        state.steps + 1,
        state.clipped + step.clipped.any(),
        state.nonfinite + ~step.finite,
    )


def load(
    clipper: Clipper | AGC,
    statistics: object,
    labels: Sequence[str],
    tensors: Mapping[str, Array],
) -> None:
    """Put the statistics of compiled code, of these tensors, into a clipper."""
    if isinstance(clipper, AGC):
        return
    (numbers, arrays), state = parts(statistics), clipper.get_state()
    if isinstance(statistics, DeviceState):
        state["arrays"] = states.fetched(arrays)
    clipper.set_state({**state, "groups": states.dump(numbers, labels)})
    clipper.owner = owner_of(clipper, shapes_of(tensors), "")


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
