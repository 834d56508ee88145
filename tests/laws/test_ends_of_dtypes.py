# SPDX-License-Identifier: Apache-2.0
"""Bounds at both ends of each dtype: products that become subnormal, and those that overflow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import each_framework, needs
from hypothesis import given
from hypothesis import strategies as st

from fedclip import AdaptiveClip, Normalize, NormClip
from fedclip.arrays import NUMPY, backend_named
from fedclip.core.measures import slice_measures
from fedclip.testing import to_numpy, to_vector
from fedclip.transforms import clip_on_device


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
