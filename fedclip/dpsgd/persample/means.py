# SPDX-License-Identifier: Apache-2.0
"""From gradients of records to those of persons: the mean of the records that were drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedclip.dpsgd.persample.base import Data, Float64, Host, HostStack, Stack

__all__ = ["Means"]

Gradient = dict[str, Float64]


class Means:
    """The means of persons whose records come some at a time; few are kept at once.

    Parameters
    ----------
    batches
        All that will come, each with `owners` and `shares` of its records.
    """

    def __init__(self, batches: Sequence[Data]) -> None:
        self._left = Counter(int(owner) for batch in batches for owner in batch.owners)
        self._begun: dict[int, Gradient] = {}

    def of(
        self, stacks: Iterable[Stack], owners: NDArray[np.intp], shares: Float64
    ) -> Iterator[HostStack]:
        """Yield the gradients of the persons of whom nothing is left to come.

        A record with NaN or infinity counts as zero. Nothing is kept if a stack raises.
        """
        remaining, begun, start = self._left.copy(), dict(self._begun), 0
        for stack in stacks:
            arrays = stack.arrays()
            finite = np.all([_finite(array) for array in arrays.values()], axis=0)
            rows, start = slice(start, start + len(finite)), start + len(finite)
            complete = []
            for owner in map(int, np.unique(owners[rows])):
                chosen = owners[rows] == owner
                remaining[owner] -= int(chosen.sum())
                chosen &= finite
                gradient = {
                    n: np.tensordot(shares[rows][chosen], array[chosen].astype(float), 1)
                    for n, array in arrays.items()
                }
                if owner in begun:
                    before = begun.pop(owner)
                    gradient = {name: value + before[name] for name, value in gradient.items()}
                if remaining[owner]:
                    begun[owner] = gradient
                else:
                    complete.append(gradient)
            if complete:
                yield HostStack({n: np.stack([mean[n] for mean in complete]) for n in arrays})
        self._left, self._begun = remaining, begun

    def without(self, owner: int) -> Iterator[HostStack]:
        """Yield a person's gradient if all that was left of it is a record that raised."""
        self._left[owner] -= 1
        if not self._left[owner] and owner in self._begun:
            yield HostStack({n: value[None] for n, value in self._begun.pop(owner).items()})


def _finite(array: Host) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(array.reshape(len(array), -1)).all(axis=1))
