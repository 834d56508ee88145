# SPDX-License-Identifier: Apache-2.0
"""Two passes in JAX: the sums of stored gradients, whatever the records hold."""

import functools
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample import ClippedSum
from fedclip.dpsgd.step import SampleClipping

# Whatever the backends that are asked for: the faults of these passes are in no other.
jax: Any = pytest.importorskip("jax")
jnp = jax.numpy
made: Any = __import__("fedclip.dpsgd.persample.jax_records", fromlist=["x"])

FLAT = SampleClipping().factors
NAMES, SHAPES = ("v", "w"), {"v": (5, 3), "w": (6, 5)}


def loss(weights: Any, others: Any, record: Any) -> Any:
    """Take dropout from the record's own key."""
    x, y, key = record
    x = x * jax.random.bernoulli(key, 0.5, x.shape)
    return -jax.nn.log_softmax(jnp.tanh(x @ weights["w"]) @ weights["v"])[y]


def in_half(weights: Any, others: Any, record: Any) -> Any:
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
    return loss(low, others, record).astype(jnp.float32)


def at_random(weights: Any, others: Any, record: Any) -> Any:
    """Draw numbers while it is traced: each compiled pass has others."""
    return loss(weights, others, record) * np.random.default_rng().uniform(0.5, 2.0)


def records(count: int = 13) -> Any:
    rng = np.random.default_rng(0)
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), count))
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, rng.integers(0, 3, count), np.asarray(keys)


def weights() -> Any:
    rng = np.random.default_rng(1)
    return {n: jnp.asarray(rng.normal(size=shape), "float32") for n, shape in SHAPES.items()}


@functools.cache
def compiled(two_passes: bool) -> Any:
    gradients = made.RecordGradients(loss)
    gradients._is_faster = lambda *args: two_passes
    return gradients


def total(two_passes: bool, some: Any, factors: Any, groups: Any = None) -> Any:
    stacks = [*compiled(two_passes).stacks(NAMES, weights(), (), some, 5)]
    assert {type(stack) for stack in stacks} == {made.TwoPassStack if two_passes else made.JaxStack}
    return ClippedSum(SHAPES, factors, groups).add(stacks).result()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("odd", [np.nan, 1e30, 0.0])
@pytest.mark.parametrize("groups", [None, Groups(NAMES, NAMES, ((0,), (1,)))])
@pytest.mark.parametrize("factors", [*(partial(FLAT, bound=c) for c in (0.1, 1e-36)), np.ones_like])
def test_two_passes_are_the_sum_of_stored_gradients(odd: float, groups: Any, factors: Any) -> None:
    x, y, keys = records()
    # The last record also fills up the last micro-batch.
    x[[2, 12]] = odd
    sums, norms = total(True, (x, y, keys), factors, groups)
    right, theirs = total(False, (x, y, keys), factors, groups)
    np.testing.assert_allclose(norms, theirs, rtol=1e-4)
    assert (norms >= theirs)[np.isfinite(theirs)].all()
    for name, array in right.items():
        np.testing.assert_allclose(sums[name], array, rtol=1e-3, atol=1e-4 * abs(array).max())


@pytest.mark.parametrize(
    ("kind", "second", "taken"),
    [(in_half, 0.1, "Jax"), (at_random, 0.1, "Jax"), (loss, 0.1, "TwoPass"), (loss, 10.0, "Jax")],
)
def test_passes_that_disagree_are_not_taken(kind: Any, second: float, taken: str) -> None:
    gradients = made.RecordGradients(kind)
    times = [0.0, 9.0] * 4 + [0.0, second] * 4

    def kinds(many: int, **settings: Any) -> set[str]:
        stacks = gradients.stacks(NAMES, weights(), (), records(many), 5, **settings)
        return {type(stack).__name__ for stack in stacks}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.time, "perf_counter", lambda: times.pop(0))
        # It is measured once, and gradients that are asked for are always stored.
        assert kinds(13) == kinds(5) == {f"{taken}Stack"}
        assert kinds(5, materialise=True) == {"JaxStack"}
