# SPDX-License-Identifier: Apache-2.0
"""Every clipper does in compiled code what it does on the host."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import SPECIMENS, Specimen, gradient, needs, require

import fedclip.rules
from fedclip import AGC, NormClip, ZScoreClip
from fedclip.arrays import backend_named
from fedclip.errors import FedclipWarning
from fedclip.rules.constant import Given
from fedclip.rules.own import Own
from fedclip.testing import to_vector
from fedclip.transforms import NormClipping, clip_on_device, device_state

# Those of the specimens that clip norms.
RULES = [
    s for s in SPECIMENS if s.kind == "module" and isinstance(s.make()._transform, NormClipping)
]
# Those that parameters of these clippers pick.
PICKED = [
    Specimen("zscore-clip", {"warmup": 3, "action": "reciprocal", "std_eps": 0.1}, label="zclip"),
    Specimen("zscore-clip", {"warmup": 3, "estimator": "drytorch"}, label="drytorch"),
    Specimen("zscore-clip", {"warmup": 3, "estimator": "smartclip"}, label="smartclip"),
    Specimen(
        "ema-clip",
        {"warmup": 3, "estimator": "adagc", "warmup_scope": "global", "warmup_norm": 1.0}
        | {"warmup_factor": None},
        label="adagc",
    ),
    Specimen("auto-clip", {"median": "p2", "decay": None, "feedback": "none"}, label="p2"),
]


def rule_of(specimen: Specimen) -> Any:
    return specimen.make()._transform.rule


def backend(framework: str) -> Any:
    needs(framework)
    # So that JAX has float64, as it has in declearn.
    to_vector({}, framework)
    return backend_named(framework)


def test_every_rule_is_here() -> None:
    modules = [
        importlib.import_module(f"fedclip.rules.{info.name}")
        for info in pkgutil.iter_modules(fedclip.rules.__path__)
    ]
    rules = {
        cls
        for module in modules
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and hasattr(cls, "init")
        if any("__call__" in vars(c) for c in cls.__mro__)
        and not (inspect.isabstract(cls) or getattr(cls, "_is_protocol", False))
    }
    # Given holds what is worked out elsewhere; Own asks a function of the user's.
    assert rules == {type(rule_of(s)) for s in [*RULES, *PICKED]} | {Given, Own}


def float32_steps() -> list[dict[str, np.ndarray]]:
    """Return gradients with a burst, and with a step that holds NaN."""
    steps = [
        {name: value.astype(np.float32) for name, value in gradient(i, 0.15 + 2 * (i == 5)).items()}
        for i in range(9)
    ]
    steps[7]["enc.bias"][2] = np.nan
    return steps


WEIGHTS = {name: value.astype(np.float32) for name, value in gradient(99, 1.0).items()}


class Compiled:
    """A specimen as a function of gradients and a state; its groups are known beforehand."""

    def __init__(self, specimen: Specimen, framework: str, **config: Any) -> None:
        self.clipper, self.xp = specimen.make(**config), backend(framework)
        self.make = MAKE[framework]
        self.weights = {name: self.make(value) for name, value in WEIGHTS.items()}
        shapes = {name: value.shape for name, value in WEIGHTS.items()}
        self.groups = self.clipper.groups(shapes)
        if isinstance(self.clipper, AGC):
            return
        self.transform = self.clipper.transform(self.groups)

    def start(self) -> Any:
        if isinstance(self.clipper, AGC):
            return ()
        first = self.transform.init(self.groups)
        return device_state(self.transform, self.weights, self.groups, self.xp, first, {})

    def __call__(self, gradients: Any, state: Any) -> tuple[Any, Any]:
        clipper = self.clipper
        transform = (
            clipper.transform([*self.weights.values()], self.groups, self.xp, traced=True)
            if isinstance(clipper, AGC)
            else self.transform
        )
        policy = clipper.on_nonfinite
        outputs, step = clip_on_device(transform, gradients, self.groups, self.xp, state, policy)
        return outputs, step.state


MAKE: dict[str, Callable[[Any], Any]] = {
    "torch": lambda value: require("torch").tensor(value),
    "jax": lambda value: require("jax").numpy.asarray(value),
    "tensorflow": lambda value: require("tensorflow").constant(value),
}


def assert_as_on_the_host(
    specimen: Specimen, framework: str, wrap: Any, both: Any = None, **config: Any
) -> None:
    """Compare all steps; `both` makes batches of two, of which the second is looked at."""
    compiled, host = Compiled(specimen, framework, **config), specimen.make(**config)
    step, state = wrap(compiled), compiled.start()
    state = state if both is None else both(state)
    for arrays in float32_steps():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            wanted = host.clip(arrays, WEIGHTS) if isinstance(host, AGC) else host.clip(arrays)
        given = {name: compiled.make(value) for name, value in arrays.items()}
        outputs, state = step(given if both is None else both(given), state)
        for name, value in wanted.items():
            found = np.asarray(outputs[name] if both is None else outputs[name][1])
            assert found.dtype == np.float32
            near = 1e-6 * float(np.abs(np.nan_to_num(value)).max())
            np.testing.assert_allclose(found, value, rtol=1e-6, atol=near, err_msg=name)


def _jax_both(tree: Any) -> Any:
    jax = require("jax")
    return jax.tree.map(lambda x: jax.numpy.stack([0.5 * x, x]), tree)


def _torch_both(tree: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: require("torch").stack([0.5 * x, x]), tree)


def _torch_compile(step: Any) -> Any:
    torch = require("torch")
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend="eager")


WAYS: dict[str, Any] = {
    "torch.func.vmap": ("torch", lambda f: require("torch").func.vmap(f), _torch_both),
    "torch, passed on": ("torch", lambda f: f, None, "propagate"),
    "jax.vmap": ("jax", lambda f: require("jax").jit(require("jax").vmap(f)), _jax_both),
    "tf.function": ("tensorflow", lambda f: require("tensorflow").function(f.__call__), None),
    "torch.compile": ("torch", lambda f: _torch_compile(f.__call__), None),
}
# Each clipper in every second way, of which other rows of its are in one.
ROWS = [
    pytest.param(s, w, marks=[pytest.mark.slow] if "torch" not in w or "compile" in w else [])
    for i, s in enumerate([*SPECIMENS, *PICKED])
    for j, w in enumerate(WAYS)
    if (i + j) % (4 if s.label else 2) == 0
]


@pytest.mark.parametrize(("specimen", "way"), ROWS, ids=str)
def test_compiled_code_does_what_the_host_does(specimen: Specimen, way: str) -> None:
    framework, wrap, both, *policy = WAYS[way]
    needs(framework)
    assert_as_on_the_host(
        specimen, framework, wrap, both, **dict(zip(["on_nonfinite"], policy, strict=False))
    )


@pytest.mark.slow
def test_torch_compiles_once() -> None:
    torch = require("torch")
    from fedclip.loops.torch import PureClipping

    torch._dynamo.utils.counters.clear()
    pure = PureClipping(ZScoreClip(warmup=4, scope="layer"))
    update = _torch_compile(pure.update)
    state = pure.init({"0.w": torch.ones(7, 5), "1.w": torch.ones(2)})
    for scale in (1, 1, 20) * 4:
        arrays = {"0.w": scale * torch.randn(7, 5), "1.w": scale * torch.randn(2)}
        _, state = update(arrays, state)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


REFUSED: dict[str, Callable[[Any], Any]] = {
    "jax": lambda step: require("jax").jit(step)(np.ones(3, np.float32)),
    "tensorflow": lambda step: require("tensorflow").function(step, autograph=False)(np.ones(3)),
    "torch": lambda step: require("torch").func.vmap(step)(require("torch").ones(2, 3)),
}


@pytest.mark.parametrize("clipper", [NormClip(0.5), ZScoreClip(on_nonfinite="raise"), AGC(0.1)])
@pytest.mark.parametrize("framework", REFUSED)
def test_a_clipper_itself_is_refused_where_it_could_not_remember(
    framework: str, clipper: Any
) -> None:
    needs(framework)

    def step(x: Any) -> Any:
        return clipper.clip({"w": x}, *[{"w": x}] * isinstance(clipper, AGC))["w"]

    with pytest.raises(TypeError, match=rf"{clipper.name}: .* cannot leave code that is compiled"):
        REFUSED[framework](step)
    if clipper.name != "agc":
        clipper.reset()
        # Nothing of the compiled code is left in it.
        assert clipper.clip({"w": np.array([0.3])})["w"] == 0.3
        clipper.get_state()
