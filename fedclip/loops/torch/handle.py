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
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import is_
from typing import Any, Self, TypeVar

import torch

from fedclip.clippers.agc import AGC, Outputs
from fedclip.clippers.base import Clipper
from fedclip.core.records import StepRecord
from fedclip.core.states import Fields
from fedclip.errors import FedclipWarning
from fedclip.loops.clippers import Spec, check_free, clipper_of, hold, holder_of, release, unique
from fedclip.loops.owner import begin, clipper_in, configuration, has_learnt, learns, owner_of
from fedclip.loops.torch.clip import clip_named
from fedclip.loops.torch.guards import (
    Steps,
    Watch,
    check_step,
    check_unscaled,
    forget,
    uncompiled,
)
from fedclip.loops.torch.names import Parameters, check_sharding, named, outputs_of
from fedclip.loops.torch.optimizers import (
    MARK,
    Saving,
    called,
    get_state,
    has_stepped,
    held,
    is_hooked,
    is_in,
    levels_of,
    set_state,
)


class ClipHandle:
    """A clipper that acts in every step of an optimizer; `attach` returns it.

    As a context manager, it removes the clipper at the end, with a warning if there was no step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clipper: Spec,
        parameters: Parameters | None,
        outputs: Outputs | None = None,
    ) -> None:
        self.clipper = clipper_of(clipper)
        if parameters is not None and not isinstance(parameters, torch.nn.Module):
            parameters = named(parameters, self.clipper)
        self._source = parameters
        self._outputs = outputs
        self._parameters: dict[str, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []
        self._resolve(optimizer)
        check_step(optimizer)
        check_free(self.clipper)
        shapes = self._shapes()
        begin(self.clipper, shapes, type(optimizer).__name__, self._held)
        late = optimizer.param_groups[0].pop(MARK, False) or has_stepped(optimizer)
        if late and learns(self.clipper, shapes) and not has_learnt(self.clipper):
            warnings.warn(
                f"{type(optimizer).__name__} has stepped or loaded a state before "
                f"{self.clipper.name} was attached, which starts without statistics: attach "
                "first, and then call load_state_dict",
                FedclipWarning,
                stacklevel=4,
            )
        hold(self.clipper, optimizer, f"attached to {called(optimizer)}")
        self._others = _ATTACHED.get(optimizer) or _Attached(optimizer)
        taken = [h._key for h in self._others.handles]
        self._key: str = unique([*taken, f"fedclip:{self.clipper.name}"])[-1]
        self._others.handles.append(self)

    def remove(self) -> None:
        """Stop clipping, and restore the optimizer."""
        self._others.leave(self)

    def _release(self) -> None:
        """Release the clipper for other use: this optimizer takes no more steps."""
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
        """Record of the last step."""
        return self.clipper.last

    def on_round_start(self) -> None:
        """Start a round of the records, such as an epoch; statistics continue."""
        self.clipper.on_round_start()

    def get_state(self) -> Fields:
        """Return the clipper's statistics; see `fedclip.loops.torch.get_state`."""
        return get_state(self.clipper)

    def set_state(self, state: Mapping[str, object] | None) -> None:
        """Restore statistics of this model and optimizer; see `fedclip.loops.owner`."""
        optimizer = self._others.optimizer()
        if optimizer is None or isinstance(self.clipper, AGC):
            set_state(self.clipper, state)
            return
        # What an optimizer loads may be other parameters, until its own loading is over.
        with suppress(ValueError):
            self._resolve(optimizer)
        shapes, kind = self._shapes(), type(optimizer).__name__
        set_state(self.clipper, state, owner_of(self.clipper, shapes, kind))
        begin(self.clipper, shapes, kind, [*self._parameters.values()])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self._parameters.items()}

    def reset(self) -> None:
        """Forget all statistics and records."""
        self.clipper.reset()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger; see `fedclip.Clipper.metrics`."""
        return self.clipper.metrics(prefix)

    def __repr__(self) -> str:
        optimizer = type(self._others.optimizer()).__name__
        return f"{type(self).__name__}({optimizer}, {self.clipper!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether the other has an equal clipper, for parameters of the same names."""
        if type(self) is not type(other):
            return NotImplemented
        return self.clipper == other.clipper and [*self._parameters] == [*other._parameters]

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to make the handle again: it is one of its optimizer's, also of a copy's."""
        optimizer = self._others.optimizer()
        places = [place for place, h in enumerate(self._others.handles) if h is self]
        if optimizer is None or not places:
            raise TypeError(
                f"the handle of {self.clipper.name} is in no optimizer any more, and can not be "
                "copied or pickled: keep handle.get_state(), or the clipper"
            )
        return _handle_of, (optimizer, places[0])

    def _resolve(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the parameters that the optimizer holds now, by name."""
        now = held(optimizer)
        if len(now) == len(self._held) and all(map(is_, now, self._held)):
            return self._parameters
        source = _with_names(optimizer) if self._source is None else self._source
        if not isinstance(source, Mapping):
            source = named(source, self.clipper)
        nameless = {id(p): p for p in now}
        chosen = {n: p for n, p in source.items() if nameless.pop(id(p), None) is not None}
        if not chosen:
            raise ValueError("none of the named parameters is in the optimizer")
        if nameless:
            shapes = ", ".join(str(tuple(p.shape)) for p in list(nameless.values())[:5])
            raise ValueError(
                f"the optimizer holds {len(nameless)} parameters without a name (of shape "
                f"{shapes}), which would not be clipped: give attach the model that has them, or "
                "names for all, and put those to leave alone into the clipper's exclude"
            )
        check_sharding(now)
        if self._outputs is None or isinstance(self._source, torch.nn.Module):
            self._outputs = outputs_of(self._source, chosen, self.clipper)
        self._held, self._parameters = now, chosen
        if hasattr(self, "_key") and isinstance(self.clipper, Clipper) and self.clipper.owner:
            # Parameters were added: it is the same model still.
            kind = type(optimizer).__name__
            self.clipper.owner = owner_of(self.clipper, self._shapes(), kind)
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
        clip_named(self._resolve(optimizer), self.clipper, self._outputs)

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
        self.called = called(optimizer)
        self.clips = 0
        self._clips_before = 0
        self._is_step = True
        self._steps = Steps()
        # A step that was put into the class since has no hooks.
        optimizer._patch_step_function()
        self._hooks = [
            optimizer.register_step_pre_hook(uncompiled(self._begin)),
            optimizer.register_step_post_hook(uncompiled(self._end)),
        ]
        self.saving = Saving(self._states, self._load)
        self.saving.add(optimizer)
        self._watch = Watch(optimizer, held(optimizer))
        # Torch leaves hooks out of copies, which would clip nothing, and say nothing.
        copyreg.pickle(type(optimizer), _reduced)
        _ATTACHED[optimizer] = self

    def leave(self, handle: ClipHandle) -> None:
        """Forget a handle, and with the last one the optimizer."""
        optimizer = self.optimizer()
        others = [other for other in self.handles if other is not handle]
        if len(others) == len(self.handles) or optimizer is None:
            return
        self.handles = others
        handle._release()
        if not self.handles:
            for hook in self._hooks:
                hook.remove()
            self.saving.end()
            self._watch.end()
            del _ATTACHED[optimizer]

    def _begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if self._steps.begin():
            self._is_step = not _is_dummy(optimizer)
            self._clips_before = self.clips
            forget(optimizer)
            for handle in self.handles if self._is_step else ():
                handle._begin(optimizer)
        by_name = kwargs.get("closure")
        given = by_name or (args[1] if len(args) > 1 else None)
        if not callable(given):
            if self.clips == self._clips_before and self._is_step:
                self._clip(optimizer)
            return None
        check_unscaled(optimizer)

        def closure() -> object:
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
        if any(p.grad is not None for p in held(optimizer)):
            self._watch.end()
        for handle in self.handles:
            handle._clip(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._steps.end() and self._is_step:
            for handle in self.handles:
                handle._end()

    def _states(self) -> dict[str, Fields]:
        # AGC has no state to save.
        return {h._key: saved for h in self.handles if (saved := h.get_state())}

    def _load(self, states: Mapping[str, Fields]) -> None:
        """Give each handle the next state of its configuration; else that of its key, if left."""
        left = dict(sorted(states.items(), key=lambda item: (len(item[0]), item[0])))
        found = []
        for handle in self.handles:
            config = configuration(handle.clipper)
            same = (key for key, saved in left.items() if clipper_in(saved) == config)
            found.append(left.pop(next(same, ""), None))
        for handle, own in zip(self.handles, found, strict=True):
            handle.set_state(left.pop(handle._key, None) if own is None else own)


def _is_dummy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves nothing: all rates and gradients are 0, or there are none.

    torch.distributed.checkpoint takes such a step to make an optimizer's state.
    """
    if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
        return False
    return not any(p.grad is not None and bool(p.grad.any()) for p in held(optimizer))


_ATTACHED: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Attached]
_ATTACHED = weakref.WeakKeyDictionary()


def _reduced(optimizer: torch.optim.Optimizer) -> Any:
    """Return how to make an optimizer again, with a handle for each clipper."""
    reduced: Any = optimizer.__reduce_ex__(4)
    found = _ATTACHED.get(optimizer)
    if found is None:
        return reduced
    attached = [(type(h), h.clipper, h._resolve(optimizer), h._outputs) for h in found.handles]
    make, args, state, *_ = reduced
    return _again, (make, args, state, attached)


def _again(
    make: Callable[..., torch.optim.Optimizer], args: Any, state: Any, attached: Any
) -> torch.optim.Optimizer:
    optimizer = make(*args)
    optimizer.__setstate__(state)
    for handle, clipper, parameters, outputs in attached:
        # A shallow copy comes with the clipper of the original.
        own = clipper if holder_of(clipper) is None else copy.deepcopy(clipper)
        handle(optimizer, own, parameters, outputs)
    return optimizer


def _handle_of(optimizer: torch.optim.Optimizer, place: int) -> ClipHandle:
    return handles(optimizer)[place]


def _with_names(optimizer: torch.optim.Optimizer) -> Parameters:
    """Return the parameters of an optimizer, with the names that it was given, if it was."""
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        return held(optimizer)
    return [p for g in groups for p in zip(g["param_names"], g["params"], strict=True)]


def handles(optimizer: torch.optim.Optimizer) -> list[ClipHandle]:
    """Return the handles of an optimizer, in the order in which they clip; also of a copy."""
    found = _ATTACHED.get(levels_of(optimizer)[-1])
    return list(found.handles) if found else []


H = TypeVar("H", bound=ClipHandle)


def attached(
    kind: type[H], optimizer: torch.optim.Optimizer, clipper: Spec, parameters: Parameters | None
) -> H:
    """Return a handle of this kind, whose clipper is saved with the optimizer, or warn."""
    levels = levels_of(optimizer)
    handle = kind(levels[-1], clipper, parameters)
    for level in filter(is_hooked, levels[:-1]):
        _ATTACHED[levels[-1]].saving.add(level)
    if len(levels) > 1 and handle.get_state() and not _saves(levels[0], handle):
        warnings.warn(
            f"the state_dict() of {type(levels[0]).__name__} is without the statistics of "
            f"{handle.clipper.name}: save handle.get_state() beside it, and give it to "
            "handle.set_state()",
            FedclipWarning,
            stacklevel=3,
        )
    return handle


def _saves(optimizer: object, handle: ClipHandle) -> bool:
    """Return whether the statistics are in an optimizer's state, or none can be seen."""
    if not hasattr(optimizer, "state_dict"):
        return True
    try:
        return is_in(optimizer.state_dict(), [handle._key])
    except (RuntimeError, NotImplementedError):
        # It can not be saved yet, as ZeRO before it has gathered its parts.
        return True


def attach(
    optimizer: torch.optim.Optimizer,
    clipper: Spec,
    parameters: Parameters | None = None,
) -> ClipHandle:
    """Clip in every ``optimizer.step()``, until you call ``remove()`` of the returned handle.

    ::

        with attach(optimizer, ZScoreClip(), model):
            train(model, optimizer)

    It clips once a step, with gradient accumulation too, and under AMP after the GradScaler has
    unscaled the gradients. If you pass a closure, as for L-BFGS, it clips after each call of the
    closure. If the step of a class calls that of its base class, it clips once, at the start.
    Several handles clip one after the other.

    ``optimizer.state_dict()`` includes the clipper's state. If you load a state without one, the
    clipper starts from the beginning, with a warning. A copied or pickled optimizer clips with a
    copy of the clipper (see `handles`).

    A `FedclipWarning` reports weights that change before the first step is seen, and a wrapper with
    a state that cannot hold the clipper's.

    Parameters
    ----------
    optimizer
        Any torch optimizer, or a wrapper that holds one, such as Accelerate's, SAM or Lookahead.
        The gradients that the inner optimizer uses are clipped.
    clipper
        Any clipper of fedclip, or its name or (name, config) as in a declearn configuration.
    parameters
        The model, which also names parameters from later ``add_param_group`` calls; or, as in
        `clip_`, names for all parameters of the optimizer. None: the names that the optimizer
        knows, or else numbers.

    Raises
    ------
    ValueError
        If the optimizer holds none of the parameters, or one without a name (also at the first step
        after ``add_param_group``). Also if the clipper is already attached, or in a Trainer.
    TypeError
        If the clipper needs names and there are none. Also for pieces of FSDP1, for a wrapper with
        neither torch's hooks nor one inner optimizer, and for an optimizer without a step, such as
        LOMO.
    RuntimeError
        At a step, if the gradients are still scaled by a GradScaler, or a closure would scale them.

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
