"""Measure one framework; print JSON: ``python -m benchmarks.measure FRAMEWORK [--quick]``."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from declearn.optimizer import list_optim_modules
from declearn.optimizer.modules import L2GlobalClipping

import fedclip
from fedclip.parameters import signature_of

# Name, shapes, rounds of measuring.
GRADIENTS = (
    ("40 tensors, 21M", [(525_000,)] * 40, 11),
    ("200 tensors, 3.7M", [(136, 136)] * 200, 25),
    ("20 tensors, 2.7k", [(135,)] * 20, 151),
)

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


def vector_of(framework: str, shapes: list[tuple[int, ...]]) -> Any:
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


def side_by_side(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of every call in every round, taken in turn.

    Each call is made once, untimed, ahead of the one that counts, so that what it finds in the
    caches does not depend on which other call came before it. The order is another one in each
    round, as the threads of a BLAS call keep spinning for some time after it.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    order, names = random.Random(0), list(calls)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            call = calls[name]
            call()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median microseconds of every call."""
    times = side_by_side(calls, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_quiet(framework: str, shapes: list[tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Return medians in microseconds where nothing is clipped, and what zscore-clip costs more."""
    gradient = vector_of(framework, shapes)
    host = [np.asarray(x) for x in gradient.coefs.values()]
    calls: dict[str, Callable[[], Any]] = {
        "floor": lambda: [np.vdot(x, x) for x in host],
        "norm-clip": runner(framework, fedclip.NormClip(FAR), gradient),
        "declearn": runner(framework, L2GlobalClipping(FAR), gradient),
    }
    result = medians(calls, rounds)
    scopes = {"zscore minus norm": "global"}
    if len(shapes) >= 100:
        scopes["zscore minus norm, by tensor"] = "tensor"
    for name, scope in scopes.items():
        pair = {
            "norm": runner(framework, fedclip.NormClip(FAR, scope=scope), gradient),
            "zscore": runner(framework, fedclip.ZScoreClip(max_norm=FAR, scope=scope), gradient),
        }
        times = side_by_side(pair, 2 * rounds)
        result[name] = _more(times["zscore"], times["norm"])
    return result


def measure_clipped(framework: str, shapes: list[tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Return medians in microseconds where all is clipped."""
    gradient = vector_of(framework, shapes)
    arrays = list(gradient.coefs.values())
    host = [np.asarray(x) for x in arrays]
    calls: dict[str, Callable[[], Any]] = {
        "floor, clipped": lambda: [np.vdot(x, x) for x in host],
        "norm-clip, clipped": runner(framework, fedclip.NormClip(1.0), gradient),
        "declearn, clipped": runner(framework, L2GlobalClipping(1.0), gradient),
        "multiply": multiplier(framework, arrays),
    }
    return medians(calls, rounds)


def _more(times: list[float], others: list[float]) -> float:
    """Return the median of the differences, each of two calls made one after the other."""
    return statistics.median(a - b for a, b in zip(times, others, strict=True))


def measure_clippers(framework: str, rounds: int) -> dict[str, dict[str, float | None]]:
    """Return for each clipper its time against norm-clip's, and that of a step by tensor."""
    large = vector_of(framework, GRADIENTS[0][1])
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
        times = medians(calls, rounds)
        ours = times[name + "*"]
        entry: dict[str, float | None] = {
            "microseconds": ours,
            "times norm-clip": ours / times["norm-clip"],
            "changed": float(module.run(large) is not large),
            "by tensor, ms": None,
        }
        if by_tensor is not None:
            steps = medians({"step": runner(framework, by_tensor, many)}, rounds * 3)
            entry["by tensor, ms"] = steps["step"] / 1000
        found[name] = entry
    return found


def main() -> None:
    """Measure the framework that the command line names."""
    framework, quick = sys.argv[1], "--quick" in sys.argv[2:]
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"gradients": {}}
    # First all where nothing is clipped: once norm-clip has clipped, the allocator keeps more
    # memory, and declearn's own clipper takes a fifth of the time (`fedclip.arrays.arena`).
    for measure in (measure_quiet, measure_clipped):
        for name, shapes, rounds in GRADIENTS:
            many = max(5, rounds // 4) if quick else rounds
            times = measure(framework, shapes, many)
            result["gradients"].setdefault(name, {}).update(times)
    if framework == "numpy":
        result["clippers"] = measure_clippers(framework, 5 if quick else 9)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
