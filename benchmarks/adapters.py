"""Adapters beside each framework's own clip: ``python -m benchmarks.adapters [FRAMEWORK ...]``.

Prints medians in microseconds and ratios, measured in turn in one process for each framework, and
of compiled TensorFlow the operations in the graph; asserts nothing. The torch rows that clip
include putting the gradients back, and those of Keras a step of SGD. AGC is measured beside
`optax.adaptive_grad_clip`, and in torch beside the operations of timm's `adaptive_clip_grad`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import medians
from benchmarks.models import GRADIENTS, Shape
from fedclip import AGC, NormClip, ZScoreClip

CASES: dict[str, tuple[list[Shape], int]] = {
    "MLP": (GRADIENTS["MLP"], 200),
    "20 tensors": (GRADIENTS["20 tensors, 2.7k"], 200),
    "200 tensors": (GRADIENTS["200 tensors, 3.7M"], 60),
    "1,000 tensors": ([(64, 64)] * 1000, 20),
    "ResNet-50": (GRADIENTS["ResNet-50"], 5),
}
"""The shapes of gradients, and how often each call is measured."""
LIMITS = {"nothing clipped": 1e9, "clipped": 1.0}

Calls = dict[str, Callable[[], Any]]


def plain_agc(parameters: list[Any], ratio: float, least: float = 1e-3) -> None:
    """Clip as timm does, in float32, without looking for numbers that are not finite."""
    import torch

    def norms(x: Any) -> Any:
        return x.norm(2) if x.ndim < 2 else x.norm(2, tuple(range(1, x.ndim)), keepdim=True)

    for parameter in parameters:
        limits = norms(parameter.detach()).clamp_(min=least).mul_(ratio)
        found = norms(parameter.grad)
        clipped = parameter.grad * (limits / found.clamp(min=1e-6))
        parameter.grad.copy_(torch.where(found < limits, parameter.grad, clipped))


def torch_calls(arrays: list[Any], limit: float) -> dict[str, Calls]:
    import torch

    from fedclip.loops.torch import attach, clip_, clip_grad_norm_

    parameters = {f"p{i}": torch.nn.Parameter(torch.ones(a.shape)) for i, a in enumerate(arrays)}
    values = list(parameters.values())
    source = [torch.from_numpy(a) for a in arrays]
    for parameter, tensor in zip(values, source, strict=True):
        parameter.grad = tensor.clone()
    norm, zscore = NormClip(limit), ZScoreClip(max_norm=limit)
    agc = AGC(limit / 100, min_norm=1e-3, axis=0)
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
            "norm-clip, drop-in": fresh(lambda: clip_grad_norm_(values, limit)),
            "norm-clip": fresh(lambda: clip_(parameters, norm)),
            "norm-clip, attached": fresh(lambda: handle._clip(optimizer)),
            "zscore-clip": fresh(lambda: clip_(parameters, zscore)),
        },
        "plain AGC": {
            "theirs": fresh(lambda: plain_agc(values, limit / 100)),
            "agc": fresh(lambda: clip_(parameters, agc)),
        },
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
    weights = jax.tree.map(jnp.ones_like, gradients)

    def call(transform: Any) -> Callable[[], Any]:
        state = transform.init(weights)
        update = jax.jit(transform.update)
        return lambda: jax.block_until_ready(update(gradients, state, weights))

    return {
        "optax.clip_by_global_norm, jit": {
            "theirs": call(optax.clip_by_global_norm(limit)),
            "norm-clip": call(as_optax(NormClip(limit))),
            "zscore-clip": call(as_optax(ZScoreClip(max_norm=limit))),
        },
        "optax.adaptive_grad_clip, jit": {
            "theirs": call(optax.adaptive_grad_clip(limit / 100)),
            "agc": call(as_optax(AGC(limit / 100, min_norm=1e-3, unit="optax"))),
        },
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
    for name, (shapes, rounds) in CASES.items():
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        for what, limit in LIMITS.items():
            for peer, calls in CALLS[framework](arrays, limit).items():
                found = medians(calls, 0.0, rounds)
                ratios = ", ".join(
                    f"{ours} {found[ours]:.0f} µs ({found[ours] / found['theirs']:.2f}×"
                    f"{operations(calls[ours])})"
                    for ours in found
                    if ours != "theirs"
                )
                theirs = f"{found['theirs']:.0f} µs{operations(calls['theirs'])}"
                print(f"{name}, {what}: {peer} {theirs}; {ratios}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--in-process"]:
        run(sys.argv[2])
        return
    for framework in sys.argv[1:] or CALLS:
        command = [sys.executable, "-m", "benchmarks.adapters", "--in-process", framework]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
