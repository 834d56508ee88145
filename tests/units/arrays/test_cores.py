# SPDX-License-Identifier: Apache-2.0
"""Threads over large gradients: the same bits whatever their number, after a fork too."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import PATIENCE

from fedclip import NormClip, ValueClip
from fedclip.arrays import blocks, cores
from fedclip.arrays import numpy as numpy_file


def large(dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (1500, 1001), "b": (64, 64, 3, 3), "c": (999,), "d": (), "e": (700_001,)}
    arrays = {name: np.asarray(rng.standard_normal(s), dtype) for name, s in shapes.items()}
    return arrays | {"turned": np.asfortranarray(arrays["a"]), "gaps": arrays["a"][:, ::3]}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(number: int) -> None:
        for module in (blocks, numpy_file):
            monkeypatch.setattr(module, "num_threads", lambda _: number)

    return use


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scope"), [("float16", "tensor"), ("float32", "global")])
def test_the_bits_do_not_depend_on_the_number_of_threads(
    dtype: str, scope: str, threads: Any
) -> None:
    found = []
    for number in (1, 2, 3, 8):
        threads(number)
        clip = NormClip(1.0, scope=scope)
        output = clip.run(NumpyVector(large(dtype))).coefs
        values = ValueClip(0.5).run(NumpyVector(large(dtype))).coefs
        norms = np.asarray(clip.last.norm_before).tobytes()
        arrays = (*output.values(), *values.values())
        found.append((norms, [np.asarray(v).tobytes() for v in arrays]))
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(
    ("setting", "most"), [("1", 1), ("2,1", 2), ("", 64), ("many", 64), ("0", 1)]
)
def test_settings_limit_the_number(setting: str, most: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setitem(cores.sys.modules, "torch", None)
    assert cores.cores() == most
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert cores.cores() == 1
    assert cores.num_threads([1 << 30]) == 1


def test_nobody_waits_for_threads_that_others_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(cores, "_helpers", lambda: pool)
        go = threading.Event()
        pool.submit(go.wait, PATIENCE)
        made: list[int] = []
        cores.each([partial(made.append, i) for i in range(10)], 3)
        assert made == [*range(10)]
        go.set()
    # It takes no more work now, as at the interpreter's exit.
    cores.each([partial(made.append, i) for i in range(10)], 3)
    assert len(made) == 20
