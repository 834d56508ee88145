# SPDX-License-Identifier: Apache-2.0
"""Memory for the arrays of a new gradient, without page faults at every step.

An allocator maps hundreds of middling arrays page by page, and gives them back after each step:
the page faults then cost several times what the multiplication does.

- From 4 to 32 MiB, one allocation of that size is made and freed, untouched: from then on glibc
  keeps as much of what is freed (its threshold for trimming follows the largest block that was
  mapped and freed, up to that size), and every array finds memory that was used before.
- Above, middling arrays are cut out of one allocation, for which NumPy asks the kernel for huge
  pages, of which few are needed. It lives for as long as any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Arena"]

# What glibc keeps at most; what NumPy asks huge pages for; what is worth the detour.
_KEPT = 1 << 25
_HUGE = 1 << 22
_SMALL = 1 << 16
# Of a cache line, and what frameworks ask for to share memory.
_ALIGNMENT = 64


class Arena:
    """New arrays, as fast to write as memory allows.

    Parameters
    ----------
    sizes
        Bytes of all arrays of a step, or nothing if not known: about as many will be asked for.
    """

    # What glibc was made to keep, which it does for as long as the process lives.
    _largest = 0
    # The same of all until something is written: most arenas are never asked for anything.
    _wanted: bool | None = None
    _block = np.empty(0, np.uint8)
    _next = 0

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes = sizes

    @property
    def wanted(self) -> bool:
        """Whether some arrays of this step are to be cut out of one allocation."""
        # Only worked out for frameworks that write to it.
        if self._wanted is None:
            total = sum(self.sizes)
            self._wanted = total >= _KEPT
            if _HUGE <= total < _KEPT and total > Arena._largest:
                np.empty(total, np.uint8)
                Arena._largest = total
        return self._wanted

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array that holds anything, C-contiguous."""
        size = math.prod(shape) * dtype.itemsize
        # Larger ones get huge pages of their own.
        if not (self.wanted and _SMALL <= size < _HUGE):
            return np.empty(shape, dtype)
        start = self._next
        if start + size > self._block.size:
            start = self._allocate(size)
        # The next one is aligned too.
        self._next = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, self._block, start)
        return array

    def _allocate(self, size: int) -> int:
        """Make a new block, and return where its first array starts."""
        sizes = [n + _ALIGNMENT for n in self.sizes if n < _HUGE]
        self._block = np.empty(max(sum(sizes), size) + _ALIGNMENT, np.uint8)
        return -self._block.ctypes.data % _ALIGNMENT
