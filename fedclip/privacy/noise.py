# SPDX-License-Identifier: Apache-2.0
r"""Gaussian noise from a cryptographically secure generator, in float64, on a grid.

::

    k, l = 64 and 53 random bits, from the operating system's generator
    u    = (k + 1) / 2^64                        in (0, 1]: its logarithm is finite
    r, t = sqrt(-2 ln u), 2 pi l / 2^53
    x, y = r cos t, r sin t                      (Box & Muller, 1958)
    value + std x, rounded to a multiple of the largest power of two below 2^-30 std

Guarantees
----------
- No draw is NaN or infinite: the largest is ``sqrt(2 * 117 * ln 2)`` = 12.74. The tail beyond it
  is cut off; its probability is 1e-35.
- Noise is drawn and added in float64. The sum is rounded to the grid, then once to the dtype of
  the array, of which it is at most the largest number. Rounding comes after the noise, and costs
  no privacy.
- Every value can reach every multiple of the grid, so that the last bits of the output do not
  tell values apart (Mironov, 2012). Draws are finer than the grid, also in the tail and near 0
  (Holohan & Braghin, 2021): if k is below 2^32, it gets 53 bits more. Floats beyond 2^22 times
  `std` are themselves spaced wider than the grid.
- Only the other, insecure generator takes a seed; it is for experiments.

The points of the grid do not have exactly the probabilities of a Gaussian.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Array, backend_of, narrowed

__all__ = ["Normals", "add_noise", "insecure_normals", "noised", "random_words", "secure_normals"]

Float64: TypeAlias = NDArray[np.float64]

Normals: TypeAlias = Callable[[int], Float64]
"""A function that returns a given number of standard normal draws."""

# Number of pairs processed at a time, so that they stay in the cache.
_PAIRS = 1 << 14
_ONE = 2.0**-53


def secure_normals(size: int) -> Float64:
    """Return `size` standard normal draws from the operating system's secure generator."""
    result = np.empty(size + size % 2)
    for start in range(0, result.size, 2 * _PAIRS):
        block = result[start : start + 2 * _PAIRS]
        pairs = block.size // 2
        bits = random_words(block.size)
        radius = np.sqrt(2.0 * _exponentials(bits[:pairs]))
        angle = (bits[pairs:] >> 11).astype(np.float64) * (2.0 * math.pi * _ONE)
        np.multiply(radius, np.cos(angle), out=block[:pairs])
        np.multiply(radius, np.sin(angle), out=block[pairs:])
    return result[:size]


def _exponentials(bits: NDArray[np.uint64]) -> Float64:
    """Return -ln((k + 1) / 2^64), finely spaced in the tail and near 0 too."""
    result = -np.log((bits.astype(np.float64) + 1.0) * 2.0**-64)
    (tail,) = np.nonzero(bits < 1 << 32)
    if tail.size:
        more = (random_words(tail.size) >> 11).astype(np.float64)
        result[tail] = -np.log((bits[tail].astype(np.float64) + (more + 1.0) * _ONE) * 2.0**-64)
    (near,) = np.nonzero(bits >= (1 << 64) - (1 << 40))
    result[near] = -np.log1p(-((~bits[near]).astype(np.float64) * 2.0**-64))
    return result


def random_words(size: int) -> NDArray[np.uint64]:
    """Return uniform words of 64 bits from the operating system's secure generator."""
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def insecure_normals(*seed: int) -> Normals:
    """Return a generator for experiments, which gives the same draws for the same seed."""
    return np.random.default_rng(seed or None).standard_normal


def noised(values: Float64, std: float, normals: Normals) -> Float64:
    """Return the values with Gaussian noise added to each, rounded to the grid of the noise.

    >>> float(noised(np.array([1.0]), 0.25, lambda size: np.full(size, 2.0**-40))[0])
    1.0
    """
    result: Float64 = np.asarray(values + std * normals(values.size).reshape(values.shape))
    if std == 0.0:
        return result
    # A power of two: dividing and multiplying by it does not round.
    grid = math.ldexp(1.0, max(math.frexp(std)[1] - 31, -1074))
    with np.errstate(over="ignore"):
        rounded: Float64 = np.asarray(result / grid)
    np.rint(rounded, out=rounded)
    np.multiply(rounded, grid, out=rounded)
    # Values too large to be counted in steps of the grid are multiples of it already.
    np.copyto(rounded, result, where=np.isinf(rounded))
    return rounded


def add_noise(
    arrays: Mapping[str, Array],
    std: float,
    normals: Normals,
    exact: Mapping[str, Float64] | None = None,
) -> dict[str, Array]:
    """Return the arrays with independent Gaussian noise on each element; sparse ones as dense.

    Parameters
    ----------
    arrays
        Arrays of any framework, on any device, by name; they are not changed.
    std
        Standard deviation.
    normals
        The generator: `secure_normals`, or one made by `insecure_normals`.
    exact
        The values of the arrays before they were rounded to their dtypes. What is rounded before
        the noise may lie further apart than it did.
    """
    result = {}
    for name, array in arrays.items():
        backend = backend_of(array)
        dense = backend.dense(array)
        values = backend.to_host(dense) if exact is None else exact[name]
        result[name] = narrowed(noised(np.asarray(values, np.float64), std, normals), dense)
    return result
