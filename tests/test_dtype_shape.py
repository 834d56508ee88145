# SPDX-License-Identifier: Apache-2.0
"""Each tensor comes back in its own framework, dtype and shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import Specimen, each_framework, needs, run, specimens

from fedclip import AGC, NormClip, Standardize, ValueClip
from fedclip.testing import apply, check_dtype_and_shape, gradient_stream, to_vector


@each_framework()
@specimens()
def test_dtype_and_shape(specimen: Specimen, framework: str) -> None:
    needs(framework)
    check_dtype_and_shape(specimen.make, framework)


@each_framework()
@specimens()
def test_mixed_dtypes(specimen: Specimen, framework: str) -> None:
    needs(framework)
    rng = np.random.default_rng(0)
    shapes = {"enc.a": (4, 3), "enc.b": (2,), "head.c": (), "head.scale": (5,)}
    dtypes = ("float16", "float32", "float64", "float32")
    clipper = specimen.make()
    for _ in range(6):
        arrays = {
            name: np.asarray(rng.normal(0, 3, shape)).astype(dtype)
            for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
        }
        vector = to_vector(arrays, framework)
        out = apply(clipper, vector)
        for name, value in vector.coefs.items():
            assert out.coefs[name].dtype == value.dtype
            assert tuple(out.coefs[name].shape) == shapes[name]


@each_framework()
@specimens()
def test_empty_tensor_and_zero_dimensions(specimen: Specimen, framework: str) -> None:
    needs(framework)
    arrays = {
        "enc.empty": np.zeros((0, 3)),
        "enc.w": np.full((2, 2), 7.0),
        "head.scale": np.array(9.0),
    }
    clipper = specimen.make()
    for _ in range(3):
        out = apply(clipper, to_vector(arrays, framework))
        for name, value in arrays.items():
            assert tuple(out.coefs[name].shape) == value.shape


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


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
@specimens()
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


def _torch_8_bits() -> Any:
    torch = pytest.importorskip("torch")
    return torch.ones(3).to(torch.float8_e4m3fn)


def _torch_half_complex() -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros(3, dtype=torch.complex64).to(torch.complex32)


def _tensorflow_8_bits() -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2)


def _jax_8_bits() -> Any:
    numpy = pytest.importorskip("jax.numpy")
    return numpy.ones(3, numpy.float8_e4m3fn)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    ("make", "framework"),
    [
        (_torch_8_bits, "torch"),
        (_torch_half_complex, "torch"),
        (_tensorflow_8_bits, "tensorflow"),
        (_jax_8_bits, "jax"),
    ],
)
def test_a_dtype_that_numpy_lacks_is_refused_by_name(make: Any, framework: str) -> None:
    needs(framework)
    with pytest.raises(TypeError, match=r"norm-clip clips float16.* 'w' is (float8|complex32)"):
        NormClip(1.0).clip({"w": make()})


def _masked() -> Any:
    return np.ma.masked_array([1.0, 2.0], mask=[True, False])


def _nested() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _ragged() -> Any:
    return pytest.importorskip("tensorflow").ragged.constant([[1.0, 2.0], [3.0]])


def _sparse_tensor() -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.sparse.from_dense(tf.eye(3))


def _bcoo() -> Any:
    sparse = pytest.importorskip("jax.experimental.sparse")
    return sparse.BCOO.fromdense(np.eye(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "framework"),
    [
        (_masked, "numpy"),
        (_nested, "torch"),
        (_ragged, "tensorflow"),
        (_sparse_tensor, "tensorflow"),
        (_bcoo, "jax"),
    ],
)
def test_a_container_that_can_not_be_read_is_refused(make: Any, framework: str) -> None:
    needs(framework)
    with pytest.raises(TypeError, match=r"fedclip (clips|reads) dense .* got"):
        NormClip(1.0).clip({"w": make()})


def test_slices_without_a_shape_are_refused_where_they_are_made_dense() -> None:
    needs("tensorflow")
    tf = pytest.importorskip("tensorflow")
    slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 1]))
    clipped = NormClip(1.0).clip({"w": slices})["w"]
    np.testing.assert_allclose(clipped.values, [[0.6], [0.8]], rtol=2e-6)
    with pytest.raises(ValueError, match="give them a dense_shape"):
        Standardize().clip({"w": slices})


def test_tensors_that_are_negated_when_they_are_read() -> None:
    needs("torch")
    torch = pytest.importorskip("torch")
    given = {"w": torch._neg_view(torch.tensor([3.0, 4.0]))}
    for clipper in (NormClip(5.0, dims=0), NormClip(1.0), Standardize(), ValueClip(1.0)):
        found = clipper.clip(given)["w"].resolve_neg()
        right = clipper.clip({"w": given["w"].resolve_neg()})["w"]
        assert torch.equal(found, right)


def test_variables_of_tensorflow() -> None:
    needs("tensorflow")
    tf = pytest.importorskip("tensorflow")
    clipped = NormClip(1.0).clip({"w": tf.Variable([3.0, 4.0])})["w"]
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=2e-6)
