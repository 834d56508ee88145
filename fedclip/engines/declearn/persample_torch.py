# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of declearn's torch models."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from declearn.model.torch import TorchModel

from fedclip.dpsgd.persample import torch_check, torch_records
from fedclip.dpsgd.persample.base import Data, Float64, UnsupportedModelError
from fedclip.dpsgd.persample.torch_plan import Loss, Run
from fedclip.dpsgd.persample.torch_records import TorchStack

# Of a gradient, how far it may differ from itself in a second pass.
_NOISE = 1e-5

Gradient: TypeAlias = Callable[[TorchModel, Data], Float64]


def check(model: TorchModel) -> None:
    """Refuse layers that mix records, or remember them outside of the weights."""
    torch_check.check(model._raw_model.module)


def try_out(model: TorchModel, records: Sequence[Data], gradient: Gradient) -> None:
    """Take the gradients of records there and back; refuse a model for which that matters."""
    for record in records:
        batch, loss = _data_and_loss(model, record)
        torch_records.check_tracked(model._raw_model.module, loss, batch)

    def passed(of: TorchModel, order: Sequence[Data]) -> list[Float64]:
        # Which layers are known is found out first, and takes random numbers too.
        return [(gradient(of, record), _settled(of, gradient, record))[1] for record in order]

    fresh = copy.deepcopy(model)
    forth, held = passed(model, records), _held(model)
    passed(model, records[::-1])
    back = passed(fresh, records[::-1])[::-1]
    changed = {name for name, _ in held ^ _held(model)}
    pairs = zip(forth, back, strict=True)
    if changed or any(np.abs(a - b).max() > _NOISE * np.abs(a).max() for a, b in pairs):
        what = ", ".join(sorted(changed)) or "a gradient is another one after other records"
        text = f"the model carries something from one record to the next ({what}): it must not keep"
        raise UnsupportedModelError(f"{text} what it sees, count, or have private random numbers")


def _held(model: TorchModel) -> set[tuple[str, object]]:
    return {*torch_check.held([model._raw_model.module, model._loss_fn.module])}


def _settled(model: TorchModel, gradient: Gradient, record: Data) -> Float64:
    """Return a gradient with random numbers that are the same each time."""
    device, states = model._raw_model.device, (random.getstate(), np.random.get_state())
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        try:
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(0)
            return gradient(model, record)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def stacks(model: TorchModel, batch: Data, micro_batch: int, whole: bool) -> Iterator[TorchStack]:
    """Return the gradients of each micro-batch."""
    records, loss = _data_and_loss(model, batch)
    module = model._raw_model.module
    return torch_records.record_stacks(module, loss, records, micro_batch, whole, "module.")


def _data_and_loss(model: TorchModel, batch: Data) -> tuple[Data, Loss]:
    # Not those that declearn wraps them in, which send all arguments to the device once more.
    device, module = model._raw_model.device, model._raw_model.module
    criterion = model._loss_fn.module
    module.train()
    inputs, targets, weights = model._unpack_batch(batch)
    arrays = {"inputs": inputs, "target": targets, "weight": weights}
    records = torch.utils._pytree.tree_map(
        lambda data: data.to(device), {n: x for n, x in arrays.items() if x is not None}
    )

    def loss(run: Run, record: Data) -> torch.Tensor:
        output = run(tuple(x.unsqueeze(0) for x in record["inputs"]))
        target = record["target"].unsqueeze(0) if "target" in record else None
        value: torch.Tensor = criterion(output, target).mean()
        return value * record["weight"].to(value.dtype) if "weight" in record else value

    return records, loss
