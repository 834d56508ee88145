# SPDX-License-Identifier: Apache-2.0
"""Each tensor comes back in its own framework, dtype and shape, in whatever order they come."""

from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import SPECIMENS, Specimen, gradient, needs, norm, pairwise, require, run, specimens

from fedclip import Normalize, NormClip, PercentileClip, Standardize, ValueClip
from fedclip.testing import FRAMEWORKS, apply, gradient_stream, to_vector


@pytest.mark.parametrize("values", [[1], [True], [1j], np.array([1.0], np.longdouble)])
def test_each_step_is_looked_at_like_the_first(values: Any) -> None:
    clip = NormClip(0.5)
    clip.run(NumpyVector({"w": np.array([1.0])}))
    words = r"norm-clip clips float16.* 'w' is .*: convert it, or put its name in exclude"
    with pytest.raises(TypeError, match=words):
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


@pytest.mark.parametrize("clipper", [Normalize(0.7), PercentileClip(60)], ids=lambda c: c.name)
def test_moving_twice_is_moving_once(clipper: Any) -> None:
    once = clipper.clip(gradient())
    for name, value in clipper.clip(once).items():
        np.testing.assert_allclose(value, once[name], rtol=1e-12, atol=1e-300)


@specimens()
def test_the_order_of_tensors_does_not_matter(specimen: Specimen) -> None:
    steps = gradient_stream(8)
    turned = run(specimen.make(), [dict(reversed(step.items())) for step in steps])
    for got, wanted in zip(turned, run(specimen.make(), steps), strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-7, atol=1e-9)


@specimens()
def test_nothing_to_clip(specimen: Specimen) -> None:
    if isinstance(specimen.config.get("scope"), dict):
        return
    clipper = specimen.make()
    for arrays in ({}, {"w": np.zeros((0,))}):
        vector = to_vector(arrays)
        assert apply(clipper, vector) is vector
    # Nothing was observed: a first norm of 0 would be in the statistics.
    if specimen.kind == "module":
        assert not any(s.get("count") for s in clipper.get_state()["groups"].values())


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_arrays_of_two_frameworks_are_refused(framework: str) -> None:
    needs(framework)
    (alien,) = to_vector({"b": np.ones(3)}, framework).coefs.values()
    own, clipper = np.ones(3), NormClip()
    clipper.clip({"a": own, "b": own})
    for arrays in ({"a": own, "b": alien}, {"a": alien, "b": own}):
        with pytest.raises(TypeError, match=r"one framework: 'a' is of [a-z]+, 'b'"):
            clipper.clip(arrays)


def test_tensors_that_are_negated_when_they_are_read() -> None:
    torch = require("torch")
    given = {"w": torch._neg_view(torch.tensor([3.0, 4.0]))}
    for clipper in (NormClip(5.0, dims=0), NormClip(1.0), Standardize(), ValueClip(1.0)):
        found = clipper.clip(given)["w"].resolve_neg()
        assert torch.equal(found, clipper.clip({"w": given["w"].resolve_neg()})["w"])


# -- sparse gradients: rows that repeat are added up before they are measured ---------------------
ROWS = np.array([1, 3, 1, 0])
VALUES = np.array([[3.0, 4.0], [0.0, 12.0], [1.0, -1.0], [0.5, 0.5]])


def sparse(framework: str, rows: Any, numbers: Any, dtype: str | None = None) -> Any:
    """Return the gradient of an embedding of five rows, of which some may repeat."""
    module = require(framework)
    found = to_vector({"emb.table": numbers}, framework, dtype)
    values = found.coefs["emb.table"]
    table = (
        module.sparse_coo_tensor(rows[None], values, (5, 2), check_invariants=True)
        if framework == "torch"
        else module.IndexedSlices(values, rows, module.constant([5, 2], "int64"))
    )
    found.coefs["emb.table"] = table
    return found


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
    given = sparse(framework, ROWS, VALUES)
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
    given = sparse(framework, rows, values, dtype)
    output = NormClip(0.1).run(given).coefs["emb.table"]
    if framework == "torch":
        found = output.double().to_dense()
    else:
        wide = module.cast(output.values, "float64")
        # Added up in float64, as nobody rounds.
        found = to_dense(module.IndexedSlices(wide, output.indices, output.dense_shape))
    assert np.linalg.norm(found) <= 0.1 * (1 + 1e-12)
    assert NormClip(1e6).run(given) is given


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_slices_that_do_not_know_their_shape_keep_to_tiny_limits(dtype: str) -> None:
    """The gradients of embeddings in a `tf.function` are such."""
    tf = require("tensorflow")
    values = tf.cast(tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]), dtype)
    limit = 1e-5 if dtype == "float16" else 1e-30
    clipped = NormClip(limit).clip({"w": tf.IndexedSlices(values, tf.constant([0, 1, 0]))})["w"]
    assert 0.0 < norm([tf.cast(clipped.values, "float64").numpy()]) <= limit
