# SPDX-License-Identifier: Apache-2.0
r"""The parts of a private step: a Poisson sample, clipped records, noise, a fixed divisor.

=============================  ==========================================  =================
mode                           factor of a record, or group of its tensors  sum is divided by
=============================  ==========================================  =================
``"flat"``                     min(1, C / n)                               1
``"tensor"``, ``"layer"``,     min(1, C / √k / n) for each of k groups     1
patterns
``"automatic"``                C / (n + gamma) (Bu et al., 2022)           C
``"adaptive"``                 min(1, C / n), and C follows a quantile     C
                               of the norms (Andrew et al., 2021)
=============================  ==========================================  =================

In each mode the norm of what a record adds is at most C. A step divided by C needs no other
learning rate when C changes.

The adaptive bound learns from one bit of each record, recentred to ±1/2, so that a record moves
the sum of the bits by 1/2; that sum has separate noise, which the budget pays for
(`fedclip.privacy.accounting.split_noise`)::

    fraction = clamp(1/2 + (sum of bits + noise) / expected batch size, 0, 1)
    C       <- C exp(-rate (fraction - quantile))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedclip.core import parameters
from fedclip.core.scopes import Groups, resolve
from fedclip.dpsgd.persample import ClippedSum
from fedclip.dpsgd.persample.base import Float64, Stack
from fedclip.privacy.accounting import default_bits_noise, split_noise
from fedclip.privacy.noise import Normals, Words, noised, random_words, secure_normals
from fedclip.rules.adaptive import geometric_update

MODES = ("flat", "tensor", "layer", "automatic", "adaptive")


@dataclass(frozen=True)
class SampleClipping:
    """What becomes of each record, given its norms.

    Attributes
    ----------
    mode
        One of `MODES`, or a list of patterns.
    gamma
        Stability constant of "automatic", in the units of the gradient.
    quantile, rate
        Fraction of records that the adaptive bound leaves alone, and the size of its steps.
    """

    mode: str | Sequence[str] = "flat"
    gamma: float = 0.01
    quantile: float = 0.5
    rate: float = 0.2

    def groups(self, names: Sequence[str]) -> Groups:
        """Return which tensors share a norm."""
        one_norm = self.mode in ("flat", "automatic", "adaptive")
        return resolve("global" if one_norm else self.mode, None, tuple(names))

    def factors(self, norms: Float64, bound: float) -> Float64:
        """Return by what to multiply each group of each record; norms are finite.

        >>> SampleClipping().factors(np.array([[0.5], [4.0]]), 1.0).tolist()
        [[1.0], [0.25]]
        """
        if self.mode == "automatic":
            return np.asarray(bound / (norms + self.gamma))
        limit = bound / math.sqrt(norms.shape[1])
        # Where a norm is 0 the quotient is of no consequence.
        return np.asarray(np.where(norms > limit, limit / np.where(norms > 0, norms, 1.0), 1.0))

    def scale(self, bound: float) -> float:
        """Return what the noisy sum is multiplied by."""
        return 1.0 / bound if self.mode in ("automatic", "adaptive") else 1.0

    def noise_multiplier(self, noise_multiplier: float, expected: float) -> float:
        """Return the multiplier of the noise on the gradients; the bits' share is taken off."""
        if self.mode != "adaptive":
            return noise_multiplier
        bits = default_bits_noise(noise_multiplier, math.ceil(expected))
        return split_noise(noise_multiplier, bits)

    def next_bound(
        self,
        bound: float,
        norms: Float64,
        noise_multiplier: float,
        expected: float,
        normals: Normals,
    ) -> float:
        """Return the bound of the next step.

        Parameters
        ----------
        bound
            The one that these norms were compared with.
        norms
            Of all records of the batch; NaN where a record was none, which votes for neither.
        noise_multiplier, expected
            The whole budget's z, and the expected size of a batch.
        normals
            Where the noise on the votes comes from; their sum lies on its grid.
        """
        if self.mode != "adaptive":
            return bound
        seen = norms[~np.isnan(norms)]
        bits = np.where(seen <= bound, 0.5, -0.5).sum(keepdims=True)
        std = default_bits_noise(noise_multiplier, math.ceil(expected))
        noisy = float(noised(bits, std, normals)[0])
        fraction = min(max(0.5 + noisy / expected, 0.0), 1.0)
        following = geometric_update(bound, fraction, quantile=self.quantile, rate=self.rate)
        return float(min(max(following, 1e-30), 1e30))


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
    as in `SampleClipping`."""
    noise: IndependentNoise = field(default_factory=IndependentNoise)
    """The object that adds noise: Gaussian, from a computationally secure generator, keyed by the
    operating system."""

    def __post_init__(self) -> None:
        """Check the parameters."""
        parameters.positive(max_norm=self.max_norm)
        parameters.non_negative(noise_multiplier=self.noise_multiplier)
        parameters.positive(expected_batch_size=self.expected_batch_size)
        if isinstance(self.mode, str):
            # The adaptive bound has a state.
            parameters.choice(MODES[:-1], mode=self.mode)

    def __call__(
        self, stacks: Iterable[Stack], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Float64]:
        """Return the mean of the gradients of the records, some at a time; `shapes` by name."""
        bound, clipping = float(self.max_norm), SampleClipping(self.mode)
        factors = partial(clipping.factors, bound=bound)
        total = ClippedSum(shapes, factors, clipping.groups([*shapes])).add(stacks)
        scale = clipping.scale(bound) / self.expected_batch_size
        noisy = self.noise.add(total.result()[0], self.noise_multiplier * bound)
        return {name: array * scale for name, array in noisy.items()}
