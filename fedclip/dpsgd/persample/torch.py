# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in torch: `vmap` of `grad`, or one by one where that has no rule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from declearn.model.torch import TorchModel, TorchVector
from torch.func import functional_call, grad, vmap

__all__ = ["check", "gradients", "vector"]

Tensors = dict[str, torch.Tensor]


def check(model: TorchModel) -> None:
    """Refuse layers that mix records, or remember them outside of the weights."""
    for name, module in model._raw_model.module.named_modules():
        mixes = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if mixes or getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"the layer {name!r} ({type(module).__name__}) mixes the records of a batch, or "
                "remembers them unclipped and without noise: use GroupNorm or LayerNorm"
            )


def vector(model: TorchModel, arrays: Any) -> TorchVector:
    """Return float64 arrays as a vector of the weights' dtypes, on their devices."""
    weights = model.get_weights(trainable=True).coefs
    return TorchVector(
        {k: torch.from_numpy(a).to(weights[k].device, weights[k].dtype) for k, a in arrays.items()}
    )


def gradients(
    model: TorchModel, batch: Any, micro_batch: int
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the stacked gradients of each micro-batch."""
    module, criterion = model._raw_model, model._loss_fn
    module.train()
    inputs, targets, weights = model._unpack_batch(batch)
    trained = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    # The model's own buffers are never written to.
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}

    def loss(trained: Tensors, inputs: Any, target: Any, weight: Any) -> torch.Tensor:
        given = tuple(x.unsqueeze(0) for x in inputs)
        found = functional_call(module, (trained, buffers), given)
        value: torch.Tensor = criterion(
            found, None if target is None else target.unsqueeze(0)
        ).mean()
        return value if weight is None else value * weight.to(value.device).to(value.dtype)

    def one_by_one(inputs: Any, targets: Any, weights: Any) -> Tensors:
        rows = []
        for i in range(len(inputs[0])):
            fresh = {n: p.clone().requires_grad_() for n, p in trained.items()}
            record = [x[i] for x in inputs]
            target, weight = (None if v is None else v[i] for v in (targets, weights))
            with torch.enable_grad():
                value = loss(fresh, record, target, weight)
                found = torch.autograd.grad(value, [*fresh.values()], allow_unused=True)
            pairs = zip(fresh.items(), found, strict=True)
            rows.append(
                {n: torch.zeros_like(p) if g is None else g.to_dense() for (n, p), g in pairs}
            )
        return {n: torch.stack([row[n] for row in rows]) for n in trained}

    dims = (None, 0, None if targets is None else 0, None if weights is None else 0)
    together = vmap(grad(loss), in_dims=dims, randomness="different")
    for start in range(0, len(inputs[0]), micro_batch):
        part = slice(start, start + micro_batch)
        xs = [x[part].to(module.device) for x in inputs]
        y, w = (None if v is None else v[part].to(module.device) for v in (targets, weights))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Slower than it might be, where a layer has no rule: right all the same.
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                found = together(trained, xs, y, w)
        except RuntimeError:
            # No rule for `vmap` (recurrent layers, branches on values); a fault of the model
            # comes again.
            found = one_by_one(xs, y, w)
        _unchanged(module, buffers)
        yield {n: _host(g) for n, g in found.items()}


def _host(array: torch.Tensor) -> np.ndarray[Any, Any]:
    array = array.detach().cpu()
    return (array.float() if array.dtype is torch.bfloat16 else array).numpy()


def _unchanged(module: torch.nn.Module, buffers: Tensors) -> None:
    for name, buffer in module.named_buffers():
        if not torch.equal(buffers[name].nan_to_num(), buffer.nan_to_num()):
            raise ValueError(
                f"training changes the buffer {name.removeprefix('module.')!r}, which would keep "
                "records unclipped and without noise: use a layer without such a memory"
            )
