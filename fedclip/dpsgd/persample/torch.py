# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of declearn's torch models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from declearn.model.torch import TorchModel, TorchVector

from fedclip.dpsgd.persample import torch_records
from fedclip.dpsgd.persample.base import Float64
from fedclip.dpsgd.persample.torch_layers import Part

__all__ = ["TorchStack", "check", "shapes", "stacks", "vector"]


def check(model: TorchModel) -> None:
    """Refuse layers that mix records, or remember them outside of the weights."""
    torch_records.check(model._raw_model.module)


def shapes(model: TorchModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights."""
    return {n: tuple(p.shape) for n, p in torch_records.trained(model._raw_model).items()}


def vector(model: TorchModel, arrays: Any) -> TorchVector:
    """Return float64 arrays as a vector of the weights' dtypes, on their devices."""
    weights = torch_records.trained(model._raw_model)
    return TorchVector(
        {k: torch.from_numpy(a).to(weights[k].device, weights[k].dtype) for k, a in arrays.items()}
    )


def stacks(model: TorchModel, batch: Any, micro_batch: int, whole: bool) -> Iterator[TorchStack]:
    """Yield the gradients of each micro-batch."""
    module, criterion = model._raw_model, model._loss_fn
    module.train()
    inputs, targets, weights = model._unpack_batch(batch)
    given = {"inputs": inputs, "target": targets, "weight": weights}
    records = torch.utils._pytree.tree_map(
        lambda data: data.to(module.device), {n: x for n, x in given.items() if x is not None}
    )

    def loss(run: Any, record: Any) -> torch.Tensor:
        found = run(tuple(x.unsqueeze(0) for x in record["inputs"]))
        target = record["target"].unsqueeze(0) if "target" in record else None
        value: torch.Tensor = criterion(found, target).mean()
        return value * record["weight"].to(value.dtype) if "weight" in record else value

    trained = torch_records.trained(module)
    for parts in torch_records.record_parts(module, loss, records, micro_batch, whole):
        yield TorchStack(parts, trained)


class TorchStack:
    """Gradients by parameter, on the device of the module."""

    def __init__(self, parts: dict[str, Part], trained: dict[str, torch.Tensor]) -> None:
        self._parts, self._trained = parts, trained

    def squares(self, names: tuple[str, ...]) -> Float64:
        found = torch.stack([self._parts[name].squares() for name in names], 1)
        return np.asarray(found.cpu().numpy())

    def add(self, totals: dict[str, Any], factors: Mapping[str, Float64], sound: Any) -> None:
        kept = None if sound.all() else torch.from_numpy(np.flatnonzero(sound))
        for name, factor in factors.items():
            part, scale, like = self._parts[name], torch.from_numpy(factor), self._trained[name]
            if kept is not None:
                part, scale = part.only(kept.to(like.device)), scale[kept]
            found = part.sum(scale.to(like.device)).view(like.shape)
            totals[name] = totals[name].add_(found) if name in totals else found

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: _host(part) for name, part in self._parts.items()}


def _host(part: Any) -> np.ndarray[Any, Any]:
    rows = part.rows.detach().cpu()
    return np.asarray((rows.float() if rows.dtype is torch.bfloat16 else rows).numpy())
