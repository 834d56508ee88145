# SPDX-License-Identifier: Apache-2.0
"""Averages updates, which are mappings of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedclip.arrays import Array, Float64, HostView, backend_of, narrowed
from fedclip.arrays.blocks import extremes
from fedclip.arrays.numpy import bits
from fedclip.federation.update.exchange import Arrays

_PIECE = 2**14


def averaged(
    updates: Sequence[Arrays], clients: int, factors: Sequence[float]
) -> dict[str, Float64]:
    """Return the sum of updates times factors, tensor by tensor, divided by `clients`.

    In float64: a sum in the dtype of the updates is rounded at each client, so that with noise
    one client could move it by more than the bound, and without noise many small updates in half
    precision would add up to too little.
    """
    means = {}
    for name, first in updates[0].items():
        total = np.zeros(tuple(first.shape))
        for update, factor in zip(updates, factors, strict=True):
            backend = backend_of(update[name])
            _add(total, backend.to_host(backend.dense(update[name])), factor)
        means[name] = np.asarray(total / clients)
    return means


def _add(total: Float64, array: HostView, factor: float) -> None:
    """Add an array times a factor, in float64."""
    if factor == 1.0:
        total += array
        return
    to, values = total.reshape(-1), np.asarray(array).reshape(-1)
    # What is in between stays in the cache.
    for start in range(0, to.size, _PIECE):
        piece = slice(start, start + _PIECE)
        to[piece] += np.multiply(values[piece], factor, dtype=np.float64)


def rounded(means: Mapping[str, Float64], like: Arrays) -> dict[str, Array]:
    """Return averages as arrays like those of an update, but dense."""
    return {
        name: narrowed(mean, backend_of(like[name]).dense(like[name]))
        for name, mean in means.items()
    }


def zeros(arrays: Arrays) -> dict[str, Array]:
    """Return zeros of the same shapes, whatever the arrays hold."""
    return {name: backend_of(array).keep_if(False, [array])[0] for name, array in arrays.items()}


def peaks(arrays: Arrays, limit: float) -> dict[str, float]:
    """Return the tensors that hold a value beyond ±limit, or NaN, and their largest values."""
    found = {}
    for name, array in arrays.items():
        peak = float(np.abs(extremes(bits(backend_of(array).to_host(array)))).max())
        if not peak <= limit:
            found[name] = peak
    return found
