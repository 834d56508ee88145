"""Adapters beside each framework's own clip: ``python -m benchmarks.adapters [FRAMEWORK ...]``.

Prints medians in microseconds and ratios, measured in turn in one process for each framework, and
of compiled TensorFlow the operations in the graph; asserts nothing. The torch rows that clip
include putting the gradients back, and those of Keras a step of SGD.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import medians
from fedclip import NormClip, ZScoreClip

CASES = ((20, (135,), 200), (200, (136, 136), 60), (1000, (64, 64), 20))
LIMITS = {"nothing clipped": 1e9, "clipped": 1.0}

Calls = dict[str, Callable[[], Any]]


def torch_calls(arrays: list[Any], limit: float) -> dict[str, Calls]:
    import torch

    from fedclip.loops.torch import attach, clip_

    parameters = {f"p{i}": torch.nn.Parameter(torch.zeros(a.shape)) for i, a in enumerate(arrays)}
    values = list(parameters.values())
    source = [torch.from_numpy(a) for a in arrays]
    for parameter, tensor in zip(values, source, strict=True):
        parameter.grad = tensor.clone()
    norm, zscore = NormClip(limit), ZScoreClip(max_norm=limit)
    optimizer = torch.optim.SGD(values)
    # What the handle does before each step.
    handle = attach(optimizer, NormClip(limit), parameters)

    def fresh(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            if limit < 1e9:
                torch._foreach_copy_([p.grad for p in values], source)
            call()

        return run

    return {
        "clip_grad_norm_": {
            "theirs": fresh(lambda: torch.nn.utils.clip_grad_norm_(values, limit)),
            "norm-clip": fresh(lambda: clip_(parameters, norm)),
            "norm-clip, attached": fresh(lambda: handle._clip(optimizer)),
            "zscore-clip": fresh(lambda: clip_(parameters, zscore)),
        }
    }


def tensorflow_calls(arrays: list[Any], limit: float) -> dict[str, Calls]:
    import tensorflow as tf

    from fedclip.loops.tensorflow import clip

    gradients = [tf.constant(a) for a in arrays]
    variables = [tf.Variable(tf.zeros(a.shape), name=f"v{i}") for i, a in enumerate(arrays)]

    def ours(clipper: Any) -> Callable[[], Any]:
        return lambda: [x for x, _ in clip(zip(gradients, variables, strict=True), clipper)]

    def theirs() -> Any:
        return tf.clip_by_global_norm(gradients, limit)[0]

    found = {}
    # The gradients are no arguments, as in a training step: TensorFlow would take longer to look
    # at hundreds of arguments than either takes to clip.
    for name, wrap in (("eager", lambda f: f), ("tf.function", tf.function)):
        found[f"clip_by_global_norm, {name}"] = {
            "theirs": wrap(theirs),
            "norm-clip": wrap(ours(NormClip(limit))),
            "zscore-clip": wrap(ours(ZScoreClip(max_norm=limit))),
        }
    return found


def jax_calls(arrays: list[Any], limit: float) -> dict[str, Calls]:
    import jax
    import jax.numpy as jnp
    import optax

    from fedclip.loops.jax import as_optax

    gradients = {f"p{i}": jnp.asarray(a) for i, a in enumerate(arrays)}

    def call(transform: Any) -> Callable[[], Any]:
        state = transform.init(gradients)
        update = jax.jit(lambda g, s: transform.update(g, s))
        return lambda: jax.block_until_ready(update(gradients, state))

    return {
        "optax.clip_by_global_norm, jit": {
            "theirs": call(optax.clip_by_global_norm(limit)),
            "norm-clip": call(as_optax(NormClip(limit))),
            "zscore-clip": call(as_optax(ZScoreClip(max_norm=limit))),
        }
    }


def keras_calls(arrays: list[Any], limit: float) -> dict[str, Calls]:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    from fedclip.loops.keras import ClippedOptimizer

    gradients = [tf.constant(a) for a in arrays]

    def call(optimizer: Any) -> Callable[[], Any]:
        variables = [keras.Variable(np.zeros_like(a), name=f"v{i}") for i, a in enumerate(arrays)]
        optimizer.build(variables)
        return tf.function(lambda: optimizer.apply(gradients, variables))

    sgd = keras.optimizers.SGD
    return {
        "SGD with global_clipnorm, tf.function": {
            "theirs": call(sgd(0.0, global_clipnorm=limit)),
            "norm-clip": call(ClippedOptimizer(sgd(0.0), NormClip(limit))),
            "zscore-clip": call(ClippedOptimizer(sgd(0.0), ZScoreClip(max_norm=limit))),
        }
    }


def operations(call: Callable[[], Any]) -> str:
    """Return the number of operations in the graph of a call, in words; nothing without one."""
    if not hasattr(call, "get_concrete_function"):
        return ""
    return f", {len(call.get_concrete_function().graph.get_operations())} operations"


CALLS = {
    "torch": torch_calls,
    "tensorflow": tensorflow_calls,
    "keras": keras_calls,
    "jax": jax_calls,
}


def run(framework: str) -> None:
    rng = np.random.default_rng(0)
    for count, shape, rounds in CASES:
        arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]
        for what, limit in LIMITS.items():
            for peer, calls in CALLS[framework](arrays, limit).items():
                found = medians(calls, 0.0, rounds)
                ratios = ", ".join(
                    f"{name} {found[name]:.0f} µs ({found[name] / found['theirs']:.2f}×"
                    f"{operations(calls[name])})"
                    for name in found
                    if name != "theirs"
                )
                theirs = f"{found['theirs']:.0f} µs{operations(calls['theirs'])}"
                print(f"{count} tensors, {what}: {peer} {theirs}; {ratios}")


def main() -> None:
    if sys.argv[1:2] == ["--in-process"]:
        run(sys.argv[2])
        return
    for framework in sys.argv[1:] or CALLS:
        command = [sys.executable, "-m", "benchmarks.adapters", "--in-process", framework]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
