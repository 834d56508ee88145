# SPDX-License-Identifier: Apache-2.0
"""Clippers by element, mean, deviation and moving average: what their docstrings promise."""

import itertools
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import MODULES, Specimen, each_framework, require, run, specimens

import fedclip
from fedclip import Centralize, EmaNormClip, Normalize, PercentileClip, Standardize, ValueClip
from fedclip.arrays.blocks import decode, encode
from fedclip.testing import gradient_stream, to_numpy, to_vector

# They keep moving averages of arrays.
KEEPING = ("ema-value-clip", "ema-norm-clip", "ema-normalize", "growth-value-clip")
each_that_keeps = specimens([s for s in MODULES if s.name in KEEPING])


def one(clipper: Any, values: Any, dtype: Any = np.float64) -> np.ndarray:
    """Return what a clipper makes of a single tensor."""
    return clipper.run(NumpyVector({"w": np.asarray(values, dtype)})).coefs["w"]


@each_that_keeps
def test_pieces_may_be_cut_anywhere(specimen: Specimen, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = gradient_stream(8)
    wanted = run(specimen.make(), stream)
    monkeypatch.setattr("fedclip.arrays.blocks.CHUNK", 7)
    for found, expected in zip(run(specimen.make(), stream), wanted, strict=True):
        np.testing.assert_equal(found, expected)


@each_that_keeps
def test_state_of_another_model_is_refused_in_words(specimen: Specimen) -> None:
    clipper, other = specimen.make(), specimen.make()
    one(clipper, np.ones((2, 3)))
    state = clipper.get_state()
    other.set_state(state)
    with pytest.raises(ValueError, match=r"'w' is of shape \(2, 3\), its gradient of \(3, 2\)"):
        one(other, np.ones((3, 2)))
    state["arrays"]["w"].pop("count")
    with pytest.raises(fedclip.StateError, match="must have"):
        other.set_state(state)


def test_encode_is_the_inverse_of_decode_and_bfloat16_is_rounded_as_torch_does() -> None:
    for kind, towards_zero in itertools.product(("<f2", "<u2"), (False, True)):
        every = np.arange(1 << 16, dtype=np.uint16).view(kind)
        wide = decode(every)
        finite = np.isfinite(wide)
        again = encode(wide[finite], every.dtype, towards_zero=towards_zero)
        np.testing.assert_array_equal(again.view("<u2"), every[finite].view("<u2"))
    torch = require("torch")
    values = np.random.default_rng(0).normal(0, 1, 100_000).astype(np.float32)
    values[:3] = 1.00390625, 1.01171875, 3.3895e38
    theirs = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(encode(values, np.dtype(np.uint16)), theirs)


@pytest.mark.parametrize(
    ("clipper", "values", "dtype", "expected"),
    [
        (Normalize(dims=1), [[3.0, 4.0], [0.0, 0.0]], "f8", [[0.6, 0.8], [0.0, 0.0]]),
        # A single number has no deviation.
        (Normalize(ord="std"), 3.0, "f8", 3.0),
        # It saturates instead of overflowing.
        (Centralize(), [6e4, -6e4, -6e4, -6e4], "f2", [65504.0, -3e4, -3e4, -3e4]),
        # 0.29 of 100 positions is 28.999999999999996 in floats: the number is as it was written.
        (PercentileClip(99.9), np.arange(1.0, 1002.0), "f8", [*range(1, 1001), 1000.0]),
        *(
            (Standardize(*eps), [value] * 7, "f8", [0.0] * 7)
            for value in (0.1, 1e10, 1e-30, -3e300)
            for eps in ((), (0.0,))
        ),
    ],
)
def test_ends_by_hand(clipper: Any, values: Any, dtype: str, expected: Any) -> None:
    np.testing.assert_allclose(one(clipper, values, dtype), expected, rtol=1e-6)


def test_standardized_mean_and_deviation() -> None:
    for step in gradient_stream(3):
        output = Standardize().run(NumpyVector(step)).coefs
        assert output["head.scale"] is step["head.scale"]
        for key in ("enc.weight", "enc.bias", "head.weight"):
            assert output[key].mean() == pytest.approx(0, abs=1e-12)
            assert output[key].std(ddof=1) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("percent", [0, 1, 29, 50, 57, 58, 90, 95, 99, 100])
def test_percentile_position_is_that_of_integers(percent: int) -> None:
    rng = np.random.default_rng(percent)
    for size in (*range(1, 40), 101, 201, 399):
        values = rng.normal(0, 1, size)
        limit = np.sort(np.abs(values))[percent * (size - 1) // 100]
        found = one(PercentileClip(percent), values)
        np.testing.assert_array_equal(found, np.clip(values, -limit, limit))


def test_averages_begin_with_the_first_gradient_and_grow_by_max_growth_at_most() -> None:
    first = EmaNormClip(0.9)
    for _ in range(2):
        np.testing.assert_allclose(one(first, [3.0, 4.0]), [3.0, 4.0], rtol=1e-5)
    clipper, limits = EmaNormClip(0.5, max_growth=1.5, init=0.0), []
    for value in (1e-3, 1.0, 1.0, 1.0, 1e3):
        one(clipper, [value])
        limits.append(clipper.last.limit[0])
    np.testing.assert_allclose(np.divide(limits[1:], limits[:-1]), 1.5, rtol=1e-9)


@each_framework()
@pytest.mark.parametrize(("low", "high"), [(-0.25, np.inf), (-np.inf, -1.5)])
def test_a_box_may_be_open_on_one_side(framework: str, low: float, high: float) -> None:
    values = np.array([-3e30, -1.0, -0.25, 0.0, 0.5, 7.0, 2e30], dtype="float32")
    clip = ValueClip(high, min_value=low)
    out = to_numpy(clip.run(to_vector({"w": values}, framework)))["w"]
    np.testing.assert_array_equal(out, np.clip(values, low, high))
    assert clip.last.limit == (abs(low if np.isfinite(low) else high),)
    assert clip.last.clipped == (True,)
    assert clip.l2_bound({"w": (7,)}) is None
    again = ValueClip.from_config(clip.get_config())
    assert (again.min_value, again.max_value) == (low, high)
    with pytest.raises(ValueError, match="limits nothing: make one finite"):
        ValueClip(np.inf, min_value=-np.inf)
    for wrong in ({"max_value": -np.inf}, {"max_value": np.inf}, {"min_value": np.inf}):
        with pytest.raises(ValueError, match="must be a finite number"):
            ValueClip(**wrong)
