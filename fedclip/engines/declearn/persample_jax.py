# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of declearn's Haiku models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from weakref import WeakKeyDictionary, proxy

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from declearn.model.haiku import HaikuModel, JaxNumpyVector

from fedclip.dpsgd.persample.base import Array, Arrays, Data, Stack
from fedclip.dpsgd.persample.jax_records import RecordGradients

__all__ = ["check", "stacks", "vector"]

# To compile takes long: once for a model.
_COMPILED: WeakKeyDictionary[HaikuModel, RecordGradients] = WeakKeyDictionary()


def check(model: HaikuModel) -> None:
    """Refuse nothing: declearn's Haiku models have no state, and records go through alone."""


def vector(model: HaikuModel, arrays: Arrays) -> JaxNumpyVector:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    made = {k: np.asarray(a).astype(weights[k].dtype) for k, a in arrays.items()}
    return JaxNumpyVector({k: jax.device_put(a, model._device) for k, a in made.items()})


def stacks(model: HaikuModel, batch: Data, micro_batch: int, materialise: bool) -> Iterator[Stack]:
    """Yield the gradients of each micro-batch."""
    inputs, targets, weights = model._unpack_batch(batch)
    trained, fixed = hk.data_structures.partition(
        lambda layer, name, _: f"{layer}:{name}" in model._trainable, model._params
    )
    if model not in _COMPILED:
        # Weak, since the table keeps what is made of it.
        _COMPILED[model] = RecordGradients(partial(_loss, proxy(model)))
    # The model's own keys follow a seed, which the server may know, and the order of records.
    words = np.frombuffer(os.urandom(8 * len(inputs[0])), np.uint32)
    records = jnp.asarray(words.reshape(-1, 2)), (inputs, targets, weights)
    names = [f"{layer}:{name}" for layer in sorted(trained) for name in sorted(trained[layer])]
    yield from _COMPILED[model].stacks(names, trained, fixed, records, micro_batch, materialise)


def _loss(model: HaikuModel, trained: Data, fixed: Data, record: Data) -> Array:
    key, data = record
    batch = jax.tree_util.tree_map(lambda a: jnp.expand_dims(a, 0), data)
    return model._forward(trained, fixed, key, batch)
