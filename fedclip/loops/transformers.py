# SPDX-License-Identifier: Apache-2.0
"""Clippers in the Trainer of Hugging Face Transformers, from 4.50 on."""

from __future__ import annotations

import base64
import weakref
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from fedclip.arrays import Array
from fedclip.core.states import Fields, each
from fedclip.errors import Unchecked, needing, public_names

with needing(__name__, "Transformers: pip install 'transformers[torch]'"):
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

from fedclip.loops import clippers
from fedclip.loops.clippers import Spec, Theirs, configuration
from fedclip.loops.torch import set_state
from fedclip.loops.torch.clip import clip_named, named, outputs_of

__all__ = ["ClipCallback", "attach"]

__dir__ = public_names(__name__)


_TRAINING: weakref.WeakSet[ClipCallback] = weakref.WeakSet()


class ClipCallback(TrainerCallback, ExportableState):
    """Clip the gradients right before each optimizer step of a Trainer.

    ::

        Trainer(model, TrainingArguments(max_grad_norm=0), callbacks=[ClipCallback(ZScoreClip())])

    Gradients are accumulated and, with fp16, unscaled before. Together with ``grad_norm``, the
    Trainer's logs get ``limit``, ``clipped`` (1 if the last step was clipped, else 0) and
    ``clipped_share`` (of the steps of this epoch). Use `attach` if TensorBoard and others should
    see them too. Checkpoints hold the clipper's state, and a resumed run continues with it. From an
    older checkpoint, the clipper starts from the beginning, with a warning. An epoch is a round of
    the clipper's records.

    Parameters
    ----------
    clipper
        A clipper of fedclip, or its name or (name, config) as in a declearn configuration. Clippers
        with arrays, such as `EmaNormClip`, save them as text in ``trainer_state.json``.

    Raises
    ------
    ValueError
        Before the first step, if ``max_grad_norm`` is not 0 (the default of 1.0 also clips), or if
        the clipper is in use elsewhere.
    NotImplementedError
        Before the first step with DeepSpeed, which never shows whole gradients.
    RuntimeError
        At a step without gradients: the optimizer has already used them.
    """

    def __init__(self, clipper: Spec) -> None:
        self.clipper = clippers.clipper_of(clipper)
        self._within = False
        self._training: object = None

    def on_train_begin(self, args: Theirs, state: Theirs, *_: Theirs, **kwargs: Theirs) -> None:
        """Refuse to clip twice, and restore the state of a checkpoint."""
        optimizer, clipper = kwargs["optimizer"], self.clipper
        if norm := args.max_grad_norm:
            raise ValueError(f"max_grad_norm={norm!r} would clip too: give max_grad_norm=0")
        if "DeepSpeed" in type(optimizer).__name__:
            raise NotImplementedError("DeepSpeed shows no whole gradients: use gradient_clipping")
        others = [c for c in _TRAINING if c._training is state and c.clipper is not clipper]
        if any(configuration(other.clipper) == configuration(clipper) for other in others):
            why = "would swap their statistics in a checkpoint: give one, or clippers that differ"
            raise ValueError(f"two ClipCallbacks have the same {clipper.name}, and {why}")
        # A training that failed did not call on_train_end.
        failed = self._training is not None
        clippers.release(clipper, self)
        clippers.hold(clipper, self, "in the ClipCallback of a Trainer")
        self._training = state
        _TRAINING.add(self)
        # Without an entry, as in older checkpoints, the Trainer fails when it saves the next one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, [])
        parameters = named(kwargs["model"], clipper)
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        self._within = bool(state.global_step and state.epoch % 1)
        if state.global_step:
            # The Trainer adds the states of several callbacks to the end of one list.
            entries = saved if isinstance(saved, list) else [saved]
            fitting = [e["attributes"]["clipper_state"] for e in entries if self._wrote(e)]
            owner = clippers.owner_of(clipper, parameters, kind)
            set_state(clipper, _read(fitting[-1]) if fitting else None, owner)
        elif failed:
            clipper.reset()
        clippers.begin(clipper, parameters, kind)

    def _wrote(self, entry: Theirs) -> bool:
        """Whether a checkpoint entry is of a clipper of this name and configuration."""
        wrote = clippers.clipper_of(tuple(entry["args"]["clipper"]))
        return configuration(wrote) == configuration(self.clipper)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Release the clipper for another Trainer."""
        clippers.release(self.clipper, self)
        self._training = None
        _TRAINING.discard(self)

    def on_epoch_begin(self, *args: object, **kwargs: object) -> None:
        """Start a round of the records, unless the run resumes within an epoch."""
        if not self._within:
            self.clipper.on_round_start()
        self._within = False

    def on_pre_optimizer_step(self, *args: object, **kwargs: Theirs) -> None:
        """Unscale the gradients, unless the Trainer has (as from version 5 on), and clip."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            # Only this error shows that the gradients are already unscaled.
            with suppress(RuntimeError):
                scaler.unscale_(optimizer.optimizer)
        parameters = named(model, self.clipper)
        outputs = outputs_of(model, parameters, self.clipper)
        if clip_named(parameters, self.clipper, outputs) is None:
            raise RuntimeError(
                f"{self.clipper.name} found no gradient: use one that steps after backward()"
            )

    def on_log(self, args: object, state: Theirs, control: object, **kwargs: Theirs) -> None:
        """Add the numbers of the last step to the Trainer's logs of steps."""
        logs = kwargs["logs"]
        if "loss" not in logs or self.clipper.last is None:
            return
        epoch = next(r for r in reversed(self.clipper.rounds) if r.group == "all")
        numbers = {**self.clipper.last.as_dict(groups=False), "clipped_share": epoch.clipped_share}
        if "norm" in numbers:
            logs.setdefault("grad_norm", numbers.pop("norm"))
        prefix = f"{self.clipper.name}/" if "limit" in logs else ""
        logs |= {prefix + name: number for name, number in numbers.items()}
        state.log_history[-1] |= logs

    def state(self) -> dict[str, object]:
        """Return what Transformers writes into its checkpoints."""
        args = {"clipper": [self.clipper.name, self.clipper.get_config()]}
        return {"args": args, "attributes": {"clipper_state": self.clipper_state}}

    @property
    def clipper_state(self) -> Fields:
        """The clipper's state for JSON; Transformers may set it when it restores a checkpoint."""
        return clippers.state_of(self.clipper, _to_text)

    @clipper_state.setter
    def clipper_state(self, state: Mapping[str, object]) -> None:
        set_state(self.clipper, _read(state))


def attach(trainer: Theirs, clipper: Spec) -> ClipCallback:
    """Add a `ClipCallback` to a Trainer, before all others, so that they see its logs.

    If you pass callbacks to a Trainer, those of ``report_to`` come first.
    """
    callback = ClipCallback(clipper)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


def _to_text(array: Array) -> list[object]:
    return [str(array.dtype), array.shape, base64.b64encode(array.tobytes()).decode()]


def _read(state: Unchecked) -> Fields:
    """Return a clipper's state that was saved as JSON, with its arrays."""
    return {**state, "arrays": each(state["arrays"], _from_text)} if state else state


def _from_text(text: Unchecked) -> Array:
    dtype, shape, data = text
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
