# SPDX-License-Identifier: Apache-2.0
"""What is asked of an optimizer, or of what holds one, and what is saved and loaded with it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fedclip.clippers.agc import AGC
from fedclip.clippers.base import Clipper
from fedclip.core import states
from fedclip.core.states import Fields
from fedclip.errors import FedclipWarning
from fedclip.loops.owner import fitting

MARK = "fedclip"
"""In the first group of parameters of a state: there were statistics of a clipper."""


def called(optimizer: object) -> str:
    """Return what an optimizer is called in errors."""
    return f"an optimizer ({type(optimizer).__name__})"


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of an optimizer is that after a step."""
    return any(
        isinstance(state, dict)
        and (state.get("momentum_buffer") is not None or float(state.get("step", 0)) > 0)
        for state in optimizer.state.values()
    )


def levels_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer, the one that it holds, and so on; the last one takes the steps.

    Wrappers, as Accelerate's or SAM, call one that they hold.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"the first argument must be a torch optimizer, got {optimizer!r:.80}")
    inside = {id(o): o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)}
    hooked, own = is_hooked(optimizer), {*map(id, held(optimizer))}
    # One that holds other parameters has a part of them (ZeRO), or copies.
    for inner in inside.values() if len(inside) == 1 else ():
        if not hooked or {*map(id, held(inner))} == own:
            return [optimizer, *levels_of(inner)]
    if not hooked:
        raise TypeError(
            f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer: attach to each "
            "optimizer that it holds"
        )
    return [optimizer]


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is an optimizer, and no wrapper, which may have some of the hooks."""
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


# -- statistics ------------------------------------------------------------------------------------
def get_state(clipper: Clipper | AGC) -> Fields:
    """Return the statistics and records: numbers, strings, lists and tensors.

    ``torch.load(weights_only=True)`` reads them. `AGC` has none: its limits follow from the
    weights.
    """
    if isinstance(clipper, AGC):
        return {}
    found = clipper.get_state()
    found["arrays"] = states.each(found["arrays"], torch.from_numpy)
    return found


def set_state(
    clipper: Clipper | AGC,
    state: Mapping[str, Any] | None,
    owner: Mapping[str, str] | None = None,
) -> None:
    """Take over what `get_state` returned; None, from before there was a clipper, starts anew.

    Parameters
    ----------
    owner
        Of a clipper that is attached: the model, optimizer and configuration that the state has
        to be of (see `fedclip.loops.owner`).

    Raises
    ------
    StateError
        If the state is another clipper's or model's, or damaged. The clipper then keeps its old
        state.
    """
    if isinstance(clipper, AGC):
        return
    if state is None:
        warnings.warn(
            f"the checkpoint holds nothing for {clipper.name}, which starts anew",
            FedclipWarning,
            stacklevel=3,
        )
        clipper.reset()
        return
    if isinstance(state, Mapping) and isinstance(state.get("arrays"), Mapping):
        state = {**state, "arrays": states.each(state["arrays"], _array)}
    if owner is not None and fitting(clipper, state, dict(owner)) is None:
        clipper.reset()
        return
    clipper.set_state(dict(state))


def _array(value: object) -> object:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


# -- saved with an optimizer ----------------------------------------------------------------------
class Saving:
    """Saves and loads states by key with optimizers, whose methods are replaced, not the class's.

    ::

        state_dict()        the optimizer's own, and what is ours unless it is inside
        load_state_dict()   the optimizer's own, with the rest; in the end of the outermost, ours

    Torch's hooks would not do: a class may save or load without them, and what holds an optimizer
    may give it only what it knows of.

    Parameters
    ----------
    save
        Returns the states, by key.
    load
        Takes the states that were there, of all keys that it asks for.
    """

    def __init__(
        self, save: Callable[[], dict[str, Fields]], load: Callable[[Mapping[str, Fields]], None]
    ) -> None:
        self._save, self._load = save, load
        self._loaded: dict[str, Fields] | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Save and load with an optimizer too."""
        own = weakref.ref(optimizer)
        self._optimizers.append(own)
        vars(optimizer)["state_dict"] = partial(self._saved, own)
        vars(optimizer)["load_state_dict"] = partial(self._loads, own)

    def end(self) -> None:
        """Leave the optimizers as they were."""
        for own in self._optimizers:
            if (optimizer := own()) is not None:
                vars(optimizer).pop("state_dict", None)
                vars(optimizer).pop("load_state_dict", None)

    def _saved(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        found, ours = type(own()).state_dict(own(), *args, **kwargs), self._save()
        # What loads this and does not know of clippers keeps the parameters of groups.
        for group in found.get("param_groups", [])[:1] if ours else ():
            group[MARK] = True
        return found if is_in(found, ours) else {**found, **ours}

    def _loads(self, own: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        outermost, rest = self._loaded is None, dict(state_dict)
        loaded = self._loaded = {} if self._loaded is None else self._loaded
        loaded |= {key: rest.pop(key) for key in state_dict if str(key).startswith("fedclip:")}
        try:
            found = type(own()).load_state_dict(own(), rest, *args, **kwargs)
        finally:
            if outermost:
                self._loaded = None
        for group in own().param_groups:
            group.pop(MARK, None)
        if outermost:
            self._load(loaded)
        return found


def is_in(saved: object, keys: Iterable[str]) -> bool:
    """Return whether all these keys are somewhere in a nested dict."""
    return isinstance(saved, Mapping) and all(
        key in saved or any(is_in(value, [key]) for value in saved.values()) for key in keys
    )
