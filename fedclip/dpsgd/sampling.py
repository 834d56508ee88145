# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling from the computationally secure generator of `fedclip.privacy.noise`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.core import parameters
from fedclip.privacy.noise import random_words

__all__ = ["Bits", "PoissonSampler"]

Bits: TypeAlias = Callable[[int], NDArray[np.uint64]]
"""A function that returns a given number of words of 64 random bits."""


class PoissonSampler:
    """Draws batches that hold each record independently, with the same probability.

    ::

        rate  = min(1, expected / records)
        batch = [i for each record i, if u_i < rate]      u_i uniform, independent

    The size of a batch is binomial; an empty batch is a step like any other. The rate in use is
    rounded down to a multiple of 2^-64, so that the rate accounted for is never too small.

    Parameters
    ----------
    records
        How many there are, at least 1.
    expected
        Expected size of a batch, at least 1; no more than `records` counts.
    bits
        Where the randomness comes from.

    Examples
    --------
    >>> sampler = PoissonSampler(4, 4)
    >>> sampler.rate, sampler.draw().tolist()
    (1.0, [0, 1, 2, 3])
    """

    def __init__(self, records: int, expected: int, bits: Bits = random_words) -> None:
        self.records = parameters.integer(1, records=records)
        self.expected = min(parameters.integer(1, batch_size=expected), self.records)
        self.rate = self.expected / self.records
        self._bits = bits

    def draw(self) -> NDArray[np.intp]:
        """Return the positions of the records of one batch, in order; there may be none."""
        if self.rate == 1.0:
            return np.arange(self.records)
        threshold = np.uint64(math.floor(self.rate * 2.0**64))
        return np.flatnonzero(self._bits(self.records) < threshold)
