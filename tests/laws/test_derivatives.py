# SPDX-License-Identifier: Apache-2.0
"""What is clipped in compiled code has the derivatives of finite differences, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from helpers import SPECIMENS, Specimen, gradient, require

from fedclip import AGC, NormClip, ValueClip, ZScoreClip
from fedclip.testing import SHAPES

NAMES = [*SHAPES]
STEPS = 7
ZERO = "enc.weight"

SAMPLE = ("norm-clip-l1", "ema-value-clip")
Trees = list[Any]


def point(seed: int, zero: bool, steps: int = STEPS) -> list[np.ndarray]:
    """Return gradients of several steps, with a spike among them, and weights."""
    rng = np.random.default_rng(seed + 100)
    rows = [gradient(seed + t, 0.6 if t == steps - 2 else 0.15) for t in range(steps)]
    rows.append({n: rng.standard_normal(shape) / 2 for n, shape in SHAPES.items()})
    return [np.array(r[n] * (not zero or n != ZERO), np.float64) for r in rows for n in NAMES]


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
def test_torch(specimen: Specimen) -> None:
    torch = require("torch")
    # One tensor is zero at each step; the others are as any.
    function, values = torch_sum(specimen), point(3, zero=True)
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
    for one, other in zip(
        first, torch.func.grad(function)([*map(torch.tensor, values)]), strict=True
    ):
        torch.testing.assert_close(one, other)
    _, pushed = torch.func.jvp(
        function, ([*map(torch.tensor, values)],), ([*map(torch.tensor, v)],)
    )
    assert along == pytest.approx(float(pushed), rel=1e-9, abs=1e-9)
    single = slopes(function, values, v, torch.float32)
    assert single[1:] == pytest.approx((along, second), rel=1e-3, abs=1e-3)


@pytest.mark.slow
def test_torch_compiled() -> None:
    torch = require("torch")
    pure, slopes = pure_clipping(NormClip(1.0)), []
    for update in (pure.update, torch.compile(pure.update, backend="aot_eager", fullgraph=True)):
        w = torch.tensor([3.0, 4.0], requires_grad=True)
        clipped, _ = update({"w": w}, pure.init({"w": w.detach()}))
        slopes += torch.autograd.grad(clipped["w"][0], w)
    torch.testing.assert_close(*slopes)
    # d (x / n) / dx = (1 - x²/n²) / n, and so on.
    torch.testing.assert_close(slopes[0], torch.tensor([0.128, -0.096]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "clipper", [NormClip(1.0), ZScoreClip(), ValueClip(0.1)], ids=lambda c: c.name
)
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
    torch = require("torch")
    sparse = torch.eye(2).to_sparse()
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
def test_jax(specimen: Specimen) -> None:
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
        values, rng = point(3, zero=True, steps=3), np.random.default_rng(1)
        v = [rng.standard_normal(a.shape) * 0.1 * bool(a.any()) for a in values]
        up, down = (jax.jit(function)(moved(values, v, h)) for h in (1e-6, -1e-6))
        slope, gradient = jax.jit(along)(values, v), jax.jit(jax.grad(function))(values)
        assert float(slope) == pytest.approx(float(up - down) / 2e-6, rel=1e-6, abs=1e-6)
        backward = sum(np.vdot(g, d) for g, d in zip(gradient, v, strict=True))
        assert backward == pytest.approx(float(slope), rel=1e-9, abs=1e-9)
        second = jax.jit(lambda x: jax.jvp(lambda y: along(y, v), (x,), (v,))[1])(values)
        up, down = (jax.jit(along)(moved(values, v, h), v) for h in (1e-5, -1e-5))
        assert float(second) == pytest.approx(float(up - down) / 2e-5, rel=1e-4, abs=1e-4)
