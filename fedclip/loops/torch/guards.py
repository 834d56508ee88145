# SPDX-License-Identifier: Apache-2.0
"""Guards for unusual torch loops: each with the loop that it is for.

==========================================================  ======================================
loop                                                        guard
==========================================================  ======================================
an optimizer that steps in ``backward()``: LOMO             `check_step`
a step that calls another step, or fails                    `Steps`
another optimizer that steps with the same parameters       `watch_others`
wrappers: Accelerate, SAM, Lookahead                        `levels_of`
optimizers that save without torch's hooks: bitsandbytes    `Saving`
==========================================================  ======================================
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedclip.core.states import Fields
from fedclip.errors import FedclipWarning
from fedclip.loops.torch.clip import uncompiled

MARK = "fedclip"
"""In the first group of parameters of a state: it was saved together with a clipper's."""
_STEPS_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


# -- any optimizer -------------------------------------------------------------------------------
def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def warn(text: str, stacklevel: int) -> None:
    """Warn of a loop that would not be clipped as its user expects."""
    warnings.warn(text, FedclipWarning, stacklevel=stacklevel)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of an optimizer is that after a step."""
    return any(
        isinstance(state, dict)
        and (state.get("momentum_buffer") is not None or float(state.get("step", 0)) > 0)
        for state in optimizer.state.values()
    )


# -- an optimizer that steps in backward() -------------------------------------------------------
def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise a TypeError for an optimizer that has no step, such as LOMO."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    if code is not None and code.co_names == ("NotImplementedError",):
        raise TypeError(
            f"{type(optimizer).__name__} has no step() in which a clipper could act: use another"
        )


# -- a step that calls another step, or fails ----------------------------------------------------
class Steps:
    """The steps of one optimizer that are running: a step may call another one, or fail.

    A step that fails calls no hook at its end. Only the call stack shows that it is over.
    """

    def __init__(self) -> None:
        self._running: list[FrameType] = []

    def begin(self) -> bool:
        """Return whether the step that begins is the outermost one."""
        callers = [frame for frame, _ in walk_stack(None)]
        self._running = [frame for frame in self._running if frame in callers]
        outermost = not self._running
        self._running += [f for f in callers if f.f_code.co_filename == _STEPS_FILE][:1]
        return outermost

    def end(self, *_: object) -> None:
        """Note that the innermost step has ended."""
        del self._running[-1:]


# -- another optimizer that steps instead of the one with a clipper ------------------------------
ATTACHED: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""The handles of each optimizer."""


@cache
def watch_others() -> None:
    """Warn, from now on, if another optimizer steps with the parameters of one with a clipper."""
    register_optimizer_step_post_hook(uncompiled(_look))


def _look(stepping: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    unseen = [] if stepping in ATTACHED else [x for x in ATTACHED.items() if not x[1].seen]
    for optimizer, attached in unseen:
        if not {*map(id, held(stepping))}.isdisjoint(map(id, held(optimizer))):
            attached.seen = True
            warn(
                f"{type(stepping).__name__} steps with parameters of "
                f"{type(optimizer).__name__}, which has the clipper: attach it to the other",
                4,
            )


# -- wrappers ------------------------------------------------------------------------------------
def levels_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer, the one inside it, and so on; the last one takes the steps."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"the first argument must be a torch optimizer, got {optimizer!r:.80}")
    inside = {id(o): o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)}
    hooked, parameters = is_hooked(optimizer), {*map(id, held(optimizer))}
    # An optimizer inside with other parameters has a part of them (ZeRO), or copies.
    for inner in inside.values() if len(inside) == 1 else ():
        if not hooked or {*map(id, held(inner))} == parameters:
            return [optimizer, *levels_of(inner)]
    if not hooked:
        raise TypeError(
            f"{type(optimizer).__name__} has no hooks of torch: attach to each optimizer inside it"
        )
    return [optimizer]


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this has all hooks of torch's optimizers; wrappers may have some."""
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


# -- optimizers that save without torch's hooks --------------------------------------------------
class Saving:
    """Saves and loads states by key with optimizers, whose methods are replaced, not the class's.

    ::

        state_dict()        the optimizer's, and these states unless they are inside it
        load_state_dict()   the optimizer's; at the end of the outermost one, these states

    Torch's hooks are not enough: a class may save or load without them, and a wrapper may pass on
    only the keys that it knows.

    Parameters
    ----------
    save
        Returns the states, by key.
    load
        Takes the states by key, of those that are in what is loaded.
    """

    def __init__(
        self, save: Callable[[], dict[str, Fields]], load: Callable[[Mapping[str, Fields]], None]
    ) -> None:
        self._save, self._load = save, load
        self._loaded: dict[str, Fields] | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Save and load with an optimizer too; it is not copied or pickled without its clipper."""
        self._optimizers.add(optimizer)
        replaced = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        ref = weakref.ref(optimizer)
        vars(optimizer).update({name: partial(call, ref) for name, call in replaced.items()})
        vars(optimizer)["__reduce_ex__"] = _refuse_copy

    def end(self) -> None:
        """Give the optimizers their methods back."""
        for optimizer in self._optimizers:
            for name in ("state_dict", "load_state_dict", "__reduce_ex__"):
                vars(optimizer).pop(name, None)

    def _state_dict(self, ref: Any, *args: Any, **kwargs: Any) -> Any:
        states = self._save()
        saved = type(ref()).state_dict(ref(), *args, **kwargs)
        # An optimizer without a clipper that loads this keeps the parameters of groups.
        for group in saved.get("param_groups", [])[:1] if states else ():
            group[MARK] = True
        return saved if is_in(saved, states) else {**saved, **states}

    def _load_state_dict(self, ref: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        outermost, others = self._loaded is None, dict(state_dict)
        loaded = self._loaded = {} if self._loaded is None else self._loaded
        loaded |= {key: others.pop(key) for key in state_dict if str(key).startswith("fedclip:")}
        try:
            result = type(ref()).load_state_dict(ref(), others, *args, **kwargs)
        finally:
            if outermost:
                self._loaded = None
        for group in ref().param_groups:
            group.pop(MARK, None)
        if outermost:
            self._load(loaded)
        return result


def is_in(saved: object, keys: Iterable[str]) -> bool:
    """Return whether all these keys are somewhere in a nested dict."""
    return isinstance(saved, Mapping) and all(
        key in saved or any(is_in(value, [key]) for value in saved.values()) for key in keys
    )


def _refuse_copy(protocol: object) -> None:
    # Torch leaves out hooks, so that a copy would clip nothing.
    raise TypeError(
        "an optimizer with a clipper cannot be copied or pickled: call handle.remove() first"
    )
