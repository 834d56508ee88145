# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in TensorFlow: `vectorized_map` of a gradient.

Recurrent layers have no vectorized gradient, and that of attention fails; layers with random
numbers would give all records the same. In models that have such a layer, records go one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from declearn.model.tensorflow import TensorflowModel, TensorflowVector

from fedclip.dpsgd.persample.base import (
    Arrays,
    Data,
    Float64,
    Host,
    UnsupportedModelError,
    at_once,
    padded,
    spread,
)

__all__ = ["TensorflowStack", "check", "shapes", "stacks", "vector"]

_ONE_BY_ONE = (
    tf.keras.layers.RNN,
    tf.keras.layers.Attention,
    tf.keras.layers.GroupQueryAttention,
    tf.keras.layers.MultiHeadAttention,
)

Tensor: TypeAlias = tf.Tensor
Traced: TypeAlias = tf.types.experimental.PolymorphicFunction

# To trace takes long: once for a model.
_TRACED: WeakKeyDictionary[TensorflowModel, Traced] = WeakKeyDictionary()


def check(model: TensorflowModel) -> None:
    """Refuse layers that mix records."""
    for layer in model._model._flatten_layers():
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            raise ValueError(
                f"the layer {layer.name!r} ({type(layer).__name__}) mixes the records of a batch, "
                "and remembers them unclipped and without noise: use GroupNormalization or "
                "LayerNormalization"
            )


def vector(model: TensorflowModel, arrays: Arrays) -> TensorflowVector:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    with tf.device(model._device):
        return TensorflowVector({k: tf.cast(a, weights[k].dtype) for k, a in arrays.items()})


def shapes(model: TensorflowModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights."""
    return {v.name: tuple(v.shape) for v in model._get_weight_variables(trainable=True)}


def stacks(
    model: TensorflowModel, batch: Data, micro_batch: int, whole: bool
) -> Iterator[TensorflowStack]:
    """Yield the gradients of each micro-batch, which are always whole."""
    with tf.device(model._device):
        inputs, targets, weights = model._unpack_batch(batch)
    variables = [*model._get_weight_variables(trainable=True)]
    trained = {v.ref() for v in variables}
    if model not in _TRACED:
        _TRACED[model] = tf.function(_together(model), reduce_retracing=True)
    arrays = {"inputs": inputs, "target": targets, "weight": weights}
    arrays = {name: data for name, data in arrays.items() if data is not None}
    many = len(tf.nest.flatten(inputs)[0])
    together = at_once(micro_batch, sum(int(np.prod(v.shape)) for v in variables))
    for rows, size in padded(many, together):
        with tf.device(model._device):
            # Those of the layers, and any other that the pass comes across.
            used = _TRACED[model].get_concrete_function(arrays, rows).variables
            for state in filter(_random, used):
                # A seed may be the server's, and what follows from it depends on earlier records.
                state.assign(np.frombuffer(os.urandom(8), np.uint32).astype(state.dtype.name))
            before = [(v, v.numpy()) for v in used if not (_random(v) or v.ref() in trained)]
            gradients, squares = _TRACED[model](arrays, rows)
            _unchanged(before)
            named = dict(zip([v.name for v in variables], gradients, strict=True))
            yield TensorflowStack(named, squares, size)


class TensorflowStack:
    """Gradients of shape (records, ...), of which the first `size` count."""

    def __init__(self, arrays: dict[str, Tensor], squares: Tensor, size: int) -> None:
        self._arrays, self._squares, self._size = arrays, squares, size

    def squares(self, names: tuple[str, ...]) -> Float64:
        order = [*self._arrays]
        return np.array(self._squares)[: self._size, [order.index(name) for name in names]]

    def add(self, totals: dict[str, Tensor], factors: Mapping[str, Float64], finite: Host) -> None:
        names = [*factors]
        arrays = [self._arrays[name] for name in names]
        scales, counting = spread(factors, finite, len(arrays[0]))
        start = [
            totals.get(n, tf.zeros(a.shape[1:], tf.float64))
            for n, a in zip(names, arrays, strict=True)
        ]
        totals.update(zip(names, _sums(start, arrays, scales, counting), strict=True))

    def arrays(self) -> dict[str, Host]:
        return {name: _host(array)[: self._size] for name, array in self._arrays.items()}


# Without being compiled, it takes three times as long.
@tf.function(jit_compile=True)
def _sums(totals: list[Tensor], arrays: list[Tensor], scales: Host, counting: Host) -> list[Tensor]:
    sums = []
    for i, array in enumerate(arrays):
        # Zero times NaN would be NaN.
        rows = tf.where(counting[:, None], _rows(array), 0.0)
        sums.append(tf.reshape(tf.einsum("i,ij->j", scales[i], rows), totals[i].shape))
    return [total + more for total, more in zip(totals, sums, strict=True)]


def _rows(array: Tensor) -> Tensor:
    return tf.reshape(tf.cast(array, tf.float64), (tf.shape(array)[0], -1))


def _together(model: TensorflowModel) -> Callable[[Data, Host], tuple[list[Tensor], Tensor]]:
    keras = model._model
    one_by_one = any(
        isinstance(layer, _ONE_BY_ONE) or hasattr(layer, "seed_generator")
        for layer in keras._flatten_layers()
    )

    def of_record(record: Data) -> list[Tensor]:
        batch = tf.nest.map_structure(lambda a: tf.expand_dims(a, 0), record)
        with tf.GradientTape() as tape:
            outputs = keras(batch["inputs"], training=True)
            loss = keras.compute_loss(batch["inputs"], batch.get("target"), outputs)
            loss = tf.reduce_mean(loss)
            if "weight" in record:
                loss *= tf.cast(record["weight"], loss.dtype)
        trained = model._get_weight_variables(trainable=True)
        grads = tape.gradient(loss, [*trained], unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in grads]

    def together(arrays: Data, rows: Host) -> tuple[list[Tensor], Tensor]:
        records = tf.nest.map_structure(lambda a: tf.gather(a, rows), arrays)
        if one_by_one:
            kinds = [v.dtype for v in model._get_weight_variables(trainable=True)]
            gradients = tf.map_fn(of_record, records, fn_output_signature=kinds)
        else:
            gradients = tf.vectorized_map(of_record, records)
        wide = [_rows(array) for array in gradients]
        return gradients, tf.stack([tf.reduce_sum(r * r, axis=1) for r in wide], axis=1)

    return together


def _host(array: Tensor) -> Host:
    return np.asarray(tf.cast(array, tf.float32) if array.dtype == tf.bfloat16 else array)


def _random(variable: tf.Variable) -> bool:
    # The state of a generator follows no record.
    return "seed_generator_state" in variable.name


def _unchanged(before: list[tuple[tf.Variable, Host]]) -> None:
    changed = [(v, a) for v, a in before if not np.array_equal(a, v.numpy(), equal_nan=True)]
    for variable, array in changed:
        variable.assign(array)
    if changed:
        raise UnsupportedModelError(
            f"training changes {changed[0][0].name!r}, which would keep records unclipped and "
            "without noise: use a layer without such a memory"
        )
