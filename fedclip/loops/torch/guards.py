# SPDX-License-Identifier: Apache-2.0
"""Guards for unusual torch loops: each with the loop that it is for."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fedclip.errors import FedclipWarning
from fedclip.loops.torch.optimizers import held

_TORCHS_STEP = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
# Called by a GradScaler that is enabled; one that is not calls the optimizer's step itself.
_SCALED_STEP = torch.amp.GradScaler._maybe_opt_step.__code__
# Parts of arrays, and arrays of a kind of their own, may not be looked at.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Of each parameter that is watched: some of its weights, and of their gradient.
_NOTED: Any = WeakIdKeyDictionary()


def _is_within(code: CodeType) -> bool:
    """Return whether this code is among the callers."""
    return any(frame.f_code is code for frame, _ in walk_stack(None))


def check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error in a GradScaler's step, whose closure would leave scaled gradients.

    The scaler unscales before the step; only a fused optimizer is told of it, and else the call
    shows it. It refuses closures itself, but only those that are given by name.
    """
    if _is_within(_SCALED_STEP) or hasattr(optimizer, "found_inf"):
        # The scaler would leave there what it tells a fused optimizer.
        for told in ("grad_scale", "found_inf"):
            vars(optimizer).pop(told, None)
        raise RuntimeError(
            f"scaler.step(optimizer, closure) lets {type(optimizer).__name__} step with "
            "gradients that are still scaled by the GradScaler: call closure(), then "
            "scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise a TypeError for an optimizer that has no step of its own: LOMO steps in backward."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    if code is not None and code.co_names == ("NotImplementedError",):
        raise TypeError(
            f"{type(optimizer).__name__} has no step() in which a clipper could act: it uses up "
            "each gradient as it is computed; take its own clipping, or another optimizer"
        )


class Steps:
    """The steps of one optimizer that are running: one may call the next, and one may have failed.

    Of the callers it asks only which they are. Nothing else tells of a step that has failed: it
    calls no hook at its end, and is not among the callers of later ones.
    """

    def __init__(self) -> None:
        self._running: list[FrameType] = []

    def begin(self) -> bool:
        """Return whether the step that begins is the outermost one."""
        self._forget_failed()
        outermost = not self._running
        for frame, _ in walk_stack(None):
            if frame.f_code.co_filename == _TORCHS_STEP:
                self._running.append(frame)
                break
        return outermost

    def end(self) -> bool:
        """Return whether the step that ends is the outermost one."""
        if len(self._running) > 1:
            self._forget_failed()
        del self._running[-1:]
        return not self._running

    def _forget_failed(self) -> None:
        if self._running:
            callers = {id(frame) for frame, _ in walk_stack(None)}
            self._running = [frame for frame in self._running if id(frame) in callers]


class Watch:
    """Warns of weights that learn before a first step of their optimizer was seen.

    ::

        a gradient comes: note a few weights, and their gradient
        the next comes:   weights that have moved down the slope in between were in a step

    Weights that stay are in no step yet, however many gradients come: they are accumulated, were
    not finite, or it is another model's turn. Weights that moved up are SAM's, or an attack's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Any]) -> None:
        self._optimizer = weakref.ref(optimizer)
        # Another watch may have noted them, long ago.
        forget(optimizer)
        # A parameter is saved without its hook, and without a warning.
        saved_without: Any = torch.utils.hooks.unserializable_hook
        self._hooks = [
            p.register_hook(saved_without(partial(self._look, weakref.ref(p))))
            for p in parameters
            if type(p) in _PLAIN and p.requires_grad
        ]

    @property
    def is_on(self) -> bool:
        """Whether it still watches."""
        return bool(self._hooks)

    def end(self) -> None:
        """Watch no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self, known: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
        optimizer, parameter = self._optimizer(), known()
        if optimizer is None or parameter is None:
            self.end()
            return
        gradients = [g for g in (gradient, parameter.grad) if g is not None]
        if any(g.layout is not torch.strided for g in gradients) or _is_recorded(gradient):
            return
        weights = _some(parameter)
        slope = torch.stack([_some(g) for g in gradients]).sum(0)
        before, past = _NOTED.get(parameter, (weights, slope))
        if _kind(before) != _kind(weights) or _stays(before, weights):
            _NOTED[parameter] = weights, slope
        elif ((weights - before) * past.conj()).real.sum() < 0:
            self.end()
            warnings.warn(
                f"the weights learn, and no step of the optimizer ({type(optimizer).__name__}) to "
                "which a clipper is attached was seen: what moves them is not clipped. Attach to "
                "the optimizer that steps; in a loop that takes its steps itself, call clip_",
                FedclipWarning,
                stacklevel=2,
            )


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Let no watch mind how the parameters of an optimizer move: they are in a clipped step."""
    for parameter in held(optimizer) if _NOTED else ():
        _NOTED.pop(parameter, None)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten()[:: max(1, tensor.numel() // 64)].clone()


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape


def _stays(before: torch.Tensor, now: torch.Tensor) -> bool:
    # What was added and taken away again leaves a rounding.
    return torch.allclose(before, now, rtol=4 * torch.finfo(now.dtype).eps, atol=0.0)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether a graph is made, which can not wait for numbers."""
    return torch.compiler.is_compiling() or (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    )
