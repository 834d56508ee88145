# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: tensors, variables and IndexedSlices, eager and in a tf.function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

# Private names: neither what is traced for XLA nor what is recorded has a public sign.
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.eager.record import could_possibly_record, should_record_backprop
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from fedclip.arrays.base import NOWHERE, UNDERFLOW, Array, Backend, Host, HostView, Views
from fedclip.arrays.memory import is_aligned
from fedclip.arrays.numpy import bits, clamp, shared

__all__ = ["TensorflowBackend"]

_EAGER = {tf.__internal__.EagerTensor}
_product = tf.raw_ops.Mul
# With fewer elements in all, copying them into one array is faster than one call for each tensor.
_SMALL = 1 << 14
# Of so few elements, one more operation takes longer than a copy.
_SHORT = 1 << 13
# Groups of fewer elements have a smaller margin: their norm is exact to its rounding.
_FEW = 512
# In rows of so many, no sum adds more than 16 numbers one after the other, in 16 lanes or more.
_ROW = 256
_CUT = 128
_SHARED = {tf.float32, tf.float64}


def _tensor(array: HostView) -> Array:
    """Return a tensor over the memory of a NumPy array, which is aligned."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _norms(table: Array) -> Array:
    """Return the norms of the rows."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        # XLA lacks the operation, and makes one of these, without a copy in float64.
        squares = tf.square(tf.cast(table, tf.float64))
        return _sqrt(tf.reduce_sum(squares, -1))
    return tf.math.reduce_euclidean_norm(table, -1)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _sqrt(x: Array) -> Array:
    """Return the square root; that of 0 has the derivative 0, as nothing follows from it."""
    root = tf.sqrt(x)
    return root, lambda change: tf.math.divide_no_nan(0.5 * change, _sqrt(x))


@cache
def _only_cpu() -> bool:
    # Asking a tensor for its device takes as long as making a view of it.
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def _recorded(tensors: list[Array]) -> bool:
    """Return whether a tape or an accumulator watches one of these tensors."""
    return should_record_backprop(tensors) or bool(pack_tangents(tensors).tangents)


def _of(dtype: Any, value: Any) -> Any:
    """Return an array or a number in this dtype."""
    # `tf.cast` would take a Python number to float32 first.
    if isinstance(value, (int, float)):
        return tf.constant(value, dtype)
    return tf.cast(value, dtype)


class TensorflowBackend(Backend):
    """Tensors of TensorFlow."""

    name = "tensorflow"
    writes = True

    def host(self, arrays: Sequence[Array]) -> Views:
        # The usual case first, without a method call for each of hundreds of tensors.
        kinds = {type(t) for t in arrays}
        if _only_cpu() and kinds == _EAGER and not _recorded([*arrays]):
            try:
                views = Views([np.asarray(t) for t in arrays], dense=True)
            except ValueError:
                # A bfloat16 tensor without dimensions.
                views = Views([])
            if views.usual:
                return views
        return Views([self._view(t) for t in arrays])

    def traced(self, array: Array) -> bool:
        values = self._values(array)
        return not hasattr(values, "numpy") or _recorded([tf.convert_to_tensor(values)])

    def reads(self, cls: type) -> bool:
        return not issubclass(cls, (tf.RaggedTensor, tf.SparseTensor))

    def _view(self, tensor: Array) -> HostView | None:
        tensor = self._values(tensor)
        # A symbolic tensor has no device and no data; one on an accelerator stays there.
        if not hasattr(tensor, "numpy") or not self._is_local(tensor):
            return None
        return bits(self._numpy(tensor))

    @staticmethod
    def _is_local(tensor: Array) -> bool:
        return _only_cpu() or "CPU" in tensor.device

    @staticmethod
    def _numpy(tensor: Array) -> HostView:
        # TensorFlow turns a bfloat16 tensor without dimensions into a scalar, not an array.
        return np.asarray(tensor if tensor.shape.rank else tensor.numpy())

    def _values(self, tensor: Array) -> Array:
        return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor

    @staticmethod
    def _merge(slices: Any) -> Any:
        """Return IndexedSlices with repeated rows added up."""
        rows, place = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows))
        return tf.IndexedSlices(values, rows, slices.dense_shape)

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return [self._merge(t) if isinstance(t, tf.IndexedSlices) else t for t in arrays]

    def size(self, array: Array) -> Any:
        values = self._values(array)
        known = values.shape.num_elements()
        return tf.cast(tf.size(values), tf.float64) if known is None else known

    def dtype(self, array: Array) -> str:
        return str(array.dtype.name)

    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        if host.views and self._may_write(arrays):
            # Without TensorFlow's threads, which it wakes for each product of a middling tensor: a
            # clipped step over an MLP takes half as long ("MLP" of `make bench`).
            k = np.asarray(factor, arrays[0].dtype.as_numpy_dtype)
            return [*map(_tensor, shared(np.multiply, k, host))]
        k = tf.constant(factor, self._product_dtype(arrays[0]))
        return [self._multiply(t, k) for t in arrays]

    @staticmethod
    def _may_write(arrays: Sequence[Array]) -> bool:
        """Return whether NumPy may compute results for arrays of the host: no tape misses them."""
        dense = arrays[0].dtype in _SHARED and {*map(type, arrays)} == _EAGER
        return dense and not could_possibly_record()

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        return self._multiply(array, tf.constant(factors, self._product_dtype(array)))

    @staticmethod
    def _product_dtype(tensor: Array) -> Any:
        # Half precision is multiplied in float32.
        return tf.float64 if tensor.dtype == tf.float64 else tf.float32

    @staticmethod
    def _multiply(tensor: Array, factor: Array, product: Any = _product) -> Array:
        if isinstance(tensor, tf.IndexedSlices):
            values = TensorflowBackend._multiply(tensor.values, factor, product)
            return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
        if tensor.dtype == factor.dtype:
            return product(x=tensor, y=factor)
        return tf.cast(product(x=tf.cast(tensor, factor.dtype), y=factor), tensor.dtype)

    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        if host.views and self._may_write(arrays):
            kind = arrays[0].dtype.as_numpy_dtype
            return [*map(_tensor, shared(clamp, (kind(low), kind(high)), host))]
        return [self._clip(t, low, high) for t in arrays]

    def _clip(self, array: Array, low: float, high: float) -> Array:
        if isinstance(array, tf.IndexedSlices):
            values = self._clip(array.values, low, high)
            return tf.IndexedSlices(values, array.indices, array.dense_shape)
        low, high = tf.constant(low, array.dtype), tf.constant(high, array.dtype)
        return tf.minimum(tf.maximum(array, low), high)

    def zeros_like(self, array: Array) -> Array:
        if isinstance(array, tf.IndexedSlices):
            return tf.IndexedSlices(tf.zeros_like(array.values), array.indices, array.dense_shape)
        return tf.zeros_like(array)

    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        sums = [tf.reduce_sum(tf.square(tf.cast(self._values(t), tf.float64))) for t in arrays]
        values: list[float] = tf.stack(sums).numpy().tolist()
        return values

    def to_host(self, array: Array) -> HostView:
        return self._numpy(self._values(array))

    def dense(self, array: Array) -> Array:
        if not isinstance(array, tf.IndexedSlices):
            return array
        # The shape is that of the variable, which a function knows as it is traced.
        if array.shape.num_elements() is None:
            raise ValueError(
                "IndexedSlices of unknown shape can not be made dense: give them a dense_shape; in "
                "a tf.function, take them from a tape in the same function"
            )
        dense = tf.math.unsorted_segment_sum(array.values, array.indices, array.shape[0])
        dense.set_shape(array.shape)
        return dense

    def from_host(self, values: HostView, like: Array) -> Array:
        values = values.view(like.dtype.as_numpy_dtype)
        if self._is_local(like) and self._may_write([like]) and is_aligned(values):
            return _tensor(values)
        with tf.device(like.device):
            return tf.convert_to_tensor(values)

    def asarray(self, values: Any, like: Array | None = None) -> Array:
        return tf.convert_to_tensor(values, dtype=tf.float64)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        # A number takes the dtype of the other branch; two numbers become float64, like states.
        dtype = next((v.dtype for v in (x, y) if tf.is_tensor(v)), tf.float64)
        return tf.where(condition, _of(dtype, x), _of(dtype, y))

    def full_like(self, x: Array, number: float) -> Array:
        # What is constant is worked out before the graph runs.
        return tf.fill(x.shape, tf.constant(number, x.dtype))

    def ratio(self, x: Array, y: Array, counts: Array) -> Array:
        return tf.math.divide_no_nan(x, y)

    def isfinite(self, x: Array) -> Array:
        if x.dtype.is_complex:
            return tf.math.is_finite(tf.math.real(x)) & tf.math.is_finite(tf.math.imag(x))
        return tf.math.is_finite(x)

    def sqrt(self, x: Array) -> Array:
        return _sqrt(x)

    def unit(self, peak: Array) -> Array:
        # Nothing depends on the unit, and the square of its reciprocal may overflow.
        return super().unit(tf.stop_gradient(peak))

    def exp(self, x: Array) -> Array:
        return tf.exp(x)

    def minimum(self, x: Array, y: Any) -> Array:
        return tf.minimum(x, _of(x.dtype, y))

    def maximum(self, x: Array, y: Any) -> Array:
        return tf.maximum(x, _of(x.dtype, y))

    def sum(self, x: Array) -> Array:
        return tf.reduce_sum(x)

    def max(self, x: Array) -> Array:
        return tf.reduce_max(x)

    def sort(self, table: Array) -> Array:
        return tf.sort(table, axis=0)

    def pick(self, table: Array, row: Array) -> Array:
        return tf.gather(tf.transpose(table), tf.cast(tf.round(row), tf.int32), batch_dims=1)

    def median(self, values: Sequence[Array]) -> Array:
        # Nine operations in the place of many: the largest come first, and 0 is none of them.
        most = tf.math.top_k(tf.stack(values, axis=-1), 3).values
        first, second, third = tf.unstack(most, axis=-1)
        _, four, _, two, one = (value > 0 for value in values)
        found = tf.where(one, first, tf.constant(np.inf, first.dtype))
        return tf.where(four, third, tf.where(two, second, found))

    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        values = [self._values(t) for t in arrays]
        if self._are_small(values):
            joined = [self.joined([values[i] for i in m]) for m in members]
            halves = [tf.raw_ops.L2Loss(t=tf.cast(j, tf.float64)) for j in joined]
            # Of a single group, numbers are of shape (): this saves an operation here and there.
            return _sqrt(2.0 * (tf.stack(halves) if len(halves) > 1 else halves[0]))
        tables, places = self._tables(values, members)
        sums = self._square_sums(tables, places)
        # Measure again, relative to the maximum, if a sum has overflowed or underflowed.
        sound = tf.reduce_all((sums >= UNDERFLOW) & (sums < np.inf))

        # TensorFlow derives node names from argument names, and warns if one starts with "_".
        def fast(sums: Array, *tables: Array) -> Array:
            return _sqrt(sums)

        def again(sums: Array, *tables: Array) -> Array:
            found = [self._scaled_norm([tables[i] for i in some]) for some in places]
            return tf.stack(found) if len(found) > 1 else found[0]

        return self._choose(sound, fast, again, [sums, *tables])

    def _tables(
        self, values: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[list[Array], list[range]]:
        """Return the arrays, the short ones of a group as one table, and where each group's are."""
        tables: list[Array] = []
        places = []
        for some in members:
            short = [values[i] for i in some if self._is_short(values[i])]
            long = [values[i] for i in some if not self._is_short(values[i])]
            size = sum(v.shape.num_elements() for v in short)
            if size < _FEW and short:
                short = [tf.cast(self.joined(short), tf.float64)]
            elif len(short) > 1:
                joined = self.joined([*short, tf.zeros(-size % _CUT, short[0].dtype)])
                short = [tf.reshape(joined, [-1, _CUT])]
            places.append(range(len(tables), len(tables) + len(long) + len(short)))
            tables += map(self._wide, [*long, *short])
        return tables, places

    @staticmethod
    def _is_short(tensor: Array) -> bool:
        size = tensor.shape.num_elements()
        return size is not None and bool(size < _SHORT)

    @staticmethod
    def _square_sums(tables: Sequence[Array], places: Sequence[range]) -> Array:
        """Return the sum of the squares of each group, in float64."""
        # Each operation costs time: one or two for each table, few others.
        norms = [TensorflowBackend._row_norms(table) for table in tables]
        single = [k for k, n in enumerate(norms) if n.dtype == tf.float32]
        double = [k for k, n in enumerate(norms) if n.dtype == tf.float64]
        joined = [tf.concat([norms[k] for k in some], 0) for some in (single, double) if some]
        squares = tf.square(tf.concat([tf.cast(some, tf.float64) for some in joined], 0))
        if len(places) == 1:
            return tf.reduce_sum(squares)
        groups = [group for group, some in enumerate(places) for _ in some]
        index = [np.full(norms[k].shape[0], groups[k]) for k in single + double]
        return tf.math.unsorted_segment_sum(squares, np.concatenate(index), len(places))

    @staticmethod
    def _row_norms(table: Array) -> Array:
        """Return the norms of the rows, which are cut from a long tensor.

        Over a long tensor, a sum adds up to 256 float32 one after the other, and for a constant
        all their roundings may have the same sign.
        """
        size, last = table.shape.num_elements(), 0
        if size and size >= _FEW:
            last = int(table.shape[-1])
            if not 32 <= last <= _ROW:
                last = next((n for n in range(_CUT, 31, -1) if size % n == 0), 0)
                table = tf.reshape(table, [-1, last]) if last else table
        if not last:
            table = tf.reshape(tf.cast(table, tf.float64), [1, -1])
        rows = _norms(table)
        return rows if rows.shape.rank == 1 else tf.reshape(rows, [-1])

    @staticmethod
    def _are_small(values: Sequence[Array]) -> bool:
        """Return whether to join these in one float64 array, where squares do not underflow."""
        sizes = [v.shape.num_elements() for v in values]
        if any(size is None for size in sizes) or any(v.dtype == tf.float64 for v in values):
            return False
        return bool(sum(sizes) < _SMALL)

    @staticmethod
    def _choose(
        condition: Array, yes: Callable[..., Array], no: Callable[..., Array], inputs: list[Array]
    ) -> Array:
        """Return ``yes(*inputs)`` or ``no(*inputs)``; only that one is computed."""
        if tf.executing_eagerly():
            return yes(*inputs) if condition else no(*inputs)
        # Not `tf.cond`: it replaces the branches by two operations for each input.
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
        then, otherwise = (tf.function(f).get_concrete_function(*specs) for f in (yes, no))
        (result,) = tf.raw_ops.StatelessIf(
            cond=condition,
            input=inputs,
            Tout=[tf.float64],
            then_branch=then,
            else_branch=otherwise,
        )
        result.set_shape(then.output_shapes)
        return result

    @staticmethod
    def _wide(tensor: Array) -> Array:
        return tensor if tensor.dtype in (tf.float32, tf.float64) else tf.cast(tensor, tf.float32)

    def _scaled_norm(self, values: Sequence[Array]) -> Array:
        zero = tf.zeros(1, tf.float64)
        flat = [tf.reshape(tf.cast(v, tf.float64), [-1]) for v in values]
        joined = tf.concat([zero, *flat], axis=0)
        unit = self.unit(tf.reduce_max(tf.abs(joined)))
        return unit * _sqrt(tf.reduce_sum(tf.square(joined / unit)))

    def of_group(self, numbers: Array, group: int) -> Array:
        # To see one number as another shape takes less than to cut it out.
        single = numbers.shape.num_elements() == 1
        return self._only(numbers) if single else numbers[group]

    def all(self, x: Array) -> Array:
        return self._only(x) if x.shape.num_elements() == 1 else tf.reduce_all(x)

    @staticmethod
    def _only(x: Array) -> Array:
        return tf.reshape(x, []) if x.shape.rank else x

    def multiply(
        self, arrays: Sequence[Array], factor: Array, product: Any = _product
    ) -> list[Array]:
        k = tf.cast(factor, self._product_dtype(arrays[0]))
        return [self._multiply(t, k, product) for t in arrays]

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        return [self._keep(condition, t) for t in arrays]

    def _keep(self, condition: Array, tensor: Array) -> Array:
        if isinstance(tensor, tf.IndexedSlices):
            values = self._keep(condition, tensor.values)
            return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
        return tf.where(condition, tensor, tf.zeros_like(tensor))

    def group_extremes(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        zero = tf.zeros(1, tf.float64)
        flat = [tf.reshape(tf.cast(self._values(t), tf.float64), [-1]) for t in arrays]
        joined = [tf.concat([zero, *(flat[i] for i in m)], axis=0) for m in members]
        return (
            tf.stack([tf.reduce_min(values) for values in joined]),
            tf.stack([tf.reduce_max(values) for values in joined]),
        )

    def stack(self, arrays: Sequence[Array]) -> Array:
        return tf.stack(arrays)

    def cast(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, dtype)

    def largest(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        return tf.reduce_max(tf.abs(array), axis=axes, keepdims=axes is not None)

    def total(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        return tf.reduce_sum(tf.cast(array, tf.float64), axis=axes, keepdims=axes is not None)

    def wide(self, array: Array) -> Array:
        return tf.cast(array, tf.float64)

    def joined(self, arrays: Sequence[Array]) -> Array:
        values = [self._values(t) for t in arrays]
        widest = max((v.dtype for v in values), key=lambda dtype: dtype.size)
        if len({v.dtype for v in values}) > 1:
            widest = max(widest, tf.float32, key=lambda dtype: dtype.size)
        flat = [v if v.shape.rank == 1 else tf.reshape(v, [-1]) for v in values]
        return tf.concat([tf.cast(v, widest) for v in flat], axis=0)

    def _slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        wide = tf.cast(array, tf.float64)
        unit = self.unit(tf.reduce_max(tf.abs(wide), axis=axes, keepdims=True))
        return unit * _sqrt(tf.reduce_sum(tf.square(wide / unit), axis=axes, keepdims=True))

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return tf.reshape(array, shape)

    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        pairs = zip(arrays, factors, strict=True)
        return [self._multiply(a, tf.cast(k, self._product_dtype(a))) for a, k in pairs]

    def repeated(self, numbers: Sequence[int], times: Sequence[int], like: Array) -> Array:
        return tf.constant(np.repeat(numbers, times))

    def take(self, values: Array, index: Array) -> Array:
        return tf.gather(values, index)

    def group_max(self, values: Array, index: Array, groups: int) -> Array:
        return tf.math.unsorted_segment_max(values, index, groups)

    def rescale(self, arrays: Sequence[Array], factor: Array, keep: Array | None) -> list[Array]:
        if keep is None:
            return self.multiply(arrays, factor)
        # In MulNoNan, 0 times NaN is 0: one operation for each tensor zeroes a skipped step.
        kept = tf.where(keep, factor, tf.zeros_like(factor))
        return self.multiply(arrays, kept, tf.raw_ops.MulNoNan)
