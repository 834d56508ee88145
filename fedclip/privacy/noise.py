# SPDX-License-Identifier: Apache-2.0
r"""Gaussian noise from a cryptographically secure generator, in float64.

::

    k, l = 53 random bits each, from the operating system's generator
    u    = (k + 1) / 2^53                        in (0, 1]: its logarithm is finite
    r, t = sqrt(-2 ln u), 2 pi l / 2^53
    x, y = r cos t, r sin t                      (Box & Muller, 1958)

Guarantees
----------
- No draw is NaN or infinite: the largest is ``sqrt(2 * 53 * ln 2)`` = 8.57. The tail beyond it,
  which is cut off, has a probability of 1e-17.
- Noise is drawn and added in float64, and the sum is rounded once to the dtype of the array:
  rounding comes after the noise, and costs no privacy.
- A seed can only be given to the other, insecure generator, which is for experiments.

What is not covered is an attack on the last bits of floating-point noise (Mironov, 2012): it
needs the exact, unrounded noisy values of float64 models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from fedclip.arrays import Array, backend_of
from fedclip.measures.l2 import encode

__all__ = ["Normals", "add_noise", "insecure_normals", "secure_normals"]

Float64: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

Normals: TypeAlias = Callable[[int], Float64]
"""A function that returns so many draws of the standard normal distribution."""

# Pairs that are worked on together, so that they stay in the cache.
_PAIRS = 1 << 14
_ONE = 2.0**-53


def secure_normals(size: int) -> Float64:
    """Return `size` standard normal draws from the operating system's secure generator."""
    result = np.empty(size + size % 2)
    for start in range(0, result.size, 2 * _PAIRS):
        block = result[start : start + 2 * _PAIRS]
        pairs = block.size // 2
        bits = (np.frombuffer(os.urandom(8 * block.size), dtype=np.uint64) >> 11).astype(np.float64)
        radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * _ONE))
        angle = bits[pairs:] * (2.0 * math.pi * _ONE)
        np.multiply(radius, np.cos(angle), out=block[:pairs])
        np.multiply(radius, np.sin(angle), out=block[pairs:])
    return result[:size]


def insecure_normals(*seed: int) -> Normals:
    """Return a generator for experiments, which gives the same draws for the same seed."""
    return np.random.default_rng(seed or None).standard_normal


def add_noise(arrays: Mapping[str, Array], std: float, normals: Normals) -> dict[str, Array]:
    """Return the arrays with independent Gaussian noise on each element; sparse ones as dense.

    Parameters
    ----------
    arrays
        Arrays of any framework, on any device, by name; they are not changed.
    std
        Standard deviation.
    normals
        Where the noise comes from: `secure_normals`, or an `insecure_normals`.
    """
    result = {}
    for name, array in arrays.items():
        backend = backend_of(array)
        dense = backend.dense(array)
        values = np.array(backend.to_host(dense), dtype=np.float64)
        values += std * normals(values.size).reshape(values.shape)
        dtype = backend.dtype(dense)
        # `encode` takes the bits of bfloat16, which NumPy does not have, for uint16.
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        result[name] = backend.from_host(encode(values, kind), dense)
    return result
