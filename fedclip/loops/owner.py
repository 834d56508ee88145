# SPDX-License-Identifier: Apache-2.0
"""Which model, optimizer and configuration a clipper's statistics belong to.

===========================  ==================================  ==================================
what differs                 when a clipper is attached again,   when a state is loaded
                             or a new training begins
===========================  ==================================  ==================================
nothing                      it continues                        it continues
names or shapes of weights,  it starts anew, with a warning      refused
or the model itself
class of the optimizer       it starts anew, with a warning      it starts anew, with a warning
configuration of clipper     (does not change)                   it starts anew, with a warning
a state that does not say    it continues                        it continues
===========================  ==================================  ==================================

A state that does not say is an older one, or comes from a federation.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from fedclip.clippers.agc import AGC
from fedclip.clippers.base import Clipper
from fedclip.errors import FedclipWarning, StateError

Owner = dict[str, str]


def owner_of(clipper: Clipper, shapes: Mapping[str, Sequence[int]], optimizer: str) -> Owner:
    """Return the fingerprint of weights by name, the class of an optimizer, and a configuration."""
    named = sorted((name, [*map(int, shape)]) for name, shape in shapes.items())
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
    return {"model": digest, "optimizer": optimizer, "clipper": configuration(clipper)}


def configuration(clipper: Clipper | AGC) -> str:
    """Return name and parameters of a clipper as text."""
    return configuration_of(clipper.name, clipper.get_config())


def configuration_of(name: str, config: Mapping[str, object]) -> str:
    """Return name and parameters of a clipper as text."""
    found = {key: value for key, value in config.items() if key != "keep_memory"}
    return json.dumps([name, found], sort_keys=True, default=repr)


def clipper_in(state: Any) -> str | None:
    """Return the configuration that a state is of, if it says so."""
    owner = state.get("owner") if isinstance(state, Mapping) else None
    return owner.get("clipper") if isinstance(owner, Mapping) else None


def learns(clipper: Clipper | AGC, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a clipper keeps statistics of past steps of tensors of these shapes."""
    if isinstance(clipper, AGC):
        return False
    groups = clipper.groups(shapes)
    transform = clipper.transform(groups)
    return bool(transform.array_fields or transform.init(groups)._fields)


def has_learnt(clipper: Clipper | AGC) -> bool:
    """Whether a clipper has statistics of past steps."""
    if isinstance(clipper, AGC):
        return False
    state = clipper.get_state()
    return bool(state["arrays"]) or any(state["groups"].values())


def begin(
    clipper: Clipper | AGC,
    shapes: Mapping[str, Sequence[int]],
    optimizer: str,
    tensors: Sequence[Any],
) -> None:
    """Let a clipper continue with its statistics, or forget them with a warning.

    Parameters
    ----------
    optimizer
        The class of the optimizer; "" if it is not known, which goes with any.
    tensors
        Those of the model, of which the first stands for it later.

    Raises
    ------
    StateError
        If the statistics were loaded, and are of weights of other names or shapes.
    """
    if isinstance(clipper, AGC) or not learns(clipper, shapes):
        return
    now, model = owner_of(clipper, shapes, optimizer), clipper.model
    if has_learnt(clipper):
        if model is None:
            fits = fitting(clipper, clipper.get_state(), now) is not None
        else:
            fits = any(model() is t for t in tensors) and not _different(clipper.owner or {}, now)
            if not fits:
                _warn(clipper, "another model or optimizer")
        if not fits:
            clipper.reset()
    clipper.owner, clipper.model = now, weakref.ref(tensors[0])


def check_owner(clipper: Clipper | AGC, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise a StateError for a clipper whose statistics are of weights of other names or shapes."""
    if isinstance(clipper, Clipper) and clipper.owner is not None and has_learnt(clipper):
        fitting(clipper, clipper.get_state(), owner_of(clipper, shapes, ""))


def fitting(clipper: Clipper, state: Mapping[str, Any], now: Owner) -> Mapping[str, Any] | None:
    """Return a state that is loaded; None, with a warning, if a clipper has to start anew.

    Raises
    ------
    StateError
        If it is of weights of other names or shapes.
    """
    past = state.get("owner") if isinstance(state, Mapping) else None
    if not isinstance(past, Mapping):
        return state
    if "model" in (found := _different(past, now)):
        raise StateError(
            f"the statistics of {clipper.name} are of a model with other names or shapes of "
            "parameters: load the state of this model, or none; clipper.reset() forgets them"
        )
    if found:
        other = past["optimizer"] if found == ["optimizer"] else f"a {clipper.name} set otherwise"
        _warn(clipper, f"{other}, and this is {clipper.name} with {now['optimizer'] or 'a loop'}")
        return None
    return state


def _different(past: Mapping[str, str], now: Owner) -> list[str]:
    return [what for what in now if past.get(what) and now[what] and past[what] != now[what]]


def _warn(clipper: Clipper, text: str) -> None:
    warnings.warn(
        f"the statistics of {clipper.name} are of {text}: it starts anew",
        FedclipWarning,
        stacklevel=4,
    )
