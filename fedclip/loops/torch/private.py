# SPDX-License-Identifier: Apache-2.0
"""The gradients of DP-SGD in plain loops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from fedclip.dpsgd.persample import torch_check, torch_records
from fedclip.dpsgd.persample.base import Data
from fedclip.dpsgd.persample.torch_plan import Run
from fedclip.dpsgd.step import PrivateMean

# Modules whose gradients were compared with those of a plain backward.
_TRIED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def _like(record: torch.Tensor) -> torch.Tensor:
    """Return a record that nobody protects."""
    if not record.is_floating_point():
        return torch.zeros_like(record)
    return torch.linspace(0.1, 1.0, record.numel()).reshape(record.shape).to(record)


def private_gradients(
    module: torch.nn.Module,
    loss: Callable[[Data, torch.Tensor], torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    mean: PrivateMean,
    *,
    micro_batch: int = 128,
) -> dict[str, torch.Tensor]:
    """Return the gradients of one DP-SGD step, by the names of the trained parameters.

    ::

        (Σ min(1, max_norm / n_i) g_i  +  noise_multiplier max_norm normal) / expected_batch_size

    Each record passes the module separately; layers that remember records are refused. Draw Poisson
    samples (`fedclip.dpsgd.step.PoissonSampler`), call it for empty samples too, and account
    for each call with the mean's `noise_multiplier` (``fedclip privacy calibrate``).

    Parameters
    ----------
    module
        In training mode, on the device of the records.
    loss
        A function of the module's output and the targets, for one record in a batch of size 1. It
        returns a tensor; its mean is the loss. Parameters that the loss uses directly get no
        gradient: add the gradients of penalties afterwards.
    inputs, targets
        Tensors with the records along the first axis; there may be no record.
    mean
        How records are clipped, the noise, and the divisor. Use one for all steps.
    micro_batch
        Largest number of records in memory at once.

    Raises
    ------
    TypeError, ValueError
        If a parameter is invalid, or a layer mixes records (its name is in the message). Also if
        the gradient of a parameter differs from that of a plain backward pass.

    Examples
    --------
    >>> import torch
    >>> from fedclip.dpsgd.step import PrivateMean
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> mean = PrivateMean(max_norm=1.0, noise_multiplier=1.1, expected_batch_size=3)
    >>> found = private_gradients(
    ...     layer, torch.nn.MSELoss(), torch.randn(3, 2), torch.zeros(3, 1), mean
    ... )
    >>> layer.weight.grad = found["weight"]
    """
    torch_check.check(module)
    arguments = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)

    def of(run: Run, record: Sequence[torch.Tensor]) -> torch.Tensor:
        *batch_of_one, target = (x.unsqueeze(0) for x in record)
        return loss(run(tuple(batch_of_one)), target).mean()

    if module not in _TRIED and len(targets):
        torch_records.check_tracked(module, of, [_like(x[:1]) for x in (*arguments, targets)])
        _TRIED.add(module)
    weights = torch_records.trained(module)
    gradients = mean(
        torch_records.record_stacks(module, of, (*arguments, targets), micro_batch),
        {name: tuple(weight.shape) for name, weight in weights.items()},
    )
    return torch_records.restored(gradients, weights)
