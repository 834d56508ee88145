# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records in TensorFlow: `vectorized_map` of a gradient.

Recurrent layers have no vectorized gradient, and that of attention fails; layers with random
numbers would give all records the same. In models that have such a layer, records go one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from fedclip.dpsgd.persample import base
from fedclip.dpsgd.persample.base import Data, Host, HostStack

_L = tf.keras.layers
_ONE_BY_ONE = (_L.RNN, _L.Attention, _L.GroupQueryAttention, _L.MultiHeadAttention)

Tensor: TypeAlias = tf.Tensor
Variables: TypeAlias = Sequence[tf.Variable]


def check(model: tf.keras.Model) -> None:
    """Refuse layers that mix records."""
    for layer in model._flatten_layers():
        if isinstance(layer, _L.BatchNormalization):
            named = f"the layer {layer.name!r} ({type(layer).__name__})"
            raise ValueError(f"{named} mixes the records of a batch: use LayerNormalization")


class RecordGradients:
    """The gradients of a Keras model's loss for single records, traced once.

    Parameters
    ----------
    model
        A compiled model.
    variables
        Those that are trained.
    device
        The name of the device.
    """

    def __init__(self, model: tf.keras.Model, variables: Variables, device: str) -> None:
        self._model, self._variables, self._device = model, variables, device
        self._gradients = tf.function(self._of_records, reduce_retracing=True)
        self._one_by_one = any(
            isinstance(layer, _ONE_BY_ONE) or hasattr(layer, "seed_generator")
            for layer in model._flatten_layers()
        )

    def stacks(self, records: Mapping[str, Data], micro_batch: int) -> Iterator[HostStack]:
        """Yield the gradients of each micro-batch, which are always whole.

        Parameters
        ----------
        records
            "inputs", and "target" and "weight" if there are any: arrays, or lists of them, whose
            first axis is the records.
        micro_batch
            How many records are taken together, at most; fewer, if their gradients are large.
        """
        variables = self._variables
        with tf.device(self._device):
            arrays = tf.nest.map_structure(tf.convert_to_tensor, dict(records))
        together = base.at_once(micro_batch, sum(int(np.prod(v.shape)) for v in variables))
        for rows, size in base.padded(len(tf.nest.flatten(arrays["inputs"])[0]), together):
            with tf.device(self._device):
                # Those of the layers, and any other that the pass comes across.
                used = self._gradients.get_concrete_function(arrays, rows).variables
                trained, before = {v.ref() for v in variables}, []
                for state in used:
                    # The state of a generator follows no record. A seed may be the server's, and
                    # what follows from it depends on earlier records.
                    if "seed_generator_state" in state.name:
                        fresh = np.frombuffer(os.urandom(8), np.uint32)
                        state.assign(fresh.astype(state.dtype.name))
                    elif state.ref() not in trained:
                        before.append((state, state.numpy()))
                gradients = self._gradients(arrays, rows)
            _refuse_changed(before)
            pairs = zip(variables, gradients, strict=True)
            yield HostStack({v.name: base.widened(gradient)[:size] for v, gradient in pairs})

    def _of_records(self, arrays: Data, rows: Host) -> Data:
        records = tf.nest.map_structure(lambda a: tf.gather(a, rows), arrays)
        if not self._one_by_one:
            return tf.vectorized_map(self._of_record, records)
        dtypes = [v.dtype for v in self._variables]
        return tf.map_fn(self._of_record, records, fn_output_signature=dtypes)

    def _of_record(self, record: Data) -> list[Tensor]:
        batch = tf.nest.map_structure(lambda a: tf.expand_dims(a, 0), record)
        with tf.GradientTape() as tape:
            outputs = self._model(batch["inputs"], training=True)
            loss = self._model.compute_loss(batch["inputs"], batch.get("target"), outputs)
            loss = tf.reduce_mean(loss)
            if "weight" in record:
                loss *= tf.cast(record["weight"], loss.dtype)
        gradients = tape.gradient(loss, self._variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(gradient) for gradient in gradients]


def _refuse_changed(before: list[tuple[tf.Variable, Host]]) -> None:
    """Refuse a model of which training changes other variables, and undo the changes."""
    changed = [(v, a) for v, a in before if not np.array_equal(a, v.numpy(), equal_nan=True)]
    for variable, array in changed:
        variable.assign(array)
    for variable, _ in changed:
        text = f"training changes {variable.name!r}, which would keep records without noise"
        raise base.UnsupportedModelError(f"{text}: use a layer without such a memory")
