"""Time secure noise beside declearn's: ``python -m benchmarks.noise``; prints nanoseconds a value.

Their generators are the same, the operating system's; declearn's asks it value by value.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import GaussianNoiseModule

from fedclip.privacy.noise import add_noise, insecure_normals, secure_normals

SIZE = 1_000_000


def best(action: Callable[[], object], times: int) -> float:
    """Return the nanoseconds that each value takes, the best of so many times."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / SIZE * 1e9


def main() -> None:
    vector = NumpyVector({"w": np.zeros(SIZE, dtype=np.float32)})
    secure, fast = (GaussianNoiseModule(std=1.0, safe_mode=safe) for safe in (True, False))
    times = {
        "declearn, secure": best(lambda: secure.run(vector), 2),
        "fedclip, secure": best(lambda: add_noise(vector.coefs, 1.0, secure_normals), 7),
        "declearn, insecure": best(lambda: fast.run(vector), 7),
        "fedclip, insecure": best(lambda: add_noise(vector.coefs, 1.0, insecure_normals(0)), 7),
    }
    for name, taken in times.items():
        print(f"{name:20} {taken:8.1f} ns a value")
    ratio = times["declearn, secure"] / times["fedclip, secure"]
    print(f"secure noise: {ratio:.1f} times as fast as declearn's")


if __name__ == "__main__":
    main()
