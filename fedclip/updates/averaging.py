# SPDX-License-Identifier: Apache-2.0
"""Averages updates, which are mappings of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedclip.arrays import Array, Float64, HostView, backend_of, narrowed
from fedclip.arrays.blocks import peak as peak_of
from fedclip.arrays.numpy import bits
from fedclip.updates.protocol import Arrays

# So many updates are multiplied at once, in pieces of so many values: what is in between is 2 MiB.
_ROWS, _PIECE = 8, 2**15


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
        for start in range(0, len(updates), _ROWS):
            rows = slice(start, start + _ROWS)
            _add(total, [_values(update[name]) for update in updates[rows]], factors[rows])
        means[name] = np.asarray(total / clients)
    return means


def _values(array: Array) -> HostView:
    backend = backend_of(array)
    return backend.to_host(backend.dense(array))


def finite_values(array: Array) -> Float64:
    """Return an array in float64, with the ends of its dtype in place of infinity."""
    return np.asarray(np.nan_to_num(_values(array)), np.float64)


def _add(total: Float64, arrays: Sequence[HostView], factors: Sequence[float]) -> None:
    """Add arrays times factors, in float64."""
    if set(factors) == {1.0}:
        for array in arrays:
            total += array
        return
    to, rows = total.reshape(-1), [array.reshape(-1) for array in arrays]
    block = np.empty((len(rows), min(_PIECE, to.size)))
    for start in range(0, to.size, _PIECE):
        piece = to[start : start + _PIECE]
        part = block[:, : piece.size]
        for values, row in zip(part, rows, strict=True):
            values[...] = row[start : start + _PIECE]
        # One product of a row and a table, which is a third of a product and a sum for each row.
        piece += np.asarray(factors) @ part


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
        peak = peak_of(bits(backend_of(array).to_host(array)))
        if not peak <= limit:
            found[name] = peak
    return found
