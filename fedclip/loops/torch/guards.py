# SPDX-License-Identifier: Apache-2.0
"""Guards for unusual torch loops: each with the loop that it is for.

==========================================================  ======================================
loop                                                        guard
==========================================================  ======================================
``scaler.step(optimizer, closure)``                         `check_unscaled`
an optimizer that steps in ``backward()``: LOMO             `check_step`
a step that calls another step, or fails                    `running_steps`
another optimizer that steps with the same parameters       `watch_others`
wrappers: Accelerate, SAM, Lookahead                        `levels_of`
optimizers that save without torch's hooks: bitsandbytes    `Saving`
copies and pickles of an optimizer                          `reduced`
==========================================================  ======================================
"""

from __future__ import annotations

import copy
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
from fedclip.loops.clippers import is_held
from fedclip.loops.torch.clip import uncompiled

MARK = "fedclip"
"""In the first group of parameters of a state: it was saved together with a clipper's."""
_STEPS_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
# Called by a GradScaler that is enabled; one that is not calls the optimizer's step itself.
_SCALED_STEP = torch.amp.GradScaler._maybe_opt_step.__code__


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


# -- a GradScaler's step -------------------------------------------------------------------------
def check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error in a GradScaler's step, whose closure would compute scaled gradients.

    The scaler itself refuses only closures that are passed by name. It marks fused optimizers; for
    others, only the call stack shows it.
    """
    in_scaler = any(frame.f_code is _SCALED_STEP for frame, _ in walk_stack(None))
    if in_scaler or hasattr(optimizer, "found_inf"):
        # The scaler would leave its marks on a fused optimizer.
        for mark in ("grad_scale", "found_inf"):
            vars(optimizer).pop(mark, None)
        raise RuntimeError(
            "the gradients of a closure are still scaled by the GradScaler: call closure(), then "
            "scaler.unscale_(optimizer) and scaler.step(optimizer)"
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
def running_steps() -> list[FrameType]:
    """Return the frames of all steps that are running, the innermost first.

    A step that fails calls no hook at its end. Only the call stack shows that it is over.
    """
    return [frame for frame, _ in walk_stack(None) if frame.f_code.co_filename == _STEPS_FILE]


# -- another optimizer that steps instead of the one with a clipper ------------------------------
ATTACHED: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""The handles of each optimizer; `parts` makes those of a copy."""


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
        """Save and load with an optimizer too."""
        self._optimizers.add(optimizer)
        replaced = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        ref = weakref.ref(optimizer)
        vars(optimizer).update({name: partial(call, ref) for name, call in replaced.items()})

    def end(self) -> None:
        """Give the optimizers their methods back."""
        for optimizer in self._optimizers:
            for name in ("state_dict", "load_state_dict"):
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


# -- copies and pickles of an optimizer: torch leaves out hooks, so a copy would clip nothing -----
def reduced(ref: Any, protocol: int) -> tuple[object, ...]:
    """Return what copies and pickles an optimizer with what is attached to it."""
    optimizer = ref()
    kind: Any = type(optimizer)
    make, args, state, *_ = kind.__reduce_ex__(optimizer, protocol)
    return _again, (make, args, state, ATTACHED[optimizer].parts(optimizer))


def _again(make: Callable[..., Any], args: Any, state: Any, parts: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = make(*args)
    optimizer.__setstate__(state)
    for handle, clipper, *settings in parts:
        # A shallow copy comes with the clipper of the original.
        free = copy.deepcopy(clipper) if is_held(clipper) else clipper
        handle(optimizer, free, *settings)
    return optimizer
