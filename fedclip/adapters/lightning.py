# SPDX-License-Identifier: Apache-2.0
"""Clippers in Lightning."""

from __future__ import annotations

from typing import Any

import torch

from fedclip.adapters.torch import clip_
from fedclip.modules import Clipper

__all__ = ["LightningClipping"]


class LightningClipping:
    """Mixin of a LightningModule that clips with ``self.clipper``, and saves its state.

    ::

        class Model(LightningClipping, LightningModule):
            def __init__(self):
                super().__init__()
                self.clipper = ZScoreClip()

    Lightning calls it once for each optimizer step, after unscaling. Do not set the Trainer's
    ``gradient_clip_val``: the gradients would be clipped twice.
    """

    clipper: Clipper

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the parameters of this optimizer."""
        if gradient_clip_val:
            raise ValueError(
                f"gradient_clip_val={gradient_clip_val!r} and self.clipper would clip twice: "
                "leave gradient_clip_val out of the Trainer"
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = self.named_parameters()  # type: ignore[attr-defined]
        clip_([pair for pair in named if id(pair[1]) in held], self.clipper)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the clipper's state into the checkpoint."""
        checkpoint["fedclip"] = self.clipper.get_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the clipper's state from the checkpoint."""
        self.clipper.set_state(checkpoint["fedclip"])
