# SPDX-License-Identifier: Apache-2.0
r"""Norms and sums of single records' gradients in JAX, in float64 whatever JAX is set to.

Gradients are stored, or worked out in two passes, of which the first stores none::

    n_i   = norm of the gradient of loss_i           fused with the gradient, in blocks of records
    sum  += gradient of Σ_i f_i loss_i               over the same block

Both passes get the same random keys. `RecordGradients` tries both ways on made-up records, and
takes two passes if these are faster and agree to `_AGREES`; norms are enlarged by as much. Dense
models get several times faster; convolutions and recurrent layers are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map

from fedclip.dpsgd.persample.base import Data, Float64, Host, at_once, padded, spread, widened

Tree: TypeAlias = Any
Arguments: TypeAlias = tuple[Tree, Tree, Tree]
"""Weights, other arrays, records."""
Named: TypeAlias = dict[str, jax.Array]
Loss: TypeAlias = Callable[[Tree, Tree, Tree], jax.Array]
"""From the trained weights, other arrays and one record to a number."""

# Under its name of today, or that of before.
_float64 = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]

# How far the sum of the second pass may differ from that of stored gradients, relative to it.
_AGREES = 2.0**-16
# Below this, products with a factor may underflow in float32.
_SMALL = 2.0**-100


class RecordGradients:
    """The gradients of a loss for single records, compiled once.

    Parameters
    ----------
    loss
        From weights, other arrays and one record, without its first axis, to a number.
    """

    def __init__(self, loss: Loss) -> None:
        each = jax.vmap(jax.grad(loss), in_axes=(None, None, 0))
        losses = jax.vmap(loss, in_axes=(None, None, 0))

        def squares(setting: bool, *arguments: Tree) -> Any:
            with _float64(setting):
                gradients = tree_leaves(each(*arguments))
            return _squares(gradients)

        def total(weights: Tree, others: Tree, records: Tree, factors: jax.Array) -> jax.Array:
            values = losses(weights, others, records)
            return jnp.dot(values, factors.astype(values.dtype))

        self.stored = jax.jit(each)
        self.squares = jax.jit(squares, static_argnums=0)
        self.weighted = jax.jit(jax.grad(total))
        self._two_passes: dict[object, bool] = {}

    def stacks(
        self,
        names: Sequence[str],
        weights: Tree,
        others: Tree,
        records: Tree,
        micro_batch: int,
        materialise: bool = False,
    ) -> Iterator[JaxStack | TwoPassStack]:
        """Yield the gradients of each micro-batch, always of the same size.

        Parameters
        ----------
        names
            Of the leaves of the weights.
        records
            Arrays whose first axis is the records.
        micro_batch
            How many records are taken together, at most; fewer, if their gradients are large.
        materialise
            Whether the gradients themselves will be asked for.
        """
        weights, others = tree_map(jnp.asarray, (weights, others))
        # NumPy takes rows faster.
        records = tree_map(_on_host, records)
        leaves = tree_leaves(records)
        elements = sum(leaf.size for leaf in tree_leaves(weights))
        for rows, count in padded(len(leaves[0]), at_once(micro_batch, elements)):
            some = tree_map(lambda a, rows=rows: a[rows], records)
            two_passes = not materialise and self._is_faster(weights, others, some)
            make = TwoPassStack if two_passes else _stored
            yield make(self, names, (weights, others, some), count)

    def _is_faster(self, weights: Tree, others: Tree, records: Tree) -> bool:
        """Return whether two passes are faster for records of these shapes, and agree."""
        key = tuple((a.shape, str(a.dtype)) for a in tree_leaves(records))
        if key not in self._two_passes:
            self._two_passes[key] = self._compare(weights, others, tree_map(_made_up, records))
        return self._two_passes[key]

    def _compare(self, weights: Tree, others: Tree, records: Tree) -> bool:
        names = [str(i) for i in range(len(tree_leaves(weights)))]
        size = len(tree_leaves(records)[0])
        # Not powers of two, whose products are exact in low precision too.
        factors = dict.fromkeys(names, np.linspace(0.3, 0.7, size))
        arguments, finite = (weights, others, records), np.ones(size, dtype=bool)
        sums, times = [], []
        for make in (_stored, TwoPassStack):
            seconds = []
            for _ in range(4):
                start, totals = time.perf_counter(), dict[str, jax.Array]()
                stack = make(self, names, arguments, size)
                stack.squares(tuple(names))
                stack.add(totals, factors, finite)
                sums.append(np.concatenate([np.ravel(totals[name]) for name in names]))
                seconds.append(time.perf_counter() - start)
            times.append(min(seconds))
        agree = np.abs(sums[-1] - sums[0]).max() <= _AGREES * np.abs(sums[0]).max()
        return bool(agree) and times[1] < times[0]


def _on_host(array: Data) -> Data:
    """Return an array as NumPy's, in the dtype that JAX gives it; keys of JAX are not numbers."""
    if not isinstance(array.dtype, np.dtype):
        return array
    return np.asarray(array, dtype=jax.dtypes.canonicalize_dtype(array.dtype))


def _made_up(array: Data) -> Data:
    """Return an array of this shape and dtype that holds nothing of a record."""
    if not isinstance(array.dtype, np.dtype):
        return array
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    return jnp.linspace(0.1, 1.0, array.size).reshape(array.shape).astype(array.dtype)


def _stored(
    gradients: RecordGradients, names: Sequence[str], arguments: Arguments, size: int
) -> JaxStack:
    leaves = tree_leaves(gradients.stored(*arguments))
    return JaxStack(dict(zip(names, leaves, strict=True)), size)


class TwoPassStack:
    """The gradients of some records, none of which is stored; the first `size` count."""

    def __init__(
        self, gradients: RecordGradients, names: Sequence[str], arguments: Arguments, size: int
    ) -> None:
        self._gradients, self._names, self._size = gradients, [*names], size
        self._arguments = arguments

    def squares(self, names: tuple[str, ...]) -> Float64:
        setting = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        with _float64(True):
            squares = self._gradients.squares(setting, *self._arguments)
        order = [self._names.index(name) for name in names]
        return np.array(squares)[: self._size, order] * (1.0 + _AGREES) ** 2

    def add(self, totals: Named, factors: Mapping[str, Float64], finite: Host) -> None:
        if not finite.any():
            return
        weights, others, records = self._arguments
        scales, rows = spread(factors, finite, len(tree_leaves(records)[0]))
        if not rows.all():
            # Zero times NaN would be NaN: another record stands for one that does not count.
            counting = np.where(rows, np.arange(len(rows)), np.argmax(rows))
            records = tree_map(lambda a: a[counting], records)
        distinct, group = np.unique(scales, axis=0, return_inverse=True)
        if not (distinct[distinct != 0.0] < _SMALL).any():
            weighted = partial(self._gradients.weighted, weights, others, records)
            gradients = [tree_leaves(weighted(scale)) for scale in distinct]
            groups = zip(factors, group.reshape(-1), strict=True)
            sums = {name: gradients[g][self._names.index(name)] for name, g in groups}
            with _float64(True):
                start = {n: totals.get(n, np.zeros(array.shape)) for n, array in sums.items()}
                new, all_finite = _accumulate(start, sums)
            if all_finite:
                totals.update(new)
                return
        self._stored().add(totals, factors, finite)

    def arrays(self) -> dict[str, Host]:
        return self._stored().arrays()

    def _stored(self) -> JaxStack:
        return _stored(self._gradients, self._names, self._arguments, self._size)


@jax.jit
def _accumulate(totals: Named, sums: Named) -> tuple[Named, jax.Array]:
    finite = [jnp.isfinite(array).all() for array in sums.values()]
    new = {name: totals[name] + array.astype(jnp.float64) for name, array in sums.items()}
    return new, jnp.stack(finite).all()


class JaxStack:
    """Gradients of shape (records, ...), of which the first `size` count."""

    def __init__(self, arrays: Named, size: int) -> None:
        self._arrays, self._size = arrays, size

    def squares(self, names: tuple[str, ...]) -> Float64:
        with _float64(True):
            squares = _squares([self._arrays[name] for name in names])
        return np.array(squares)[: self._size]

    def add(self, totals: Named, factors: Mapping[str, Float64], finite: Host) -> None:
        arrays = {name: self._arrays[name] for name in factors}
        scales, rows = spread(factors, finite, len(next(iter(arrays.values()))))
        by_name, counting = dict(zip(factors, scales, strict=True)), None if finite.all() else rows
        with _float64(True):
            start = {n: totals.get(n, np.zeros(array.shape[1:])) for n, array in arrays.items()}
            totals.update(_sums(start, arrays, by_name, counting))

    def arrays(self) -> dict[str, Host]:
        return {name: widened(array)[: self._size] for name, array in self._arrays.items()}


@jax.jit
def _squares(arrays: list[jax.Array]) -> jax.Array:
    wide = [a.astype(jnp.float64).reshape(len(a), -1) for a in arrays]
    return jnp.stack([jnp.sum(a * a, axis=1) for a in wide], axis=1)


@jax.jit
def _sums(totals: Named, arrays: Named, scales: Named, counting: jax.Array | None) -> Named:
    sums = {}
    for name, array in arrays.items():
        rows = array.astype(jnp.float64).reshape(len(array), -1)
        if counting is not None:
            # Zero times NaN would be NaN.
            rows = jnp.where(counting[:, None], rows, 0.0)
        sums[name] = totals[name] + (scales[name] @ rows).reshape(array.shape[1:])
    return sums
