# SPDX-License-Identifier: Apache-2.0
"""Numbers that overflow or underflow when squared, sizes from 0 to 10^8, half precision."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from helpers import needs, norm

from fedclip import NoOp, NormClip
from fedclip.testing import to_numpy, to_vector

MAGNITUDES = [
    ("torch", "float16", 300.0),
    ("numpy", "float16", 6e-5),
    ("tensorflow", "float16", 6e-8),
    ("torch", "bfloat16", 1e20),
    ("jax", "bfloat16", 1e-30),
    ("numpy", "float32", 1e20),
    ("tensorflow", "float32", 3e38),
    ("torch", "float32", 1e-30),
    ("jax", "float64", 1e20),
    ("numpy", "float64", 1e-28),
    ("torch", "float64", 1e200),
]


def values(magnitude: float) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        "w": magnitude * rng.uniform(0.1, 1, (5, 40)) * rng.choice([-1, 1], (5, 40)),
        "b": magnitude * rng.uniform(0.1, 1, 3),
        "s": np.array(-magnitude),
        "e": np.zeros((0, 4)),
    }


@pytest.mark.parametrize(("framework", "dtype", "magnitude"), MAGNITUDES)
def test_measured_norm(framework: str, dtype: str, magnitude: float) -> None:
    needs(framework)
    vector = to_vector(values(magnitude), framework, dtype)
    clip = NoOp()
    clip.run(vector)
    assert clip.last.norm_before[0] == pytest.approx(norm(to_numpy(vector)), rel=1e-6)


@pytest.mark.slow
def test_a_hundred_million_elements() -> None:
    # One float32 dot over so many is off by 10^-3; that is a bound broken by size alone.
    array = np.random.default_rng(0).standard_normal(100_000_000, dtype=np.float32)
    expected = float64_norm(array)
    vector = to_vector({})
    vector.coefs["w"] = array
    clip = NormClip(1.0)
    out = clip.run(vector).coefs["w"]
    assert clip.last.norm_before[0] == pytest.approx(expected, rel=1e-6)
    assert out.dtype == np.float32
    assert 1 - 2e-6 <= float64_norm(out) <= 1
    del array, vector, out
    gc.collect()


def float64_norm(array: np.ndarray) -> float:
    """Return the norm in float64 without a float64 copy of all of it."""
    total = sum(
        float(np.square(block.astype(np.float64)).sum()) for block in np.array_split(array, 64)
    )
    return total**0.5


def test_a_long_array_whose_squares_underflow_is_measured() -> None:
    look = NoOp()
    look.run(to_vector({"w": np.full(5000, 1e-30)}, dtype="float32"))
    assert look.last.norm_before[0] == pytest.approx(1e-30 * 5000**0.5, rel=1e-6, abs=0)


@pytest.mark.parametrize("size", [0, 1, 2, 1023, 1024, 1025, 65_535, 65_536, 65_537, 200_001])
def test_every_size(size: int) -> None:
    array = np.random.default_rng(size).standard_normal(size).astype("float32")
    clip = NoOp()
    clip.run(to_vector({"w": array, "v": np.ones(3, "float32")}))
    assert clip.last.norm_before[0] == pytest.approx(norm({"w": array, "v": np.ones(3)}), rel=1e-6)
