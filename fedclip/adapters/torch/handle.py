# SPDX-License-Identifier: Apache-2.0
"""A clipper that acts in every step of an optimizer.

::

    step()           clip, then the optimizer's own step
    step(closure)    the optimizer's own step; each time it calls the closure: closure, then clip

It uses torch's own hooks, and replaces no method of the optimizer's class.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from operator import is_
from typing import Any, Self, TypeVar

import torch

from fedclip.adapters.shared import Spec, clipper_of, hold, holder_of, release, reset, stats
from fedclip.adapters.torch.clip import clip_named
from fedclip.adapters.torch.names import Parameters, check_sharding, named
from fedclip.adapters.torch.running import Steps, is_within
from fedclip.adapters.torch.statistics import load_state, state
from fedclip.adapters.torch.watch import Watch, forget
from fedclip.errors import FedclipWarning
from fedclip.modules import AGC, Clipper
from fedclip.records import StepRecord

__all__ = ["ClipHandle", "attach", "handles"]

# Called by a GradScaler that is enabled; one that is not calls the optimizer's step itself.
_SCALED_STEP = torch.amp.GradScaler._maybe_opt_step.__code__


class ClipHandle:
    """A clipper that acts in every step of an optimizer; made by `attach`.

    As a context manager it is removed at the end, with a warning if no step was seen.
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
        _check_step(optimizer)
        hold(self.clipper, optimizer, f"attached to {_called(optimizer)}")
        self._others = _ATTACHED.get(optimizer) or _Attached(optimizer)
        keys = {handle._key for handle in self._others.handles}
        first = f"fedclip:{self.clipper.name}"
        numbered = (f"{first}#{n}" for n in count(1))
        self._key: str = next(key for key in chain([first], numbered) if key not in keys)
        self._others.handles.append(self)

    def remove(self) -> None:
        """Stop clipping, and leave the optimizer as it was."""
        self._others.leave(self)

    def _release(self) -> None:
        """Let the clipper act elsewhere too: this optimizer takes no steps any more."""
        if (optimizer := self._others.optimizer()) is not None:
            release(self.clipper, optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._others.clips:
            warnings.warn(
                f"{self.clipper.name} has clipped nothing: no step of {self._others.called} was "
                "seen. What steps in another way, as the inner loops of higher do, needs a clip "
                "in the loop: clip_, or PureClipping",
                FedclipWarning,
                stacklevel=2,
            )
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
        held = _held(optimizer)
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

    # What is done in a step: at its begin, with each new gradient, and at its end.
    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients may come in the step only."""

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients."""
        # A GradScaler sets `grad_scale` on optimizers that unscale the gradients in their step.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "the gradients are still scaled by the GradScaler, and would be clipped at the "
                "wrong size: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        clip_named(self._resolve(optimizer), self.clipper)

    def _end(self) -> None:
        """Do nothing: the gradients are used up."""


class _Attached:
    """All handles of one optimizer, and the hooks in which they act.

    ::

        a step begins, and no other of this optimizer is running:    begin
            it was given a closure:           clip after each call, unless a clip was in the call
            or nothing was clipped so far:    clip
        it ends, and no other of this optimizer is running:          end

    A class and those it comes from may all have a ``step`` with hooks, of which one calls the
    next; the outermost is the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.handles: list[ClipHandle] = []
        self.optimizer = weakref.ref(optimizer)
        self.called = _called(optimizer)
        self.clips = 0
        self._clips_before = 0
        self._watching = True
        self._steps = Steps()
        self._loaded = False
        self._offered: dict[str, Any] = {}
        self._own_ways: list[tuple[weakref.ref[torch.optim.Optimizer], str]] = []
        # A step that was put into the class since has no hooks.
        optimizer._patch_step_function()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._save_with(optimizer)
        self._watch = Watch(optimizer, _held(optimizer))
        # Torch leaves hooks out of copies, which would clip nothing, and say nothing.
        copyreg.pickle(type(optimizer), _reduced)
        _ATTACHED[optimizer] = self

    def leave(self, handle: ClipHandle) -> None:
        """Forget a handle, and with the last one the optimizer."""
        optimizer = self.optimizer()
        if handle not in self.handles or optimizer is None:
            return
        self.handles.remove(handle)
        handle._release()
        if not self.handles:
            for hook in self._hooks:
                hook.remove()
            for known, name in self._own_ways:
                if (own := known()) is not None:
                    vars(own).pop(name, None)
            self._watch.end()
            del _ATTACHED[optimizer]

    def be_saved(self, levels: Sequence[Any], handle: ClipHandle) -> None:
        """Be in the state of each optimizer that holds the next, or warn.

        The state of one may have that of the next in it, as Lookahead's, or not, as SAM's.
        """
        if len(levels) == 1 or not handle.state():
            return
        for level in reversed(levels[:-1]):
            if not _saves(level, handle) and _is_hooked(level):
                self._save_with(level)
        if _saves(levels[0], handle) is False:
            warnings.warn(
                f"the state_dict() of {type(levels[0]).__name__} is without the statistics of "
                f"{handle.clipper.name}: save handle.state() beside it, and give it to "
                "handle.load_state()",
                FedclipWarning,
                stacklevel=3,
            )

    def _save_with(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooks += [
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]
        # A class may save or load without torch's hooks.
        for name, method in (("state_dict", self._saved), ("load_state_dict", self._loads)):
            if getattr(type(optimizer), name) is not getattr(torch.optim.Optimizer, name):
                known = weakref.ref(optimizer)
                vars(optimizer)[name] = partial(method, known)
                self._own_ways.append((known, name))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        found: tuple[Any, Any] | None = _uncompiled(self._begin)(optimizer, args, kwargs)
        return found

    def _begin(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if self._steps.begin():
            self._clips_before = self.clips
            forget(optimizer)
            for handle in self.handles:
                handle._begin(optimizer)
        by_name = kwargs.get("closure")
        given = by_name or (args[1] if len(args) > 1 else None)
        if not callable(given):
            if self.clips == self._clips_before:
                self._clip(optimizer)
            return None
        _check_unscaled(optimizer)

        def closure() -> Any:
            clips = self.clips
            loss = given()
            if self.clips == clips:
                self._clip(optimizer)
            return loss

        if by_name:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        self.clips += 1
        forget(optimizer)
        if self._watching and any(p.grad is not None for p in _held(optimizer)):
            self._watching = False
            self._watch.end()
        for handle in self.handles:
            handle._clip(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _uncompiled(self._end)()

    def _end(self) -> None:
        if self._steps.end():
            for handle in self.handles:
                handle._end()

    def _save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        # AGC has no state to save.
        found = {h._key: saved for h in self.handles if (saved := h.state())}
        return {**state_dict, **found}

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._loaded = True
        rest = dict(state_dict)
        for handle in self.handles:
            handle.load_state(rest.pop(handle._key, self._offered.get(handle._key)))
        return rest

    def _saved(self, known: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = known()
        found = type(optimizer).state_dict(optimizer, *args, **kwargs)
        saved = all(_has(found, handle._key) for handle in self.handles)
        return found if saved else self._save(optimizer, found)

    def _loads(self, known: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # What is outside may not reach the hooks of what is inside.
        optimizer, outside, self._loaded = known(), self._offered, False
        self._offered = {**outside, **state_dict}
        try:
            found = type(optimizer).load_state_dict(optimizer, state_dict, *args, **kwargs)
            if not self._loaded:
                self._load(optimizer, state_dict)
        finally:
            self._offered = outside
        return found


_ATTACHED: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Attached]
_ATTACHED = weakref.WeakKeyDictionary()


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stays outside of the graph of ``torch.compile``: it looks at its callers."""
    if torch.compiler.is_compiling():
        # The decorator would import the compiler with this module.
        disable: Any = torch.compiler.disable
        function = disable(function)
    return function


def _reduced(optimizer: torch.optim.Optimizer) -> Any:
    """Return how to make an optimizer again, with a handle for each clipper."""
    reduced: Any = optimizer.__reduce_ex__(4)
    found = _ATTACHED.get(optimizer)
    if found is None:
        return reduced
    attached = [(type(h), h.clipper, h._resolve(optimizer)) for h in found.handles]
    make, args, state, *_ = reduced
    return _again, (make, args, state, attached)


def _again(
    make: Callable[..., torch.optim.Optimizer], args: Any, state: Any, attached: Any
) -> torch.optim.Optimizer:
    optimizer = make(*args)
    optimizer.__setstate__(state)
    for handle, clipper, parameters in attached:
        # A shallow copy comes with the clipper of the original.
        own = clipper if holder_of(clipper) is None else copy.deepcopy(clipper)
        handle(optimizer, own, parameters)
    return optimizer


def _handle_of(optimizer: torch.optim.Optimizer, place: int) -> ClipHandle:
    return handles(optimizer)[place]


def _called(optimizer: Any) -> str:
    return f"an optimizer ({type(optimizer).__name__})"


def _check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error in a GradScaler's step, whose closure would leave scaled gradients.

    The scaler unscales before the step; only a fused optimizer is told of it, and else the call
    shows it. It refuses closures itself, but only those that are given by name.
    """
    if is_within(_SCALED_STEP) or hasattr(optimizer, "found_inf"):
        # The scaler would leave there what it tells a fused optimizer.
        for told in ("grad_scale", "found_inf"):
            vars(optimizer).pop(told, None)
        raise RuntimeError(
            f"scaler.step(optimizer, closure) lets {type(optimizer).__name__} step with "
            "gradients that are still scaled by the GradScaler: call closure(), then "
            "scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise a TypeError for an optimizer that has no step of its own: LOMO steps in backward."""
    step = inspect.unwrap(type(optimizer).step)
    code = getattr(step, "__code__", None)
    if code is not None and code.co_names == ("NotImplementedError",):
        raise TypeError(
            f"{type(optimizer).__name__} has no step() in which a clipper could act: it uses up "
            "each gradient as it is computed; take its own clipping, or another optimizer"
        )


def _saves(optimizer: Any, handle: ClipHandle) -> bool | None:
    """Return whether the statistics are in an optimizer's state; None if it can not be seen."""
    if not hasattr(optimizer, "state_dict"):
        return None
    try:
        return _has(optimizer.state_dict(), handle._key)
    except (RuntimeError, NotImplementedError):
        # It can not be saved yet, as ZeRO before it has gathered its parts.
        return None


def _has(saved: Any, key: str) -> bool:
    nested = isinstance(saved, Mapping)
    return nested and (key in saved or any(_has(value, key) for value in saved.values()))


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what takes the steps: wrappers, as Accelerate's or SAM, call one that they hold."""
    return levels_of(optimizer)[-1]


def levels_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer, the one that it holds, and so on; the last one takes the steps."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"the first argument must be a torch optimizer, got {optimizer!r:.80}")
    inside = {id(o): o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)}
    hooked = _is_hooked(optimizer)
    own = {*map(id, _held(optimizer))}
    # One that holds other parameters has a part of them (ZeRO), or copies.
    for inner in inside.values() if len(inside) == 1 else ():
        if not hooked or {*map(id, _held(inner))} == own:
            return [optimizer, *levels_of(inner)]
    if not hooked:
        raise TypeError(
            f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer: attach to each "
            "optimizer that it holds"
        )
    return [optimizer]


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named_by(optimizer: torch.optim.Optimizer, clipper: Clipper | AGC) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer by the names that it has, or numbered."""
    groups = optimizer.param_groups
    if all("param_names" in group for group in groups):
        pairs = [p for g in groups for p in zip(g["param_names"], g["params"], strict=True)]
        return named(pairs, clipper)
    return named(_held(optimizer), clipper)


def handles(optimizer: torch.optim.Optimizer) -> list[ClipHandle]:
    """Return the handles of an optimizer, in the order in which they clip; also of a copy."""
    found = _ATTACHED.get(inner_of(optimizer))
    return list(found.handles) if found else []


H = TypeVar("H", bound=ClipHandle)


def attached(
    kind: type[H], optimizer: torch.optim.Optimizer, clipper: Spec, parameters: Parameters | None
) -> H:
    """Return a handle of this kind, whose clipper is saved with the optimizer."""
    levels = levels_of(optimizer)
    handle = kind(levels[-1], clipper, parameters)
    _ATTACHED[levels[-1]].be_saved(levels, handle)
    return handle


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
    unscaled the gradients. A step is that of your call: where a class's step calls that of the
    class that it comes from, it clips once, at the begin. Several handles clip one after the
    other.

    The clipper's state is saved and loaded with ``optimizer.state_dict()``, under a key of its
    own; a state from before there was a clipper starts it anew, with a warning. A copy of the
    optimizer, or one that was pickled, clips with a copy of the clipper (see `handles`).

    Until a first step was seen, a `FedclipWarning` tells of weights that learn without one, at
    the second round of gradients; and of a wrapper whose state can not hold the clipper's.

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
        If the optimizer holds none of the parameters, or one without a name, at the first step
        after ``add_param_group`` too; or if the clipper is attached already, or in a Trainer.
    TypeError
        If the clipper needs names and there are none, if the parameters are pieces of FSDP1, if
        a wrapper has neither torch's hooks nor one optimizer inside, or if the optimizer has no
        step, as LOMO.
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
    return attached(ClipHandle, optimizer, clipper, parameters)
