# SPDX-License-Identifier: Apache-2.0
"""Quantiles of many numbers from counts in buckets that grow by a constant factor.

::

    gamma         = (1 + error) / (1 - error)
    bucket of x   = the k with  lowest * gamma^(k-1) < x <= lowest * gamma^k
    stands for    = 2 * lowest * gamma^k / (gamma + 1)        within `error` of all in it

Add the counts of two sketches to get the sketch of all numbers. Masson, Rim & Lee, 2019,
"DDSketch: a fast and fully-mergeable quantile sketch with relative-error guarantees",
arXiv:1908.10693.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedclip.arrays import Float64

Integers = np.ndarray[Any, np.dtype[np.int64]]
Edge = TypeVar("Edge", float, Float64)


@dataclass(frozen=True)
class Sketch:
    """The buckets that count numbers > 0, and the number that stands for each bucket.

    Attributes
    ----------
    error
        Relative error of a quantile, in (0, 1).
    lowest
        Upper edge of bucket 0.
    """

    error: float
    lowest: float = 1.0

    @property
    def gamma(self) -> float:
        """Factor by which each bucket is wider than the one before."""
        return (1 + self.error) / (1 - self.error)

    def bucket(self, numbers: Float64) -> Integers:
        """Return the bucket of each number; it may be negative, and has no upper end."""
        steps = np.log(numbers / self.lowest) / math.log(self.gamma)
        return np.ceil(steps).astype(np.int64)

    def edges(self, size: int) -> Float64:
        """Return the upper edges of the buckets 0 to ``size - 1``."""
        edges: Float64 = self.lowest * self.gamma ** np.arange(float(size))
        return edges

    def middle(self, edge: Edge) -> Edge:
        """Return the number that stands for the bucket with this upper edge."""
        return 2.0 * edge / (self.gamma + 1.0)


def holder(counts: Sequence[int] | Integers, rank: float) -> int:
    """Return the bucket that holds the number of a rank (counted from 0, rounded down)."""
    return int(np.searchsorted(np.cumsum(counts), math.floor(rank), side="right"))
