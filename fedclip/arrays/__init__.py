# SPDX-License-Identifier: Apache-2.0
"""The only folder that knows frameworks: one file each, chosen by the type of an array.

A framework is imported when fedclip meets the first array of it. To add a framework, write its
file and add a row to `_FILES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedclip.arrays.base import HALF_UNIT as HALF_UNIT
from fedclip.arrays.base import LARGEST as LARGEST
from fedclip.arrays.base import Arithmetic as Arithmetic
from fedclip.arrays.base import Array as Array
from fedclip.arrays.base import Arrays as Arrays
from fedclip.arrays.base import Backend as Backend
from fedclip.arrays.base import HostView as HostView
from fedclip.arrays.base import Repeated as Repeated
from fedclip.arrays.base import unit_of as unit_of
from fedclip.arrays.base import with_others as with_others
from fedclip.arrays.blocks import Float64 as Float64
from fedclip.arrays.blocks import encode
from fedclip.arrays.memory import Memory as Memory
from fedclip.arrays.numpy import NumpyBackend as NumpyBackend

NUMPY = NumpyBackend()

# Top-level package of a value's class -> file of the backend.
# The class has the name of the file.
_FILES = {name: name for name in ("numpy", "torch", "tensorflow", "jax")}
_FILES |= {"jaxlib": "jax", "dtensor": "sharded"}
# Classes of these packages without one value in each place; a mask would be lost.
_REFUSED = {"MaskedArray", "RaggedTensor", "SparseTensor", "JAXSparse", "ShapeDtypeStruct"}
_loaded: dict[str, Backend] = {"numpy": NUMPY}
_by_type: dict[type, Backend] = {}


def backend_named(name: str) -> Backend:
    """Return the backend of the framework called `name`, importing it at the first call."""
    file = _FILES[name]
    if file not in _loaded:
        module = importlib.import_module(f"fedclip.arrays.{file}")
        _loaded[file] = getattr(module, f"{file.title()}Backend")()
    return _loaded[file]


def backend_of(value: Any) -> Backend:
    """Return the backend for `value`, found from its type.

    Raises
    ------
    TypeError
        If no supported framework made the value.
    """
    cls = type(value)
    backend = _by_type.get(cls)
    if backend is None:
        backend = _by_type[cls] = _find(cls)
    return backend


def on_host(numbers: Any) -> HostView:
    """Return a number, or an array of numbers of any framework, as a NumPy array."""
    if isinstance(numbers, (bool, int, float, np.generic, np.ndarray)):
        return np.atleast_1d(numbers)
    return np.atleast_1d(backend_of(numbers).to_host(numbers))


def narrowed(values: Float64, like: Array) -> Array:
    """Return values as a dense array of the kind, dtype and device of `like`.

    Values too large for the dtype become its largest number. For an array that is not of floats
    the result is of the framework's widest ones.
    """
    backend = backend_of(like)
    like = like if isinstance(like, np.ndarray) else backend.dense(like)
    dtype = backend.dtype(like)
    if not dtype.startswith(("float", "bfloat")):
        return backend.asarray(values, like)
    # NumPy has no bfloat16: `encode` writes its bits as uint16.
    kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    values = np.asarray(np.clip(values, -LARGEST[dtype], LARGEST[dtype]))
    return backend.from_host([encode(values, kind)], [like])[0]


def rounded(means: Mapping[str, Float64], like: Mapping[str, Array]) -> dict[str, Array]:
    """Return averages as arrays like others, but dense; see `narrowed`."""
    return {name: narrowed(mean, like[name]) for name, mean in means.items()}


def _find(cls: type) -> Backend:
    if cls.__name__ == "DTensor":
        return backend_named("dtensor")
    roots = [base.__module__.partition(".")[0] for base in cls.__mro__]
    name = next((root for root in roots if root in _FILES), None)
    if name is None or not _REFUSED.isdisjoint(base.__name__ for base in cls.__mro__):
        raise TypeError(
            "fedclip clips dense arrays of NumPy, PyTorch, TensorFlow and JAX, sparse COO tensors "
            f"and IndexedSlices, got {cls.__module__}.{cls.__name__}: convert it to one of these"
        )
    return backend_named(name)
