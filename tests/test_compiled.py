# SPDX-License-Identifier: Apache-2.0
"""One text of a rule gives the same in every arithmetic, and every clipper compiled as eagerly."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import SPECIMENS, Specimen, gradient, needs

import fedclip.rules
from fedclip import AGC
from fedclip.arrays import NUMBER, NUMPY, backend_named
from fedclip.errors import FedclipWarning
from fedclip.rules.constant import Given
from fedclip.testing import to_vector
from fedclip.transforms import NormClipping, carried, clip_on_device

GROUPS, STEPS = 3, 25
# Those of the specimens that clip norms.
RULES = [
    s for s in SPECIMENS if s.kind == "module" and isinstance(s.make()._transform, NormClipping)
]
each_rule = pytest.mark.parametrize("specimen", RULES, ids=str)

Step = Callable[[Any, Any], tuple[Any, Any]]


def rule_of(specimen: Specimen) -> Any:
    return specimen.make()._transform.rule


def norms() -> np.ndarray:
    """Return one row of norms a step, with bursts, a zero and tiny ones among them."""
    rng = np.random.default_rng(5)
    rows = rng.lognormal(0, 0.4, (STEPS, GROUPS))
    rows[7:9] *= 30
    rows[12, 1] = 0.0
    rows[15] *= 1e-6
    rows[20, 0] = 1e20
    return rows


def run(rule: Any, xp: Any, step: Step | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the limits of all steps, and the last state."""
    state = rule.init(GROUPS, xp)
    step = step or (lambda n, s: rule(n, s, xp))
    limits = []
    for row in norms():
        row_limits, state = step(xp.asarray(row.tolist()), state)
        limits.append(np.broadcast_to(np.asarray(row_limits), GROUPS))
    return np.array(limits), [np.asarray(field, dtype=float) for field in state]


def assert_same(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-12)
    assert len(got[1]) == len(wanted[1])
    for a, b in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-300)


def oracle(specimen: Specimen) -> Any:
    return run(rule_of(specimen), NUMPY)


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
        if any("__call__" in vars(c) for c in cls.__mro__) and not inspect.isabstract(cls)
    }
    # Given holds limits that are worked out elsewhere.
    assert rules == {type(rule_of(s)) for s in RULES} | {Given}


@each_rule
def test_plain_numbers(specimen: Specimen) -> None:
    rule = rule_of(specimen)
    limits, _ = oracle(specimen)
    for group in range(GROUPS):
        state = rule.init(1, NUMBER)
        for step, row in enumerate(norms()):
            limit, state = rule(float(row[group]), state, NUMBER)
            # To the bit: which of the two is used must not show.
            assert float(np.ravel(limit)[0]) == limits[step, group]


@each_rule
@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_eager(specimen: Specimen, framework: str) -> None:
    assert_same(run(rule_of(specimen), backend(framework)), oracle(specimen))


@each_rule
def test_jax_jit(specimen: Specimen) -> None:
    xp, rule = backend("jax"), rule_of(specimen)
    import jax

    step = jax.jit(lambda n, s: rule(n, s, xp))
    assert_same(run(rule, xp, step), oracle(specimen))


@each_rule
def test_tf_function(specimen: Specimen) -> None:
    xp, rule = backend("tensorflow"), rule_of(specimen)
    import tensorflow as tf

    step = tf.function(lambda n, s: rule(n, s, xp))
    assert_same(run(rule, xp, step), oracle(specimen))


@each_rule
def test_torch_without_a_look_at_a_value(specimen: Specimen) -> None:
    xp, rule = backend("torch"), rule_of(specimen)
    import torch

    # "Meta" tensors have no values: a rule that branched on one would raise.
    state = rule.init(GROUPS, xp)
    meta = type(state)(*(field.to("meta") for field in state))
    limits, after = rule(torch.ones(GROUPS, dtype=torch.float64, device="meta"), meta, xp)
    assert tuple(limits.shape) == (GROUPS,)
    assert [tuple(f.shape) for f in after] == [tuple(f.shape) for f in state]


# -- whole clippers, compiled -----------------------------------------------------------------
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

    def __init__(self, specimen: Specimen, framework: str) -> None:
        self.clipper, self.xp = specimen.make(), backend(framework)
        self.make = {"torch": _tensor, "jax": _jax_array, "tensorflow": _tf_tensor}[framework]
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
        return carried(self.transform, self.weights, self.groups, self.xp, first, {})

    def __call__(self, gradients: Any, state: Any) -> tuple[Any, Any]:
        clipper = self.clipper
        transform = (
            clipper.device_transform([*self.weights.values()], self.groups, self.xp)
            if isinstance(clipper, AGC)
            else self.transform
        )
        policy = clipper.on_nonfinite
        outputs, step = clip_on_device(transform, gradients, self.groups, self.xp, state, policy)
        return outputs, step.state


def _tensor(value: Any) -> Any:
    import torch

    return torch.tensor(value)


def _jax_array(value: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(value)


def _tf_tensor(value: Any) -> Any:
    import tensorflow as tf

    return tf.constant(value)


def assert_as_on_the_host(specimen: Specimen, framework: str, wrap: Any, both: Any = None) -> None:
    """Compare all steps; `both` makes batches of two, of which the second is looked at."""
    compiled, host = Compiled(specimen, framework), specimen.make()
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


each_clipper = pytest.mark.parametrize("specimen", SPECIMENS, ids=str)


@pytest.mark.slow
@each_clipper
def test_jit_does_what_the_host_does(specimen: Specimen) -> None:
    needs("jax")
    import jax

    assert_as_on_the_host(specimen, "jax", jax.jit)


@pytest.mark.slow
@each_clipper
def test_jax_vmap_does_what_the_host_does(specimen: Specimen) -> None:
    needs("jax")
    import jax
    import jax.numpy as jnp

    def both(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.stack([0.5 * x, x]), tree)

    assert_as_on_the_host(specimen, "jax", lambda f: jax.jit(jax.vmap(f)), both)


@pytest.mark.slow
@each_clipper
def test_tf_function_does_what_the_host_does(specimen: Specimen) -> None:
    needs("tensorflow")
    import tensorflow as tf

    assert_as_on_the_host(specimen, "tensorflow", lambda f: tf.function(f.__call__))


@pytest.mark.slow
@each_clipper
def test_torch_compile_does_what_the_host_does(specimen: Specimen) -> None:
    needs("torch")
    import torch

    torch._dynamo.reset()
    assert_as_on_the_host(
        specimen, "torch", lambda f: torch.compile(f.__call__, fullgraph=True, backend="eager")
    )


@each_clipper
def test_torch_vmap_does_what_the_host_does(specimen: Specimen) -> None:
    needs("torch")
    import torch
    from torch.utils._pytree import tree_map

    def both(tree: Any) -> Any:
        return tree_map(lambda x: torch.stack([0.5 * x, x]), tree)

    assert_as_on_the_host(specimen, "torch", torch.func.vmap, both)
