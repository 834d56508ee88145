# SPDX-License-Identifier: Apache-2.0
"""A clipper that acts in every step of an optimizer.

::

    step()           clip, then the optimizer's own step
    step(closure)    the optimizer's own step; each time it calls the closure: closure, then clip

It uses torch's own hooks, and replaces no method of the optimizer's class.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import chain, count
from operator import is_
from types import FrameType
from typing import Any, Self

import torch

from fedclip.adapters.shared import Spec, clipper_of, reset, stats
from fedclip.adapters.torch.clip import clip_named
from fedclip.adapters.torch.names import Parameters, check_sharding, named
from fedclip.adapters.torch.statistics import load_state, state
from fedclip.modules import AGC, Clipper
from fedclip.records import StepRecord

__all__ = ["ClipHandle", "attach", "handles"]

# Copies and pickles ask an object for this; the attribute of an instance comes first.
_REDUCE = "__reduce_ex__"


class ClipHandle:
    """A clipper that acts in every step of an optimizer; made by `attach`.

    As a context manager it is removed at the end.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clipper: Spec,
        parameters: Parameters | None,
    ) -> None:
        self.clipper = clipper_of(clipper)
        if parameters is not None and not isinstance(parameters, torch.nn.Module):
            parameters = named(parameters, self.clipper)
        self._source = parameters
        self._parameters: dict[str, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []
        self._resolve(optimizer)
        others = _attached(optimizer)
        keys = {handle._key for handle in others.handles}
        first = f"fedclip:{self.clipper.name}"
        numbered = (f"{first}#{n}" for n in count(1))
        self._key: str = next(key for key in chain([first], numbered) if key not in keys)
        self._others = others
        others.handles.append(self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    def remove(self) -> None:
        """Stop clipping, and leave the optimizer as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._others.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def last(self) -> StepRecord | None:
        """What the last step did."""
        return self.clipper.last

    def state(self) -> dict[str, Any]:
        """Return the clipper's statistics; see `fedclip.adapters.torch.state`."""
        return state(self.clipper)

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Take over statistics; see `fedclip.adapters.torch.load_state`."""
        load_state(self.clipper, state)

    def reset(self) -> None:
        """Forget all statistics and records."""
        reset(self.clipper)

    def stats(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger; see `fedclip.adapters.torch.stats`."""
        return stats(self.clipper, prefix)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make the handle again: it is one of its optimizer's, also of a copy's."""
        optimizer = self._others.optimizer()
        if optimizer is None or self not in self._others.handles:
            raise TypeError(
                f"the handle of {self.clipper.name} is in no optimizer any more, and can not be "
                "copied or pickled: keep handle.state(), or the clipper"
            )
        return _handle_of, (optimizer, self._others.handles.index(self))

    def _resolve(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the parameters that the optimizer holds now, by name."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if len(held) == len(self._held) and all(map(is_, held, self._held)):
            return self._parameters
        known = _named_by(optimizer, self.clipper) if self._source is None else self._source
        if isinstance(known, torch.nn.Module):
            known = named(known, self.clipper)
        nameless = {id(p): p for p in held}
        chosen = {n: p for n, p in known.items() if nameless.pop(id(p), None) is not None}
        if not chosen:
            raise ValueError("none of the named parameters is in the optimizer")
        if nameless:
            shapes = ", ".join(str(tuple(p.shape)) for p in list(nameless.values())[:5])
            raise ValueError(
                f"the optimizer holds {len(nameless)} parameters without a name (of shape "
                f"{shapes}), which would not be clipped: give attach the model that has them, or "
                "names for all, and put those to leave alone into the clipper's exclude"
            )
        check_sharding(held)
        self._held, self._parameters = held, chosen
        return chosen

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        by_name = kwargs.get("closure")
        given = by_name or (args[1] if len(args) > 1 else None)
        if not callable(given):
            self._clip(optimizer)
            return None
        _check_unscaled(optimizer)

        def closure() -> Any:
            loss = given()
            self._clip(optimizer)
            return loss

        if by_name:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        # A GradScaler sets `grad_scale` on optimizers that unscale the gradients in their step.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "the gradients are still scaled by the GradScaler, and would be clipped at the "
                "wrong size: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        clip_named(self._resolve(optimizer), self.clipper)

    def _save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        # AGC has no state to save.
        found = self.state()
        return {**state_dict, self._key: found} if found else state_dict

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        rest = dict(state_dict)
        self.load_state(rest.pop(self._key, None))
        return rest


class _Attached:
    """All handles of one optimizer, and how it is copied and pickled with them.

    Torch leaves hooks out of copies, which would clip nothing, and say nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.handles: list[ClipHandle] = []
        self.optimizer = weakref.ref(optimizer)

    def leave(self, handle: ClipHandle) -> None:
        """Forget a handle."""
        if handle in self.handles:
            self.handles.remove(handle)
        if not self.handles and (optimizer := self.optimizer()) is not None:
            vars(optimizer).pop(_REDUCE, None)

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        """Return how to make the optimizer again, with a handle for each clipper."""
        optimizer: Any = self.optimizer()
        reduced: Any = type(optimizer).__reduce_ex__
        make, args, state, *_ = reduced(optimizer, protocol)
        attached = [(type(h), h.clipper, h._resolve(optimizer)) for h in self.handles]
        return _again, (make, args, state, attached)


def _again(
    make: Callable[..., torch.optim.Optimizer], args: Any, state: Any, attached: Any
) -> torch.optim.Optimizer:
    optimizer = make(*args)
    optimizer.__setstate__(state)
    for handle, clipper, parameters in attached:
        handle(optimizer, clipper, parameters)
    return optimizer


def _handle_of(optimizer: torch.optim.Optimizer, place: int) -> ClipHandle:
    return handles(optimizer)[place]


def _check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error in a GradScaler's step, whose closure would leave scaled gradients.

    The scaler unscales before the step, and leaves no trace on the optimizer; only the call shows
    that there is one. It refuses closures itself, but only those that are given by name.
    """
    scalers = torch.amp.GradScaler.step.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is scalers and frame.f_locals["self"].is_enabled():
            raise RuntimeError(
                f"scaler.step(optimizer, closure) lets {type(optimizer).__name__} step with "
                "gradients that are still scaled by the GradScaler: call closure(), then "
                "scaler.unscale_(optimizer) and scaler.step(optimizer)"
            )
        frame = frame.f_back


def _attached(optimizer: torch.optim.Optimizer) -> _Attached:
    found: _Attached = vars(optimizer).setdefault(_REDUCE, _Attached(optimizer))
    return found


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what takes the steps: wrappers, as Accelerate's or SAM, call one that they hold."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"the first argument must be a torch optimizer, got {optimizer!r:.80}")
    inside = {id(o): o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)}
    hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
    # One that holds other parameters has a part of them (ZeRO), or copies.
    for inner in inside.values() if len(inside) == 1 else ():
        if not hooked or _held(inner) == _held(optimizer):
            return inner_of(inner)
    if not hooked:
        raise TypeError(
            f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer: attach to each "
            "optimizer that it holds"
        )
    return optimizer


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _named_by(optimizer: torch.optim.Optimizer, clipper: Clipper | AGC) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer by the names that it has, or numbered."""
    groups = optimizer.param_groups
    if all("param_names" in group for group in groups):
        pairs = [p for g in groups for p in zip(g["param_names"], g["params"], strict=True)]
        return named(pairs, clipper)
    return named([p for group in groups for p in group["params"]], clipper)


def handles(optimizer: torch.optim.Optimizer) -> list[ClipHandle]:
    """Return the handles of an optimizer, in the order in which they clip; also of a copy."""
    found = vars(inner_of(optimizer)).get(_REDUCE)
    return list(found.handles) if isinstance(found, _Attached) else []


def attach(
    optimizer: torch.optim.Optimizer,
    clipper: Spec,
    parameters: Parameters | None = None,
) -> ClipHandle:
    """Clip in every ``optimizer.step()``, until the handle's ``remove()`` is called.

    ::

        with attach(optimizer, ZScoreClip(), model):
            train(model, optimizer)

    Given a closure, as L-BFGS needs it, it clips each time the optimizer has called the closure.
    With gradient accumulation it clips once a step; under AMP it clips after the GradScaler has
    unscaled the gradients. Several handles clip one after the other.

    The clipper's state is saved and loaded with ``optimizer.state_dict()``, under a key of its
    own; a state from before there was a clipper starts it anew, with a warning. A copy of the
    optimizer, or one that was pickled, clips with a copy of the clipper (see `handles`).

    Parameters
    ----------
    optimizer
        Any torch optimizer, or a wrapper that holds one: what Accelerate has prepared, SAM,
        Lookahead. It clips what the optimizer inside steps with.
    clipper
        Any clipper of fedclip, or its name or (name, config) as in a declearn configuration.
    parameters
        The model, which also names what ``add_param_group`` adds later; or as in `clip_`, names
        for all that the optimizer holds. None for the names that the optimizer was given, or
        else numbers.

    Raises
    ------
    ValueError
        If the optimizer holds none of the parameters, or one without a name; at the first step
        after ``add_param_group`` too.
    TypeError
        If the clipper needs names and there are none, if the parameters are pieces of FSDP1, or
        if a wrapper has neither torch's hooks nor one optimizer inside.
    RuntimeError
        At a step, if the gradients are still scaled by a GradScaler, or will be, by a closure
        that is given to its step.

    Examples
    --------
    >>> import torch
    >>> from fedclip import ZScoreClip
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> handle = attach(optimizer, ZScoreClip(), model)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> round(float(handle.last), 3)
    1.732
    >>> handle.remove()
    """
    return ClipHandle(inner_of(optimizer), clipper, parameters)
