# SPDX-License-Identifier: Apache-2.0
"""Gradients that share memory, which a change in place would change twice.

Views of one flat buffer, as DistributedDataParallel makes them, lie side by side: these may stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import add, attrgetter, itemgetter, le

import numpy as np
import torch

__all__ = ["are_apart", "part"]


def are_apart(gradients: Collection[torch.Tensor]) -> bool:
    """Return whether no two are one or may share memory, and no element is there twice."""
    if len({*map(id, gradients)}) < len(gradients):
        return False
    dense: Collection[torch.Tensor] = gradients
    try:
        addresses = [*map(torch.Tensor.data_ptr, dense)]
    except RuntimeError:
        dense = [*filter(_address, gradients)]
        addresses = [*map(_address, dense)]
    # Without a Python loop where all are contiguous: a model has hundreds of gradients.
    sizes = map(attrgetter("nbytes"), dense)
    if not all(map(torch.Tensor.is_contiguous, dense)):
        if any(map(_folds, dense)):
            return False
        sizes = map(_reach, dense)
    # Meta tensors, DTensors and empty ones are at 0.
    spans = sorted(filter(itemgetter(0), zip(addresses, sizes, strict=True)))
    starts = [*map(itemgetter(0), spans)]
    ends = map(add, starts, map(itemgetter(1), spans))
    return all(map(le, ends, starts[1:]))


def part(parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    """Give a gradient of its own to each parameter that shares memory with one before it."""
    known: set[int] = set()
    spans, again = [], []
    for name, gradient in gradients.items():
        if id(gradient) in known or _folds(gradient):
            again.append(name)
        elif address := _address(gradient):
            spans.append((address, _reach(gradient), name))
        known.add(id(gradient))
    begin, taken = 0, np.zeros(0, bool)
    for start, size, name in sorted(spans):
        if start >= begin + taken.size:
            begin, taken = start, np.zeros(0, bool)
        taken = np.append(taken, np.zeros(max(0, start + size - begin - taken.size), bool))
        gradient = gradients[name]
        item = gradient.itemsize
        steps = (*(item * step for step in gradient.stride()), 1)
        own = np.lib.stride_tricks.as_strided(
            taken[start - begin :], (*gradient.shape, item), steps
        )
        if own.any():
            again.append(name)
        own[...] = True
    for name in again:
        parameters[name].grad = gradients[name] = gradients[name].clone()


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor begins; 0 for a sparse one, or on a device that shows no address."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


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


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum((number - 1) * step for step, number in pairs)) * tensor.itemsize
