# SPDX-License-Identifier: Apache-2.0
"""One Python float in place of an array of one group.

Most clippers have a single group, and Python floats are ten times faster than arrays of one
element. Both follow IEEE arithmetic, so results are the same to the bit. Where a group has several
numbers, such as its last norms, they are an array of one column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedclip.arrays.base import Arithmetic, Array

__all__ = ["NumberArithmetic"]


class NumberArithmetic(Arithmetic):
    """Arithmetic of rules on Python floats."""

    measures_again = True

    def asarray(self, values: Any, like: Array | None = None) -> Any:
        if isinstance(values, np.ndarray) and values.ndim > 1:
            return values
        (value,) = values
        return float(value)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if condition is True or condition is False:
            return x if condition else y
        return np.where(condition, x, y)

    def either(self, condition: bool, x: float) -> bool:
        return condition or x > 0

    def known(self, condition: Any) -> bool | None:
        return bool(condition)

    def put(self, table: Any, row: float, values: float) -> Any:
        result = table.copy()
        result[int(row)] = values
        return result

    def ranked(self, table: Any, held: float, rank: float) -> tuple[float, float]:
        ordered = np.sort(table[: int(held), 0]).tolist()
        return ordered[int(rank)], ordered[int(min(rank + 1.0, held - 1.0))]

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

    def median(self, values: Sequence[float]) -> float:
        held = sorted(value for value in values if value > 0)
        return held[(len(held) - 1) // 2] if held else math.inf

    def sum(self, x: float) -> float:
        return x

    def max(self, x: float) -> float:
        return x
