# SPDX-License-Identifier: Apache-2.0
"""Bounds hold for the numbers that sums lose most digits of, on hosts, devices and in graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from helpers import needs, pairwise, require

from fedclip import NormClip
from fedclip.arrays import backend_named
from fedclip.arrays.blocks import UNCERTAINTY, lanes
from fedclip.testing import FRAMEWORKS, to_vector
from fedclip.transforms import clip_on_device

LIMIT = 0.7
SIZES = [100, 511, 512, 1024, 5000, 16_384, 100_003]
# Half of the last digit of 1.
TIE = {"float32": 2.0**-24, "float64": 2.0**-53}


def norm(values: Any) -> float:
    # NumPy adds up in pairs, and mostly in 80 bits here.
    return float(np.sqrt(np.square(np.asarray(values, np.longdouble)).sum()))


def hard(size: int, dtype: str) -> Iterator[np.ndarray]:
    """Yield arrays of which many kinds of sums lose many digits, to one side."""
    rng = np.random.default_rng(size)
    for value in rng.uniform(0.5, 1, 12):
        yield np.full(size, value)
    for many in (1, 8, 32, 128):
        squares = np.full(size, TIE[dtype])
        squares[:many] = 1
        yield np.sqrt(squares)
    for width in (16, 32, 256, 1024):
        squares = np.full(size, TIE[dtype])
        squares[::width] = 1
        yield np.sqrt(squares)
        yield np.sqrt(fractal(size, width, TIE[dtype]))


def fractal(size: int, width: int, tie: float) -> np.ndarray:
    """Return squares of which a tree of sums of so many loses all but the first."""
    squares = np.zeros(size)
    squares[0], held = 1.0, 1
    while held < size:
        for start in range(held, min(size, held * width), held):
            squares[start : start + held] = tie / held
        held *= width
    return squares


def assert_bound(clip: Callable[[np.ndarray], Any], size: int, dtype: str) -> None:
    for values in hard(size, dtype):
        given = values.astype(dtype)
        found = norm(np.asarray(clip(given)))
        assert found <= LIMIT
        # And the limit is used up, but for the margin.
        assert found >= LIMIT * (1 - 1.5e-6)


@pairwise(framework=FRAMEWORKS, dtype=[*TIE], size=SIZES)
def test_on_the_host(framework: str, dtype: str, size: int) -> None:
    needs(framework)
    clipper = NormClip(LIMIT)
    assert_bound(lambda v: clipper.run(to_vector({"w": v}, framework)).coefs["w"], size, dtype)


@contextmanager
def compiled(framework: str, dtype: str, size: tuple[int, ...], **config: Any) -> Iterator[Any]:
    """Give the step of `norm-clip` on a device, in a graph where the framework has one."""
    needs(framework)
    module, xp, jit = require(framework), backend_named(framework), config.pop("jit", False)
    clipper = NormClip(LIMIT, **config)
    groups = clipper.groups({"w": size})
    transform = clipper.transform(groups)

    def step(array: Any) -> Any:
        return clip_on_device(transform, {"w": array}, groups, xp, (), "skip")[0]["w"]

    session: Any = nullcontext()
    if framework == "torch":
        make, graph = module.from_numpy, step
    elif framework == "tensorflow":
        make, graph = module.constant, module.function(step, jit_compile=jit)
    else:
        from fedclip.arrays.jax import float64

        # JAX has float64 only if it is needed, as in plain JAX.
        make, graph, session = module.numpy.asarray, module.jit(step), float64(dtype == "float64")
    with session:
        yield lambda values: np.asarray(graph(make(values)))


ON_DEVICES = [framework for framework in FRAMEWORKS if framework != "numpy"]


@pairwise(framework=ON_DEVICES, jit=[False, True], dtype=[*TIE], size=[100, 512, 16_384, 100_003])
def test_on_devices(framework: str, jit: bool, dtype: str, size: int) -> None:
    with compiled(framework, dtype, (size,), jit=jit) as step:
        assert_bound(step, size, dtype)


@pytest.mark.parametrize("dtype", TIE)
@pytest.mark.parametrize("framework", ON_DEVICES)
def test_slices_on_devices(framework: str, dtype: str) -> None:
    with compiled(framework, dtype, (10_000, 4), dims=[0]) as step:
        for values in hard(40_000, dtype):
            clipped = step(values.astype(dtype).reshape(4, 10_000).T.copy())
            assert max(map(norm, clipped.T)) <= LIMIT


@pytest.mark.parametrize("dtype", TIE)
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_on_the_host(dim: int, dtype: str) -> None:
    clipper = NormClip(LIMIT, dims=dim)
    for values in hard(36_000, dtype):
        table = values.reshape(4, 9000).astype(dtype)
        clipped = clipper.clip({"w": table if dim else table.T})["w"]
        assert max(map(norm, clipped if dim else clipped.T)) <= LIMIT


@pytest.mark.parametrize(
    ("wide", "found"), [(1, 1), (8, 8), (12, 8), (16, 16), (32, 32), (64, 64), (128, 64)]
)
def test_lanes_of_a_processor(wide: int, found: int) -> None:
    def dot(x: np.ndarray, y: np.ndarray) -> float:
        sums = np.zeros(wide, np.float32)
        for start in range(0, len(x), wide):
            part = x[start : start + wide] * y[start : start + wide]
            sums[: len(part)] += part
        return math.fsum(sums.tolist())

    assert lanes(dot) == found


@pytest.mark.parametrize("shape", [(1 << 23,), (1 << 12, 1 << 11), (2, 1 << 22)])
def test_long_arrays_of_jax_are_measured_as_well_as_short_ones(shape: tuple[int, ...]) -> None:
    needs("jax")
    import jax

    values = np.zeros(math.prod(shape), np.float32)
    # Each of these is added to the first one, and lost, where XLA adds up all at once.
    values[[2**k for k in range(23) if not 10 < k < 15]] = 2.0**-12
    values[[48, 192, 768, 3 << 19, 3 << 21]] = 2.0**-12
    values[0] = 1.0
    xp = backend_named("jax")
    measured = jax.jit(lambda array: xp.group_norms([array], [[0]]))
    found = float(measured(jax.numpy.asarray(values.reshape(shape)))[0])
    assert norm(values) * (1 - UNCERTAINTY) <= found <= norm(values) * (1 + 1e-7)
