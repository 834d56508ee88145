# SPDX-License-Identifier: Apache-2.0
"""One Python float in place of an array of one group.

Most clippers have a single group, and Python floats are ten times faster than arrays of one
element. Both follow IEEE arithmetic, so results are the same to the bit.
"""

from __future__ import annotations

import math
from typing import Any

from fedclip.arrays.base import Arithmetic, Array

__all__ = ["NumberArithmetic"]


class NumberArithmetic(Arithmetic):
    """Arithmetic of rules on Python floats."""

    def asarray(self, values: Any, like: Array | None = None) -> float:
        (value,) = values
        return float(value)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y

    def isfinite(self, x: float) -> bool:
        return math.isfinite(x)

    def sqrt(self, x: float) -> float:
        return math.sqrt(x)

    def exp(self, x: float) -> float:
        return math.exp(x)

    def minimum(self, x: float, y: float) -> float:
        return x if x <= y else y

    def maximum(self, x: float, y: float) -> float:
        return x if x >= y else y

    def sum(self, x: float) -> float:
        return x

    def max(self, x: float) -> float:
        return x
