# SPDX-License-Identifier: Apache-2.0
"""Clippers in Lightning: a callback of the Trainer."""

from __future__ import annotations

import copy
from importlib import import_module

from fedclip.errors import needing, public_names
from fedclip.loops.clippers import Spec, Theirs, clipper_of
from fedclip.loops.torch import ClipHandle, attach

__all__ = ["ClipCallback"]

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
        Before the first step, if the Trainer has a ``gradient_clip_val``, or the clipper is in use
        elsewhere. Also if a list is not as long as the list of optimizers, or a fused optimizer
        would unscale the gradients after clipping.
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
        if value := trainer.gradient_clip_val:
            raise ValueError(f"remove gradient_clip_val={value!r}: ClipCallback clips too")
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise NotImplementedError("DeepSpeed shows no whole gradients: use gradient_clip_val")
        # Finders of a learning rate or batch size step in on_fit_start.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda c: not isinstance(c, ClipCallback))

    def on_fit_start(self, trainer: Theirs, pl_module: Theirs) -> None:
        """Attach a clipper to each optimizer, before a checkpoint is loaded."""
        optimizers = trainer.optimizers
        if self._copies:
            further = range(len(self.clippers), len(optimizers))
            self.clippers += [copy.deepcopy(self.clippers[0]) for _ in further]
        if len(self.clippers) != len(optimizers):
            raise ValueError(
                f"got {len(self.clippers)} clippers and {len(optimizers)} optimizers: give one each"
            )
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if scaled and any(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers):
            raise ValueError("a fused optimizer unscales after a clip: make it without fused=True")
        for handle in self._handles:
            handle.remove()
        pairs = zip(optimizers, self.clippers, strict=True)
        self._handles = [attach(optimizer, clipper, pl_module) for optimizer, clipper in pairs]

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
