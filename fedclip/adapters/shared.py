# SPDX-License-Identifier: Apache-2.0
"""What several adapters need: names, and the statistics of compiled code."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from declearn.optimizer import list_optim_modules

from fedclip import states
from fedclip.arrays import NUMPY, Array, Backend, HostView
from fedclip.errors import nearest
from fedclip.modules import AGC, Clipper, NormClip, OwnLimit
from fedclip.modules.agc import weights_of
from fedclip.records import RoundRecord, StepRecord
from fedclip.scopes import Groups, resolve
from fedclip.transforms import Carried, SliceClipping, Transform, carried

__all__ = [
    "ClipState",
    "Kind",
    "Spec",
    "check_clipper",
    "check_compilable",
    "check_free",
    "check_state",
    "clipped",
    "clipper_of",
    "counted",
    "groups_of",
    "hold",
    "holder_of",
    "kept",
    "kind_of",
    "load",
    "of_state",
    "release",
    "reset",
    "start",
    "stats",
    "transform_of",
    "unique",
]


class ClipState(NamedTuple):
    """State of a clipper in compiled code: small arrays, each with a buffer of its own.

    `stats` gives them as plain numbers; ``optax.tree.get(state, "norm")`` finds a field inside the
    state of a chain.
    """

    statistics: Any
    """The rule's statistics of past norms: arrays over groups."""
    norm: Array
    """Norm of each group at the last step, before clipping."""
    limit: Array
    """Limit of each group at the last step."""
    over: Array
    """Whether each group was over its limit at the last step."""
    steps: Array
    """Number of steps."""
    clipped: Array
    """Number of steps at which some group was clipped."""
    nonfinite: Array
    """Number of steps that held NaN or infinity."""


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, all different: those that come again are numbered.

    >>> unique(["w", "b", "w", "w#1"])
    ['w', 'b', 'w#1', 'w#1#1']
    """
    found: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for name in names:
        chosen = name
        while chosen in found:
            counts[name] += 1
            chosen = f"{name}#{counts[name]}"
        found[chosen] = None
    return list(found)


Spec: TypeAlias = Clipper | AGC | float | str | tuple[str, Mapping[str, Any]]
"""A clipper, a fixed limit of the norm, or a name or (name, config) as in a configuration."""


def clipper_of(spec: Spec) -> Clipper | AGC:
    """Return a clipper, made of its limit, or name and configuration, if it is not one yet."""
    if isinstance(spec, int | float):
        return NormClip(spec)
    match (spec, {}) if isinstance(spec, str) else spec:
        case (str(name), Mapping() as config):
            modules = list_optim_modules()
            known: dict[str, Callable[..., Clipper | AGC]]
            known = {name: cls for name, cls in modules.items() if issubclass(cls, Clipper)}
            known[AGC.name] = AGC  # a regularizer in declearn
            if name not in known:
                raise ValueError(f"no clipper is called {name!r}{nearest(name, known)}")
            return known[name](**config)
    return check_clipper(spec)


def check_clipper(given: Any) -> Clipper | AGC:
    """Return a clipper; raise a TypeError for what is none."""
    if isinstance(given, (Clipper, AGC)):
        return given
    raise TypeError(
        f"{given!r:.80} is not a clipper of fedclip: give one, such as NormClip(1.0), made once, "
        "before the first step"
    )


def clipped(
    clipper: Clipper | AGC,
    gradients: Mapping[str, Array],
    weights: Callable[[], Mapping[str, Array]],
    backend: Backend | None = None,
) -> Mapping[str, Array]:
    """Return the gradients, clipped in eager code; only `agc` asks for the weights."""
    if isinstance(clipper, AGC):
        return clipper.clip(gradients, weights(), backend=backend)
    return clipper.clip(gradients, backend=backend)


class Holder(NamedTuple):
    """What acts with a clipper until it lets go of it."""

    ref: weakref.ref[Any]
    where: str
    """In words."""


_holders: weakref.WeakKeyDictionary[Clipper | AGC, Holder] = weakref.WeakKeyDictionary()


def holder_of(clipper: Clipper | AGC) -> Holder | None:
    """Return what acts with a clipper now, if anything does."""
    found = _holders.get(clipper)
    if found is not None and found.ref() is not None:
        # What nobody can reach any more may still wait to be collected.
        gc.collect()
    return found if found is not None and found.ref() is not None else None


def hold(clipper: Clipper | AGC, holder: object, where: str) -> None:
    """Note what acts with a clipper from now on: one thing, as it has one record of the past.

    Raises
    ------
    ValueError
        If something does already.
    """
    check_free(clipper)
    _holders[clipper] = Holder(weakref.ref(holder), where)


def release(clipper: Clipper | AGC, holder: object) -> None:
    """Note that something acts with a clipper no longer."""
    found = _holders.get(clipper)
    if found is not None and found.ref() is holder:
        del _holders[clipper]


def check_free(clipper: Clipper | AGC) -> None:
    """Raise a ValueError for a clipper that something acts with."""
    found = holder_of(clipper)
    if found is not None:
        raise ValueError(
            f"this {clipper.name} is {found.where} already, and would take the norms of both for "
            "those of one: give each a clipper of its own, by copy.deepcopy(clipper), or as a "
            "name or (name, config); or remove the first"
        )


def check_compilable(clipper: Clipper | AGC) -> None:
    """Raise an error for a clipper that compiled code can not follow."""
    if isinstance(clipper, OwnLimit):
        raise NotImplementedError(
            f"{clipper.name} asks a function of yours, which needs numbers, and compiled code has "
            "none: clip in eager code (`clip_` or `attach` in torch, `clip` in TensorFlow), or "
            "take a clipper with a rule of its own, such as ZScoreClip"
        )
    if clipper.on_nonfinite == "raise":
        raise NotImplementedError(
            "on_nonfinite='raise' can not be done in compiled code, which would have to wait for "
            "the device: use 'skip' or 'propagate'"
        )
    if isinstance(clipper, Clipper) and not clipper.runs_on_device:
        raise NotImplementedError(
            f"{clipper.name} works on the host only: use it in eager code, or give its transform a "
            "device_step"
        )


class Kind(NamedTuple):
    """What all states of a clipper for the same groups have in common."""

    groups: int
    fields: type
    """The type of the numbers of the groups."""
    sizes: tuple[int, ...]
    """The size of each of them."""
    arrays: tuple[str, ...]
    """The names of the arrays that are kept for each tensor."""


def kind_of(clipper: Clipper | AGC, groups: Groups) -> Kind:
    """Return the kind of a clipper's states, for `check_state`."""
    first = start(clipper, groups, fresh=True)
    arrays = () if isinstance(clipper, AGC) else clipper.transform(groups).array_fields
    return Kind(len(groups), type(first), tuple(np.size(c) for c in first), arrays)


def check_state(state: Any, kind: Kind | None, name: str) -> None:
    """Raise a TypeError for what is no state of compiled code of the clipper of this name.

    A state of another number of groups raises a ValueError. Without a kind, nothing is known but
    that it is a state.
    """
    if not isinstance(state, ClipState):
        raise TypeError(f"update needs the ClipState that init returned, got {state!r:.80}")
    if kind is None:
        return
    groups = math.prod(state.norm.shape)
    if groups != kind.groups:
        raise ValueError(
            f"the state is of {groups} groups of tensors, and these gradients have {kind.groups}: "
            "give init and update the same tensors"
        )
    carries = isinstance(state.statistics, Carried)
    fields, kept = state.statistics if carries else Carried(state.statistics, {})
    sizes = tuple(math.prod(column.shape) for column in fields)
    alike = type(fields) is kind.fields and sizes == kind.sizes and carries == bool(kind.arrays)
    if not alike or any({*arrays} != {*kind.arrays} for arrays in kept.values()):
        raise TypeError(
            f"the state is another clipper's, or of {name} with other parameters: give update "
            f"what init, or the last update, of this {name} returned"
        )


def groups_of(clipper: Clipper | AGC, tensors: Mapping[str, Array]) -> Groups:
    """Return the groups of a clipper for tensors by name; `agc` looks at their shapes."""
    if isinstance(clipper, Clipper):
        return resolve(clipper.scope, clipper.exclude, list(tensors))
    scope = "global" if clipper.unit == "global" else "tensor"
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return resolve(scope, clipper.excluded(shapes), list(shapes))


def transform_of(
    clipper: Clipper | AGC, groups: Groups, weights: Mapping[str, Array] | None, backend: Backend
) -> Transform:
    """Return the transform of a clipper; that of `agc` has the limits for these weights."""
    if isinstance(clipper, Clipper):
        return clipper.transform(groups)
    return clipper.device_transform(weights_of(weights, groups), groups, backend)


def start(clipper: Clipper | AGC, groups: Groups, *, fresh: bool = False) -> Any:
    """Return a first state for these groups: the clipper's statistics if it has all of them.

    If it is `fresh`, it knows nothing; `agc` learns nothing. A state that was loaded and is of
    other groups raises a ValueError, as in a step of the clipper itself.
    """
    if isinstance(clipper, AGC):
        return SliceClipping((), None).init(groups)
    known = {} if fresh else clipper.known(groups)
    fits = set(groups.labels) <= set(known)
    first = clipper.transform(groups).init(groups)
    return states.load(first, known if fits else {}, groups.labels)


def kept(
    clipper: Clipper | AGC, groups: Groups, shaped: Mapping[str, HostView]
) -> states.Statistics:
    """Return the first arrays that a clipper keeps for tensors of these shapes, on the host."""
    if isinstance(clipper, AGC):
        return {}
    transform = clipper.transform(groups)
    first = carried(transform, shaped, groups, NUMPY, (), clipper.get_state()["arrays"])
    return states.fetched(first.arrays) if isinstance(first, Carried) else {}


def load(clipper: Clipper, state: Any, labels: Sequence[str]) -> None:
    """Put the statistics of compiled code into a clipper."""
    known = clipper.get_state()
    if isinstance(state, Carried):
        state, known["arrays"] = state.groups, states.fetched(state.arrays)
    clipper.set_state({**known, "groups": states.dump(state, labels)})


def reset(clipper: Clipper | AGC) -> None:
    """Forget all statistics and records."""
    if not isinstance(clipper, AGC):
        clipper.reset()


def stats(clipper: Clipper | AGC, prefix: str = "") -> dict[str, float]:
    """Return plain numbers for a logger: of the last step, and of the round (``round/...``).

    They are those of `StepRecord.as_dict` and `RoundRecord.as_dict`. Where nothing begins rounds,
    all steps are one.
    """
    found = {} if clipper.last is None else clipper.last.as_dict(prefix)
    rounds = [record for record in clipper.rounds if record.group == "all"]
    return found | (rounds[-1].as_dict(f"{prefix}round/") if rounds else {})


def of_state(state: ClipState, labels: tuple[str, ...], prefix: str) -> dict[str, float]:
    """Return the plain numbers of `stats` from a state of compiled code."""
    last = StepRecord(labels, state.norm, state.limit, state.over)
    every = counted((state.steps, state.clipped, state.nonfinite), f"{prefix}round/")
    return (last.as_dict(prefix) if int(state.steps) else {}) | every


def counted(counts: Iterable[Any], prefix: str) -> dict[str, float]:
    """Return numbers of steps, clipped and nonfinite ones as those of a round.

    Compiled code does not count what set its limits: these numbers are left out.
    """
    steps, clipped, nonfinite = map(int, counts)
    every = RoundRecord(0, steps=steps, clipped=clipped, nonfinite=nonfinite).as_dict()
    unknown = ("fixed", "learnt", "warmup")
    return {prefix + name: number for name, number in every.items() if name not in unknown}
