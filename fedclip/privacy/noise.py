# SPDX-License-Identifier: Apache-2.0
r"""Gaussian noise from a computationally secure generator, in float64, on a grid.

::

    key  = 256 random bits from the operating system, new for each draw
    k, l = 64 and 53 bits of the ChaCha20 stream of that key
    u    = (k + 1) / 2^64                        in (0, 1]: its logarithm is finite
    r, t = sqrt(-2 ln u), 2 pi l / 2^53
    x, y = r cos t, r sin t                      (Box & Muller, 1958)
    value + std x, rounded to a multiple of the largest power of two below 2^-30 std

Guarantees
----------
- The generator is computationally secure, keyed by the operating system: whoever tells its bits
  from random ones breaks ChaCha20, or the operating system's generator.
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
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Array, backend_named, backend_of, narrowed

Float64: TypeAlias = NDArray[np.float64]

Normals: TypeAlias = Callable[[int], Float64]
"""A function that returns a given number of standard normal draws."""

Words: TypeAlias = Callable[[int], NDArray[np.uint64]]
"""A function that returns a given number of words of 64 random bits."""

_ONE = 2.0**-53
# Number of values drawn and rounded at a time, so that they stay in the cache.
_BLOCK = 1 << 15


def secure_normals(size: int) -> Float64:
    """Return `size` standard normal draws from the computationally secure generator."""
    result = np.empty(size)
    for start in range(0, size, _BLOCK):
        block = result[start : start + _BLOCK]
        block[:] = _pairs(block.size)
    return result


def _pairs(size: int) -> Float64:
    pairs = (size + 1) // 2
    bits = random_words(2 * pairs)
    angle = (bits[pairs:] >> 11).astype(np.float64)
    angle *= 2.0 * math.pi * _ONE
    bits = bits[:pairs]
    # torch is several times faster, and not imported for this.
    backend = backend_named("torch" if "torch" in sys.modules else "numpy")
    draws = backend.normal_pairs(_uniforms(bits), angle)
    # Near 1, a float holds fewer bits of u than of 1 - u.
    (near,) = np.nonzero(bits >= (1 << 64) - (1 << 40))
    radius = np.sqrt(-2.0 * np.log1p(-((~bits[near]).astype(np.float64) * 2.0**-64)))
    draws[0, near], draws[1, near] = radius * np.cos(angle[near]), radius * np.sin(angle[near])
    return draws.reshape(-1)[:size]


def _uniforms(bits: NDArray[np.uint64]) -> Float64:
    """Return (k + 1) / 2^64, finely spaced in the tail too."""
    result = bits.astype(np.float64)
    result += 1.0
    (tail,) = np.nonzero(bits < 1 << 32)
    if tail.size:
        more = (random_words(tail.size) >> 11).astype(np.float64)
        result[tail] = bits[tail].astype(np.float64) + (more + 1.0) * _ONE
    result *= 2.0**-64
    return result


def random_words(size: int) -> NDArray[np.uint64]:
    """Return words of 64 random bits: a ChaCha20 stream under a fresh key from `os.urandom`."""
    # Imported here: loops of JAX import this file, and most of them draw no noise.
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
    words = bytearray(8 * size)
    stream.update_into(words, words)
    return np.frombuffer(words, dtype=np.uint64)


def insecure_normals(*seed: int) -> Normals:
    """Return a generator for experiments, which gives the same draws for the same seed."""
    return np.random.default_rng(seed or None).standard_normal


def noised(values: Float64, std: float, normals: Normals) -> Float64:
    """Return the values with Gaussian noise added to each, rounded to the grid of the noise.

    >>> float(noised(np.array([1.0]), 0.25, lambda size: np.full(size, 2.0**-40))[0])
    1.0
    """
    draws, flat = normals(values.size).reshape(-1), np.asarray(values).reshape(-1)
    # A power of two: dividing and multiplying by it does not round.
    grid = math.ldexp(1.0, max(math.frexp(std)[1] - 31, -1074))
    result = np.empty(values.shape)
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        block = std * draws[part]
        block += flat[part]
        result.reshape(-1)[part] = block if std == 0.0 else _rounded(block, grid)
    return result


def _rounded(values: Float64, grid: float) -> Float64:
    with np.errstate(over="ignore"):
        rounded = values / grid
    np.rint(rounded, out=rounded)
    rounded *= grid
    # A value too large to be counted in steps of the grid is a multiple of it already.
    np.copyto(rounded, values, where=np.isinf(rounded))
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
        The values of the arrays before they were rounded to their dtypes. Rounding before the
        noise may move values further apart.
    """
    result = {}
    for name, array in arrays.items():
        backend = backend_of(array)
        dense = backend.dense(array)
        values = backend.to_host(dense) if exact is None else exact[name]
        result[name] = narrowed(noised(np.asarray(values, np.float64), std, normals), dense)
    return result
