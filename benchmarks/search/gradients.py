"""Gradients of every framework, dtype and layout, of ordinary and of extreme values."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fedclip.testing import to_vector

DTYPES = ("float16", "bfloat16", "float32", "float64")

# The largest finite number, the smallest normal one, and the smallest of all.
RANGES = {
    "float16": (65504.0, 2.0**-14, 2.0**-24),
    "bfloat16": (3.3895313892515355e38, 2.0**-126, 2.0**-133),
    "float32": (3.4028234663852886e38, 2.0**-126, 2.0**-149),
    "float64": (1.7976931348623157e308, 2.0**-1022, 2.0**-1074),
}

# Few sets of shapes, so that what is compiled for them is used again.
SHAPES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"w": (7,)},
    {"w": (2,)},
    {"scale": ()},
    {"empty": (0,)},
    {"enc.w": (3, 4), "enc.b": (4,), "scale": ()},
    {"enc.w": (3, 4), "enc.b": (4,), "head.w": (5, 2), "head.b": (2,)},
    {"a": (1,), "empty": (0, 3), "b": (2, 3, 2)},
    {"conv.k": (2, 2, 3, 2), "conv.b": (2,), "head": (5, 2)},
    {"w": (40,), "v": (40,)},
    {"w": (1200,)},
)
KINDS = ("normal", "normal", "equal", "one", "wide", "subnormal", "huge", "tiny", "zero", "few")
LAYOUTS = {
    "numpy": ("plain", "fortran", "strided", "reversed", "transposed", "repeated", "swapped"),
    "torch": ("plain", "strided", "transposed", "repeated", "sparse", "sparse"),
    "tensorflow": ("plain", "sparse"),
    "jax": ("plain",),
}


@dataclass(frozen=True)
class Tensor:
    """What one tensor is made of: all that its reproduction needs.

    Attributes
    ----------
    values
        float64 numbers that the dtype can hold; of a sparse tensor, its rows before merging.
    dtype, layout
        As in `DTYPES` and `LAYOUTS`.
    rows
        Which row each of the values of a sparse tensor is added to; there are `n_rows`.
    """

    values: np.ndarray
    dtype: str
    layout: str = "plain"
    rows: tuple[int, ...] = ()
    n_rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, which of a sparse one is that of the dense one."""
        if self.layout == "sparse":
            return (self.n_rows, *self.values.shape[1:])
        return self.values.shape


Gradient = dict[str, Tensor]


def held(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values that the dtype can hold, as float64; what is too large is its largest."""
    top = RANGES[dtype][0]
    values = np.clip(values, -top, top)
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    # The upper half of a float32, rounded to the nearest.
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    found = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.clip(found, -top, top)


def draw(rng: np.random.Generator, framework: str, scale: float, shapes: Any) -> Gradient:
    """Return a gradient of about the scale; mostly of one dtype and kind, sometimes of several."""
    dtypes = [d for d in DTYPES if framework != "numpy" or d != "bfloat16"]
    mixed = rng.random() < 0.2
    dtype, kind = str(rng.choice(dtypes)), str(rng.choice(KINDS))
    found = {}
    for name, shape in shapes.items():
        if mixed:
            dtype, kind = str(rng.choice(dtypes)), str(rng.choice(KINDS))
        plain = rng.random() < 0.6
        layout = "plain" if plain else str(rng.choice(LAYOUTS[framework]))
        found[name] = _tensor(rng, shape, dtype, kind, layout, scale)
    return found


def _tensor(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: str,
    kind: str,
    layout: str,
    scale: float,
) -> Tensor:
    if layout == "sparse" and len(shape) in (1, 2) and shape[0]:
        n_rows, count = shape[0], int(rng.integers(0, 9))
        rows = tuple(int(row) for row in rng.integers(0, min(n_rows, 4), count))
        values = _values(rng, (count, *shape[1:]), dtype, kind, scale)
        if count and rng.random() < 0.5:
            # Rows that nearly cancel; those near the largest number become infinite.
            with np.errstate(over="ignore"):
                values[count // 2 :] = -values[: count - count // 2] * rng.uniform(0.9, 1.1)
        return Tensor(held(values, dtype), dtype, layout, rows, n_rows)
    if layout == "sparse" or not shape:
        layout = "plain"
    values = _values(rng, shape, dtype, kind, scale)
    if layout == "repeated":
        values = np.broadcast_to(values[:1], shape)
    return Tensor(held(values, dtype), dtype, layout)


def _values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, kind: str, scale: float
) -> np.ndarray:
    largest, smallest_normal, smallest = RANGES[dtype]
    normal = rng.standard_normal(shape)
    match kind:
        case "equal":
            return np.full(shape, scale * rng.choice([-1.0, 1.0]))
        case "one":
            values = np.zeros(shape)
            if values.size:
                values.flat[rng.integers(values.size)] = scale * rng.standard_normal()
            return values
        case "wide":
            return np.clip(normal * scale, -1e300, 1e300) * 10.0 ** rng.uniform(-8, 4, shape)
        case "subnormal":
            return smallest * rng.integers(-40, 41, shape)
        case "huge":
            return largest * rng.uniform(-1.0, 1.0, shape)
        case "tiny":
            return smallest_normal * normal * 10.0 ** rng.uniform(-2, 2)
        case "zero":
            return np.zeros(shape)
        case "few":
            # Whole multiples of a power of two: their norm is known exactly.
            return 2.0 ** math.floor(math.log2(scale)) * rng.integers(-4, 5, shape)
        case _:
            return normal * scale


def build(gradient: Gradient, framework: str) -> Any:
    """Return the declearn Vector of the framework."""
    empty = to_vector({}, framework)
    return type(empty)({name: _array(tensor, framework) for name, tensor in gradient.items()})


def _array(tensor: Tensor, framework: str) -> Any:
    if tensor.layout == "sparse":
        return _sparse(tensor, framework)
    if framework == "numpy":
        return _numpy(tensor.values.astype(tensor.dtype), tensor.layout)
    if framework == "torch":
        return _torch(tensor)
    # A conversion by TensorFlow would flush subnormals.
    narrow = tensor.values if tensor.dtype == "bfloat16" else tensor.values.astype(tensor.dtype)
    return to_vector({"x": narrow}, framework, tensor.dtype).coefs["x"]


def _numpy(values: np.ndarray, layout: str) -> np.ndarray:
    match layout:
        case "fortran":
            return np.asfortranarray(values)
        case "strided":
            wide = np.full((*values.shape[:-1], 2 * values.shape[-1]), 7, values.dtype)
            wide[..., ::2] = values
            return wide[..., ::2]
        case "reversed":
            return np.ascontiguousarray(values[::-1])[::-1]
        case "transposed":
            return np.ascontiguousarray(values.T).T
        case "repeated" if len(values):
            return np.broadcast_to(np.ascontiguousarray(values[:1]), values.shape)
        case "swapped":
            return values.astype(values.dtype.newbyteorder())
    return values


def _torch(tensor: Tensor) -> Any:
    import torch

    values = torch.tensor(tensor.values, dtype=getattr(torch, tensor.dtype))
    match tensor.layout:
        case "strided":
            wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0, dtype=values.dtype)
            wide[..., ::2] = values
            return wide[..., ::2]
        case "transposed":
            dims = tuple(range(values.ndim))[::-1]
            return values.permute(dims).contiguous().permute(dims)
        case "repeated" if len(values):
            return values[:1].clone().expand(values.shape)
    return values


def _sparse(tensor: Tensor, framework: str) -> Any:
    if framework == "torch":
        import torch

        # Of values with the strides of a larger array, torch 2.13 writes a dense tensor past its
        # end; a copy has strides of its own.
        values = tensor.values.copy()
        return torch.sparse_coo_tensor(
            torch.tensor([list(tensor.rows)], dtype=torch.int64),
            torch.tensor(values, dtype=getattr(torch, tensor.dtype)),
            tensor.shape,
            check_invariants=True,
        )
    import tensorflow as tf

    return tf.IndexedSlices(
        _array(replace(tensor, layout="plain"), framework),
        tf.constant(list(tensor.rows), dtype=tf.int64),
        tf.constant(tensor.shape, dtype=tf.int64),
    )


def merged(array: Any) -> np.ndarray:
    """Return an array as dense float64; rows that repeat are added up as its framework does."""
    if getattr(array, "is_sparse", False) is True:
        array = array.detach().coalesce().to_dense()
    elif type(array).__name__ == "IndexedSlices":
        array = _as_dense(array)
    return _host(array).astype(np.float64)


def _as_dense(slices: Any) -> Any:
    import tensorflow as tf

    shape = tuple(int(n) for n in slices.dense_shape)
    if not len(slices.indices):
        return tf.zeros(shape, slices.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])


def parts(array: Any) -> tuple[Any, ...]:
    """Return what tells whether an array has been changed: dtype, shape, strides and bytes."""
    if getattr(array, "is_sparse", False) is True:
        return ("sparse", tuple(array.shape), *parts(array._indices()), *parts(array._values()))
    if type(array).__name__ == "IndexedSlices":
        shape = tuple(int(n) for n in array.dense_shape)
        return ("sparse", shape, *parts(array.indices), *parts(array.values))
    return str(array.dtype), tuple(array.shape), _host(array).tobytes()


def _host(array: Any) -> np.ndarray:
    if str(array.dtype) == "torch.bfloat16":
        array = array.float()
    # TensorFlow's bfloat16 of no dimensions has to be asked in words.
    return np.asarray(array.numpy() if hasattr(array, "numpy") else array)


@cache
def kind_of(framework: str) -> str:
    """Return what stands for a framework in reproductions: the import of its Vector."""
    cls = type(to_vector({}, framework))
    return f"from {cls.__module__} import {cls.__name__}"
