# SPDX-License-Identifier: Apache-2.0
"""The bound holds: no output is above it, and what is clipped is not far below."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
from helpers import each_framework, needs, norm
from hypothesis import given
from hypothesis import strategies as st

from fedclip import AdaptiveClip, NoOp, Normalize, NormClip, ValueClip
from fedclip.arrays import NUMPY, backend_named
from fedclip.arrays.blocks import exact_norm
from fedclip.core.measures import slice_measures
from fedclip.testing import apply, gradient_stream, to_numpy, to_vector
from fedclip.transforms import clip_on_device


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


# -- the ends of each dtype: products that become subnormal, and those that overflow ---------------
def measure(rows: Any, ord: Any) -> float:
    """Return the measure of all elements together."""
    values = np.concatenate([np.ravel(row) for row in rows]).astype(np.float64)
    return float(slice_measures([values], [(0,)], ord, NUMPY)[0])


def length(arrays: dict[str, Any]) -> float:
    return math.sqrt(math.fsum(float(x) * float(x) for a in arrays.values() for x in a.ravel()))


@each_framework()
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_no_output_that_becomes_subnormal_is_above_its_limit(framework: str, size: int) -> None:
    needs(framework)
    rng = np.random.default_rng(size)
    for times in (0.3, 1.0, 3.7, 40.0, 900.0):
        limit = times * 2.0**-24
        for values in (np.full(size, 0.5), rng.uniform(0.1, 1.0, size)):
            output = NormClip(limit).run(to_vector({"w": values}, framework, "float16"))
            assert length(to_numpy(output)) <= limit * (1 + 1e-12)


@each_framework()
@pytest.mark.parametrize("device", [False, True])
def test_the_ends_of_the_range_of_limits(framework: str, device: bool) -> None:
    needs(framework)
    for limit, value in ((1e-30, 1e4), (1e-30, 1e38), (1e30, 1e38), (1e-30, 1e-36)):
        arrays = {"w": np.full(5, value, np.float32), "x": np.full(5, value)}
        clip = NormClip(limit, ord="rms")
        output = (
            on_device(clip, arrays, framework)
            if device
            else to_numpy(clip.run(to_vector(arrays, framework)))
        )
        # A factor below 2^-126 gives zeros.
        assert np.isfinite(output["w"]).all()
        assert measure([*output.values()], "rms") <= limit
        assert measure([*output.values()], "rms") > 0.99 * min(limit, value) or value / limit > 1e37


def test_a_learnt_limit_below_the_range_gives_zeros() -> None:
    for limit, zero in ((1e-29, False), (0.9e-30, True)):
        clip = AdaptiveClip(start_norm=1.0)
        clip.run(to_vector({"w": np.ones(3)}))
        clip.set_statistics(limit=limit)
        assert to_numpy(clip.run(to_vector({"w": np.ones(3)})))["w"].any() != zero


def on_device(clip: Any, arrays: dict[str, Any], framework: str) -> dict[str, Any]:
    """Return what a step on a device makes of arrays of several dtypes."""
    coefs = {
        name: to_vector({name: array}, framework, array.dtype.name).coefs[name]
        for name, array in arrays.items()
    }
    groups, xp = clip._resolve(coefs), backend_named(framework)
    outputs, _ = clip_on_device(clip.transform(groups), coefs, groups, xp, (), "skip")
    return {name: np.asarray(xp.to_host(output)) for name, output in outputs.items()}


@each_framework(oracle=False)
def test_subnormals_of_one_dtype_leave_no_more_to_the_others_of_a_group(framework: str) -> None:
    needs(framework)
    size = 1000
    for share in np.linspace(0.3, 0.7, 12):
        half = np.full(size, share / math.sqrt(size)).astype(np.float16)
        rest = math.sqrt(1.0 - length({"h": half}) ** 2)
        # Where products of `half` lie above the middle of two of its numbers, all are rounded up
        # together.
        arrays = {"h": half, "w": np.array([rest], np.float32)}
        assert length(on_device(NormClip(1e-3), arrays, framework)) <= 1e-3


@given(st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=30), st.floats(1e-8, 1e3))
def test_half_precision_keeps_to_any_limit(values: list[float], limit: float) -> None:
    output = NormClip(limit).run(to_vector({"w": np.array(values)}, dtype="float16"))
    assert length(to_numpy(output)) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("dims", [None, 0])
@pytest.mark.parametrize("ord", [2, "inf", "rms", "std"])
def test_what_is_scaled_up_stays_finite_and_keeps_its_direction(ord: Any, dims: Any) -> None:
    values = np.array([1.0, 2.0, -4.0])
    for clipper in (Normalize(1e6, ord=ord, dims=dims), NormClip(None, min_norm=1e6, ord=ord)):
        output = to_numpy(clipper.run(to_vector({"w": values}, dtype="float16")))["w"]
        np.testing.assert_allclose(output / output[0], values, rtol=2e-3)
        assert 6e4 < np.abs(output).max() <= 65504
