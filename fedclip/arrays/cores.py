# SPDX-License-Identifier: Apache-2.0
"""All cores that the process may use, for reading and multiplying large arrays.

One core does not read as fast as memory delivers. NumPy releases the interpreter's lock in both
operations, so threads of Python are enough. The results do not depend on their number:
each piece has its own place for its result, and the results are added up afterwards, in order.

``python -m benchmarks --threads 1,2`` shows the gain.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import numpy as np

PIECE = 1 << 18
"""Number of elements in one call: its 2 MiB in float64 take a hundred times as long as the call."""

# Bytes: waking a thread takes as long as reading some hundred kilobytes.
_PER_CORE = 1 << 21
THREADED = 2 * _PER_CORE
"""Bytes from which on a second thread is worth its while."""
_LARGE = 1 << 18


def cores() -> int:
    """Return the number of threads that may run: by affinity, OMP_NUM_THREADS and torch."""
    affinity = getattr(os, "sched_getaffinity", None)
    number = len(affinity(0)) if affinity else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if setting.isdigit():
        number = min(number, int(setting))
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        number = min(number, torch.get_num_threads())  # type: ignore[union-attr]
    return max(number, 1)


def num_threads(sizes: Sequence[int]) -> int:
    """Return the number of threads for arrays of these sizes in bytes: 1 for small ones."""
    # The calls for small arrays are so short that threads only wait for the interpreter's lock:
    # with two, 200 arrays of 74 kB take a third longer.
    size = sum(sizes)
    if size >= THREADED:
        size = sum([size for size in sizes if size >= _LARGE])
    return 1 if size < THREADED else min(cores(), size // _PER_CORE)


def each(calls: Sequence[Callable[[], object]], threads: int) -> None:
    """Make all calls, in any order, over a number of threads, this one included."""
    if threads < 2:
        for call in calls:
            call()
        return
    # Two threads never get the same call, and each of them ends at a None.
    turns = deque([*calls, *[None] * threads])
    helpers: list[Future[None]] = []
    # The system may have no more threads, and Python starts none while it exits.
    with suppress(RuntimeError):
        for _ in range(threads - 1):
            helpers.append(_helpers().submit(_work, turns))
    try:
        _work(turns)
    finally:
        # A helper that has not begun, as others keep the threads busy, is not waited for.
        begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()


def _work(turns: deque[Callable[[], object] | None]) -> None:
    # A thread has its own settings for errors of floating point.
    with np.errstate(all="ignore"):
        for call in iter(turns.popleft, None):
            call()


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(os.cpu_count() or 1, 2) - 1, "fedclip")


# The threads are not there after a fork; a child that waited for them would hang.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)
