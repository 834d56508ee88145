"""Measure one cell, and print JSON: ``python -m benchmarks.measure FRAMEWORK GRADIENT MODE``.

MODE is "quiet", where nothing is clipped; "clipped"; or "clippers", for all of them.
The floor is the machine's: reading with all cores that the process may use, or with one where
that is faster, and a product into memory that was touched before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from declearn.optimizer import list_optim_modules
from declearn.optimizer.modules import L2GlobalClipping

import fedclip
from benchmarks.models import GRADIENTS, Shape
from fedclip.core.parameters import signature_of

FAR = 1e9
"""A limit that no gradient here comes near."""

# What keeps each clipper from clipping anything; those not named here are left at their
# defaults, under which a gradient that is the same at every step is not clipped either.
QUIET: dict[str, dict[str, Any]] = {
    "norm-clip": {"max_norm": FAR},
    "value-clip": {"max_value": FAR},
    "adaptive-clip": {"start_norm": FAR},
    "ema-clip": {"warmup_norm": FAR},
    "growth-clip": {"warmup_norm": FAR},
    "auto-clip": {"warmup_norm": FAR},
    "percentile-norm-clip": {"warmup_norm": FAR},
}


def vector_of(framework: str, shapes: Sequence[Shape]) -> Any:
    """Return a gradient of standard normals, float32, as declearn's Vector of the framework."""
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    if framework == "numpy":
        from declearn.model.sklearn import NumpyVector

        return NumpyVector(arrays)
    if framework == "torch":
        import torch
        from declearn.model.torch import TorchVector

        return TorchVector({name: torch.from_numpy(x) for name, x in arrays.items()})
    if framework == "tensorflow":
        import tensorflow as tf
        from declearn.model.tensorflow import TensorflowVector

        return TensorflowVector({name: tf.constant(x) for name, x in arrays.items()})
    import jax.numpy as jnp
    from declearn.model.haiku import JaxNumpyVector

    return JaxNumpyVector({name: jnp.asarray(x) for name, x in arrays.items()})


def multiplier(framework: str, arrays: list[Any]) -> Callable[[], Any]:
    """Return the framework's own out-of-place multiplication of each array by a number."""
    if framework == "tensorflow":
        import tensorflow as tf

        return lambda: [tf.multiply(x, 0.5) for x in arrays]
    if framework == "jax":
        import jax

        return lambda: jax.block_until_ready([x * 0.5 for x in arrays])
    return lambda: [x * 0.5 for x in arrays]


def runner(framework: str, module: Any, gradient: Any) -> Callable[[], Any]:
    """Return a call of the module that ends when its result is there."""
    if framework != "jax":
        return lambda: module.run(gradient)
    import jax

    def run() -> Any:
        output = module.run(gradient)
        # What is not clipped comes back as it is: there is nothing to wait for.
        return output if output is gradient else jax.block_until_ready([*output.coefs.values()])

    return run


class Floor:
    """What reading and multiplying must take: NumPy on pieces of 1 MiB, over all cores.

    `product` writes to memory that it has touched before.
    """

    def __init__(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        flat = [a.reshape(-1) for a in arrays]
        outputs = [np.zeros_like(a) for a in flat]
        step = 1 << 18
        self._pieces = [
            (a[i : i + step], o[i : i + step])
            for a, o in zip(flat, outputs, strict=True)
            for i in range(0, a.size, step)
        ]
        # Waking a thread takes longer than reading 4 MiB. A thread that goes back to sleep also
        # takes the interpreter's lock, from the call that is measured next.
        self.cores = cores() if sum(a.nbytes for a in flat) >= 1 << 22 else 1
        self._pool = ThreadPoolExecutor(self.cores)

    def calls(self, name: str, call: Callable[[Any, Any], Any]) -> dict[str, Callable[[], Any]]:
        """Return what makes the call on each piece: with one core, and with all."""

        def one() -> None:
            for source, output in self._pieces:
                call(source, output)

        def every() -> None:
            turn, last = itertools.count(), len(self._pieces)

            def work(_: int) -> None:
                while (i := next(turn)) < last:
                    call(*self._pieces[i])

            list(self._pool.map(work, range(self.cores)))

        found: dict[str, Callable[[], Any]] = {f"{name}, one core": one}
        return found | ({f"{name}, all cores": every} if self.cores > 1 else {})

    def read(self) -> dict[str, Callable[[], Any]]:
        """Return calls that read all arrays once."""
        return self.calls("read", lambda source, _: np.vdot(source, source))

    def product(self) -> dict[str, Callable[[], Any]]:
        """Return calls that multiply all arrays."""
        k = np.float32(0.5)
        return self.calls("product", lambda source, output: np.multiply(source, k, out=output))


def cores() -> int:
    """Return the number of cores that this process may use."""
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    found = len(os.sched_getaffinity(0))
    return min(found, int(allowed)) if allowed.isdigit() else found


def side_by_side(
    calls: dict[str, Callable[[], Any]], seconds: float, least: int = 5
) -> dict[str, list[float]]:
    """Return the microseconds of every call in every round, taken in turn for some seconds.

    Each call is made untimed for half a millisecond, and at least once, ahead of the one that
    counts, so that what it finds in the caches does not depend on which other call came before
    it: after a step of JAX, a step of 45 microseconds takes 84 the second time, and 47 the sixth.
    The order is another one in each round, as the threads of a BLAS call keep spinning for some
    time after it.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    order, names = random.Random(0), list(calls)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < least or (time.perf_counter() < end and rounds < 300):
        rounds += 1
        order.shuffle(names)
        for name in names:
            call = calls[name]
            warm = time.perf_counter() + 5e-4
            call()
            while time.perf_counter() < warm:
                call()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def medians(
    calls: dict[str, Callable[[], Any]], seconds: float, least: int = 5
) -> dict[str, float]:
    """Return the median microseconds of every call."""
    times = side_by_side(calls, seconds, least)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_quiet(framework: str, shapes: Sequence[Shape], seconds: float) -> dict[str, float]:
    """Return medians in microseconds where nothing is clipped, and what zscore-clip costs more."""
    gradient = vector_of(framework, shapes)
    floor = Floor([np.asarray(x) for x in gradient.coefs.values()])
    result = medians(
        floor.read()
        | {
            "norm-clip": runner(framework, fedclip.NormClip(FAR), gradient),
            "declearn": runner(framework, L2GlobalClipping(FAR), gradient),
        },
        seconds,
    )
    scopes = {"zscore minus norm": "global"}
    if len(shapes) >= 100:
        scopes["zscore minus norm, by tensor"] = "tensor"
    for name, scope in scopes.items():
        if sum(map(np.prod, shapes)) > 1e7:
            break
        pair = {
            "norm": runner(framework, fedclip.NormClip(FAR, scope=scope), gradient),
            "zscore": runner(framework, fedclip.ZScoreClip(max_norm=FAR, scope=scope), gradient),
        }
        times = side_by_side(pair, seconds / 2)
        result[name] = _more(times["zscore"], times["norm"])
    return result


def measure_clipped(framework: str, shapes: Sequence[Shape], seconds: float) -> dict[str, float]:
    """Return medians in microseconds where all is clipped, and MiB that a step takes at most."""
    gradient = vector_of(framework, shapes)
    arrays = list(gradient.coefs.values())
    floor = Floor([np.asarray(x) for x in arrays])
    makers = {"norm-clip": fedclip.NormClip, "declearn": L2GlobalClipping}
    result = medians(
        floor.read()
        | floor.product()
        | {name: runner(framework, make(1.0), gradient) for name, make in makers.items()}
        | {"multiply": multiplier(framework, arrays)},
        seconds,
    )
    for name, make in makers.items():
        result[f"MiB, {name}"] = peak(lambda make=make: runner(framework, make(1.0), gradient))
    return result


def peak(make: Callable[[], Callable[[], Any]]) -> float:
    """Return the MiB that three steps need at most besides what is there before them."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return 0.0

    def kib(field: str) -> int:
        found = next(x for x in status.read_text().splitlines() if x.startswith(field))
        return int(found.split()[1])

    call = make()
    # This sets the peak back to what is in use now.
    reset.write_text("5")
    before = kib("VmRSS:")
    for _ in range(3):
        call()
    return (kib("VmHWM:") - before) / 1024


def _more(times: list[float], others: list[float]) -> float:
    """Return the median of the differences, each of two calls made one after the other."""
    return statistics.median(a - b for a, b in zip(times, others, strict=False))


def measure_clippers(
    framework: str, shapes: Sequence[Shape], seconds: float
) -> dict[str, dict[str, float | None]]:
    """Return for each clipper its time against norm-clip's, and that of a step by tensor."""
    large = vector_of(framework, shapes)
    many = vector_of(framework, [(64,)] * 1000)
    found: dict[str, dict[str, float | None]] = {}
    for name, cls in sorted(list_optim_modules().items()):
        if not issubclass(cls, fedclip.Clipper):
            continue
        config = QUIET.get(name, {})
        if name not in QUIET and "max_norm" in signature_of(cls):
            config = {"max_norm": FAR}
        try:
            module, by_tensor = cls(**config), None
            if "scope" in signature_of(cls):
                by_tensor = cls(**config, scope="tensor")
        except (TypeError, ValueError) as exc:
            print(f"{name} is left out: {exc}", file=sys.stderr)
            continue
        calls = {
            "norm-clip": runner(framework, fedclip.NormClip(FAR), large),
            name + "*": runner(framework, module, large),
        }
        times = medians(calls, seconds)
        ours = times[name + "*"]
        entry: dict[str, float | None] = {
            "microseconds": ours,
            "times norm-clip": ours / times["norm-clip"],
            "changed": float(module.run(large) is not large),
            "by tensor, ms": None,
        }
        if by_tensor is not None:
            steps = medians({"step": runner(framework, by_tensor, many)}, seconds)
            entry["by tensor, ms"] = steps["step"] / 1000
        found[name] = entry
    return found


MODES = {"quiet": measure_quiet, "clipped": measure_clipped, "clippers": measure_clippers}


def main() -> None:
    """Measure the cell that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=__doc__)
    parser.add_argument("framework")
    parser.add_argument("gradient", choices=GRADIENTS)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = MODES[options.mode](options.framework, GRADIENTS[options.gradient], options.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
