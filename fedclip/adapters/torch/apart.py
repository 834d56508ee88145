# SPDX-License-Identifier: Apache-2.0
"""Gradients that share memory, which a change in place would change twice.

Views of one flat buffer, as DistributedDataParallel makes them, lie side by side: these may stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import torch

__all__ = ["are_apart", "part"]


def are_apart(gradients: Collection[torch.Tensor]) -> bool:
    """Return whether no two are one or may share memory, and no element is there twice."""
    # Meta tensors, DTensors and empty ones are at 0.
    spans = sorted(span for span in map(_span, gradients) if span[0])
    return (
        len({*map(id, gradients)}) == len(gradients)
        and all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        and not any(map(_folds, gradients))
    )


def part(parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    """Give a gradient of its own to each parameter that may share memory with another one."""
    end, seen = 0, set()
    for name, gradient in sorted(gradients.items(), key=lambda item: _span(item[1])):
        start, size = _span(gradient)
        if id(gradient) in seen or _folds(gradient) or 0 < start < end:
            parameters[name].grad = gradients[name] = gradient.clone()
        else:
            end = max(end, start + size)
        seen.add(id(gradient))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins, and its bytes up to the end of its last element.

    It begins at 0 if it is sparse, or on a device that shows no address.
    """
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        return 0, 0
    if tensor.is_contiguous():
        return start, tensor.nbytes
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return start, (1 + sum((number - 1) * step for step, number in pairs)) * tensor.itemsize


def _folds(tensor: torch.Tensor) -> bool:
    """Return whether an element of memory may be there twice, as after ``expand``."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    reach = 1
    for step, number in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if number > 1 and step < reach:
            return True
        reach += (number - 1) * step
    return False
