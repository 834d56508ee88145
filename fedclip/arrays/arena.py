# SPDX-License-Identifier: Apache-2.0
"""Memory for the arrays of a new gradient, without page faults at every step.

An allocator maps hundreds of middle-sized arrays page by page, and unmaps them after each step.
The page faults then cost several times as much as the multiplication.

- From 4 to 32 MiB in all, the arena allocates and frees one block of that size, without touching
  it. From then on glibc keeps that much freed memory (its trimming threshold follows the largest
  block that was mapped and freed, up to that size), and every array reuses memory.
- Above 32 MiB, middle-sized arrays are parts of one block. NumPy asks the kernel for huge pages
  for it, so that few pages are needed. The block lives as long as any of its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Arena"]

# Bytes: what glibc keeps at most; where NumPy starts to ask for huge pages; the smallest array
# that is put into the block.
_KEPT = 1 << 25
_HUGE = 1 << 22
_SMALL = 1 << 16
# A cache line; frameworks share memory only with this alignment.
_ALIGNMENT = 64


class Arena:
    """New arrays, as fast to write as memory allows.

    Parameters
    ----------
    sizes
        Bytes of each array of a step; empty if not known.
    """

    # The largest block so far: glibc keeps that much until the process ends.
    _largest = 0
    # Class attributes until the first write: most arenas are never used.
    _wanted: bool | None = None
    _block = np.empty(0, np.uint8)
    _next = 0

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes = sizes

    @property
    def wanted(self) -> bool:
        """Whether some arrays of this step should be parts of one block."""
        # Computed on demand: not every framework writes to the arena.
        if self._wanted is None:
            total = sum(self.sizes)
            self._wanted = total >= _KEPT
            if _HUGE <= total < _KEPT and total > Arena._largest:
                np.empty(total, np.uint8)
                Arena._largest = total
        return self._wanted

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an uninitialised, C-contiguous array."""
        size = math.prod(shape) * dtype.itemsize
        # Larger arrays get huge pages of their own.
        if not (self.wanted and _SMALL <= size < _HUGE):
            return np.empty(shape, dtype)
        start = self._next
        if start + size > self._block.size:
            start = self._allocate(size)
        # Keep the next array aligned.
        self._next = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, self._block, start)
        return array

    def _allocate(self, size: int) -> int:
        """Make a new block, and return where its first array starts."""
        sizes = [n + _ALIGNMENT for n in self.sizes if n < _HUGE]
        self._block = np.empty(max(sum(sizes), size) + _ALIGNMENT, np.uint8)
        return -self._block.ctypes.data % _ALIGNMENT
