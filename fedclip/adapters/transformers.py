# SPDX-License-Identifier: Apache-2.0
"""Clippers in the Trainer of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "fedclip.adapters.transformers needs Transformers: pip install 'transformers[torch]'"
    ) from error

from fedclip.adapters.shared import clipper_of
from fedclip.adapters.torch import clip_
from fedclip.modules import Clipper

__all__ = ["ClipCallback"]


class ClipCallback(TrainerCallback, ExportableState):
    """Clip the gradients right before each optimizer step of a Trainer.

    Set ``max_grad_norm=0`` in the TrainingArguments, or the gradients are clipped twice. The
    Trainer saves the state in its checkpoints, and restores it with
    ``restore_callback_states_from_checkpoint=True``.

    Parameters
    ----------
    clipper
        A clipper of fedclip, or (name, config) as in a declearn configuration.
    """

    def __init__(self, clipper: Clipper | tuple[str, dict[str, Any]]) -> None:
        self.clipper = clipper_of(clipper)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to clip twice."""
        if args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm!r} and {self.clipper.name} would clip twice: "
                "give max_grad_norm=0 in the TrainingArguments"
            )

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Clip; Transformers has unscaled and accumulated the gradients by now."""
        clip_(model.named_parameters(), self.clipper)

    def state(self) -> dict[str, Any]:
        """Return what Transformers writes into its checkpoints."""
        return {
            "args": {"clipper": [self.clipper.name, self.clipper.get_config()]},
            "attributes": {"clipper_state": self.clipper.get_state()},
        }

    @property
    def clipper_state(self) -> dict[str, Any]:
        """The clipper's statistics; Transformers sets it when it restores a checkpoint."""
        return self.clipper.get_state()

    @clipper_state.setter
    def clipper_state(self, state: dict[str, Any]) -> None:
        self.clipper.set_state(state)
