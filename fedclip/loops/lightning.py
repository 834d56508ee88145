# SPDX-License-Identifier: Apache-2.0
"""Clippers in Lightning: a callback of the Trainer, or a mixin of the module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from importlib import import_module

from fedclip.errors import needing, public_names
from fedclip.loops.clippers import Spec, Theirs, clipper_of
from fedclip.loops.torch import ClipHandle, attach

__all__ = ["ClipCallback", "LightningClipping"]

__dir__ = public_names(__name__)

Callback: Theirs
# The package has two names, and users have either.
with needing(__name__, "Lightning: pip install lightning"):
    try:
        Callback = import_module("lightning.pytorch").Callback
    except ImportError:
        Callback = import_module("pytorch_lightning").Callback


class ClipCallback(Callback):
    """Clip before each optimizer step of a Lightning Trainer.

    ::

        trainer = Trainer(callbacks=[ClipCallback(ZScoreClip())])

    It clips once a step, in automatic and manual optimization, after accumulation and unscaling.
    Checkpoints hold the clipper's statistics with the optimizer's. From an older checkpoint, the
    clipper starts from the beginning, with a warning. An epoch is a round of the clipper's records.
    Loggers get the numbers of the last step every ``log_every_n_steps``.

    Parameters
    ----------
    clipper
        A clipper of fedclip, or its name or (name, config). With several optimizers, the others get
        copies; or pass a list with one clipper for each optimizer.

    Raises
    ------
    ValueError
        Before the first step: if the Trainer has a ``gradient_clip_val``, if a list is not as long
        as the list of optimizers, if the clipper is in use elsewhere, or if a fused optimizer would
        unscale the gradients after clipping.
    NotImplementedError
        Before the first step with DeepSpeed, which never shows whole gradients.

    Examples
    --------
    >>> from fedclip import NormClip
    >>> callback = ClipCallback(NormClip(1.0))
    >>> callback.clippers[0].name
    'norm-clip'
    """

    def __init__(self, clipper: Spec | list[Spec]) -> None:
        self._copies = not isinstance(clipper, list)
        specs = clipper if isinstance(clipper, list) else [clipper]
        self.clippers = [clipper_of(spec) for spec in specs]
        self._handles: list[ClipHandle] = []

    def setup(self, trainer: Theirs, pl_module: Theirs, stage: str) -> None:
        """Refuse to clip twice, and what cannot be clipped."""
        if stage != "fit":
            return
        if trainer.gradient_clip_val:
            raise ValueError(
                f"gradient_clip_val={trainer.gradient_clip_val!r} and ClipCallback would clip "
                "twice: remove gradient_clip_val from the Trainer"
            )
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise NotImplementedError(
                "DeepSpeed does not show whole gradients: use its gradient_clip_val"
            )
        # Finders of a learning rate or batch size step in on_fit_start.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda c: not isinstance(c, ClipCallback))

    def on_fit_start(self, trainer: Theirs, pl_module: Theirs) -> None:
        """Attach a clipper to each optimizer, before a checkpoint is loaded."""
        optimizers = trainer.optimizers
        if self._copies:
            further = len(optimizers) - len(self.clippers)
            self.clippers += [copy.deepcopy(self.clippers[0]) for _ in range(further)]
        if len(self.clippers) != len(optimizers):
            raise ValueError(
                f"there are {len(self.clippers)} clippers and {len(optimizers)} optimizers: give "
                "one clipper for each optimizer, or a single one, which is copied"
            )
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for optimizer, clipper in zip(optimizers, self.clippers, strict=True):
            if scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
                raise ValueError(
                    f"a fused {type(optimizer).__name__} unscales the gradients in its step, "
                    "after the clip: make it without fused=True"
                )
            self._handles.append(attach(optimizer, clipper, pl_module))

    def teardown(self, trainer: Theirs, pl_module: Theirs, stage: str) -> None:
        """Release the clippers for another Trainer; later checkpoints still include them."""
        for handle in self._handles:
            handle._release()

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Release the clippers."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_epoch_start(self, trainer: object, pl_module: object) -> None:
        """Start a round of the records."""
        for clipper in self.clippers:
            clipper.on_round_start()

    def on_train_batch_end(self, trainer: Theirs, pl_module: Theirs, *args: object) -> None:
        """Log the numbers of the last step, as often as Lightning logs."""
        every = trainer.log_every_n_steps
        if not every or trainer.global_step % every:
            return
        for i, clipper in enumerate(self.clippers):
            if clipper.last is not None:
                prefix = "clip/" if len(self.clippers) == 1 else f"clip/{i}/"
                pl_module.log_dict(clipper.last.as_dict(prefix, groups=False))


class LightningClipping:
    """Mixin of a LightningModule that adds a `ClipCallback` with ``self.clipper``.

    ::

        class Model(LightningClipping, LightningModule):
            def __init__(self):
                super().__init__()
                self.clipper = ZScoreClip()

    The order of the bases does not matter; the class may have a ``configure_callbacks``.
    """

    clipper: Spec | list[Spec]
    configure_callbacks: Callable[..., list[Theirs]]
    _clip_callback: ClipCallback | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Add the callback to those that the class configures."""
        super().__init_subclass__(**kwargs)
        inner = getattr(cls, "configure_callbacks", None)
        if inner is None:
            return

        @functools.wraps(inner)
        def configure_callbacks(self: Theirs) -> list[Theirs]:
            configured = inner(self)
            callbacks = [*configured] if isinstance(configured, Sequence) else [configured]
            if not any(isinstance(callback, ClipCallback) for callback in callbacks):
                # Keep the callback for the next fit, with the clippers of further optimizers.
                if self._clip_callback is None:
                    self._clip_callback = ClipCallback(self.clipper)
                callbacks.append(self._clip_callback)
            return callbacks

        cls.configure_callbacks = configure_callbacks
