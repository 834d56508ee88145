# SPDX-License-Identifier: Apache-2.0
"""Every clipper does in compiled code what it does on the host."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable
from functools import partial
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


def _torch() -> Any:
    return require("torch")


def _jax() -> Any:
    return require("jax")


def _tf() -> Any:
    return require("tensorflow")


MAKE: dict[str, Callable[[Any], Any]] = {
    "torch": lambda value: _torch().tensor(value),
    "jax": lambda value: _jax().numpy.asarray(value),
    "tensorflow": lambda value: _tf().constant(value),
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
    return _jax().tree.map(lambda x: _jax().numpy.stack([0.5 * x, x]), tree)


def _torch_both(tree: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: _torch().stack([0.5 * x, x]), tree)


def _torch_compile(step: Any) -> Any:
    _torch()._dynamo.reset()
    return _torch().compile(step.__call__, fullgraph=True, backend="eager")


WAYS: dict[str, Any] = {
    "torch.func.vmap": ("torch", lambda f: _torch().func.vmap(f), _torch_both),
    "torch, passed on": ("torch", lambda f: f, None, "propagate"),
    "jax.vmap": ("jax", lambda f: _jax().jit(_jax().vmap(f)), _jax_both),
    "tf.function": ("tensorflow", lambda f: _tf().function(f.__call__), None),
    "torch.compile": ("torch", _torch_compile, None),
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


one_of_each = pytest.mark.parametrize("specimen", [s for s in SPECIMENS if not s.label], ids=str)


@one_of_each
def test_rows_of_a_sparse_tensor_are_clipped_as_on_the_host(specimen: Specimen) -> None:
    needs("torch")
    import torch

    table = {"scope": {"enc.*": 0.3}} if isinstance(specimen.config.get("scope"), dict) else {}
    compiled, host = Compiled(specimen, "torch", **table), specimen.make(**table)
    state, rng = compiled.start(), np.random.default_rng(4)
    for step in range(4):
        given = {name: MAKE["torch"](value) for name, value in float32_steps()[step].items()}
        rows = torch.tensor(rng.standard_normal((4, 5)), dtype=torch.float32)
        given["enc.weight"] = torch.sparse_coo_tensor(
            [[1, 5, 1, 2]], rows, (7, 5), check_invariants=False
        )
        weights = compiled.weights
        wanted = host.clip(given, weights) if isinstance(host, AGC) else host.clip(given)
        outputs, state = compiled(given, state)
        for name, value in wanted.items():
            found, right = outputs[name].to_dense(), value.to_dense()
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


# -- how much there is in compiled code ---------------------------------------------------------
def equations(jaxpr: Any) -> int:
    """Return the number of equations of a jaxpr, those within others included."""
    from jax.extend.core import jaxprs_in_params

    inner = [sub for e in jaxpr.eqns for sub in jaxprs_in_params(e.params)]
    return len(jaxpr.eqns) + sum(map(equations, inner))


def many(framework: str, clipper: Any) -> tuple[Any, Any]:
    """Return a step over 20 tensors, and its arguments."""
    xp = backend(framework)
    arrays = {f"t{i}": MAKE[framework](np.ones((3, 5), np.float32)) for i in range(20)}
    groups = clipper.groups(dict.fromkeys(arrays, (3, 5)))
    transform = clipper.transform(groups)
    state = device_state(transform, arrays, groups, xp, transform.init(groups), {})

    def step(given: Any, state: Any) -> Any:
        outputs, outcome = clip_on_device(transform, given, groups, xp, state, "skip")
        return outputs, outcome.state

    return step, (arrays, state)


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
@pytest.mark.parametrize(("make", "most"), [(partial(NormClip, 1.0), 300), (ZScoreClip, 500)])
def test_compiled_code_is_short(framework: str, make: Any, most: int) -> None:
    needs(framework)
    step, arguments = many(framework, make())
    if framework == "jax":
        assert equations(_jax().make_jaxpr(step)(*arguments).jaxpr) <= most
    else:
        graph = _tf().function(step).get_concrete_function(*arguments).graph
        assert len(graph.as_graph_def().node) <= most


REFUSED: dict[str, Callable[[Any], Any]] = {
    "jax": lambda step: _jax().jit(step)(np.ones(3, np.float32)),
    "tensorflow": lambda step: _tf().function(step, autograph=False)(_tf().ones(3)),
    "torch": lambda step: _torch().func.vmap(step)(_torch().ones(2, 3)),
}


@pytest.mark.parametrize("clipper", [NormClip(0.5), ZScoreClip(), ZScoreClip(on_nonfinite="raise")])
@pytest.mark.parametrize("framework", REFUSED)
def test_a_clipper_itself_is_refused_where_it_could_not_remember(
    framework: str, clipper: Any
) -> None:
    needs(framework)
    clipper.reset()
    with pytest.raises(TypeError, match="cannot leave code that is compiled"):
        REFUSED[framework](lambda x: clipper.clip({"w": x})["w"])
    # Nothing of the compiled code is left in it.
    assert clipper.clip({"w": np.array([0.3])})["w"] == 0.3
    clipper.get_state()


def test_agc_itself_is_refused_in_compiled_code() -> None:
    needs("jax")
    with pytest.raises(TypeError, match="agc: what a clipper learns and records cannot leave"):
        REFUSED["jax"](lambda x: AGC(0.1).clip({"w": x}, {"w": x})["w"])
