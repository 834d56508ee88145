# SPDX-License-Identifier: Apache-2.0
"""The memory that outputs are written to: large gradients come out as small ones do."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers import each_framework, needs, run

from fedclip import NormClip, ValueClip
from fedclip.arrays import NUMPY, Arena
from fedclip.arrays.base import Arithmetic
from fedclip.testing import to_numpy, to_vector

MANY = [(1100, 210)] * 37 + [(), (0, 3), (5,)]
"""Above 32 MiB together, each below 4 MiB."""


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_arrays_are_apart_and_aligned() -> None:
    source = [np.full(shape, i, np.float32) for i, shape in enumerate(MANY)]
    arena = Arena([s.nbytes for s in source])
    outputs = [arena.empty(s.shape, s.dtype) for s in source]
    for output, values in zip(outputs, source, strict=True):
        assert output.shape == values.shape
        assert output.flags.c_contiguous
        output[...] = values
    for output, values in zip(outputs, source, strict=True):
        np.testing.assert_array_equal(output, values)
        if values.nbytes > 65_536:
            assert address(output) % 64 == 0
    # It was one allocation.
    assert len({id(o.base) for o in outputs if o.nbytes > 65_536}) == 1


def test_more_than_was_said_is_given_too() -> None:
    arena = Arena([8 * 2**18] * 16)
    arrays = [arena.empty((2**18,), np.dtype(float)) for _ in range(40)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [array[0] for array in arrays] == list(range(40))
    assert len({id(array.base) for array in arrays}) == 3


def test_little_is_given_separately() -> None:
    arena = Arena([8000] * 20)
    assert arena.empty((1000,), np.dtype(float)).base is None


FAULTS = """
import resource
import numpy as np
from declearn.model.sklearn import NumpyVector
from fedclip import NormClip

gradient = NumpyVector({f"t{i}": np.full((136, 136), i, np.float32) for i in range(200)})
clipper = NormClip(1.0)
for _ in range(3):
    clipper.run(gradient)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    clipper.run(gradient)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do as they like")
def test_memory_is_used_again_from_step_to_step() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    # Page by page it would be 3,600 a step.
    assert int(done.stdout) < 3_600


@each_framework()
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_large_gradient_is_clipped_as_a_small_one(framework: str, scope: str) -> None:
    needs(framework)
    rng = np.random.default_rng(7)
    arrays = {f"t{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(MANY)}
    arrays["wide"] = rng.standard_normal((1100, 1000)).astype(np.float32)
    arrays["turned"] = np.asfortranarray(rng.standard_normal((400, 90)).astype(np.float32))
    before = {name: array.copy() for name, array in arrays.items()}
    gradient = to_vector(arrays, framework)
    output = to_numpy(NormClip(0.01, scope=scope).run(gradient))
    norms = {name: float(np.linalg.norm(a.astype(np.float64))) for name, a in before.items()}
    total = float(np.linalg.norm(list(norms.values())))
    for name, expected in before.items():
        np.testing.assert_array_equal(to_numpy(gradient)[name], expected)
        norm = total if scope == "global" else norms[name]
        factor = 0.01 / norm if norm > 0.01 else 1.0
        assert output[name].shape == expected.shape
        np.testing.assert_allclose(output[name], expected * factor, rtol=3e-6)


def test_values_of_a_large_gradient() -> None:
    rng = np.random.default_rng(8)
    arrays = {f"t{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(MANY)}
    (output,) = run(ValueClip(0.5), [arrays])
    for name, values in arrays.items():
        np.testing.assert_array_equal(output[name], np.clip(values, -0.5, 0.5))


@pytest.mark.parametrize("held", [[1, 1, 1], [5, 5, 5], [8, 8, 8], [2, 8, 5]])
def test_selected_or_sorted_is_the_same(held: list[int]) -> None:
    rng = np.random.default_rng(9)
    table = rng.integers(0, 5, (8, 3)).astype(float)
    counts = np.array(held, float)
    for quantile in (0.0, 0.3, 0.5, 0.95, 1.0):
        rank = np.floor(quantile * (counts - 1))
        selected = NUMPY.ranked(table, counts, rank)
        ordered = Arithmetic.ranked(NUMPY, table, counts, rank)
        np.testing.assert_array_equal(selected, ordered)
    row = counts - 1
    values = np.array([7.0, 8.0, 9.0])
    put = NUMPY.put(table, row, values)
    np.testing.assert_array_equal(put, Arithmetic.put(NUMPY, table, row, values))
    assert (table < 5).all()
