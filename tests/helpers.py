# SPDX-License-Identifier: Apache-2.0
"""The clippers under test, one row each, and gradients of every framework.

To put a new clipper under test, add its row to `SPECIMENS`: every file of behaviours goes over
the table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from declearn.model.api import Vector
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import OptiModule

from fedclip.modules import Clipper

Arrays = Mapping[str, Any]

# The framework, and the package that has to be there.
_PACKAGES = {"numpy": "numpy", "torch": "torch", "tensorflow": "tensorflow", "jax": "haiku"}
FRAMEWORKS = list(_PACKAGES)


@dataclass(frozen=True)
class Specimen:
    """One clipper, as it is put under test.

    Attributes
    ----------
    name, config
        Registered name and parameters; small warm-ups, so that 20 steps see everything.
    bound
        Norm (L2, global) that no output exceeds, if there is one.
    element_bound
        The same for the absolute value of every element.
    projection
        Applying it twice, with the same state, is applying it once.
    identity
        A gradient that is nowhere over a limit comes back as the same object.
    stateful
        It has statistics.
    keeps_arrays
        Its state holds arrays of the shape of the gradient.
    equivariant
        Scaling all gradients by a power of two scales all outputs.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    bound: float | None = None
    element_bound: float | None = None
    projection: bool = False
    identity: bool = True
    stateful: bool = False
    keeps_arrays: bool = False
    equivariant: bool = False
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{'-' if self.label else ''}{self.label}"

    def make(self, **config: Any) -> Any:
        """Return a fresh clipper; `config` replaces parameters."""
        return OptiModule.from_specs(self.name, {**self.config, **config})


SPECIMENS = [
    Specimen("norm-clip", {"max_norm": 1.0}, bound=1.0, projection=True),
    Specimen("norm-clip", {"max_norm": 0.5, "scope": "tensor"}, projection=True, label="tensor"),
    Specimen("norm-clip", {"max_norm": 0.2, "dims": [0]}, projection=True, label="slices"),
    Specimen("norm-clip", {"max_norm": 0.7, "ord": 1}, projection=True, label="l1"),
    Specimen("norm-clip", {"max_norm": 0.1, "ord": "rms", "scope": "layer"}, label="rms"),
    Specimen("value-clip", {"max_value": 0.3}, element_bound=0.3, projection=True),
    Specimen("zscore-clip", {"z_max": 1.5, "warmup": 3, "max_norm": 1.5}, bound=1.5, stateful=True),
    Specimen(
        "zscore-clip",
        {"z_max": 1.5, "warmup": 3, "max_norm": None, "scope": "tensor", "std_eps": 0.0},
        stateful=True,
        equivariant=True,
        label="tensor",
    ),
    Specimen("no-op", {}, projection=True, equivariant=True),
]
MODULES = sorted({s.name for s in SPECIMENS})


def specimens(**traits: Any) -> Any:
    """Return the decorator that runs a test for each specimen with these traits."""
    chosen = [s for s in SPECIMENS if all(bool(getattr(s, t)) == v for t, v in traits.items())]
    return pytest.mark.parametrize("specimen", chosen, ids=str)


def frameworks(*, oracle: bool = True) -> Any:
    """Return the decorator that runs a test for each framework, with NumPy or without."""
    chosen = FRAMEWORKS if oracle else FRAMEWORKS[1:]
    return pytest.mark.parametrize("framework", chosen)


def available(framework: str) -> None:
    """Skip the test if the framework is not installed."""
    if importlib.util.find_spec(_PACKAGES[framework]) is None:
        pytest.skip(f"{framework} is not installed")


# -- gradients --------------------------------------------------------------------------------
@cache
def _vector_class(framework: str) -> type[Vector[Any]]:
    available(framework)
    if framework == "numpy":
        return NumpyVector
    if framework == "torch":
        from declearn.model.torch import TorchVector

        return TorchVector
    if framework == "tensorflow":
        from declearn.model.tensorflow import TensorflowVector

        return TensorflowVector
    # This turns on float64 for all of JAX, as it does for users of declearn.
    from declearn.model.haiku import JaxNumpyVector

    return JaxNumpyVector


def array(value: Any, framework: str, dtype: str | None = None) -> Any:
    """Return `value` as an array of a framework; "bfloat16" is a dtype on all but NumPy."""
    value = np.asarray(value)
    dtype = dtype or str(value.dtype)
    if framework == "numpy":
        return np.array(value, dtype=dtype)
    if framework == "torch":
        import torch

        return torch.tensor(value, dtype=getattr(torch, dtype))
    if framework == "tensorflow":
        import tensorflow as tf

        # A cast rather than a constant: TensorFlow makes no bfloat16 constant of float64 data.
        return tf.cast(tf.constant(value), dtype)
    import jax.numpy as jnp

    return jnp.asarray(value, dtype=dtype)


def vector(arrays: Arrays, framework: str = "numpy", dtype: str | None = None) -> Vector[Any]:
    """Return a declearn Vector of a framework, from NumPy arrays."""
    cls = _vector_class(framework)
    return cls({name: array(value, framework, dtype) for name, value in arrays.items()})


def as_numpy(value: Any) -> np.ndarray:
    """Return a dense array of any framework as NumPy, bfloat16 as float32."""
    if "bfloat16" in str(value.dtype):
        module = type(value).__module__
        if module.startswith("torch"):
            value = value.float()
        elif module.startswith("tensorflow"):
            import tensorflow as tf

            value = tf.cast(value, tf.float32)
        else:
            value = value.astype("float32")
    return np.asarray(value)


def to_numpy(gradients: Vector[Any]) -> dict[str, np.ndarray]:
    """Return the values of a Vector as NumPy arrays."""
    return {name: as_numpy(value) for name, value in gradients.coefs.items()}


SHAPES: dict[str, tuple[int, ...]] = {
    "enc.weight": (7, 5),
    "enc.bias": (5,),
    "head.weight": (3, 3, 2, 4),
    "head.scale": (),
}


def gradients(seed: int = 0, scale: float = 0.15) -> dict[str, np.ndarray]:
    """Return one random gradient, float64, of norm about 1.6 (for the usual scale)."""
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.normal(0, scale, shape)) for n, shape in SHAPES.items()}


def stream(steps: int = 20, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return gradients of several steps, with a spike at every sixth."""
    return [gradients(seed + t, 1.5 if t % 6 == 5 else 0.15) for t in range(steps)]


def norm(arrays: Mapping[str, Any] | Any) -> float:
    """Return the L2 norm of all arrays together, in (scaled) float64 arithmetic."""
    values = arrays.values() if isinstance(arrays, Mapping) else [arrays]
    flat = np.concatenate([as_numpy(v).astype(np.float64).ravel() for v in values])
    peak = np.abs(flat).max(initial=0.0)
    return float(peak * np.linalg.norm(flat / peak)) if peak else 0.0


def run(clipper: Clipper, steps: list[dict[str, np.ndarray]], framework: str = "numpy") -> Any:
    """Return the outputs of some steps, as NumPy arrays."""
    return [to_numpy(clipper.run(vector(step, framework))) for step in steps]


def assert_same(got: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> None:
    """Check that two lists of outputs are the same, bit for bit."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
