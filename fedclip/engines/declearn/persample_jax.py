# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in JAX: `vmap` of `grad` of Haiku models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from declearn.model.haiku import HaikuModel, JaxNumpyVector

from fedclip.dpsgd.persample.base import Array, Arrays, Data
from fedclip.dpsgd.persample.jax_records import JaxStack, micro_batches

__all__ = ["check", "stacks", "vector"]

# To compile takes long: once for a model.
_COMPILED: WeakKeyDictionary[HaikuModel, Callable[..., Array]] = WeakKeyDictionary()


def check(model: HaikuModel) -> None:
    """Refuse nothing: declearn's Haiku models have no state, and records go through alone."""


def vector(model: HaikuModel, arrays: Arrays) -> JaxNumpyVector:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    made = {k: np.asarray(a).astype(weights[k].dtype) for k, a in arrays.items()}
    return JaxNumpyVector({k: jax.device_put(a, model._device) for k, a in made.items()})


def stacks(model: HaikuModel, batch: Data, micro_batch: int, whole: bool) -> Iterator[JaxStack]:
    """Yield the gradients of each micro-batch, which are always whole."""
    inputs, targets, weights = model._unpack_batch(batch)
    trained, fixed = hk.data_structures.partition(
        lambda layer, name, _: f"{layer}:{name}" in model._trainable, model._params
    )
    if model not in _COMPILED:
        one = jax.grad(model._forward)
        _COMPILED[model] = jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))
    elements = sum(leaf.size for leaf in jax.tree_util.tree_leaves(trained))
    for some, size in micro_batches((inputs, targets, weights), micro_batch, elements):
        records = jax.tree_util.tree_map(lambda a: jnp.expand_dims(a, 1), some)
        # The model's own follow a seed, which the server may know, and the order of records.
        words = np.frombuffer(os.urandom(8 * len(records[0][0])), np.uint32)
        keys = jnp.asarray(words.reshape(-1, 2))
        found = _COMPILED[model](trained, fixed, keys, records)
        arrays = {
            f"{layer}:{name}": array
            for layer, named in found.items()
            for name, array in named.items()
        }
        yield JaxStack(arrays, size)
