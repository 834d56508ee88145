# SPDX-License-Identifier: Apache-2.0
"""The only folder that knows frameworks: one small file each, chosen by the type of an array.

A framework is imported when fedclip meets the first array of it. To add a framework, write its
file and add a row to `_FILES`.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from fedclip.arrays.base import (
    LARGEST,
    NOWHERE,
    UNDERFLOW,
    Arithmetic,
    Array,
    Backend,
    Form,
    Host,
    HostView,
    Views,
)
from fedclip.arrays.memory import Memory
from fedclip.arrays.number import NumberArithmetic
from fedclip.arrays.numpy import NumpyBackend

__all__ = [
    "LARGEST",
    "NOWHERE",
    "NUMBER",
    "NUMPY",
    "UNDERFLOW",
    "Arithmetic",
    "Array",
    "Backend",
    "Form",
    "Host",
    "HostView",
    "Memory",
    "Views",
    "backend_named",
    "backend_of",
]

NUMBER = NumberArithmetic()
NUMPY = NumpyBackend()

# Top-level package of a value's class -> file and class of the backend.
_FILES = {
    "numpy": ("numpy", "NumpyBackend"),
    "torch": ("torch", "TorchBackend"),
    "dtensor": ("sharded", "ShardedBackend"),
    "tensorflow": ("tensorflow", "TensorflowBackend"),
    "jax": ("jax", "JaxBackend"),
    "jaxlib": ("jax", "JaxBackend"),
}
_loaded: dict[str, Backend] = {"numpy": NUMPY}
_by_type: dict[type, Backend] = {}


def backend_named(name: str) -> Backend:
    """Return the backend of the framework called `name`, importing it at the first call."""
    file, cls = _FILES[name]
    if file not in _loaded:
        module = importlib.import_module(f"fedclip.arrays.{file}")
        _loaded[file] = getattr(module, cls)()
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
    if isinstance(numbers, (bool, int, float, np.ndarray)):
        return np.atleast_1d(numbers)
    return np.atleast_1d(backend_of(numbers).to_host(numbers))


def _find(cls: type) -> Backend:
    if cls.__name__ == "DTensor":
        return backend_named("dtensor")
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _FILES and (backend := backend_named(root)).reads(cls):
            return backend
    raise TypeError(
        "fedclip clips dense arrays of NumPy, PyTorch, TensorFlow and JAX, sparse COO tensors and "
        f"IndexedSlices, got {cls.__module__}.{cls.__name__}"
    )
