# SPDX-License-Identifier: Apache-2.0
"""Every clipper does in compiled code what it does on the host, and has derivatives, or refuses."""

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from helpers import MODULES, SPECIMENS, Specimen, gradient, needs, require

import fedclip.rules
from fedclip import AGC, NormClip, ValueClip, ZScoreClip
from fedclip.arrays import backend_named
from fedclip.errors import FedclipWarning
from fedclip.loops.compiled import first_state, groups_of, transform_of
from fedclip.rules.constant import Given
from fedclip.rules.own import Own
from fedclip.testing import SHAPES, to_vector
from fedclip.transforms import NormClipping, clip_on_device

# Those of the specimens that clip norms.
RULES = [s for s in MODULES if isinstance(s.make()._transform, NormClipping)]
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


def _alone(tree: Any) -> Any:
    return tree


# A framework, what compiles, what makes batches of two, of which the second is looked at.
WAYS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "torch.func.vmap": ("torch", lambda f: require("torch").func.vmap(f), _torch_both, {}),
    "torch, passed on": ("torch", lambda f: f, _alone, {"on_nonfinite": "propagate"}),
    "jax.vmap": ("jax", lambda f: require("jax").jit(require("jax").vmap(f)), _jax_both, {}),
    "tf.function": ("tensorflow", lambda f: require("tensorflow").function(f), _alone, {}),
    "torch.compile": ("torch", _torch_compile, _alone, {}),
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
    framework, wrap, both, config = WAYS[way]
    xp, clipper, host = backend(framework), specimen.make(**config), specimen.make(**config)
    groups, weights = groups_of(clipper, WEIGHTS), to_vector(WEIGHTS, framework).coefs

    def compiled(gradients: Any, state: Any) -> tuple[Any, Any]:
        transform, policy = transform_of(clipper, groups, weights, xp), clipper.on_nonfinite
        outputs, step = clip_on_device(transform, gradients, groups, xp, state, policy)
        return outputs, step.state

    step, state = wrap(compiled), both(first_state(clipper, groups, weights, xp))
    for arrays in float32_steps():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            wanted = host.clip(arrays, WEIGHTS) if isinstance(host, AGC) else host.clip(arrays)
        outputs, state = step(both(dict(to_vector(arrays, framework).coefs)), state)
        for name, value in wanted.items():
            found = np.asarray(outputs[name][1] if "vmap" in way else outputs[name])
            assert found.dtype == np.float32
            near = 1e-6 * float(np.abs(np.nan_to_num(value)).max())
            np.testing.assert_allclose(found, value, rtol=1e-6, atol=near, err_msg=name)


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


# -- derivatives are those of finite differences ---------------------------------------------------
NAMES = [*SHAPES]
SAMPLE = ("norm-clip-l1", "ema-value-clip")
Trees = list[Any]


def point(steps: int) -> list[np.ndarray]:
    """Return gradients of several steps, with a spike among them, and weights; of one, zeros."""
    rng = np.random.default_rng(103)
    rows = [gradient(3 + t, 0.6 if t == steps - 2 else 0.15) for t in range(steps)]
    rows.append({n: rng.standard_normal(shape) / 2 for n, shape in SHAPES.items()})
    return [np.array(r[n] * (n != "enc.weight"), np.float64) for r in rows for n in NAMES]


def weighed(xp: Any, step: Callable[..., Any], values: Trees) -> Any:
    """Return a sum of all outputs, norms and finite limits, each with a weight of its own."""
    rng, size, total, state = np.random.default_rng(0), len(NAMES), 0.0, None
    rows = [dict(zip(NAMES, values[i:], strict=False)) for i in range(0, len(values), size)]
    for row in rows[:-1]:
        clipped, state = step(row, state, rows[-1])
        for part in (*clipped.values(), state.norm, state.limit):
            weights = xp.asarray(rng.standard_normal(tuple(part.shape)), dtype=part.dtype)
            # A limit is infinite where there is none, and has no derivative.
            total = total + (xp.where(abs(part) < 1e300, part, 0.0) * weights).sum()
    return total


def pure_clipping(clipper: Any) -> Any:
    require("torch")
    from fedclip.loops.torch import PureClipping

    return PureClipping(clipper)


def torch_sum(specimen: Specimen) -> Callable[[Trees], Any]:
    torch, pure = require("torch"), pure_clipping(specimen.make())

    def step(row: Mapping[str, Any], state: Any, weights: Any) -> Any:
        if state is None:
            state = pure.init({n: g.detach() for n, g in row.items()})
        return pure.update(row, state, weights if specimen.kind == "regularizer" else None)

    return lambda values: weighed(torch, step, values)


def slopes(function: Any, values: list[np.ndarray], v: Trees, dtype: Any) -> Any:
    """Return the gradient, and first and second derivative in a direction, by autograd."""
    import torch

    x = [torch.tensor(a, dtype=dtype, requires_grad=True) for a in values]
    first = torch.autograd.grad(function(x), x, create_graph=True, materialize_grads=True)
    along = sum((g * torch.tensor(d, dtype=dtype)).sum() for g, d in zip(first, v, strict=True))
    second = torch.zeros(())
    if along.requires_grad:
        found = torch.autograd.grad(along, x, materialize_grads=True)
        second = sum((g * torch.tensor(d)).sum() for g, d in zip(found, v, strict=True))
    return first, float(along.detach()), float(second)


def moved(values: list[np.ndarray], v: Trees, by: float) -> list[np.ndarray]:
    return [a + by * d for a, d in zip(values, v, strict=True)]


# Torch's own, from its first forward derivative on.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("specimen", [s for s in SPECIMENS if not s.label], ids=str)
def test_derivatives_in_torch(specimen: Specimen) -> None:
    torch = require("torch")
    function, values = torch_sum(specimen), point(7)
    rng = np.random.default_rng(1)
    v = [rng.standard_normal(a.shape) * 0.1 * bool(a.any()) for a in values]
    first, along, second = slopes(function, values, v, torch.float64)
    h = 1e-6
    with torch.no_grad():
        up, down = (function([*map(torch.as_tensor, moved(values, v, e))]) for e in (h, -h))
    assert along == pytest.approx(float(up - down) / (2 * h), rel=1e-6, abs=1e-6)
    h = 1e-5
    up, down = (slopes(function, moved(values, v, e), v, torch.float64)[1] for e in (h, -h))
    assert second == pytest.approx((up - down) / (2 * h), rel=1e-4, abs=1e-4)
    tensors = [*map(torch.tensor, values)]
    for one, other in zip(first, torch.func.grad(function)(tensors), strict=True):
        torch.testing.assert_close(one, other)
    _, pushed = torch.func.jvp(function, (tensors,), ([*map(torch.tensor, v)],))
    assert along == pytest.approx(float(pushed), rel=1e-9, abs=1e-9)
    single = slopes(function, values, v, torch.float32)
    assert single[1:] == pytest.approx((along, second), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("clipper", [NormClip(1.0), ZScoreClip(), ValueClip(0.1)], ids=str)
def test_what_learns_in_python_refuses_recorded_gradients(clipper: Any) -> None:
    torch = require("torch")
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    for recorded in (w, 2 * w, (2 * w).bfloat16()):
        with pytest.raises(TypeError, match="PureClipping"):
            clipper.clip({"plain": torch.ones(2), "w": recorded})
    with torch.no_grad():
        clipper.clip({"w": w})
    assert not AGC(0.1).clip({"w": torch.ones(2)}, {"w": w})["w"].requires_grad


def test_torch_refuses_what_has_no_second_derivative() -> None:
    sparse = require("torch").eye(2).to_sparse()
    pure = pure_clipping(NormClip(1.0))
    state = pure.init({"w": sparse})
    pure.update({"w": sparse}, state)
    with pytest.raises(NotImplementedError, match="sparse"):
        pure.update({"w": sparse.requires_grad_()}, state)


# Each compiles for seconds.
@pytest.mark.slow
@pytest.mark.parametrize(
    "specimen",
    [pytest.param(s, marks=[pytest.mark.soak] * (str(s) not in SAMPLE)) for s in SPECIMENS],
    ids=str,
)
def test_derivatives_in_jax(specimen: Specimen) -> None:
    jax = require("jax")
    from fedclip.loops.jax import as_optax

    transformation = as_optax(specimen.make())

    def step(row: Any, state: Any, weights: Any) -> Any:
        return transformation.update(row, state or transformation.init(row), weights)

    def function(values: Trees) -> Any:
        return weighed(jax.numpy, step, values)

    def along(x: Trees, v: Trees) -> Any:
        return jax.jvp(function, (x,), (v,))[1]

    with jax.enable_x64(True):
        values, rng = point(3), np.random.default_rng(1)
        v = [rng.standard_normal(a.shape) * 0.1 * bool(a.any()) for a in values]
        up, down = (jax.jit(function)(moved(values, v, h)) for h in (1e-6, -1e-6))
        slope, gradient = jax.jit(along)(values, v), jax.jit(jax.grad(function))(values)
        assert float(slope) == pytest.approx(float(up - down) / 2e-6, rel=1e-6, abs=1e-6)
        backward = sum(np.vdot(g, d) for g, d in zip(gradient, v, strict=True))
        assert backward == pytest.approx(float(slope), rel=1e-9, abs=1e-9)
        second = jax.jit(lambda x: jax.jvp(lambda y: along(y, v), (x,), (v,))[1])(values)
        up, down = (jax.jit(along)(moved(values, v, h), v) for h in (1e-5, -1e-5))
        assert float(second) == pytest.approx(float(up - down) / 2e-5, rel=1e-4, abs=1e-4)
