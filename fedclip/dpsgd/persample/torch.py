# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of declearn's torch models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from declearn.model.torch import TorchModel, TorchVector

from fedclip.dpsgd.persample import torch_check, torch_records, torch_stacks

__all__ = ["check", "memory", "settled", "shapes", "stacks", "vector"]


def check(model: TorchModel) -> None:
    """Refuse layers that mix records, or remember them outside of the weights."""
    torch_check.check(model._raw_model.module)


@contextmanager
def settled(model: TorchModel) -> Iterator[None]:
    """Draw the same random numbers each time."""
    device = model._raw_model.device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(0)
        yield


def memory(model: TorchModel) -> Any:
    """Return all that the modules hold, to be compared with what they hold later."""
    return {*torch_check.held([model._raw_model.module, model._loss_fn.module])}


def shapes(model: TorchModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights."""
    return {n: tuple(p.shape) for n, p in torch_records.trained(model._raw_model).items()}


def vector(model: TorchModel, arrays: Any) -> TorchVector:
    """Return float64 arrays as a vector of the weights' dtypes, on their devices."""
    return TorchVector(torch_records.restored(arrays, torch_records.trained(model._raw_model)))


def stacks(model: TorchModel, batch: Any, micro_batch: int, whole: bool) -> Iterator[Any]:
    """Return the gradients of each micro-batch."""
    # Not those that declearn wraps them in, which send all arguments to the device once more.
    device, module = model._raw_model.device, model._raw_model.module
    criterion = model._loss_fn.module
    module.train()
    inputs, targets, weights = model._unpack_batch(batch)
    given = {"inputs": inputs, "target": targets, "weight": weights}
    records = torch.utils._pytree.tree_map(
        lambda data: data.to(device), {n: x for n, x in given.items() if x is not None}
    )

    def loss(run: Any, record: Any) -> torch.Tensor:
        found = run(tuple(x.unsqueeze(0) for x in record["inputs"]))
        target = record["target"].unsqueeze(0) if "target" in record else None
        value: torch.Tensor = criterion(found, target).mean()
        return value * record["weight"].to(value.dtype) if "weight" in record else value

    return torch_stacks.record_stacks(module, loss, records, micro_batch, whole, "module.")
