# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: tensors, variables and IndexedSlices on devices and in a tf.function.

On the CPU it only makes NumPy's views. It knows neither groups of tensors nor limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

# Private names: neither what is traced for XLA nor what is recorded has a public sign.
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.eager.record import could_possibly_record, should_record_backprop
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from fedclip.arrays import base
from fedclip.arrays.base import HALF_UNIT, Array, Arrays, Backend, HostView, Owners
from fedclip.arrays.memory import is_aligned
from fedclip.arrays.numpy import bits

_EAGER = {tf.__internal__.EagerTensor}
# In rows of so many, no sum adds more than 16 numbers one after the other, in 16 lanes or more.
_ROW = 256
_CUT = 128
_SHARED = {tf.float32, tf.float64}


@cache
def _only_cpu() -> bool:
    # Asking a tensor for its device takes as long as making a view of it.
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def _is_local(tensor: Array) -> bool:
    return _only_cpu() or "CPU" in tensor.device


def _recorded(tensors: list[Array]) -> bool:
    """Return whether a tape or an accumulator watches one of these tensors."""
    return should_record_backprop(tensors) or bool(pack_tangents(tensors).tangents)


def _numpy(tensor: Array) -> HostView:
    # TensorFlow turns a bfloat16 tensor without dimensions into a scalar, not an array.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def _of(dtype: Any, value: Any) -> Any:
    """Return an array or a number in this dtype."""
    # `tf.cast` would take a Python number to float32 first.
    if isinstance(value, (int, float)):
        return tf.constant(value, dtype)
    return tf.cast(value, dtype)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _sqrt(x: Array) -> Array:
    """Return the square root; that of 0 has the derivative 0, as nothing follows from it."""
    root = tf.sqrt(x)
    return root, lambda change: tf.math.divide_no_nan(0.5 * change, _sqrt(x))


def _square_sum(tensor: Array) -> Array:
    """Return the sum of squares, in float64."""
    # Over a long tensor, a sum adds up to 256 float32 one after the other, and for a constant all
    # their roundings may have the same sign: cut it into rows.
    size, rows = tensor.shape.num_elements() or 0, tensor
    # XLA lacks the norm, and makes one of all, without a copy in float64.
    if size >= _ROW and not GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        last = int(tensor.shape[-1])
        if not 32 <= last <= _ROW:
            last = next((n for n in range(_CUT, 31, -1) if size % n == 0), 0)
        if last:
            rows = tf.math.reduce_euclidean_norm(tf.reshape(tensor, [-1, last]), -1)
    return tf.reduce_sum(tf.square(tf.cast(rows, tf.float64)))


class TensorflowBackend(Backend):
    """Tensors of TensorFlow."""

    name = "tensorflow"
    aligned = True

    # -- arrays -------------------------------------------------------------------------------
    def traced(self, array: Array) -> bool:
        values = self.values(array)
        return not hasattr(values, "numpy") or _recorded([tf.convert_to_tensor(values)])

    def size(self, array: Array) -> Any:
        values = self.values(array)
        known = values.shape.num_elements()
        return tf.cast(tf.size(values), tf.float64) if known is None else known

    def prepared(self, arrays: Arrays) -> Arrays:
        if not any(isinstance(t, tf.IndexedSlices) for t in arrays):
            return arrays
        return [_merged(t) if isinstance(t, tf.IndexedSlices) else t for t in arrays]

    def values(self, array: Array) -> Array:
        return array.values if isinstance(array, tf.IndexedSlices) else array

    def restored(self, values: Array, like: Array) -> Array:
        if isinstance(like, tf.IndexedSlices):
            return tf.IndexedSlices(values, like.indices, like.dense_shape)
        return values

    def dense(self, array: Array) -> Array:
        if not isinstance(array, tf.IndexedSlices):
            return array
        # The shape is that of the variable, which a function knows as it is traced.
        if array.shape.num_elements() is None:
            why = "IndexedSlices of unknown shape cannot be made dense"
            raise ValueError(f"{why}: give them a dense_shape, or the tape in the same tf.function")
        dense = tf.math.unsorted_segment_sum(array.values, array.indices, array.shape[0])
        dense.set_shape(array.shape)
        return dense

    def dense_views(self, arrays: Arrays) -> Sequence[HostView] | None:
        return super().dense_views(arrays) if {*map(type, arrays)} <= _EAGER else None

    def views(self, arrays: Arrays) -> Sequence[HostView | None]:
        # The usual case first, without a method call for each of hundreds of tensors.
        usual = {*map(type, arrays)} == _EAGER and _only_cpu() and not _recorded([*arrays])
        return [bits(_numpy(t)) for t in arrays] if usual else [self._view(t) for t in arrays]

    def _view(self, tensor: Array) -> HostView | None:
        # A symbolic tensor has no device and no data; one on an accelerator stays there.
        if self.traced(tensor) or not _is_local(self.values(tensor)):
            return None
        return bits(_numpy(self.values(tensor)))

    def to_host(self, array: Array) -> HostView:
        return _numpy(self.values(array))

    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        # A tape would miss what is shared.
        shares = not could_possibly_record()
        return [self._from_host(v, x, shares) for v, x in zip(values, likes, strict=True)]

    def _from_host(self, values: HostView, like: Array, shares: bool) -> Array:
        values, old = values.view(like.dtype.as_numpy_dtype), self.values(like)
        if shares and like.dtype in _SHARED and _is_local(old) and is_aligned(values):
            return self.restored(tf.experimental.dlpack.from_dlpack(values.__dlpack__()), like)
        with tf.device(old.device):
            return self.restored(tf.convert_to_tensor(values), like)

    # -- arithmetic ---------------------------------------------------------------------------
    def asarray(self, values: Any, like: Array | None = None) -> Array:
        if tf.is_tensor(values):
            return tf.cast(values, tf.float64)
        return tf.convert_to_tensor(values, dtype=tf.float64)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        # A number takes the dtype of the other branch; two numbers become float64, like states.
        dtype = next((v.dtype for v in (x, y) if tf.is_tensor(v)), tf.float64)
        return tf.where(condition, _of(dtype, x), _of(dtype, y))

    def isfinite(self, x: Array) -> Array:
        if x.dtype.is_complex:
            return tf.math.is_finite(tf.math.real(x)) & tf.math.is_finite(tf.math.imag(x))
        return tf.math.is_finite(x)

    sqrt = staticmethod(_sqrt)
    exp = staticmethod(tf.exp)
    stack = staticmethod(tf.stack)

    def minimum(self, x: Array, y: Any) -> Array:
        return tf.minimum(x, _of(x.dtype, y))

    def maximum(self, x: Array, y: Any) -> Array:
        return tf.maximum(x, _of(x.dtype, y))

    def sum(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        return tf.reduce_sum(tf.cast(x, tf.float64), axes, keepdims=axes is not None)

    def max(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        if x.shape.num_elements() == 0:
            return tf.zeros([], x.dtype)
        return tf.reduce_max(x, axes, keepdims=axes is not None)

    sort = staticmethod(partial(tf.sort, axis=0))

    def pick(self, table: Array, row: Array) -> Array:
        return tf.gather(tf.transpose(table), tf.cast(tf.round(row), tf.int32), batch_dims=1)

    # -- numbers ------------------------------------------------------------------------------
    cast = staticmethod(tf.cast)

    def narrowed(self, x: Array, dtype: str) -> Array:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def towards_zero(x: Array) -> Array:
            narrow = tf.cast(x, dtype)
            over = tf.abs(tf.cast(narrow, x.dtype)) > tf.abs(x)
            # Floats of one sign are ordered like their bits: subtract 1 to step towards zero.
            pattern = tf.bitcast(narrow, tf.uint16) - tf.cast(over, tf.uint16)
            return tf.bitcast(pattern, dtype), lambda change: tf.cast(change, x.dtype)

        return towards_zero(x) if dtype in HALF_UNIT else tf.cast(x, dtype)

    constant = staticmethod(tf.stop_gradient)

    def group_max(self, values: Array, owners: Owners, groups: int) -> Array:
        # It would pass over NaN.
        without_nan = tf.where(tf.math.is_nan(values), tf.constant(np.inf, values.dtype), values)
        return tf.math.unsorted_segment_max(without_nan, base.index_of(owners), groups)

    def group_sum(self, values: Array, owners: Owners, groups: int) -> Array:
        return tf.math.unsorted_segment_sum(values, base.index_of(owners), groups)

    def take(self, values: Array, owners: Owners) -> Array:
        return tf.gather(values, base.index_of(owners))

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> Arrays:
        if not any(shapes):
            return list(tf.unstack(flat))
        parts = tf.split(flat, [math.prod(shape) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def joined(self, arrays: Arrays) -> Array:
        values = [self.values(t) for t in arrays]
        widest = base.widest_of(map(self.dtype, values))
        flat = [v if v.shape.rank == 1 else tf.reshape(v, [-1]) for v in values]
        return tf.concat([tf.cast(v, widest) for v in flat], axis=0)

    # -- measures of gradients ----------------------------------------------------------------
    def group_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        each = [_square_sum(self._single(self.values(t))) for t in arrays]
        sums = tf.stack([tf.add_n([each[i] for i in some]) for some in members])
        # Measure again, relative to the maximum, if a sum has overflowed or underflowed.
        in_range = tf.reduce_all((sums >= base.UNDERFLOW) & (sums < np.inf))
        return tf.cond(in_range, lambda: _sqrt(sums), lambda: self.joint_norms(arrays, members))

    def max_abs(self, arrays: Arrays) -> Array:
        # Of nothing, the largest element is minus infinity.
        peaks = [tf.reduce_max(tf.cast(tf.abs(self.values(t)), tf.float64)) for t in arrays]
        return tf.maximum(tf.stack(peaks), 0.0)


def _merged(slices: Any) -> Any:
    """Return IndexedSlices with repeated rows added up."""
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)
