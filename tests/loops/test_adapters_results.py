# SPDX-License-Identifier: Apache-2.0
"""Every loop returns what the clipper itself returns, and the same numbers and statistics."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import require

from fedclip import EmaNormClip, EmaValueClip, FedclipWarning, NormClip, ValueClip, ZScoreClip

SHAPES = {"enc/w": (4, 3), "enc/b": (3,), "scale": ()}
Arrays = Mapping[str, Any]


class Loop(NamedTuple):
    """A loop with a clipper: its steps, its metrics, its rounds, and the clipper's state."""

    step: Callable[[Arrays], Arrays]
    metrics: Callable[[], dict[str, float]]
    on_round_start: Callable[[], object]
    get_state: Callable[[], Mapping[str, Any]]


def stream(steps: int = 14, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for t in range(steps):
        size = 20.0 if t % 5 == 4 else 1.0
        arrays = {n: np.asarray(size * rng.standard_normal(s)) for n, s in SHAPES.items()}
        yield {n: a.astype("float32") for n, a in arrays.items()}


WEIGHTS = next(stream(seed=1))


def torch_tensors(arrays: Arrays) -> dict[str, Any]:
    return {n: require("torch").tensor(a) for n, a in arrays.items()}


def loop_of(step: Callable[[Arrays], Arrays], clipper: Any) -> Loop:
    """Return a loop whose numbers are those of a clipper, or of what holds it."""
    return Loop(step, partial(clipper.metrics, "clip/"), clipper.on_round_start, clipper.get_state)


def torch_in_place(clipper: Any) -> Loop:
    from fedclip.loops.torch import clip_

    parameters = {n: require("torch").nn.Parameter(w) for n, w in torch_tensors(WEIGHTS).items()}

    def step(gradient: Arrays) -> Arrays:
        grads = torch_tensors(gradient)
        for n, p in parameters.items():
            p.grad = grads[n]
        clip_(parameters, clipper)
        # Skipped steps have no gradient.
        assert all(p.grad is None or p.grad is grads[n] for n, p in parameters.items())
        return {n: np.zeros(p.shape) if p.grad is None else p.grad for n, p in parameters.items()}

    return loop_of(step, clipper)


def torch_on_a_device(clipper: Any) -> Loop:
    """Tensors of the CPU, as if they lay on a device that the host cannot read."""
    require("torch")
    from fedclip.arrays.torch import TorchBackend

    class Device(TorchBackend):
        def dense_views(self, arrays: Any) -> Any:
            return None

        def views(self, arrays: Any) -> Any:
            return [None] * len(arrays)

    return loop_of(lambda g: clipper.clip(torch_tensors(g), backend=Device()), clipper)


def torch_pure(clipper: Any) -> Loop:
    weights = torch_tensors(WEIGHTS)
    from fedclip.loops.torch import PureClipping

    pure = PureClipping(clipper)
    states = [pure.init(weights)]

    def step(gradient: Arrays) -> Arrays:
        clipped, state = pure.update(torch_tensors(gradient), states[-1], weights)
        states.append(state)
        return clipped

    def get_state() -> Any:
        pure.set_state(states[-1], weights)
        return clipper.get_state()

    return Loop(
        step,
        lambda: pure.metrics(states[-1], weights, "clip/"),
        lambda: states.append(pure.on_round_start(states[-1])),
        get_state,
    )


def tensorflow_eager(clipper: Any) -> Loop:
    tf = require("tensorflow")
    from fedclip.loops.tensorflow import clip

    variables = [tf.Variable(w, name=n) for n, w in WEIGHTS.items()]

    def step(gradient: Arrays) -> Arrays:
        pairs = zip(map(tf.constant, gradient.values()), variables, strict=True)
        return dict(zip(gradient, [g for g, _ in clip(pairs, clipper)], strict=True))

    return loop_of(step, clipper)


def tensorflow_compiled(clipper: Any) -> Loop:
    tf = require("tensorflow")
    from fedclip.loops.tensorflow import CompiledClipper, clip

    variables = [tf.Variable(w, name=n) for n, w in WEIGHTS.items()]
    run = tf.function(lambda *g: [o for o, _ in clip(zip(g, variables, strict=True), clipper)])
    step = lambda g: dict(zip(g, run(*map(tf.constant, g.values())), strict=True))  # noqa: E731
    return loop_of(step, CompiledClipper.of(clipper))


def keras_optimizer(clipper: Any) -> Loop:
    require("tensorflow")
    keras = require("keras")
    from fedclip.loops.keras import ClippedOptimizer

    variables = [keras.Variable(w, name=n.replace("/", "_")) for n, w in WEIGHTS.items()]
    optimizer = ClippedOptimizer(keras.optimizers.SGD(1.0), clipper)

    def step(gradient: Arrays) -> Arrays:
        for variable, weight in zip(variables, WEIGHTS.values(), strict=True):
            variable.assign(weight)
        optimizer.apply([*map(keras.ops.convert_to_tensor, gradient.values())], variables)
        return {n: w - v.numpy() for (n, w), v in zip(WEIGHTS.items(), variables, strict=True)}

    return loop_of(step, optimizer)


def jax_jit(clipper: Any) -> Loop:
    jax = require("jax")
    from fedclip.loops.jax import as_optax, metrics, on_round_start, set_state

    params = {n: jax.numpy.asarray(w) for n, w in WEIGHTS.items()}
    transform, traces = as_optax(clipper), []
    states = [transform.init(params)]

    def traced(*args: Any) -> Any:
        traces.append(1)
        return transform.update(*args)

    update = jax.jit(traced)

    def step(gradient: Arrays) -> Arrays:
        gradient = {n: jax.numpy.asarray(a) for n, a in gradient.items()}
        clipped, state = update(gradient, states[-1], params)
        assert len(traces) == 1
        states.append(state)
        return clipped

    def get_state() -> Any:
        set_state(clipper, states[-1], params)
        return clipper.get_state()

    return Loop(
        step,
        lambda: metrics(clipper, states[-1], params, "clip/"),
        lambda: states.append(on_round_start(states[-1])),
        get_state,
    )


LOOPS = {
    "clip_": torch_in_place,
    "on a device": torch_on_a_device,
    "PureClipping": torch_pure,
    "tensorflow": tensorflow_eager,
    "tf.function": tensorflow_compiled,
    "keras": keras_optimizer,
    "jax.jit": jax_jit,
}
EAGER = ("clip_", "on a device", "tensorflow")
# Arithmetic in compiled code is compared with all clippers in test_compiled.py; agc: test_agc.py.
CLIPPERS = {
    "norm by table": lambda: NormClip(1.0, scope={"enc*": 0.5}),
    "z-score by tensor": lambda: ZScoreClip(
        warmup=3, max_norm=None, scope="tensor", on_nonfinite="propagate"
    ),
    "excluding": lambda: ZScoreClip(warmup=3, max_norm=None, exclude="*b"),
    "spikes": lambda: ZScoreClip(warmup=3, max_norm=None, on_spike="skip"),
    "values": lambda: ValueClip(0.5),
    "averages": lambda: EmaNormClip(decay=0.8, scope="tensor"),
}
EVERYWHERE = ("averages", "spikes")
ROWS = [
    pytest.param(loop, name, id=f"{loop}, {name}")
    for i, loop in enumerate(LOOPS)
    for j, name in enumerate(CLIPPERS)
    # Each clipper in half of the loops, or all.
    if (i + j) % 2 or name in EVERYWHERE
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("make", [partial(ZScoreClip, scope="tensor"), EmaValueClip, EmaNormClip])
def test_a_state_of_other_tensors_is_refused(make: Any, loop: str) -> None:
    learnt, clipper = make(), make()
    learnt.clip({"v": np.ones(2)})
    clipper.set_state(learnt.get_state())
    with pytest.raises(ValueError, match=r"is of .*'v'.*also has \[.*\]: load the state of this"):
        LOOPS[loop](clipper).step(next(stream()))


@pytest.mark.parametrize(("loop", "name"), ROWS)
def test_a_loop_does_what_the_clipper_does(loop: str, name: str) -> None:
    clipper, reference = CLIPPERS[name](), CLIPPERS[name]()
    made = LOOPS[loop](clipper)
    if loop not in EAGER:
        assert made.metrics()["clip/round/steps"] == 0
        assert "clip/norm" not in made.metrics()
    *gradients, last = stream()
    gradients[8]["enc/b"][1] = np.nan

    def compare(gradient: Arrays) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            expected = reference.clip({n: a.copy() for n, a in gradient.items()})
            clipped = made.step(gradient)
        for n, value in expected.items():
            np.testing.assert_allclose(np.asarray(clipped[n]), value, rtol=2e-5, atol=2e-6)

    for gradient in gradients:
        compare(gradient)
    numbers, wanted = made.metrics(), reference.metrics("clip/")
    assert json.dumps(numbers)
    assert (numbers["clip/round/steps"], numbers["clip/round/nonfinite"]) == (13, 1)
    labels = {n for n in numbers if n in wanted and not n.endswith("round/round")}
    expected = pytest.approx({n: wanted[n] for n in labels}, rel=1e-4)
    assert {n: numbers[n] for n in labels} == expected
    assert ("clip/round/fixed" in numbers) == (loop in EAGER)
    made.on_round_start()
    # In eager code a round begins with its first step.
    assert made.metrics()["clip/round/steps"] == (13 if loop in EAGER else 0)
    assert made.metrics()["clip/norm"] == numbers["clip/norm"]
    state = made.get_state()
    for kind in ("groups", "arrays"):
        for label, fields in reference.get_state()[kind].items():
            found = state[kind][label.replace("/", "_") if loop == "keras" else label]
            for field, value in fields.items():
                np.testing.assert_allclose(found[field], value, rtol=1e-4, atol=1e-5)
    # Another loop continues from the state.
    clipper = CLIPPERS[name]()
    clipper.set_state(state)
    made = LOOPS[loop](clipper)
    compare(last)
