# SPDX-License-Identifier: Apache-2.0
"""Each tensor comes back in its own framework, dtype and shape, and inputs are untouched."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import SPECIMENS, Specimen, gradient, require, run, specimens, specimens_by_framework

from fedclip import AGC, NormClip, Standardize, ValueClip
from fedclip.testing import apply, gradient_stream, to_numpy, to_vector


@specimens_by_framework()
def test_dtypes_and_shapes_of_all_kinds_in_one_gradient(specimen: Specimen, framework: str) -> None:
    rng = np.random.default_rng(0)
    kinds = {
        "enc.a": ((4, 3), "float16"),
        "enc.empty": ((0, 3), "float32"),
        "head.c": ((), "float64"),
        "head.scale": ((5,), "float32"),
    }
    clipper = specimen.make()
    for _ in range(6):
        arrays = {n: np.asarray(rng.normal(0, 3, s)).astype(d) for n, (s, d) in kinds.items()}
        vector = to_vector(arrays, framework)
        out = apply(clipper, vector)
        for name, value in vector.coefs.items():
            assert out.coefs[name].dtype == value.dtype
            assert tuple(out.coefs[name].shape) == kinds[name][0]


@pytest.mark.parametrize(
    ("specimen", "dtype"), [*zip(SPECIMENS, itertools.cycle([">f2", ">f4", ">f8"]))], ids=str
)
def test_the_other_byte_order(specimen: Specimen, dtype: str) -> None:
    steps = gradient_stream(4)
    swapped = [{k: v.astype(dtype) for k, v in step.items()} for step in steps]
    native = [{k: v.astype(dtype[1:]) for k, v in step.items()} for step in steps]
    found, expected = run(specimen.make(), swapped), run(specimen.make(), native)
    for step, other in zip(found, expected, strict=True):
        for name in step:
            assert step[name].dtype == np.dtype(dtype)
            np.testing.assert_array_equal(step[name], other[name])


@pytest.mark.parametrize("values", [[1], [True], [1j], np.array([1.0], np.longdouble)])
def test_each_step_is_looked_at_like_the_first(values: Any) -> None:
    clip = NormClip(0.5)
    clip.run(NumpyVector({"w": np.array([1.0])}))
    with pytest.raises(TypeError, match=r"norm-clip clips float16.* 'w' is"):
        clip.run(NumpyVector({"w": np.asarray(values)}))


@pytest.mark.parametrize("value", [1e37, 0.5, 1e-40])
def test_a_shape_of_no_dimensions_stays(value: float) -> None:
    gradient = NumpyVector({"w": np.array(value, np.float32)})
    assert NormClip(1.0, dims=0).run(gradient).coefs["w"].shape == ()
    assert AGC(1e-3).run(gradient, gradient).coefs["w"].shape == ()


DTYPE, CONTAINER = r"norm-clip clips float16.* 'w' is (float8|complex32)", "dense .* got"
UNREADABLE: list[tuple[str, str, Any]] = [
    ("torch", DTYPE, lambda torch: torch.ones(3).to(torch.float8_e4m3fn)),
    ("torch", DTYPE, lambda torch: torch.zeros(3, dtype=torch.complex64).to(torch.complex32)),
    ("tensorflow", DTYPE, lambda tf: tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2)),
    ("jax", DTYPE, lambda jax: jax.numpy.ones(3, jax.numpy.float8_e4m3fn)),
    ("numpy", CONTAINER, lambda np: np.ma.masked_array([1.0, 2.0], mask=[True, False])),
    ("torch", CONTAINER, lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ("tensorflow", CONTAINER, lambda tf: tf.ragged.constant([[1.0, 2.0], [3.0]])),
    ("tensorflow", CONTAINER, lambda tf: tf.sparse.from_dense(tf.eye(3))),
    ("jax.experimental.sparse", CONTAINER, lambda sparse: sparse.BCOO.fromdense(np.eye(3))),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("module", "text", "make"), UNREADABLE)
def test_what_can_not_be_read_is_refused_by_name(module: str, text: str, make: Any) -> None:
    array = make(require(module))
    with pytest.raises(TypeError, match=text):
        NormClip(1.0).clip({"w": array})


def test_slices_without_a_shape_are_refused_where_they_are_made_dense() -> None:
    tf = require("tensorflow")
    slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 1]))
    clipped = NormClip(1.0).clip({"w": slices})["w"]
    np.testing.assert_allclose(clipped.values, [[0.6], [0.8]], rtol=2e-6)
    with pytest.raises(ValueError, match="give them a dense_shape"):
        Standardize().clip({"w": slices})


@specimens_by_framework()
def test_inputs_are_untouched(specimen: Specimen, framework: str) -> None:
    clipper = specimen.make()
    for step in gradient_stream(8):
        vector = to_vector(step, framework)
        objects = dict(vector.coefs)
        apply(clipper, vector)
        assert all(vector.coefs[name] is objects[name] for name in objects)
        for name, value in to_numpy(vector).items():
            np.testing.assert_array_equal(value, step[name])
    small = to_vector(gradient(1, 1e-6), framework)
    output = apply(clipper, small, to_vector(gradient(2, 1.0), framework))
    assert specimen.moves or output is small


@specimens()
def test_nothing_to_clip(specimen: Specimen) -> None:
    if isinstance(specimen.config.get("scope"), dict):
        return
    clipper = specimen.make()
    for arrays in ({}, {"w": np.zeros((0,))}):
        vector = to_vector(arrays)
        assert apply(clipper, vector) is vector
    # Nothing was observed: a first norm of 0 would be in the statistics.
    if specimen.stateful:
        assert not any(s.get("count") for s in clipper.get_state()["groups"].values())


def test_tensors_that_are_negated_when_they_are_read() -> None:
    torch = require("torch")
    given = {"w": torch._neg_view(torch.tensor([3.0, 4.0]))}
    for clipper in (NormClip(5.0, dims=0), NormClip(1.0), Standardize(), ValueClip(1.0)):
        found = clipper.clip(given)["w"].resolve_neg()
        right = clipper.clip({"w": given["w"].resolve_neg()})["w"]
        assert torch.equal(found, right)


def test_unclipped_tensors_are_the_same_objects() -> None:
    vector = to_vector({"small": np.array([0.1]), "large": np.array([5.0])})
    out = NormClip(1.0, scope="tensor").run(vector)
    assert out.coefs["small"] is vector.coefs["small"]
    assert out.coefs["large"] is not vector.coefs["large"]
