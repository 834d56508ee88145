# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: rows that repeat are added up before they are measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import SPECIMENS, Specimen, apply, needs, norm, pairwise, require

from fedclip import NormClip
from fedclip.testing import to_vector

ROWS = np.array([1, 3, 1, 0])
VALUES = np.array([[3.0, 4.0], [0.0, 12.0], [1.0, -1.0], [0.5, 0.5]])


def indexed_slices() -> Any:
    tf = require("tensorflow")
    return tf.IndexedSlices(tf.constant(VALUES), tf.constant(ROWS), tf.constant([5, 2], tf.int64))


def sparse_coo() -> Any:
    torch = require("torch")
    return torch.sparse_coo_tensor(
        torch.tensor(ROWS)[None], torch.tensor(VALUES), (5, 2), check_invariants=True
    )


def vector(framework: str, **arrays: Any) -> Any:
    needs(framework)
    if framework == "torch":
        from declearn.model.torch import TorchVector

        return TorchVector({"emb.table": sparse_coo(), **arrays})
    from declearn.model.tensorflow import TensorflowVector

    return TensorflowVector({"emb.table": indexed_slices(), **arrays})


def to_dense(value: Any) -> np.ndarray:
    if type(value).__module__.startswith("torch"):
        return np.asarray(value.to_dense() if value.is_sparse else value)
    import tensorflow as tf

    return np.asarray(tf.convert_to_tensor(value))


# A percentile is documented to be that of the rows that are there.
@pytest.mark.parametrize(
    ("specimen", "framework"),
    [
        (specimen, ("torch", "tensorflow")[i % 2])
        for i, specimen in enumerate(SPECIMENS)
        if specimen.name != "percentile-clip"
    ],
    ids=str,
)
def test_every_clipper_treats_it_as_the_dense_tensor(specimen: Specimen, framework: str) -> None:
    given = vector(framework)
    dense = to_vector({name: to_dense(value) for name, value in given.coefs.items()}, framework)
    if isinstance(specimen.config.get("scope"), dict):
        specimen = Specimen(specimen.name)
    sparse_clipper, dense_clipper = specimen.make(), specimen.make()
    for _ in range(3):
        got = to_dense(apply(sparse_clipper, given, dense).coefs["emb.table"])
        wanted = to_dense(apply(dense_clipper, dense, dense).coefs["emb.table"])
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


@pairwise(
    framework=["torch", "tensorflow"], dtype=["float16", "bfloat16", "float32"], seed=range(3)
)
def test_the_sum_of_repeated_rows_keeps_the_bound(framework: str, dtype: str, seed: int) -> None:
    rng, module = np.random.default_rng(seed), require(framework)
    rows = rng.integers(0, 3, 64)
    # Much of it cancels, so that the rounding of single rows would count.
    values = rng.standard_normal((64, 2)) * 10.0 ** rng.uniform(0, 2, (64, 1))
    (narrow,) = to_vector({"w": values}, framework, dtype).coefs.values()
    if framework == "torch":
        given = module.sparse_coo_tensor(rows[None], narrow, (5, 2), check_invariants=True)
        found = NormClip(0.1).clip({"w": given})["w"].double().to_dense()
    else:
        given = module.IndexedSlices(narrow, rows, module.constant([5, 2], "int64"))
        output = NormClip(0.1).clip({"w": given})["w"]
        wide = module.cast(output.values, "float64")
        # Added up in float64, as nobody rounds.
        found = to_dense(module.IndexedSlices(wide, output.indices, output.dense_shape))
    assert np.linalg.norm(found) <= 0.1 * (1 + 1e-12)
    assert NormClip(1e6).clip({"w": given})["w"] is given


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_slices_that_do_not_know_their_shape_keep_to_tiny_limits(dtype: str) -> None:
    """The gradients of embeddings in a `tf.function` are such."""
    tf = require("tensorflow")
    values = tf.cast(tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]), dtype)
    gradient = tf.IndexedSlices(values, tf.constant([0, 1, 0]))
    limit = 1e-5 if dtype == "float16" else 1e-30
    clipped = NormClip(limit).clip({"w": gradient})["w"]
    assert 0.0 < norm([tf.cast(clipped.values, "float64").numpy()]) <= limit
