# SPDX-License-Identifier: Apache-2.0
"""Norms and sums of single records' gradients in torch, where the module has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fedclip.dpsgd.persample.base import Data, Float64, Host
from fedclip.dpsgd.persample.torch_layers import Part
from fedclip.dpsgd.persample.torch_plan import Loss, Tensors
from fedclip.dpsgd.persample.torch_records import record_parts, trained

__all__ = ["TorchStack", "record_stacks"]


def record_stacks(
    module: nn.Module, loss: Loss, records: Data, size: int, whole: bool = False, prefix: str = ""
) -> Iterator[TorchStack]:
    """Yield what `record_parts` does, to be asked for norms and sums, under longer names."""
    weights = {prefix + name: weight for name, weight in trained(module).items()}
    for found in record_parts(module, loss, records, size, whole):
        yield TorchStack({prefix + name: part for name, part in found.items()}, weights)


class TorchStack:
    """Gradients by parameter, on the device of the module."""

    def __init__(self, found: dict[str, Part], weights: Tensors) -> None:
        self._parts, self._weights = found, weights

    def squares(self, names: tuple[str, ...]) -> Float64:
        found = torch.stack([self._parts[name].squares() for name in names], 1)
        return np.asarray(found.cpu().numpy())

    def add(self, totals: Tensors, factors: Mapping[str, Float64], sound: Host) -> None:
        kept = None if sound.all() else torch.from_numpy(np.flatnonzero(sound))
        for name, factor in factors.items():
            part, scale, like = self._parts[name], torch.from_numpy(factor), self._weights[name]
            if kept is not None:
                part, scale = part.only(kept.to(like.device)), scale[kept]
            found = part.sum(scale.to(like.device)).view(like.shape)
            totals[name] = totals[name] + found if name in totals else found

    def arrays(self) -> dict[str, Host]:
        return {name: _host(part) for name, part in self._parts.items()}


def _host(part: Any) -> Host:
    rows = part.rows.detach().cpu()
    return np.asarray((rows.float() if rows.dtype is torch.bfloat16 else rows).numpy())
