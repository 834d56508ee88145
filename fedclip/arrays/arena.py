# SPDX-License-Identifier: Apache-2.0
"""Memory for the arrays of a new gradient, in one allocation.

An allocator maps hundreds of middling arrays page by page, and gives them back after each step:
the page faults then cost several times what the multiplication does. From 4 MiB on NumPy asks
the kernel for huge pages, of which few are needed, so middling arrays are cut out of one such
allocation. It lives for as long as any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["Arena"]

_HUGE = 1 << 22
# Smaller arrays come from memory that is used again.
_SMALL = 1 << 16
# Of a cache line, and what frameworks ask for to share memory.
_ALIGNMENT = 64
_NOTHING = np.empty(0, np.uint8)


class Arena:
    """New arrays, as fast to write as memory allows.

    Parameters
    ----------
    views
        As many bytes will be asked for as these have, or not many more; None has none.
    """

    def __init__(self, views: Iterable[np.ndarray[Any, Any] | None] = ()) -> None:
        self._views = views
        self._block = _NOTHING
        self._next = 0

    # Only looked at by frameworks that write to it.
    @cached_property
    def _total(self) -> int:
        # Larger ones get huge pages of their own.
        sizes = [v.nbytes for v in self._views if v is not None and v.nbytes < _HUGE]
        return sum(sizes) + _ALIGNMENT * len(sizes)

    @cached_property
    def least(self) -> int:
        """Number of bytes below which an array is not worth the detour."""
        return _SMALL if self._total >= _HUGE else _HUGE

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array that holds anything, C-contiguous."""
        size = math.prod(shape) * dtype.itemsize
        if not self.least <= size < _HUGE:
            return np.empty(shape, dtype)
        if self._block.size < self._next + size:
            self._block = np.empty(max(self._total, size) + _ALIGNMENT, np.uint8)
            self._next = -self._block.ctypes.data % _ALIGNMENT
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, self._block, self._next)
        used = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._next, self._total = self._next + used, self._total - used
        return array
