# SPDX-License-Identifier: Apache-2.0
"""The gradients of some records taken together: norms, sums, sizes, and retries without some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.core import parameters

Float64: TypeAlias = NDArray[np.float64]
Host: TypeAlias = NDArray[Any]
Array: TypeAlias = Any
"""An array where the model's framework has it."""
Data: TypeAlias = Any
"""A dataset, or what it holds: arrays of whatever library, lists, or tables."""
Arrays: TypeAlias = Mapping[str, Host]
"""Arrays by the names of the model's trainable weights."""
Positions: TypeAlias = Sequence[int] | NDArray[np.intp]
"""Which records of a data set, counted from 0."""
Failed: TypeAlias = Callable[[int, BaseException], object]
"""Called with a record that is left out, and what it raised."""

MOST = 1 << 22
"""Words of 8 bytes that the gradients of records taken together may have: 32 MiB."""


class UnsupportedModelError(ValueError):
    """The model itself cannot be trained privately; the message holds nothing of a record."""


class Batch(tuple[Data, ...]):
    """Inputs, targets and weights (or None) of records, with the positions of these records."""

    positions: Positions = ()
    owners: NDArray[np.intp] | None = None
    """The person of each record, where persons are protected; else None."""
    shares: Float64 | None = None
    """The share of each record in the gradient of its person."""


def at_once(size: int, elements: int) -> int:
    """Return how many records to take together, each of which holds `elements` words.

    >>> at_once(128, 1000), at_once(128, 500_000), at_once(128, 100_000_000)
    (128, 8, 1)
    """
    size = parameters.integer(1, micro_batch=size)
    return max(1, min(size, MOST // max(elements, 1)))


def padded(many: int, together: int) -> Iterator[tuple[Host, int]]:
    """Yield positions of records, always equally many, and how many of them count.

    So that nothing is compiled again, the last one stands for those that are lacking.

    >>> [(rows.tolist(), count) for rows, count in padded(3, 2)]
    [([0, 1], 2), ([2, 2], 1)]
    """
    for start in range(0, many, together):
        count = min(together, many - start)
        yield np.minimum(np.arange(start, start + together), start + count - 1), count


def spread(factors: Mapping[str, Float64], finite: Host, size: int) -> tuple[Float64, Host]:
    """Return factors (names, size) and which are finite; those of records that do not count are 0.

    >>> spread({"w": np.ones(2)}, np.array([True, True]), 3)
    (array([[1., 1., 0.]]), array([ True,  True, False]))
    """
    scales, counting = np.zeros((len(factors), size)), np.zeros(size, dtype=bool)
    scales[:, : len(finite)], counting[: len(finite)] = [*factors.values()], finite
    return scales, counting


def retry_halving(work: Callable[[int, int], None], start: int, stop: int, failed: Failed) -> None:
    """Work on the records from `start` to `stop`, except those for which the work raises.

    If it raises, it runs again for each half, down to single records. It must change nothing
    where it raises.

    >>> def work(start: int, stop: int) -> None:
    ...     if 2 in range(start, stop):
    ...         raise KeyError("a name")
    ...     print(*range(start, stop))
    >>> retry_halving(work, 0, 5, lambda record, exc: print("without", record))
    0 1
    without 2
    3 4
    """
    try:
        work(start, stop)
        return
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # A transform that calls sys.exit must not end the round either.
        if stop - start == 1:
            failed(start, exc)
            return
    middle = (start + stop) // 2
    retry_halving(work, start, middle, failed)
    retry_halving(work, middle, stop, failed)


class Stack(Protocol):
    """The gradients of a micro-batch, where the framework has them."""

    def squares(self, names: tuple[str, ...]) -> Float64:
        """Return the squared norms of these tensors, of shape (records, names)."""

    def add(self, totals: dict[str, Array], factors: Mapping[str, Float64], finite: Host) -> None:
        """Add the gradients, times factors, to float64 arrays of the framework, out of place.

        Parameters
        ----------
        totals
            By name; what is not there yet counts as zero.
        factors
            For each tensor, of all records; 0 for those that are not finite.
        finite
            Which records hold finite values only: the others add nothing.
        """

    def arrays(self) -> Arrays:
        """Return the gradients themselves, on the host; if they were asked for as a whole."""


class HostStack:
    """Gradients as NumPy arrays, of shape (records, ...)."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def squares(self, names: tuple[str, ...]) -> Float64:
        rows = [_rows(self._arrays[name]) for name in names]
        with np.errstate(all="ignore"):
            return np.stack([np.einsum("ij,ij->i", r, r) for r in rows], axis=1)

    def add(self, totals: dict[str, Array], factors: Mapping[str, Float64], finite: Host) -> None:
        for name, factor in factors.items():
            array = self._arrays[name]
            rows = _rows(array)
            # Products, and their sum, are those of float64: the norm was measured in it too.
            total = factor[finite] @ (rows if finite.all() else rows[finite])
            totals[name] = totals.get(name, 0.0) + total.reshape(array.shape[1:])

    def arrays(self) -> Arrays:
        return self._arrays


def widened(array: Array) -> Host:
    """Return an array on the host, in float32 if it has fewer digits."""
    host = np.asarray(array)
    return host.astype(np.promote_types(host.dtype, np.float32), copy=False)


def _rows(array: Host) -> Float64:
    size = math.prod(array.shape[1:])
    return np.asarray(array.reshape(len(array), size), dtype=np.float64)
