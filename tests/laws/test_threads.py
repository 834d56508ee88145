# SPDX-License-Identifier: Apache-2.0
"""Threads over large gradients give the same bits; a module that several share counts each step."""

import copy
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import PATIENCE

from fedclip import AGC, NormClip, ValueClip, ZScoreClip
from fedclip.arrays import blocks, cores
from fedclip.arrays import numpy as numpy_file


@pytest.mark.slow
@pytest.mark.parametrize("cls", [NormClip, ZScoreClip])
def test_steps_of_all_threads_are_counted_once(cls: type) -> None:
    clip = cls()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(500):
            clip.run(NumpyVector({"w": rng.standard_normal(3)}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(record.steps for record in clip.rounds) == 2000
    if cls is ZScoreClip:
        # But for the first five, which fill the median that protects the start.
        assert clip.get_state()["groups"]["all"]["count"] == 1995


@contextmanager
def watched(look: Callable[[], object]) -> Iterator[None]:
    """Look on from another thread, as often as can be; a fault is raised in the end."""
    done, faults = threading.Event(), list[Exception]()

    def watch() -> None:
        while not done.is_set() and not faults:
            try:
                look()
            except Exception as exc:
                faults.append(exc)

    interval, watching = sys.getswitchinterval(), threading.Thread(target=watch)
    try:
        sys.setswitchinterval(1e-6)
        watching.start()
        yield
    finally:
        done.set()
        watching.join()
        sys.setswitchinterval(interval)
    assert faults == []


LOOKS: dict[str, Callable[[Any], object]] = {
    "rounds": lambda clip: clip.rounds,
    "get_state": lambda clip: clip.get_state(),
    "statistics": lambda clip: clip.statistics(),
    "on_round_start": lambda clip: clip.on_round_start(),
    "set_state": lambda clip: clip.set_state(clip.get_state()),
    "copy": lambda clip: (copy.deepcopy(clip), pickle.loads(pickle.dumps(clip))),
}


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_on_takes_no_step_away(look: str) -> None:
    clip, steps = ZScoreClip(scope="tensor"), 300
    with watched(lambda: LOOKS[look](clip)):
        for i in range(steps):
            # A state is taken up by the tensors that it is of.
            first = 0 if look == "set_state" else 7 * i
            clip.clip({f"w{(first + j) % 60}": np.ones(3) for j in range(4)})
    # The others begin rounds, of which old ones are dropped, or take an older state up.
    if look not in ("on_round_start", "set_state"):
        assert sum(record.steps for record in clip.rounds if record.group == "all") == steps


def test_each_thread_clips_by_its_own_weights() -> None:
    agc = AGC(1.0, unit="tensor")
    gradient = NumpyVector({"w": np.array([1e3])})

    def work(size: float) -> set[float]:
        weights = NumpyVector({"w": np.array([size])})
        return {round(float(agc.run(gradient, weights).coefs["w"][0]), 3) for _ in range(300)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [1.0, 2.0, 3.0, 4.0])) == [{1.0}, {2.0}, {3.0}, {4.0}]


def large(dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
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
        outputs = clip.clip(large(dtype)), ValueClip(0.5).clip(large(dtype))
        arrays = [np.asarray(v).tobytes() for output in outputs for v in output.values()]
        found.append((clip.last.norm_before, arrays))
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(("text", "most"), [("1", 1), ("2,1", 2), ("", 64), ("many", 64), ("0", 1)])
def test_settings_limit_the_number(text: str, most: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
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
