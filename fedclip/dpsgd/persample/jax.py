# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in JAX: `vmap` of `grad` of Haiku models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from declearn.model.haiku import HaikuModel, JaxNumpyVector

__all__ = ["check", "gradients", "vector"]

# To compile takes long: once for a model.
_COMPILED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check(model: HaikuModel) -> None:
    """Refuse nothing: declearn's Haiku models have no state, and records go through alone."""


def vector(model: HaikuModel, arrays: Any) -> Any:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    made = {k: np.asarray(a).astype(weights[k].dtype) for k, a in arrays.items()}
    return JaxNumpyVector({k: jax.device_put(a, model._device) for k, a in made.items()})


def gradients(
    model: HaikuModel, batch: Any, micro_batch: int
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the stacked gradients of each micro-batch."""
    inputs, targets, weights = model._unpack_batch(batch)
    trained, fixed = hk.data_structures.partition(
        lambda layer, name, _: f"{layer}:{name}" in model._trainable, model._params
    )
    if model not in _COMPILED:
        one = jax.grad(model._forward)
        _COMPILED[model] = jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))
    for start in range(0, len(inputs[0]), micro_batch):
        size = min(micro_batch, len(inputs[0]) - start)
        # Always as many records, so that nothing is compiled again; those too many are cut off.
        rows = np.minimum(np.arange(start, start + micro_batch), start + size - 1)
        records = jax.tree_util.tree_map(
            lambda a, rows=rows: jnp.expand_dims(a[rows], 1), (inputs, targets, weights)
        )
        keys = jax.random.split(next(model._rng_gen), micro_batch)
        found = _COMPILED[model](trained, fixed, keys, records)
        yield {
            f"{layer}:{name}": np.asarray(array, dtype=_wide(array.dtype))[:size]
            for layer, arrays in found.items()
            for name, array in arrays.items()
        }


def _wide(dtype: Any) -> Any:
    return np.float32 if dtype == jnp.bfloat16 else dtype
