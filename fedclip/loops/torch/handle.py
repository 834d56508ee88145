# SPDX-License-Identifier: Apache-2.0
"""A clipper that acts in every step of an optimizer, on the gradients or on the update.

::

    step()           clip, then the optimizer's step
    step(closure)    the optimizer's step; each time it calls the closure: closure, then clip
    of an update     remember the weights, the optimizer's step, clip the change of the weights

It uses torch's hooks, and replaces no method of the optimizer's class.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from operator import is_
from types import FrameType
from typing import Any, Self

import numpy as np
import torch

from fedclip.clippers.agc import AGC, Outputs
from fedclip.clippers.base import Clipper
from fedclip.core.records import StepRecord
from fedclip.core.states import Fields, each
from fedclip.loops import clippers
from fedclip.loops.clippers import Spec, warn
from fedclip.loops.torch import guards
from fedclip.loops.torch.clip import Parameters, clip_named, named, outputs_of, uncompiled
from fedclip.loops.torch.guards import held


# -- statistics ------------------------------------------------------------------------------------
def get_state(clipper: Clipper | AGC) -> Fields:
    """Return the statistics and records: numbers, strings, lists and tensors.

    ``torch.load(weights_only=True)`` reads them. `AGC` has none: its limits follow from the
    weights.
    """
    return clippers.state_of(clipper, torch.from_numpy)


def set_state(
    clipper: Clipper | AGC, state: Mapping[str, Any] | None, owner: clippers.Owner | None = None
) -> None:
    """Take over what `get_state` returned; None, as in a checkpoint without clipper, starts anew.

    Parameters
    ----------
    owner
        For a clipper that is attached: the model, optimizer and configuration that the state
        must belong to (see `fedclip.loops.clippers`).

    Raises
    ------
    StateError
        If the state is another clipper's or model's, or damaged. The clipper then keeps its old
        state.
    """
    if isinstance(clipper, AGC):
        return
    if state is None:
        warn(f"the checkpoint has no state of {clipper.name}, which starts anew")
        clipper.reset()
        return
    if isinstance(state, Mapping) and isinstance(state.get("arrays"), Mapping):
        arrays = each(state["arrays"], lambda a: np.asarray(torch.as_tensor(a).cpu()))
        state = {**state, "arrays": arrays}
    clippers.restore(clipper, state, owner)


# -- handles -------------------------------------------------------------------------------------
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
        *outer, optimizer = guards.levels_of(optimizer)
        self.clipper = clippers.clipper_of(clipper)
        if parameters is not None and not isinstance(parameters, torch.nn.Module):
            parameters = named(parameters, self.clipper)
        self._source, self._outputs = parameters, outputs
        self._parameters: dict[str, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []
        self._key = ""
        self._resolve(optimizer)
        guards.check_step(optimizer)
        clippers.check_free(self.clipper)
        kind = type(optimizer).__name__
        knows_nothing = clippers.begin(self.clipper, self._parameters, kind)
        late = optimizer.param_groups[0].pop(guards.MARK, False) or guards.has_stepped(optimizer)
        if late and knows_nothing:
            warn(
                f"{kind} stepped or loaded a state before {self.clipper.name} was attached, "
                "which has no statistics: attach first, and then call load_state_dict"
            )
        self._kind = f"an optimizer ({kind})"
        clippers.hold(self.clipper, optimizer, f"attached to {self._kind}")
        self._others: _Attached = guards.ATTACHED.get(optimizer) or _Attached(optimizer)
        keys = [handle._key for handle in self._others.handles]
        self._key = clippers.unique([*keys, f"fedclip:{self.clipper.name}"])[-1]
        self._others.handles.append(self)
        for level in filter(guards.is_hooked, outer):
            self._others.saving.add(level)
        save: Any = getattr(outer[0], "state_dict", None) if outer else None
        # Some cannot be saved yet, such as ZeRO before it has gathered its parts.
        with suppress(RuntimeError, NotImplementedError):
            if save is not None and self.get_state() and not guards.is_in(save(), [self._key]):
                warn(
                    f"the state_dict() of {type(outer[0]).__name__} lacks the clipper's "
                    "statistics: save handle.get_state() too"
                )

    def remove(self) -> None:
        """Stop clipping, and restore the optimizer."""
        self._others.leave(self)

    def _release(self) -> None:
        """Release the clipper for other use: this optimizer takes no more steps."""
        if (optimizer := self._others.optimizer()) is not None:
            clippers.release(self.clipper, optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._others.clips:
            warn(
                f"{self.clipper.name} has clipped nothing: no step of {self._kind} was seen. "
                "If your loop steps in another way, call clip_ in it",
                3,
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
        """Restore statistics of this model and optimizer; see `fedclip.loops.clippers`."""
        optimizer = self._others.optimizer()
        if optimizer is None:
            set_state(self.clipper, state)
            return
        # Until an optimizer has loaded its state, it may hold other parameters.
        with suppress(ValueError):
            self._resolve(optimizer)
        kind = type(optimizer).__name__
        set_state(self.clipper, state, clippers.owner_of(self.clipper, self._parameters, kind))
        clippers.begin(self.clipper, self._parameters, kind)

    def reset(self) -> None:
        """Forget all statistics and records."""
        self.clipper.reset()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger; see `fedclip.Clipper.metrics`."""
        return self.clipper.metrics(prefix)

    def __repr__(self) -> str:
        optimizer = type(self._others.optimizer()).__name__
        return f"{type(self).__name__}({optimizer}, {self.clipper!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to make the handle again: from its optimizer, or that one's copy."""
        optimizer = self._others.optimizer()
        if optimizer is None or self not in self._others.handles:
            why = "cannot be copied or pickled: keep handle.get_state(), or the clipper"
            raise TypeError(f"the handle of {self.clipper.name} was removed and {why}")
        return _handle_of, (optimizer, self._others.handles.index(self))

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
            raise ValueError("the optimizer holds no parameter of those given: give its model")
        if nameless:
            shapes = ", ".join(str(tuple(p.shape)) for p in list(nameless.values())[:5])
            hint = "give attach the model that has them, or names for all"
            got = f"{len(nameless)} parameters without a name (of shape {shapes})"
            raise ValueError(f"the optimizer holds {got}: {hint}")
        if self._outputs is None or isinstance(self._source, torch.nn.Module):
            self._outputs = outputs_of(self._source, chosen, self.clipper)
        self._held, self._parameters = now, chosen
        if self._key and self.clipper.owner:
            # Parameters were added: it is the same model still.
            self.clipper.owner = clippers.owner_of(self.clipper, chosen, type(optimizer).__name__)
        return chosen

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients."""
        # A GradScaler sets `grad_scale` on optimizers that unscale the gradients in their step.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "the gradients are still scaled by the GradScaler: call scaler.unscale_(optimizer)"
            )
        clip_named(self._resolve(optimizer), self.clipper, self._outputs)


class UpdateHandle(ClipHandle):
    """A clipper of updates; `attach_update` returns it."""

    _before: Mapping[str, torch.Tensor] = {}

    def _remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights."""
        self._before = {n: p.detach().clone() for n, p in self._resolve(optimizer).items()}

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the gradients are the optimizer's."""

    @torch.no_grad()
    def _clip_change(self) -> None:
        """Clip the change of the weights."""
        before, self._before = self._before, {}
        change = {name: self._parameters[name] - weight for name, weight in before.items()}
        if isinstance(self.clipper, AGC):
            clipped = self.clipper.clip(change, before, outputs=self._outputs)
        else:
            clipped = self.clipper.clip(change)
        for name, weight in before.items() if clipped is not change else ():
            self._parameters[name].copy_(weight + clipped[name])


class _Attached:
    """All handles of one optimizer, and the hooks in which they act.

    ::

        a step begins, and no other of this optimizer is running:    remember the weights
            it was given a closure:           clip after each call, unless a clip was in the call
            or nothing was clipped so far:    clip
        it ends, and no other of this optimizer is running:          clip the change

    A class and those it comes from may all have a ``step`` with hooks, of which one calls the
    next; the outermost is the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.handles: list[ClipHandle] = []
        self.optimizer = weakref.ref(optimizer)
        self.clips = self._clips_before = 0
        self._is_step = True
        self._outermost: FrameType | None = None
        # A step that was put into the class since has no hooks.
        optimizer._patch_step_function()
        before = optimizer.register_step_pre_hook(uncompiled(self._begin))
        self._hooks = before, optimizer.register_step_post_hook(uncompiled(self._end))
        self.saving = guards.Saving(self._states, self._load)
        self.saving.add(optimizer)
        vars(optimizer)["__reduce_ex__"] = partial(guards.reduced, self.optimizer)
        self._watch = guards.Watch(optimizer)
        guards.ATTACHED[optimizer] = self

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
            self.saving.end()
            self._watch.end()
            del vars(optimizer)["__reduce_ex__"]
            del guards.ATTACHED[optimizer]

    def _begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        steps = guards.running_steps()
        if self._outermost not in steps:
            self._outermost = next(iter(steps), None)
            self._is_step = not _is_dummy(optimizer)
            self._clips_before = self.clips
            if guards.NOTED:
                guards.forget(optimizer)
            for handle in self.handles if self._is_step else ():
                if isinstance(handle, UpdateHandle):
                    handle._remember(optimizer)
        by_name = kwargs.get("closure")
        compute = by_name or (args[1] if len(args) > 1 else None)
        if not callable(compute):
            if self.clips == self._clips_before and self._is_step:
                self._clip(optimizer)
            return None
        guards.check_unscaled(optimizer)

        def closure() -> object:
            clips = self.clips
            loss = compute()
            if self.clips == clips:
                self._clip(optimizer)
            return loss

        if by_name:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        self.clips += 1
        if guards.NOTED:
            guards.forget(optimizer)
        if self._watch.hooks and any(p.grad is not None for p in held(optimizer)):
            self._watch.end()
        for handle in self.handles:
            handle._clip(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if next(iter(guards.running_steps()), None) is self._outermost:
            self._outermost = None
            for handle in self.handles if self._is_step else ():
                if isinstance(handle, UpdateHandle):
                    handle._clip_change()

    def parts(self, optimizer: torch.optim.Optimizer) -> list[tuple[object, ...]]:
        """Return what makes each handle again, for a copy of the optimizer."""
        return [(type(h), h.clipper, h._resolve(optimizer), h._outputs) for h in self.handles]

    def _states(self) -> dict[str, Fields]:
        # AGC has no state to save.
        return {h._key: saved for h in self.handles if (saved := h.get_state())}

    def _load(self, saved: Mapping[str, Fields]) -> None:
        """Give each handle the next state of its configuration; else that of its key, if any."""
        unused = dict(sorted(saved.items(), key=lambda item: (len(item[0]), item[0])))
        chosen = []
        for handle in self.handles:
            config = clippers.configuration(handle.clipper)
            same = (k for k, s in unused.items() if clippers.owner_in(s).get("clipper") == config)
            chosen.append(unused.pop(next(same, ""), None))
        for handle, state in zip(self.handles, chosen, strict=True):
            handle.set_state(unused.pop(handle._key, None) if state is None else state)


def _is_dummy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves nothing: all rates and gradients are 0, or there are none.

    torch.distributed.checkpoint takes such a step to make an optimizer's state.
    """
    if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
        return False
    return not any(p.grad is not None and bool(p.grad.any()) for p in held(optimizer))


def _with_names(optimizer: torch.optim.Optimizer) -> Parameters:
    """Return the parameters of an optimizer, with the names that it was given, if it was."""
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        return held(optimizer)
    return [p for g in groups for p in zip(g["param_names"], g["params"], strict=True)]


def _handle_of(optimizer: torch.optim.Optimizer, place: int) -> ClipHandle:
    return handles(optimizer)[place]


def handles(optimizer: torch.optim.Optimizer) -> list[ClipHandle]:
    """Return the handles of an optimizer, in the order in which they clip; also of a copy."""
    attached = guards.ATTACHED.get(guards.levels_of(optimizer)[-1])
    return list(attached.handles) if attached else []


def attach(
    optimizer: torch.optim.Optimizer, clipper: Spec, parameters: Parameters | None = None
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
    clipper starts from the beginning, with a warning. A copied or pickled
    optimizer has a copy of the clipper.

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
        At a step, if the gradients are still scaled by a GradScaler.

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
    return ClipHandle(optimizer, clipper, parameters)


def attach_update(
    optimizer: torch.optim.Optimizer, clipper: Spec, parameters: Parameters | None = None
) -> UpdateHandle:
    """Clip the change of the weights in every ``optimizer.step()``.

    `attach` clips the gradients that enter the optimizer; this clips the resulting change. It
    includes momentum, adaptive step sizes, weight decay and the learning rate, and limits are in
    units of the weights. It copies the weights during each step. Otherwise it works like `attach`.

    Examples
    --------
    >>> import torch
    >>> from fedclip import NormClip
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.Adam(layer.parameters(), lr=10.0)
    >>> before = layer.weight.detach().clone()
    >>> with attach_update(optimizer, NormClip(0.5), layer) as handle:
    ...     layer(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> f"{float(handle.last):.2f} {float(torch.dist(layer.weight.detach(), before)):.2f}"
    '14.14 0.50'
    """
    return UpdateHandle(optimizer, clipper, parameters)
