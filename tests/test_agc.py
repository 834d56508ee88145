# SPDX-License-Identifier: Apache-2.0
"""The AGC regularizer against the packages it reproduces, and what its docstring promises."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.optimizer.regularizers import Regularizer
from helpers import BACKENDS, each_framework, needs, require

from fedclip import AGC, FedclipWarning, NonFiniteError
from fedclip.testing import check_clipper, to_numpy, to_vector

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


# -- side by side with other packages ---------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_optax(seed: int, axis: int | None) -> None:
    optax = require("optax")
    needs("jax")
    weights, grads = tensors(seed, 0.01), tensors(seed + 100)
    if axis is not None:
        # optax fails on 0-d tensors.
        weights.pop("w0"), grads.pop("w0")
    theirs = optax.adaptive_grad_clip(0.3, eps=0.02, axis=axis)
    given = to_vector(grads, "jax").coefs
    wanted, _ = theirs.update(given, theirs.init(given), to_vector(weights, "jax").coefs)
    got = run(AGC(0.3, min_norm=0.02, dims=axis), grads, weights, "jax")
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)


def timm_clip(grads: Any, weights: Any, factor: float, eps: float) -> Any:
    """Do what timm's adaptive_clip_grad does (timm/utils/agc.py), from its formulas."""
    torch = require("torch")

    def unitwise(x: Any) -> Any:
        if x.ndim <= 1:
            return x.norm(2.0)
        return x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    result = {}
    for name, grad in grads.items():
        g, p = torch.from_numpy(grad), torch.from_numpy(weights[name])
        most = unitwise(p).clamp_(min=eps).mul_(factor)
        norm = unitwise(g)
        clipped = g * (most / norm.clamp(min=1e-6))
        result[name] = torch.where(norm < most, g, clipped).numpy()
    return result


@pytest.mark.parametrize("seed", range(3))
def test_timm(seed: int) -> None:
    weights, grads = tensors(seed, 0.01), tensors(seed + 100)
    wanted = timm_clip(grads, weights, 0.2, 1e-3)
    got = run(AGC(0.2, axis=0), grads, weights, "torch")
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)


def test_smartclip() -> None:
    weights, grads = tensors(0), tensors(1)
    got = run(AGC(0.1, unit="tensor", eps=1e-8, skip_vectors=True), grads, weights)
    for name, grad in grads.items():
        target = 0.1 * (np.linalg.norm(weights[name].ravel()) + 1e-8)
        factor = min(1.0, target / (np.linalg.norm(grad.ravel()) + 1e-8))
        wanted = grad if grad.ndim < 2 else grad * factor
        np.testing.assert_allclose(got[name], wanted, rtol=1e-12)


# -- what the docstring promises --------------------------------------------------------------
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"axis": 0},
        {"dims": [-1]},
        {"unit": "tensor", "skip_vectors": True},
        {"unit": "global", "exclude": "*.bias"},
    ],
)
def test_promises_of_all_clippers(config: Any) -> None:
    check_clipper(lambda: AGC(0.1, **config), frameworks=BACKENDS)


@each_framework()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [0, -1])
def test_no_unit_exceeds_its_limit(framework: str, dtype: str, axis: int) -> None:
    needs(framework)
    if framework == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    weights, grads = tensors(2, 0.1), tensors(3)
    agc = AGC(0.05, axis=axis)
    got = run(agc, grads, weights, framework, dtype)
    held = to_numpy(to_vector(weights, framework, dtype))
    for name, value in got.items():
        limit = 0.05 * np.maximum(unit_norms(held[name], axis), 1e-3)
        assert (unit_norms(value, axis) <= limit * (1 + 1e-12)).all()
        assert (unit_norms(value, axis) >= limit * (0.98 if "16" in dtype else 1 - 3e-6)).all()


@pytest.mark.parametrize("unit", ["output", "tensor", "global"])
def test_twice_is_once(unit: str) -> None:
    weights, grads = tensors(4), tensors(5)
    agc = AGC(0.1, unit=unit)
    once = agc.run(NumpyVector(grads), NumpyVector(weights))
    assert agc.run(once, NumpyVector(weights)) is once


def test_global_is_one_ratio() -> None:
    weights, grads = tensors(4), tensors(5)
    got = run(AGC(0.1, unit="global"), grads, weights)

    def flat(values: Any) -> np.ndarray:
        return np.concatenate([v.ravel() for v in values.values()])

    ratio = 0.1 * np.linalg.norm(flat(weights)) / np.linalg.norm(flat(grads))
    np.testing.assert_allclose(flat(got), ratio * flat(grads), rtol=1e-9)


def test_weights_of_zero_or_not_finite_leave_the_floor() -> None:
    grads = {"w": np.ones((3, 4))}
    weights = {"w": np.array([[0.0] * 4, [np.nan] * 4, [1e200, np.inf, 0, 0]])}
    with pytest.warns(FedclipWarning, match=r"weights hold NaN or infinity.* is 0\.05"):
        got = run(AGC(0.1, axis=0, min_norm=0.5), grads, weights)
    np.testing.assert_allclose(unit_norms(got["w"], 0), 0.05)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_that_overflow_or_vanish_are_right(dtype: str) -> None:
    big, small = (1e20, 1e-16) if dtype == "float32" else (1e200, 1e-29)
    for unit in ("output", "tensor", "global"):
        agc = AGC(0.5, unit=unit, min_norm=small)
        for weight in (big, small):
            got = run(agc, {"w": np.full((4, 1), big)}, {"w": np.full((4, 1), weight)}, dtype=dtype)
            np.testing.assert_allclose(got["w"], weight / 2, rtol=3e-6)


def test_empty_tensors_are_left_alone() -> None:
    values = {"e": np.zeros((0, 3)), "w": np.ones((2, 2))}
    got = run(AGC(0.1), values, values)
    assert got["e"].shape == (0, 3)
    nothing = NumpyVector({"e": np.zeros((0, 3))})
    assert AGC().run(nothing, nothing) is nothing
    empty = NumpyVector({})
    assert AGC().run(empty, empty) is empty


def test_vectors_are_skipped_whatever_their_names() -> None:
    names = ["w", "b[0]", "b*", "b"]
    grads = NumpyVector({"w": np.ones((2, 2)), **{n: np.ones(2) for n in names[1:]}})
    weights = NumpyVector({"w": np.ones((2, 2)), **{n: np.zeros(2) for n in names[1:]}})
    agc = AGC(0.1, skip_vectors=True, exclude="b")
    output = agc.run(grads, weights).coefs
    assert [output[n] is grads.coefs[n] for n in names] == [False, True, True, True]
    assert agc.last is not None
    assert agc.last.groups == ("w",)
    assert agc.get_config()["exclude"] == ["b"]
    only = NumpyVector({"b": np.ones(2)})
    assert agc.run(only, only) is only


@pytest.mark.parametrize("unit", ["output", "tensor"])
def test_indexed_slices_are_the_dense_tensor_that_they_stand_for(unit: str) -> None:
    tf = require("tensorflow")
    needs("tensorflow")
    from declearn.model.tensorflow import TensorflowVector

    values = tf.constant([[1.0, 1.0], [2.0, 8.0], [1.0, 5.0]])
    sparse = tf.IndexedSlices(values, tf.constant([2, 0, 2]), tf.constant([4, 2]))
    weights = {"w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    got = AGC(0.1, unit=unit).run(TensorflowVector({"w": sparse}), to_vector(weights, "tensorflow"))
    wanted = run(AGC(0.1, unit=unit), {"w": tf.convert_to_tensor(sparse).numpy()}, weights)
    np.testing.assert_allclose(tf.convert_to_tensor(got.coefs["w"]).numpy(), wanted["w"], rtol=1e-6)


# -- in declearn ------------------------------------------------------------------------------
def test_registered_and_configured_by_name() -> None:
    optimizer = Optimizer(0.1, regularizers=[("agc", {"ratio": 0.2, "axis": 0})])
    again = Optimizer.from_config(optimizer.get_config())
    (agc,) = again.regularizers
    assert isinstance(agc, AGC)
    assert (agc.ratio, agc.axis) == (0.2, 0)
    assert isinstance(Regularizer.from_specs("agc", {}), AGC)


@pytest.mark.filterwarnings("ignore:Cannot use a GPU")
def test_acts_on_the_gradients_of_a_model() -> None:
    torch = require("torch")
    needs("torch")
    from declearn.model.torch import TorchModel, TorchVector

    model = TorchModel(torch.nn.Linear(3, 2), loss=torch.nn.MSELoss())
    names = [name for name, _ in model.get_weights().coefs.items()]
    shapes = {name: model.get_weights().coefs[name].shape for name in names}
    grads = TorchVector({name: 100 * torch.ones(shapes[name]) for name in names})
    optimizer = Optimizer(1.0, regularizers=[("agc", {"ratio": 0.01, "axis": 0})])
    updates = optimizer.compute_updates_from_gradients(model, grads)
    for name in names:
        limit = 0.01 * unit_norms(model.get_weights().coefs[name].numpy(), 0)
        np.testing.assert_allclose(unit_norms(updates.coefs[name].numpy(), 0), limit, rtol=1e-5)


def test_records_are_readable() -> None:
    agc = AGC(0.1, axis=0)
    assert agc.last is None
    weights = NumpyVector({"w": np.array([[10.0, 0.0], [1.0, 0.0]])})
    agc.on_round_start()
    agc.run(NumpyVector({"w": np.array([[2.0, 0.0], [1.0, 0.0]])}), weights)
    assert agc.last is not None
    # The worst unit is the one that is most above its own limit.
    assert (agc.last.groups, agc.last.norm_before, agc.last.clipped) == (("w",), (1.0,), (True,))
    assert agc.last.limit == pytest.approx((0.1,))
    agc.on_round_start()
    agc.run(NumpyVector({"w": np.zeros((2, 2))}), weights)
    assert [(r.round, r.steps, r.clipped) for r in agc.rounds] == [(1, 1, 1), (2, 1, 0)]


def test_weights_of_a_step_are_not_kept_alive() -> None:
    agc = AGC()
    agc.run(NumpyVector({"w": np.ones(3)}), NumpyVector({"w": np.ones(3)}))
    assert not agc._clipper.weights


@pytest.mark.parametrize("policy", ["skip", "raise", "propagate"])
def test_nonfinite_gradients_meet_the_policy(policy: str) -> None:
    agc = AGC(0.1, axis=0, on_nonfinite=policy)
    weights = NumpyVector({"w": np.ones((2, 2)), "v": np.ones(2)})
    grads = NumpyVector({"w": np.array([[np.nan, 1], [1, 1]]), "v": np.full(2, 0.01)})
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="agc: NaN or infinity in 'w'"):
            agc.run(grads, weights)
        return
    with pytest.warns(UserWarning, match="agc: NaN or infinity in 'w'"):
        output = agc.run(grads, weights).coefs
    if policy == "skip":
        assert not any(value.any() for value in output.values())
    else:
        assert np.isnan(output["w"]).all()
        assert output["v"] is grads.coefs["v"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agc.run(grads, weights)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ratio": 0}, "ratio must be a finite number > 0"),
        ({"unit": "ouput"}, "did you mean 'output'"),
        ({"axis": 0, "dims": [1]}, "give axis or dims, not both"),
        ({"axis": 0, "unit": "tensor"}, "axis and dims go with unit='output'"),
        ({"min_norm": 0}, "min_norm must be a finite number > 0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
    ],
)
def test_wrong_parameters_are_refused_in_words(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AGC(**config)


def test_unknown_parameters_are_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="agc has no parameter 'ratoi'; did you mean 'ratio'"):
        Regularizer.from_specs("agc", {"ratoi": 0.1})
    with pytest.raises(TypeError, match="axis must be an int or None"):
        AGC(axis=1.0)  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_refused_in_words() -> None:
    grads = NumpyVector({"w": np.ones((2, 3))})
    with pytest.raises(ValueError, match="agc has no weights for 'w'; it was given 'v'"):
        AGC().run(grads, NumpyVector({"v": np.ones((2, 3))}))
    with pytest.raises(ValueError, match=r"gradient of shape \(2, 3\) and weights of shape \(3,"):
        AGC().run(grads, NumpyVector({"w": np.ones((3, 2))}))


@pytest.mark.parametrize("unit", ["output", "tensor", "global"])
def test_complex_weights_are_refused_by_name(unit: str) -> None:
    gradient, weights = {"w": np.ones((2, 2))}, {"w": np.ones((2, 2), complex)}
    with pytest.raises(TypeError, match=r"agc .*'w' are complex128.*exclude"):
        AGC(unit=unit).clip(gradient, weights)
    assert AGC(unit=unit, exclude="w").clip(gradient, weights) is gradient


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ({}, ValueError, "agc has no weights for 'w'; it was given none"),
        ({"w": None}, ValueError, "agc has no weights for 'w'"),
        ({"w": [1.0, 2.0]}, TypeError, "fedclip clips dense arrays .* got builtins.list"),
    ],
)
def test_weights_that_are_none_are_told(weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        AGC(0.1).clip({"w": np.ones(2)}, weights)
