# SPDX-License-Identifier: Apache-2.0
"""Memory for new gradients that is there: a clipper's, used again when nobody holds it.

Where memory is new, the kernel maps and clears it page by page, which takes several times as long
as the multiplication. So a clipper keeps the memory of its last outputs, at most one gradient's
size. Clipping ViT-S then takes 14 ms of processor time, where the product alone takes 50 into new
memory (``python -m benchmarks --gradients vit``).

::

    lease  = an array over the whole of a block's memory, made anew for each step
    output = a part of the lease

NumPy's views keep the array alive that they are a part of, and torch's tensors keep the NumPy array
alive whose memory they share. So whatever holds an output or a part of it (views, transposes,
``p.grad``, what autograd saved, DLPack) holds the lease, and nothing else does: if a weak reference
to the lease is dead, the memory is free. Otherwise the block gets new memory, and what it had
belongs to those who hold it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Bytes: smaller arrays are not kept, as allocators have that much at hand; consecutive arrays
# share a block until it has this size.
_SMALL = 1 << 16
_BLOCK = 1 << 20
# A cache line; frameworks share memory only with this alignment.
_ALIGNMENT = 64

_Array = np.ndarray[Any, np.dtype[Any]]


class _Block:
    """Memory for some arrays, which are held or free together."""

    def __init__(self) -> None:
        self.size = self._shift = 0
        self._memory: memoryview | None = None
        self._lease: weakref.ref[_Array] | None = None

    def lend(self) -> tuple[_Array, int]:
        """Return an array over memory that nobody else holds, and where it is aligned."""
        if self._memory is None or self._lease is None or self._lease() is not None:
            # NumPy asks the kernel for huge pages from 4 MiB on.
            memory = np.empty(self.size + _ALIGNMENT, np.uint8)
            self._memory, self._shift = memory.data, -memory.ctypes.data % _ALIGNMENT
        # Views hold the lease, and not what is below it: a memoryview is no array.
        lease = np.frombuffer(self._memory, np.uint8)
        self._lease = weakref.ref(lease)
        return lease, self._shift


class _Place(NamedTuple):
    block: _Block
    start: int
    size: int


class Memory:
    """The memory that a clipper keeps from step to step; one step at a time may use it."""

    def __init__(self) -> None:
        self._sizes: Sequence[int] = ()
        self._places: dict[int, _Place] = {}

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        """Let copies and pickles be empty: two clippers must not write to one memory."""
        return Memory, ()

    def room(self, sizes: Sequence[int]) -> Room | None:
        """Return the memory for one step over arrays of these numbers of bytes; None if small."""
        if sizes != self._sizes:
            self._sizes, self._places = sizes, _places(sizes)
        return Room(self._places) if self._places else None

    def release(self) -> None:
        """Keep nothing; what somebody holds lives as long as that."""
        self._sizes, self._places = (), {}


def _places(sizes: Sequence[int]) -> dict[int, _Place]:
    """Return a place for each array that is not small."""
    found = {}
    block = _Block()
    for i, size in enumerate(sizes):
        if size < _SMALL:
            continue
        if block.size and block.size + size > _BLOCK:
            block = _Block()
        found[i] = _Place(block, block.size, size)
        # Keep the next array aligned.
        block.size += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found


class Room:
    """The memory of one step: it gives the place of each array away once."""

    def __init__(self, places: Mapping[int, _Place]) -> None:
        self._places = dict(places)
        self._leases: dict[_Block, tuple[_Array, int]] = {}

    def like(self, places: Iterable[int], views: Sequence[_Array | None]) -> list[_Array | None]:
        """Return memory for some arrays, laid out like views of them; None where there is none."""
        known = self._places
        return [
            None if i not in known or (view := views[i]) is None else self._like(i, view)
            for i in places
        ]

    def _like(self, i: int, view: _Array) -> _Array | None:
        if view.flags.c_contiguous:
            return self._take(i, view.shape, view.dtype)
        if in_memory_order(view) is None:
            return None
        return self._take(i, view.shape, view.dtype, view.strides)

    def empty(self, i: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array:
        """Return an uninitialised array in C order, in the memory for array i if it fits."""
        size = math.prod(shape) * dtype.itemsize
        array = self._take(i, shape, dtype) if self._holds(i, size) else None
        return np.empty(shape, dtype) if array is None else array

    def _holds(self, i: int, size: int) -> bool:
        return i in self._places and size <= self._places[i].size

    def _take(
        self,
        i: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        strides: tuple[int, ...] | None = None,
    ) -> _Array | None:
        block, start, _ = self._places.pop(i)
        found = self._leases.get(block)
        if found is None:
            found = self._leases[block] = block.lend()
        lease, shift = found
        array: _Array = np.ndarray(shape, dtype, lease, shift + start, strides)
        # Views of the array will hold what it holds: if that were not the lease, nobody would
        # know that they are there.
        return array if array.base is lease else None


def in_memory_order(array: _Array) -> _Array | None:
    """Return the array with its dimensions sorted as they lie in memory; None if it has gaps."""
    if array.flags.c_contiguous:
        return array
    ordered = array.transpose(sorted(range(array.ndim), key=lambda d: -array.strides[d]))
    return ordered if ordered.flags.c_contiguous else None
