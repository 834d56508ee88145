# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of rules on the numbers of one group, on the host: NumPy's scalars.

An operation takes a tenth of the time that it takes on an array of one number. A step of
`zscore-clip` makes some sixty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedclip.arrays.base import Arithmetic, Array, Arrays

__all__ = ["NUMBERS"]


class _Numbers(Arithmetic):
    sqrt = staticmethod(np.sqrt)
    exp = staticmethod(np.exp)

    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return np.float64(np.ravel(values)[0])

    def cast(self, x: Array, dtype: str) -> Array:
        return np.asarray(x, dtype)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return np.float64(x if condition else y)

    def sum(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        return x

    max = sum

    def stack(self, arrays: Arrays) -> Arrays:
        return arrays

    def sort(self, table: Arrays) -> Arrays:
        return sorted(table)

    def minimum(self, x: Array, y: Any) -> Array:
        return np.float64(y if y < x else x)

    def maximum(self, x: Array, y: Any) -> Array:
        return np.float64(y if y > x else x)


NUMBERS = _Numbers()
