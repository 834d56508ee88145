# SPDX-License-Identifier: Apache-2.0
"""The bound holds: no output is above it, and what is clipped is not far below."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from helpers import each_framework, needs, norm

from fedclip import NoOp, NormClip, ValueClip
from fedclip.arrays.blocks import exact_norm
from fedclip.testing import apply, gradient_stream, to_numpy, to_vector


@each_framework()
def test_no_element_above_the_bound(framework: str) -> None:
    needs(framework)
    # The limit itself is rounded to the dtype of the gradient.
    rounded = {"float16": float(np.float16(0.2)), "float32": float(np.float32(0.2)), "float64": 0.2}
    if framework != "numpy":
        rounded["bfloat16"] = rounded["float32"]
    for dtype, limit in rounded.items():
        clipper = ValueClip(0.2)
        for step in gradient_stream(14):
            out = to_numpy(apply(clipper, to_vector(step, framework, dtype)))
            assert max(np.abs(v).max(initial=0.0) for v in out.values()) <= limit


def test_float32_never_above_the_limit() -> None:
    # About half of all float32 clips exceed the limit where the factor is only rounded.
    rng = np.random.default_rng(0)
    for _ in range(500):
        arrays = {"w": rng.normal(size=rng.integers(1, 3000)).astype("float32")}
        if norm(arrays) > 0.5:
            out = NormClip(0.5).run(to_vector(arrays)).coefs
            assert 0.5 * (1 - 2e-6) <= norm(out) <= 0.5


def test_norm_equal_to_the_limit_is_not_clipped() -> None:
    for dtype in ("float32", "float64"):
        vector = to_vector({"w": np.array([0.6, 0.8]), "b": np.array(0.0)}, dtype=dtype)
        clip = NormClip(max_norm=norm(vector.coefs))
        assert clip.run(vector) is vector
        assert clip.last.clipped == (False,)


def test_a_long_array_at_its_very_limit_is_not_clipped() -> None:
    """Its norm is measured again near the limit, as the fast one may be a little above."""
    for seed in range(10):
        array = np.random.default_rng(seed).standard_normal(100_003).astype("float32")
        vector = to_vector({"w": array}, dtype="float32")
        assert NormClip(exact_norm([array])).run(vector) is vector


# -- numbers that overflow or underflow when squared, and long arrays -----------------------------
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
