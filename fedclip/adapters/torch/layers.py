# SPDX-License-Identifier: Apache-2.0
"""Which axis of a parameter holds the outputs of its layer, for `agc`.

==========================================  ====================================================
layer                                       axis
==========================================  ====================================================
linear, convolution (grouped or not),       0
attention, recurrent, bilinear
embedding                                   1
transposed convolution                      1; of several groups refused
``Conv1D`` of Transformers                  1
any other module                            0
==========================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fedclip.modules.agc import AGC, Axes, Outputs
from fedclip.modules.base import Clipper

if TYPE_CHECKING:
    from fedclip.adapters.torch.names import Parameters

__all__ = ["outputs_of"]

_TRANSPOSED = torch.nn.modules.conv._ConvTransposeNd
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def outputs_of(
    source: Parameters | None, parameters: Mapping[str, torch.Tensor], clipper: Clipper | AGC
) -> Outputs | None:
    """Return the axes of the outputs of parameters, by name; None if the clipper asks for none.

    A parameter of two layers (tied weights) is that of the first.

    Raises
    ------
    ValueError
        If the clipper asks for them, and `source` is not the model; or if one output of a layer
        is not along an axis.
    """
    if not isinstance(clipper, AGC) or not clipper.asks_layers:
        return None
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    names = [name for name in clipper.groups(shapes).names if len(shapes[name]) > 1]
    if not names:
        return None
    if not isinstance(source, torch.nn.Module):
        raise ValueError(
            "agc limits the weights that lead to one output of a layer, and parameters without "
            "their model do not say which these are: give the model, or set axis, such as "
            "AGC(axis=0) for linear layers and convolutions of torch"
        )
    layers: dict[int, torch.nn.Module] = {}
    for path, module in source.named_modules():
        # A parametrization's tensors are its layer's.
        layer = source.get_submodule(path.split(".parametrizations.")[0])
        for parameter in module.parameters(recurse=False):
            layers.setdefault(id(parameter), layer)
    return {name: _axes(name, layers.get(id(parameters[name]))) for name in names}


def _axes(name: str, layer: torch.nn.Module | None) -> Axes:
    if isinstance(layer, _TRANSPOSED):
        if layer.groups > 1:
            raise ValueError(
                f"agc: {name!r} is of a {type(layer).__name__} with groups={layer.groups}, in "
                'which no axis holds the outputs: put it in exclude, or use unit="tensor"'
            )
        return (1,)
    theirs = type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
    return (1,) if theirs or isinstance(layer, _EMBEDDINGS) else (0,)
