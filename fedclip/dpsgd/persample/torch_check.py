# SPDX-License-Identifier: Apache-2.0
"""Which torch modules mix records, or remember them outside of what is trained."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["check"]


def check(module: nn.Module) -> None:
    """Refuse layers that mix records, or remember them outside of the trained parameters."""
    for name, layer in module.named_modules():
        mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if mixes or getattr(layer, "running_mean", None) is not None:
            raise ValueError(
                f"the layer {name!r} ({type(layer).__name__}) mixes the records of a batch, or "
                "remembers them unclipped and without noise: use GroupNorm or LayerNorm"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ValueError(
                f"the layer {name!r} ({type(layer).__name__}) has max_norm, and would change the "
                "weights that a record looks up, without noise: leave max_norm out"
            )
        if isinstance(layer, nn.utils.parametrizations._SpectralNorm):
            raise ValueError(
                f"{name!r} is a spectral norm, whose vectors follow the weights in training, and "
                "would stand still here: use weight_norm, or none"
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise TypeError(
                f"the layer {name!r} is compiled by torch.jit, and can not be given a copy of its "
                "weights for each record: give the module as it was before"
            )
