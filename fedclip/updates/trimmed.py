# SPDX-License-Identifier: Apache-2.0
"""The trimmed mean: of each coordinate, the smallest and the largest values are left out.

::

    for each coordinate:
        sort the values of the n updates
        mean of all but the f smallest and the f largest

Yin, Chen, Ramchandran & Bartlett, 2018, "Byzantine-robust distributed learning: towards optimal
statistical rates", arXiv:1803.01498.

All updates of a round are needed at once. Besides these there is a table of a million values at a
time; arrays that are sparse or on a device are all made dense, or copied, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedclip.arrays import Float64, backend_of
from fedclip.updates.protocol import Arrays

_TABLE = 2**20


def trimmed_mean(updates: Sequence[Arrays], clients: int, n_hostile: int) -> dict[str, Float64]:
    """Return the trimmed mean of updates, tensor by tensor, in float64.

    If there are fewer than `clients`, of which there are more than 2 `n_hostile`, the others count
    as zeros.

    Examples
    --------
    >>> trimmed_mean([{"w": np.array([w, 1.0])} for w in (1.0, -99.0, 3.0)], 3, 1)
    {'w': array([1., 1.])}
    """
    means = {}
    for name, first in updates[0].items():
        backends = [backend_of(update[name]) for update in updates]
        rows = [
            np.asarray(backend.to_host(backend.dense(update[name]))).reshape(-1)
            for backend, update in zip(backends, updates, strict=True)
        ]
        mean = np.zeros(rows[0].size)
        # Sorted as they are, if that is float32; narrower ones as float32, which is exact.
        dtype, step = np.result_type(np.float32, *rows), max(1, _TABLE // clients)
        for start in range(0, mean.size, step):
            piece = slice(start, start + step)
            table = np.zeros((mean[piece].size, clients), dtype)
            for column, row in enumerate(rows):
                table[:, column] = row[piece]
            table.sort(axis=1)
            kept = table[:, n_hostile : clients - n_hostile]
            mean[piece] = kept.mean(axis=1, dtype=np.float64)
        means[name] = mean.reshape(tuple(first.shape))
    return means
