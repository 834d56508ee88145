# SPDX-License-Identifier: Apache-2.0
"""What all loops do with a clipper: make it, call it, and know whose its statistics are.

===========================  ==================================  ==================================
what differs                 when a clipper is attached again,   when a state is loaded
                             or a new training begins
===========================  ==================================  ==================================
nothing                      it continues                        it continues
names or shapes of weights,  it starts anew, with a warning      refused
or the model itself
class of the optimizer       it starts anew, with a warning      it starts anew, with a warning
configuration of clipper     (does not change)                   it starts anew, with a warning
a state without an owner     it continues                        it continues
===========================  ==================================  ==================================

A state without an owner is an older one, or comes from a federation.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from fedclip.clippers import by_name
from fedclip.clippers.agc import AGC
from fedclip.clippers.base import Clipper
from fedclip.clippers.norm_clip import NormClip
from fedclip.core.records import StepRecord
from fedclip.core.scopes import Groups, resolve
from fedclip.core.states import Fields, each
from fedclip.errors import FedclipWarning, StateError, nearest

Theirs: TypeAlias = Any
"""An object of the trainer that calls, which has no types."""

Spec: TypeAlias = Clipper | AGC | float | str | tuple[str, Mapping[str, object]]
"""A clipper, a fixed limit of the norm, or a name or (name, config) as in a configuration."""

Owner: TypeAlias = dict[str, str]
Tensors: TypeAlias = Mapping[str, Any]


# -- a clipper, and a step with it ---------------------------------------------------------------
def clipper_of(spec: Spec) -> Clipper | AGC:
    """Return a clipper; make it if its limit, name, or name and configuration is given."""
    if isinstance(spec, int | float):
        return NormClip(spec)
    match (spec, {}) if isinstance(spec, str) else spec:
        case (str(name), Mapping() as config):
            known = by_name()
            if name not in known:
                raise ValueError(f"no clipper is called {name!r}{nearest(name, known)}")
            return check_clipper(known[name](**config))
    return check_clipper(spec)


def check_clipper(clipper: object) -> Clipper | AGC:
    """Return a clipper; raise a TypeError if it is not one."""
    if isinstance(clipper, (Clipper, AGC)):
        return clipper
    raise TypeError(f"{clipper!r:.80} is not a clipper of fedclip: make one before the first step")


def skips(clipper: Clipper | AGC) -> bool:
    """Whether a clipper may skip a step: one that is not finite, or a spike."""
    return clipper.on_nonfinite == "skip" or getattr(clipper, "on_spike", "clip") == "skip"


def skipped(
    clipper: Clipper | AGC, record: StepRecord, shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return the names of the tensors that a clipper skipped in a step; the host waits for it."""
    if clipper.on_nonfinite == "skip" and not record.is_finite:
        return list(shapes)
    if getattr(clipper, "on_spike", "clip") != "skip" or not any(over := record.clipped):
        return []
    groups = clipper.groups(shapes)
    return [n for n, g in zip(groups.names, groups.owners, strict=True) if over[g]]


def skip_of_all(clipper: Clipper | AGC, what: str) -> bool:
    """Return whether a clipper skips spikes in `what`, which skips a step of all variables or none.

    Raises
    ------
    NotImplementedError
        If it skips the spikes of each group separately.
    """
    spikes = getattr(clipper, "on_spike", "clip") == "skip"
    if spikes and getattr(clipper, "scope", "global") != "global":
        raise NotImplementedError(
            f"{clipper.name} skips single groups, but {what} a whole step: use scope='global'"
        )
    return spikes


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, all different: repeated ones are numbered.

    >>> unique(["w", "b", "w", "w#1"])
    ['w', 'b', 'w#1', 'w#1#1']
    """
    numbered: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for name in names:
        chosen = name
        while chosen in numbered:
            counts[name] += 1
            chosen = f"{name}#{counts[name]}"
        numbered[chosen] = None
    return list(numbered)


# -- the statistics ------------------------------------------------------------------------------
def owner_of(clipper: Clipper | AGC, tensors: Tensors, optimizer: str) -> Owner:
    """Return the fingerprint of weights by name, the class of an optimizer, and a configuration."""
    named = sorted((name, [*map(int, tensor.shape)]) for name, tensor in tensors.items())
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
    return {"model": digest, "optimizer": optimizer, "clipper": configuration(clipper)}


def configuration(clipper: Clipper | AGC) -> str:
    """Return name and parameters of a clipper as text."""
    compared = {key: value for key, value in clipper.get_config().items() if key != "keep_memory"}
    return json.dumps([clipper.name, compared], sort_keys=True, default=repr)


def learns(clipper: Clipper | AGC, tensors: Tensors) -> TypeGuard[Clipper]:
    """Whether a clipper keeps statistics of past steps of these tensors."""
    if isinstance(clipper, AGC):
        return False
    groups = clipper.groups(shapes_of(tensors))
    transform = clipper.transform(groups)
    return bool(transform.array_fields or transform.init(groups)._fields)


def has_learnt(clipper: Clipper) -> bool:
    """Whether a clipper has statistics of past steps."""
    state = clipper.get_state()
    return bool(state["arrays"]) or any(state["groups"].values())


def begin(clipper: Clipper | AGC, tensors: Tensors, optimizer: str = "") -> bool:
    """Continue with the statistics of a clipper, or forget them with a warning.

    Return whether the clipper learns from steps, and has no statistics yet.

    Parameters
    ----------
    tensors
        Those of the model, of which the first stands for it later.
    optimizer
        The class of the optimizer; "" if it is not known, which goes with any.

    Raises
    ------
    StateError
        If the statistics were loaded, and are of weights of other names or shapes.
    """
    if not learns(clipper, tensors):
        return False
    now, model = owner_of(clipper, tensors, optimizer), clipper.model
    if has_learnt(clipper):
        if model is None:
            fits = fitting(clipper, clipper.get_state(), now)
        else:
            same = any(model() is tensor for tensor in tensors.values())
            fits = same and not _different(clipper.owner or {}, now)
            if not fits:
                _warn(clipper, "another model or optimizer")
        if not fits:
            clipper.reset()
    clipper.owner, clipper.model = now, weakref.ref(next(iter(tensors.values())))
    return not has_learnt(clipper)


def check_owner(clipper: Clipper | AGC, tensors: Tensors) -> None:
    """Raise a StateError for a clipper whose statistics are of weights of other names or shapes."""
    if isinstance(clipper, Clipper) and clipper.owner is not None and has_learnt(clipper):
        fitting(clipper, clipper.get_state(), owner_of(clipper, tensors, ""))


def fitting(clipper: Clipper, state: Mapping[str, Any], now: Owner) -> bool:
    """Return whether a state can be loaded; if not, warn that the clipper starts anew.

    Raises
    ------
    StateError
        If it is of weights of other names or shapes.
    """
    past = owner_in(state)
    different = _different(past, now)
    if "model" in different:
        raise StateError(
            f"the statistics of {clipper.name} are of a model with other names or shapes of "
            "parameters: load the state of this model, or call clipper.reset()"
        )
    if different:
        optimizer = f"the optimizer {past['optimizer']}"
        _warn(clipper, optimizer if different == ["optimizer"] else "another configuration")
    return not different


def state_of(clipper: Clipper | AGC, turned: Callable[[Any], object]) -> Fields:
    """Return a clipper's state, each array as ``turned(array)``; {} of `agc`."""
    state = {} if isinstance(clipper, AGC) else clipper.get_state()
    return state and {**state, "arrays": each(state["arrays"], turned)}


def restore(clipper: Clipper, state: Mapping[str, Any], owner: Owner | None) -> None:
    """Load a state; if it is of another optimizer or configuration than the owner, start anew."""
    if owner is None or fitting(clipper, state, owner):
        clipper.set_state(state)
    else:
        clipper.reset()
    clipper.owner = owner or clipper.owner


def owner_in(state: object) -> Mapping[str, str]:
    """Return the owner that a state names; {} if it names none."""
    owner = state.get("owner") if isinstance(state, Mapping) else None
    return owner if isinstance(owner, Mapping) else {}


def _different(past: Mapping[str, str], now: Owner) -> list[str]:
    return [key for key in now if past.get(key) and now[key] and past[key] != now[key]]


def _warn(clipper: Clipper, text: str) -> None:
    warn(f"the statistics of {clipper.name} are of {text}: it starts anew", 5)


def warn(text: str, stacklevel: int = 4) -> None:
    """Warn of a loop that would not be clipped as its user expects."""
    warnings.warn(text, FedclipWarning, stacklevel=stacklevel)


# -- the tensors of a step -----------------------------------------------------------------------
Home: TypeAlias = tuple[str, int]
"""A group, and how often all of its tensors had been replaced."""


class Members:
    """The tensors that stood for the groups of a clipper in past steps."""

    def __init__(self) -> None:
        self.last: list[int] = []
        self._shapes: dict[str, Sequence[int]] = {}
        self._turns: Counter[str] = Counter()
        self._homes: dict[int, tuple[weakref.ref[Any], Home]] = {}

    def home(self, tensor: object) -> Home | None:
        """Return where a tensor was in past steps, if it was in one."""
        ref, home = self._homes.get(id(tensor), (None, None))
        return home if ref is not None and ref() is tensor else None

    def check(
        self, clipper: Clipper | AGC, tensors: Tensors, groups: Groups, *, fixed: bool
    ) -> None:
        """Note the tensors of a step.

        Some of a group may be left out. New tensors may replace all of a group, as in loops that
        make their tensors at each step, but replaced ones must not come back. `fixed` tensors
        cannot be replaced.

        Raises
        ------
        ValueError
            If the statistics of a group are of other tensors.
        """
        another = bool(self._turns) and not any(map(self.home, tensors.values()))
        for label, places in zip(groups.labels, groups.members, strict=True):
            members = [tensors[groups.names[place]] for place in places]
            homes = {home for tensor in members if (home := self.home(tensor)) is not None}
            if not homes:
                self._turns[label] += 1
            turn, shape = self._turns[label], members[0].shape
            replaced = homes - {(label, turn)} or (fixed and (another or turn > 1))
            # A group of one tensor, which has its name.
            reshaped = label in tensors and self._shapes.setdefault(label, shape) != shape
            if replaced or reshaped:
                raise ValueError(
                    f"the statistics of {clipper.name} for {label!r} are of other tensors: give "
                    "model.named_parameters(), at each step, and give each model a clipper"
                )
            for tensor in members:
                forget = partial(self._forget, id(tensor))
                self._homes[id(tensor)] = weakref.ref(tensor, forget), (label, turn)

    def _forget(self, key: int, _: object) -> None:
        self._homes.pop(key, None)
        # Another tensor may get this id.
        self.last = [0 for _ in self.last]


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def of_model(tensors: Tensors) -> dict[str, Any]:
    """Return tensors by name, without the numbers that Keras gives to layers."""
    names = unique(re.sub(r"_\d+(?=/|$)", "", name) for name in tensors)
    return dict(zip(names, tensors.values(), strict=True))


def check_members(
    clipper: Clipper | AGC, tensors: Tensors, *, fixed: bool, new_model: bool = False
) -> None:
    """Check the tensors of a step that a loop passes to a clipper; see `Members.check`.

    With the first tensors, and with others if they can be a `new_model`, a training begins.
    """
    if isinstance(clipper, AGC):
        return
    members, now = use_of(clipper).members, [*map(id, tensors.values())]
    if now == members.last:
        return
    if clipper.last is None:
        # Nothing has been learnt yet, or it was forgotten.
        members = use_of(clipper).members = Members()
    begins = not members.last or new_model
    if tensors and begins and not any(map(members.home, tensors.values())):
        begin(clipper, of_model(tensors) if fixed else tensors)
    if learns(clipper, tensors):
        groups = clipper.groups(shapes_of(tensors))
        if fixed or clipper.transform(groups).array_fields:
            groups = by_tensor(tensors if fixed else groups.names)
        members.check(clipper, tensors, groups, fixed=fixed)
    members.last = now


def by_tensor(names: Iterable[str]) -> Groups:
    """Return groups of one tensor each."""
    return resolve("tensor", None, list(names))


# -- what uses a clipper -------------------------------------------------------------------------
NOTHING = None, (), None
"""The `Use.selection` before a first call."""


class Use:
    """The use of a clipper in this process; copies and states of the clipper leave it out."""

    def __init__(self) -> None:
        self.holder: Callable[[], object] = lambda: None
        self.place = ""
        self.members = Members()
        # Of the last call of `clip_`: what it was given, the names, and the axes of outputs.
        self.selection: Any = NOTHING
        # Addresses and sizes of gradients of which no two share memory.
        self.apart: Any = None
        # Of TensorFlow: its compiled form, and the axes of the outputs of layers.
        self.compiled: Any = None
        self.outputs: dict[str, tuple[int, ...]] = {}


def use_of(clipper: Clipper | AGC) -> Use:
    """Return the use of a clipper in this process."""
    if clipper.use is None:
        clipper.use = Use()
    use: Use = clipper.use
    return use


def is_held(clipper: Clipper | AGC) -> bool:
    """Return whether something clips with a clipper now."""
    holder = use_of(clipper).holder
    if holder() is not None:
        # Objects that nothing refers to may still wait to be collected.
        gc.collect()
    return holder() is not None


def hold(clipper: Clipper | AGC, holder: object, place: str) -> None:
    """Note what clips with a clipper from now on.

    Raises
    ------
    ValueError
        If something does already.
    """
    check_free(clipper)
    use = use_of(clipper)
    use.holder, use.place = weakref.ref(holder), place
    # It may clip other tensors than the last call of `clip_` did.
    use.selection, use.members = NOTHING, Members()


def release(clipper: Clipper | AGC, holder: object) -> None:
    """Note that something no longer clips with a clipper."""
    if use_of(clipper).holder() is holder:
        use_of(clipper).holder = lambda: None


def check_free(clipper: Clipper | AGC) -> None:
    """Raise a ValueError for a clipper that something clips with."""
    if is_held(clipper):
        place = use_of(clipper).place
        raise ValueError(f"this {clipper.name} is already {place}: give copy.deepcopy(clipper)")
