# SPDX-License-Identifier: Apache-2.0
"""Whether weights learn past the steps in which a clipper would act."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from fedclip.errors import FedclipWarning

__all__ = ["Watch", "forget"]

# Parts of arrays, and arrays of a kind of their own, may not be looked at.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Watch:
    """Warns of weights that learn before a first step of their optimizer was seen.

    ::

        a gradient comes: note a few weights, and their gradient
        the next comes:   weights that have moved down the slope in between were in a step

    Weights that stay are in no step yet, however many gradients come: they are accumulated, were
    not finite, or it is another model's turn. Weights that moved up are SAM's, or an attack's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._noted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hooks = [
            _on_gradient(p, partial(self._look, weakref.ref(p)))
            for p in parameters
            if type(p) in _PLAIN and p.requires_grad
        ]
        _WATCHES.add(self)

    def end(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        _WATCHES.discard(self)

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what was noted of the parameters of an optimizer."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._noted.pop(id(parameter), None)

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
        before, past = self._noted.get(id(parameter), (None, slope))
        if before is None or _kind(before) != _kind(weights) or _stays(before, weights):
            self._noted[id(parameter)] = weights, slope
        elif ((weights - before) * past.conj()).real.sum() < 0:
            self.end()
            warnings.warn(
                f"the weights learn, and no step of the optimizer ({type(optimizer).__name__}) to "
                "which a clipper is attached was seen: what moves them is not clipped. Attach to "
                "the optimizer that steps; in a loop that takes its steps itself, call clip_",
                FedclipWarning,
                stacklevel=2,
            )


_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()


def _on_gradient(parameter: Any, look: Any) -> Any:
    # A parameter is saved without it, and without a warning.
    hook: Any = torch.utils.hooks.unserializable_hook
    return parameter.register_hook(hook(look))


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Let no watch mind how the parameters of an optimizer move: they are in a clipped step."""
    for watch in tuple(_WATCHES):
        watch.forget(optimizer)


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
