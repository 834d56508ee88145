# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in JAX: `vmap` of `grad` of Haiku models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from declearn.model.haiku import HaikuModel, JaxNumpyVector

from fedclip.dpsgd.persample.base import Float64, at_once

__all__ = ["JaxStack", "check", "shapes", "stacks", "vector"]

# To compile takes long: once for a model.
_COMPILED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check(model: HaikuModel) -> None:
    """Refuse nothing: declearn's Haiku models have no state, and records go through alone."""


def vector(model: HaikuModel, arrays: Any) -> Any:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    made = {k: np.asarray(a).astype(weights[k].dtype) for k, a in arrays.items()}
    return JaxNumpyVector({k: jax.device_put(a, model._device) for k, a in made.items()})


def shapes(model: HaikuModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights."""
    return {n: tuple(a.shape) for n, a in model.get_weights(trainable=True).coefs.items()}


def stacks(model: HaikuModel, batch: Any, micro_batch: int, whole: bool) -> Iterator[JaxStack]:
    """Yield the gradients of each micro-batch, which are always whole."""
    inputs, targets, weights = model._unpack_batch(batch)
    trained, fixed = hk.data_structures.partition(
        lambda layer, name, _: f"{layer}:{name}" in model._trainable, model._params
    )
    if model not in _COMPILED:
        one = jax.grad(model._forward)
        _COMPILED[model] = jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))
    elements = sum(leaf.size for leaf in jax.tree_util.tree_leaves(trained))
    together = at_once(micro_batch, elements)
    for start in range(0, len(inputs[0]), together):
        size = min(together, len(inputs[0]) - start)
        # Always as many records, so that nothing is compiled again; those too many are left out.
        rows = np.minimum(np.arange(start, start + together), start + size - 1)
        records = jax.tree_util.tree_map(
            lambda a, rows=rows: jnp.expand_dims(a[rows], 1), (inputs, targets, weights)
        )
        keys = jax.random.split(next(model._rng_gen), together)
        found = _COMPILED[model](trained, fixed, keys, records)
        arrays = {
            f"{layer}:{name}": array
            for layer, named in found.items()
            for name, array in named.items()
        }
        yield JaxStack(arrays, size)


class JaxStack:
    """Gradients of shape (records, ...), of which the first `size` count."""

    def __init__(self, arrays: dict[str, jax.Array], size: int) -> None:
        self._arrays, self._size = arrays, size

    def squares(self, names: tuple[str, ...]) -> Float64:
        found = _squares([self._arrays[name] for name in names])
        return np.array(found)[: self._size]

    def add(self, totals: dict[str, Any], factors: Mapping[str, Float64], sound: Any) -> None:
        names = [*factors]
        arrays = [self._arrays[name] for name in names]
        scales = np.zeros((len(names), len(arrays[0])))
        scales[:, : self._size] = [factors[name] for name in names]
        kept = None
        if not sound.all():
            kept = np.zeros(len(arrays[0]), dtype=bool)
            kept[: self._size] = sound
        start = [totals.get(n, jnp.zeros(a.shape[1:])) for n, a in zip(names, arrays, strict=True)]
        totals.update(zip(names, _sums(start, arrays, scales, kept), strict=True))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {
            n: np.asarray(a, dtype=_wide(a.dtype))[: self._size] for n, a in self._arrays.items()
        }


@jax.jit
def _squares(arrays: list[jax.Array]) -> jax.Array:
    wide = [a.astype(jnp.float64).reshape(len(a), -1) for a in arrays]
    return jnp.stack([jnp.sum(a * a, axis=1) for a in wide], axis=1)


@jax.jit
def _sums(
    totals: list[jax.Array], arrays: list[jax.Array], scales: jax.Array, kept: jax.Array | None
) -> list[jax.Array]:
    sums = []
    for total, array, scale in zip(totals, arrays, scales, strict=True):
        rows = array.astype(jnp.float64).reshape(len(array), -1)
        if kept is not None:
            # Zero times NaN would be NaN.
            rows = jnp.where(kept[:, None], rows, 0.0)
        sums.append(total + (scale @ rows).reshape(total.shape))
    return sums


def _wide(dtype: Any) -> Any:
    return np.float32 if dtype == jnp.bfloat16 else dtype
