# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in TensorFlow: `vectorized_map` of a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from declearn.model.tensorflow import TensorflowModel, TensorflowVector

__all__ = ["check", "gradients", "vector"]

# To trace takes long: once for a model.
_TRACED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check(model: TensorflowModel) -> None:
    """Refuse layers that mix records."""
    for layer in model._model._flatten_layers():
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            raise ValueError(
                f"the layer {layer.name!r} ({type(layer).__name__}) mixes the records of a batch, "
                "and remembers them unclipped and without noise: use GroupNormalization or "
                "LayerNormalization"
            )


def vector(model: TensorflowModel, arrays: Any) -> Any:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    with tf.device(model._device):
        return TensorflowVector({k: tf.cast(a, weights[k].dtype) for k, a in arrays.items()})


def gradients(
    model: TensorflowModel, batch: Any, micro_batch: int
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the stacked gradients of each micro-batch."""
    with tf.device(model._device):
        inputs, targets, weights = model._unpack_batch(batch)
    names = [v.name for v in model._get_weight_variables(trainable=True)]
    memory = [np.array(v) for v in model._model.non_trainable_weights]
    if model not in _TRACED:
        _TRACED[model] = tf.function(_together(model), reduce_retracing=True)
    first = tf.nest.flatten(inputs)[0]
    for start in range(0, len(first), micro_batch):
        size = min(micro_batch, len(first) - start)
        # Always as many records, so that nothing is traced again; those too many are cut off.
        rows = np.minimum(np.arange(start, start + micro_batch), start + size - 1)
        given = {"inputs": inputs, "target": targets, "weight": weights}
        with tf.device(model._device):
            records = tf.nest.map_structure(
                lambda a, rows=rows: tf.gather(a, rows),
                {name: data for name, data in given.items() if data is not None},
            )
            found = _TRACED[model](records)
        _unchanged(model, memory)
        yield {n: _host(a)[:size] for n, a in zip(names, found, strict=True)}


def _together(model: TensorflowModel) -> Any:
    keras = model._model

    def one(record: Any) -> Any:
        alone = tf.nest.map_structure(lambda a: tf.expand_dims(a, 0), record)
        with tf.GradientTape() as tape:
            found = keras(alone["inputs"], training=True)
            loss = keras.compute_loss(alone["inputs"], alone.get("target"), found)
            loss = tf.reduce_mean(loss)
            if "weight" in record:
                loss *= tf.cast(record["weight"], loss.dtype)
        trained = model._get_weight_variables(trainable=True)
        grads = tape.gradient(loss, [*trained], unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in grads]

    return lambda records: tf.vectorized_map(one, records)


def _host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(tf.cast(array, tf.float32) if array.dtype == tf.bfloat16 else array)


def _unchanged(model: TensorflowModel, memory: list[np.ndarray[Any, Any]]) -> None:
    for before, variable in zip(memory, model._model.non_trainable_weights, strict=True):
        if not np.array_equal(before, np.array(variable), equal_nan=True):
            raise ValueError(
                f"training changes {variable.path!r}, which would keep records unclipped and "
                "without noise: use a layer without such a memory"
            )
