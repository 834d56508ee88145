# SPDX-License-Identifier: Apache-2.0
"""Norms and sums of single records' gradients in JAX, in float64 whatever JAX is set to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from fedclip.dpsgd.persample.base import Data, Float64, Host, at_once, padded, spread

__all__ = ["JaxStack", "micro_batches"]

# Under its name of today, or that of before.
_float64 = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]


def micro_batches(records: Data, size: int, elements: int) -> Iterator[tuple[Data, int]]:
    """Yield some records, always as many, and how many of them count; none if there is none."""
    many = len(jax.tree_util.tree_leaves(records)[0])
    for rows, count in padded(many, at_once(size, elements)):
        yield jax.tree_util.tree_map(lambda a, rows=rows: a[rows], records), count


class JaxStack:
    """Gradients of shape (records, ...), of which the first `size` count."""

    def __init__(self, arrays: dict[str, jax.Array], size: int) -> None:
        self._arrays, self._size = arrays, size

    def squares(self, names: tuple[str, ...]) -> Float64:
        with _float64(True):
            found = _squares([self._arrays[name] for name in names])
        return np.array(found)[: self._size]

    def add(
        self, totals: dict[str, jax.Array], factors: Mapping[str, Float64], sound: Host
    ) -> None:
        names = [*factors]
        arrays = [self._arrays[name] for name in names]
        scales, rows = spread(factors, sound, len(arrays[0]))
        kept = None if sound.all() else rows
        with _float64(True):
            pairs = zip(names, arrays, strict=True)
            start = [totals.get(name, jnp.zeros(array.shape[1:])) for name, array in pairs]
            totals.update(zip(names, _sums(start, arrays, scales, kept), strict=True))

    def arrays(self) -> dict[str, Host]:
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


def _wide(dtype: DTypeLike) -> DTypeLike:
    return np.float32 if dtype == jnp.bfloat16 else dtype
