# SPDX-License-Identifier: Apache-2.0
"""The AGC regularizer against the packages it reproduces, and what its docstring promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import needs, pairwise

from fedclip import AGC, FedclipWarning
from fedclip.testing import FRAMEWORKS, to_numpy, to_vector

SHAPES = [(), (6,), (1, 6), (4, 6), (3, 4, 6), (2, 3, 4, 6), (2, 2, 3, 2, 4)]


def tensors(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": np.asarray(rng.normal(0, scale, shape)) for i, shape in enumerate(SHAPES)}


def run(agc: AGC, grads: Any, weights: Any, framework: str = "numpy", dtype: Any = None) -> Any:
    return to_numpy(
        agc.run(to_vector(grads, framework, dtype), to_vector(weights, framework, dtype))
    )


def unit_norms(values: np.ndarray, axis: int) -> np.ndarray:
    values = values.astype(float)
    if values.ndim < 2:
        return np.linalg.norm(values.ravel())
    moved = np.moveaxis(values, axis, 0)
    return np.linalg.norm(moved.reshape(len(moved), -1), axis=1)


# -- what the docstring promises --------------------------------------------------------------
@pairwise(framework=FRAMEWORKS, dtype=["float16", "bfloat16", "float32", "float64"], axis=[0, -1])
def test_no_unit_exceeds_its_limit(framework: str, dtype: str, axis: int) -> None:
    needs(framework)
    if framework == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    weights, grads = tensors(2, 0.1), tensors(3)
    agc = AGC(0.05, axis=axis, min_norm=1e-3)
    got = run(agc, grads, weights, framework, dtype)
    held = to_numpy(to_vector(weights, framework, dtype))
    for name, value in got.items():
        limit = 0.05 * np.maximum(unit_norms(held[name], axis), 1e-3)
        assert (unit_norms(value, axis) <= limit * (1 + 1e-12)).all()
        assert (unit_norms(value, axis) >= limit * (0.98 if "16" in dtype else 1 - 3e-6)).all()


def test_weights_of_zero_or_not_finite_leave_the_floor() -> None:
    grads = {"w": np.ones((3, 4))}
    weights = {"w": np.array([[0.0] * 4, [np.nan] * 4, [1e200, np.inf, 0, 0]])}
    with pytest.warns(FedclipWarning, match=r"weights with NaN or infinity.* is 0\.05"):
        got = run(AGC(0.1, axis=0, min_norm=0.5), grads, weights)
    np.testing.assert_allclose(unit_norms(got["w"], 0), 0.05)


# -- in declearn ------------------------------------------------------------------------------


def test_weights_of_a_step_are_not_kept_alive() -> None:
    agc = AGC()
    agc.run(NumpyVector({"w": np.ones(3)}), NumpyVector({"w": np.ones(3)}))
    assert not agc._weights


@pytest.mark.parametrize("unit", ["output", "tensor", "global"])
def test_complex_weights_are_refused_by_name(unit: str) -> None:
    gradient, weights = {"w": np.ones((2, 2))}, {"w": np.ones((2, 2), complex)}
    with pytest.raises(TypeError, match=r"weights 'w' are complex128.*agc .*exclude"):
        AGC(unit=unit).clip(gradient, weights)
    assert AGC(unit=unit, exclude="w").clip(gradient, weights) is gradient


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ({"v": np.ones(2)}, ValueError, "agc has no weights for 'w'; it was given 'v'"),
        ({"w": np.ones((2, 1))}, ValueError, r"of shape \(2,\) and weights of shape \(2, 1\)"),
        ({}, ValueError, "agc has no weights for 'w'; it was given none"),
        ({"w": None}, ValueError, "agc has no weights for 'w'"),
        ({"w": [1.0, 2.0]}, TypeError, "fedclip clips dense arrays .* got builtins.list"),
    ],
)
def test_weights_that_do_not_fit_are_told(weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        AGC(0.1).clip({"w": np.ones(2)}, weights)
