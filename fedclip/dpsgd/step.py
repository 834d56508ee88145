# SPDX-License-Identifier: Apache-2.0
"""The parts of a private step: a Poisson sample, clipped records, noise, a fixed divisor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedclip.core import parameters
from fedclip.dpsgd import persample
from fedclip.dpsgd.clipping import MODES, SampleClipping
from fedclip.dpsgd.persample.base import Float64, Stack
from fedclip.privacy.noise import Normals, Words, noised, random_words, secure_normals

__all__ = ["IndependentNoise", "PoissonSampler", "PrivateMean"]

_STATELESS = tuple(mode for mode in MODES if mode != "adaptive")


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

    def __init__(self, records: int, expected: int, bits: Words = random_words) -> None:
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


class IndependentNoise:
    """Gaussian noise, new for each element and step, on the grid of `fedclip.privacy.noise`.

    Parameters
    ----------
    normals
        The generator: computationally secure, keyed by the operating system, unless in a test.
    """

    def __init__(self, normals: Normals = secure_normals) -> None:
        self._normals = normals

    def add(self, sums: Mapping[str, Float64], std: float) -> dict[str, Float64]:
        """Return the sums of one step, with noise of this standard deviation."""
        return {name: noised(array, std, self._normals) for name, array in sums.items()}


@dataclass(frozen=True)
class PrivateMean:
    """Returns the noisy mean of the clipped gradients of records, in float64, by name.

    Notes
    -----
    A record moves the sum by at most C, and the divisor is fixed. If each record is in a batch with
    probability q, independently of the others, a step is a Poisson-sampled Gaussian mechanism. Its
    privacy loss distribution, rounded upwards, is composed numerically.

    Neighbours are data sets of equal size, in one of which one record counts as zero (zero-out):
    q and the number of steps are then equal. The pair of distributions is that of adding or
    removing a record (``REPLACE_SPECIAL`` in dp-accounting). A replaced record costs more. The
    clipped mean of a person's records is such a record too, with q the probability of a person.
    """

    max_norm: float
    """Bound C on the norm of what a record adds, > 0."""
    noise_multiplier: float
    """Standard deviation of the noise on the sum, over C; >= 0."""
    expected_batch_size: float
    """By which the sum is divided: the sampling rate times the number of records, never the
    actual size of a batch; > 0."""
    mode: str | Sequence[str] = "flat"
    """The tensors that share a norm: "flat", "tensor", "layer", "automatic" or a list of patterns,
    as in `fedclip.dpsgd.clipping`."""
    noise: IndependentNoise = field(default_factory=IndependentNoise)
    """The object that adds noise: Gaussian, from a computationally secure generator, keyed by the
    operating system."""

    def __post_init__(self) -> None:
        """Check the parameters."""
        parameters.positive(max_norm=self.max_norm)
        parameters.non_negative(noise_multiplier=self.noise_multiplier)
        parameters.positive(expected_batch_size=self.expected_batch_size)
        if isinstance(self.mode, str):
            parameters.choice(_STATELESS, mode=self.mode)

    def __call__(
        self, stacks: Iterable[Stack], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Float64]:
        """Return the mean of the gradients of the records, some at a time; `shapes` by name."""
        bound, clipping = float(self.max_norm), SampleClipping(self.mode)
        factors = partial(clipping.factors, bound=bound)
        sums, _ = persample.add_up(stacks, shapes, factors, clipping.groups([*shapes]))
        scale = clipping.scale(bound) / self.expected_batch_size
        noisy = self.noise.add(sums, self.noise_multiplier * bound)
        return {name: array * scale for name, array in noisy.items()}
