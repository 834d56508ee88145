# SPDX-License-Identifier: Apache-2.0
"""Guards for unusual torch loops: each with the loop that it is for.

==========================================================  ======================================
loop                                                        guard
==========================================================  ======================================
``scaler.step(optimizer, closure)``                         `check_unscaled`
an optimizer that steps in ``backward()``: LOMO             `check_step`
a step that calls another step, or fails                    `running_steps`
weights that learn without a step of the optimizer          `Watch`
wrappers: Accelerate, SAM, Lookahead                        `levels_of`
optimizers that save without torch's hooks: bitsandbytes    `Saving`
copies and pickles of an optimizer                          `reduced`
==========================================================  ======================================
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fedclip.core.states import Statistics
from fedclip.loops.clippers import is_held, warn

MARK = "fedclip"
"""In the first group of parameters of a state: it was saved together with a clipper's."""
_STEPS_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
# Called by a GradScaler that is enabled; one that is not calls the optimizer's step itself.
_SCALED_STEP = torch.amp.GradScaler._maybe_opt_step.__code__
# DTensors and other subclasses may not be read.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
NOTED: Any = WeakIdKeyDictionary()
"""Of each parameter that is watched: some of its weights, and of their gradient."""


# -- any optimizer -------------------------------------------------------------------------------
def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of an optimizer is that after a step."""
    states = [s for s in optimizer.state.values() if isinstance(s, dict)]
    return any(s.get("momentum_buffer") is not None or float(s.get("step", 0)) > 0 for s in states)


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
        hint = "call closure(), then scaler.unscale_(optimizer) and scaler.step(optimizer)"
        raise RuntimeError(f"the gradients of a closure are still scaled by the GradScaler: {hint}")


# -- an optimizer that steps in backward() -------------------------------------------------------
def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise a TypeError for an optimizer that has no step, such as LOMO."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    if code is not None and code.co_names == ("NotImplementedError",):
        raise TypeError(f"{type(optimizer).__name__} has no step() to clip in: use another")


# -- a step that calls another step, or fails ----------------------------------------------------
def running_steps() -> list[FrameType]:
    """Return the frames of all steps that are running, the innermost first.

    A step that fails calls no hook at its end. Only the call stack shows that it is over.
    """
    return [frame for frame, _ in walk_stack(None) if frame.f_code.co_filename == _STEPS_FILE]


# -- weights that learn without a step of the optimizer ------------------------------------------
class Watch:
    """Warns if weights learn before the first step of their optimizer.

    ::

        first gradient     note a few weights, and their gradient
        next gradient      weights that have moved down the slope since then were in a step

    Weights that stay were in no step, however many gradients come: they accumulate, were not
    finite, or another model is trained. SAM and adversarial attacks move weights up the slope.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # Another watch may have noted them, long ago.
        forget(optimizer)
        # A parameter is saved without its hook, and without a warning.
        unsaved: Any = torch.utils.hooks.unserializable_hook
        chosen: Any = [p for p in held(optimizer) if type(p) in _PLAIN and p.requires_grad]
        self.hooks = [p.register_hook(unsaved(partial(self._look, weakref.ref(p)))) for p in chosen]

    def end(self) -> None:
        """Stop watching."""
        while self.hooks:
            self.hooks.pop().remove()

    def _look(self, known: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
        optimizer, parameter = self._optimizer(), known()
        if optimizer is None or parameter is None:
            self.end()
            return
        gradients = [g for g in (gradient, parameter.grad) if g is not None]
        # Where a graph is recorded, numbers cannot be read.
        captured = gradient.is_cuda and torch.cuda.is_current_stream_capturing()
        is_recorded = captured or torch.compiler.is_compiling()
        if is_recorded or any(g.layout is not torch.strided for g in gradients):
            return
        weights, slope = _some(parameter), torch.stack([*map(_some, gradients)]).sum(0)
        before, past = NOTED.get(parameter, (weights, slope))
        if not _has_moved(before, weights):
            NOTED[parameter] = weights, slope
        elif ((weights - before) * past.conj()).real.sum() < 0:
            self.end()
            warn(
                f"the weights change, but no step of the optimizer ({type(optimizer).__name__}) "
                "was seen: attach the clipper to the optimizer that steps, or call clip_",
                3,
            )


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Forget what was noted of an optimizer's parameters: they are in a clipped step."""
    for parameter in held(optimizer):
        NOTED.pop(parameter, None)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten()[:: max(1, tensor.numel() // 64)].clone()


def _has_moved(before: torch.Tensor, now: torch.Tensor) -> bool:
    alike = (before.device, before.dtype, before.shape) == (now.device, now.dtype, now.shape)
    # Adding and subtracting the same leaves a rounding error.
    return alike and not torch.allclose(before, now, rtol=4 * torch.finfo(now.dtype).eps, atol=0.0)


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

    def __init__(self, save: Callable[[], Statistics], load: Callable[[Statistics], None]) -> None:
        self._save, self._load = save, load
        self._loaded: Statistics | None = None
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
ATTACHED: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""The handles of each optimizer; `parts` makes those of a copy."""


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
