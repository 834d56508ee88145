# SPDX-License-Identifier: Apache-2.0
"""NumPy: the host itself, and the oracle that the other frameworks are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedclip.arrays.base import Array, Backend, HostView

__all__ = ["NumpyBackend", "bits"]


def bits(array: HostView) -> HostView:
    """Return the view that norms are taken of: bfloat16 as its bits, all else as it is."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


class NumpyBackend(Backend):
    """Arrays and 0-d scalars of NumPy."""

    name = "numpy"

    def host(self, arrays: Sequence[Array]) -> list[HostView | None]:
        return [bits(a) if type(a) is np.ndarray else bits(np.asarray(a)) for a in arrays]

    def dtype(self, array: Array) -> str:
        return str(array.dtype.name)

    def scale(self, arrays: Sequence[Array], factors: Sequence[float]) -> list[Array]:
        return [self._multiply(np.asarray(a), k) for a, k in zip(arrays, factors, strict=True)]

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        return self._multiply(np.asarray(array), factors)

    @staticmethod
    def _multiply(array: HostView, factor: Any) -> HostView:
        if array.dtype.itemsize == 2:
            product = np.multiply(array.astype(np.float32), np.asarray(factor, np.float32))
            return np.asarray(product).astype(array.dtype)
        # `out` keeps a 0-d array an array, and the memory layout what it was.
        return np.multiply(
            array, np.asarray(factor, array.dtype), out=np.empty_like(array, subok=False)
        )

    def clip(self, array: Array, low: float, high: float) -> Array:
        array = np.asarray(array)
        return np.asarray(np.clip(array, array.dtype.type(low), array.dtype.type(high)))

    def zeros_like(self, array: Array) -> Array:
        return np.zeros_like(array, subok=False)

    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        raise NotImplementedError("NumPy arrays always have a host view")

    def to_host(self, array: Array) -> HostView:
        return np.asarray(array)

    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return np.asarray(values, dtype=np.float64)

    where = staticmethod(np.where)
    isfinite = staticmethod(np.isfinite)
    sqrt = staticmethod(np.sqrt)
    exp = staticmethod(np.exp)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)
