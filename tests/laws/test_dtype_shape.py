# SPDX-License-Identifier: Apache-2.0
"""Each tensor comes back in its own framework, dtype and shape, and inputs are untouched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import Specimen, require, specimens

from fedclip import NormClip, Standardize, ValueClip
from fedclip.testing import apply, to_vector


@pytest.mark.parametrize("values", [[1], [True], [1j], np.array([1.0], np.longdouble)])
def test_each_step_is_looked_at_like_the_first(values: Any) -> None:
    clip = NormClip(0.5)
    clip.run(NumpyVector({"w": np.array([1.0])}))
    with pytest.raises(TypeError, match=r"norm-clip clips float16.* 'w' is"):
        clip.run(NumpyVector({"w": np.asarray(values)}))


DTYPE, CONTAINER = r"norm-clip clips float16.* 'w' is (float8|complex32)", "dense .* got"
UNREADABLE: list[tuple[str, str, Any]] = [
    ("torch", DTYPE, lambda torch: torch.ones(3).to(torch.float8_e4m3fn)),
    ("torch", DTYPE, lambda torch: torch.zeros(3, dtype=torch.complex64).to(torch.complex32)),
    ("tensorflow", DTYPE, lambda tf: tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2)),
    ("jax", DTYPE, lambda jax: jax.numpy.ones(3, jax.numpy.float8_e4m3fn)),
    ("numpy", CONTAINER, lambda np: np.ma.masked_array([1.0, 2.0], mask=[True, False])),
    ("torch", "sparse COO tensors, got one of layout", lambda torch: torch.eye(2).to_sparse_csr()),
    ("torch", CONTAINER, lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ("tensorflow", CONTAINER, lambda tf: tf.ragged.constant([[1.0, 2.0], [3.0]])),
    ("tensorflow", CONTAINER, lambda tf: tf.sparse.from_dense(tf.eye(3))),
    ("jax.experimental.sparse", CONTAINER, lambda sparse: sparse.BCOO.fromdense(np.eye(3))),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
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
