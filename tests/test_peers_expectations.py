# SPDX-License-Identifier: Apache-2.0
"""What other packages test of their clippers, asked of ours in our own words.

`compat.translate` gives the clipper. Where one differs, the row says why, and what it does.
docs/coming-from.md has the count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import require

from fedclip import FedclipWarning, OwnLimit, compat

torch = require("torch")

from fedclip.adapters.torch import attach, clip_  # noqa: E402


def translated(peer: str, cls: str, **config: Any) -> Any:
    kind, name, found = compat.translate(peer, cls, config)
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, found)


# -- torchzero: every clipper reaches a minimum --------------------------------------------------
class Reach(NamedTuple):
    """Losses that are reached within 50 steps on Booth's function, and 10 on a sphere."""

    cls: str
    config: dict[str, Any]
    rates: tuple[float, float]
    booth: float
    sphere: float
    steps: int = 50
    dim: int | None = None
    """What torchzero's ``dim=None`` means on the sphere, whose first tensor has no dimension."""


GROWS: dict[str, Any] = {"add": 1, "mul": None}
REACHES = {
    "ClipValue": Reach("ClipValue", {"value": 1}, (1, 1), 0, 50),
    "ClipNorm": Reach("ClipNorm", {"max_norm": 1}, (1, 0.5), 2, 0, dim=0),
    "ClipNorm, global": Reach("ClipNorm", {"max_norm": 1, "dim": "global"}, (1, 3), 2, 2),
    "Normalize": Reach("Normalize", {"norm_value": 1}, (1, 0.5), 2, 15, dim=0),
    "Normalize, global": Reach("Normalize", {"norm_value": 1, "dim": "global"}, (1, 4), 2, 2),
    # torchzero reaches 10 on the sphere: behind a first tensor without dims it centralizes nothing.
    "Centralize": Reach("Centralize", {"min_size": 3}, (0.1, 0.1), 1e-6, 20),
    "Centralize, global": Reach(
        "Centralize", {"min_size": 3, "dim": "global"}, (0.1, 0.1), 1000, 10, 1
    ),
    "ClipNormByEMA": Reach("ClipNormByEMA", {}, (0.1, 5), 1e-5, 0.1),
    "ClipNormByEMA, global": Reach("ClipNormByEMA", {"tensorwise": False}, (0.1, 5), 1e-5, 0.1),
    "NormalizeByEMA": Reach("NormalizeByEMA", {}, (0.05, 5), 1, 0.1),
    "NormalizeByEMA, global": Reach("NormalizeByEMA", {"tensorwise": False}, (0.05, 5), 1, 0.1),
    "ClipValueByEMA": Reach("ClipValueByEMA", {}, (0.1, 4), 1e-5, 0.03),
    "ClipValueGrowth": Reach("ClipValueGrowth", {}, (0.1, 0.1), 1e-6, 100),
    "ClipValueGrowth, additive": Reach("ClipValueGrowth", GROWS, (0.1, 0.1), 1e-6, 10),
    "ClipNormGrowth": Reach("ClipNormGrowth", {}, (0.1, 0.1), 1e-6, 10),
    "ClipNormGrowth, additive": Reach("ClipNormGrowth", GROWS, (0.1, 0.1), 1e-6, 10),
    "ClipNormGrowth, global": Reach("ClipNormGrowth", {"tensorwise": False}, (0.1, 0.1), 1e-6, 10),
}


def booth(x: Any, y: Any) -> Any:
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


class Sphere(torch.nn.Module):  # type: ignore[misc]
    """A sum of squares, over parameters of all kinds of shapes."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        shapes = [(10,), (1, 10), (10, 1), (1, 1, 10), (1, 10, 1), (1, 1, 10), (10, 10), (4, 4, 4)]
        shapes += [(3, 3, 3, 3), (2,) * 7, (10, 1, 3, 1, 1)]
        tensors = [torch.ones(()), torch.ones(1), torch.ones(1, 1)]
        tensors += [torch.randn(shape, generator=made) for shape in shapes]
        tensors += [torch.zeros(2, 2), torch.ones(2, 2)]
        self.tensors = torch.nn.ParameterList(map(torch.nn.Parameter, tensors))

    def forward(self) -> Any:
        return sum(p.square().sum() for p in self.tensors)


def least(
    parameters: list[Any],
    loss: Callable[[], Any],
    clipper: Any,
    lr: float,
    steps: int,
    reset: int | None = None,
) -> float:
    """Return the least loss in some steps of plain descent; one begins with a reset."""
    optimizer = torch.optim.SGD(parameters, lr=lr)
    attach(optimizer, clipper, [(f"p{i}", p) for i, p in enumerate(parameters)])
    losses = []
    for step in range(steps):
        if step == reset:
            clipper.reset()
        optimizer.zero_grad()
        now = loss()
        now.backward()
        losses.append(float(now.detach()))
        optimizer.step()
    return min([*losses, float(loss().detach())])


@pytest.mark.parametrize("name", REACHES)
@pytest.mark.parametrize("merged", [True, False])
def test_torchzero_reaches(name: str, merged: bool) -> None:
    row = REACHES[name]
    start = [[0.0, -8.0]] if merged else [0.0, -8.0]
    parameters = [torch.nn.Parameter(torch.tensor(x)) for x in start]
    flat = (lambda: booth(*parameters[0])) if merged else (lambda: booth(*parameters))
    clipper = translated("torchzero", row.cls, **row.config)
    assert least(parameters, flat, clipper, row.rates[0], row.steps) <= row.booth
    sphere = Sphere()
    config = {k: v for k, v in row.config.items() if k != "min_size"}
    clipper = translated(
        "torchzero", row.cls, **{"dim": row.dim, **config} if row.dim == 0 else config
    )
    found = least(list(sphere.parameters()), sphere, clipper, row.rates[1], 10, reset=5)
    assert found <= row.sphere


# -- drytorch: operations, and criteria on numbers -----------------------------------------------
def parameters() -> list[Any]:
    """Return parameters with no gradient, one of zeros, and a random one."""
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(3)]
    found[1].grad, found[2].grad = torch.zeros(3, 3), torch.randn(3, 3)
    return found


@pytest.mark.parametrize(
    ("cls", "config", "expected"),
    [
        ("GradParamNormalizer", {}, lambda g: float(g.norm()) == pytest.approx(1.0, rel=3e-6)),
        ("GradZScoreNormalizer", {}, lambda g: float(g.var()) == pytest.approx(1.0, abs=1e-5)),
        ("GradZScoreNormalizer", {}, lambda g: float(g.mean()) == pytest.approx(0.0, abs=1e-5)),
        (
            "GradNormClipper",
            {"threshold": 0.01},
            lambda g: float(g.norm()) == pytest.approx(0.01, rel=3e-6),
        ),
        ("GradValueClipper", {"threshold": 0.01}, lambda g: float(g.abs().max()) <= 0.01),
        ("NoOp", {}, lambda g: torch.equal(g, parameters()[2].grad)),
    ],
)
def test_drytorch_operations(cls: str, config: Any, expected: Any) -> None:
    found = parameters()
    # An iterator, which is used up at once.
    clip_(iter(found), translated("drytorch", cls, **config))
    assert found[0].grad is None
    assert not found[1].grad.any()
    assert expected(found[2].grad)


@pytest.mark.parametrize(("cls", "bad"), [("GradNormClipper", 0), ("GradValueClipper", -1)])
def test_drytorch_refuses_limits_of_no_size(cls: str, bad: float) -> None:
    with pytest.raises(ValueError, match="> 0"):
        translated("drytorch", cls, threshold=bad)


def test_drytorch_ema_criterion() -> None:
    clip = translated(
        "drytorch", "HistClipper", criterion="ema", alpha=0.5, thresh=2.0, n_warmup_steps=0
    )
    assert not clip.should_clip(10.0)
    clip.set_statistics(mean=5.0)
    assert [clip.should_clip(x) for x in (9.0, 10.0 - 1e-5, 10.1)] == [False, False, True]
    assert clip.peek(10.1).limit == (10.0,)
    clip.reset()
    clip.update(10.0)
    assert clip.statistics()["mean"] == 5.0
    clip.reset()
    assert clip.statistics() == {}


def test_drytorch_zstat_criterion() -> None:
    clip = translated("drytorch", "HistClipper", alpha=0.9, thresh=2.0, n_warmup_steps=0)
    assert not clip.should_clip(10.0)
    clip.update(10.0)
    assert clip.statistics()["mean"] == pytest.approx(1.0)
    assert clip.statistics()["variance"] == pytest.approx(10.9)
    clip.update(20.0)
    assert clip.statistics()["mean"] == pytest.approx(2.9)
    assert clip.statistics()["variance"] == pytest.approx(45.91)
    clip.set_statistics(mean=10.0, variance=4.0)
    assert [clip.should_clip(x) for x in (12.0, 16.0)] == [False, True]
    # drytorch calls a norm far below the mean a spike too, and would lengthen the gradient.
    assert not clip.should_clip(4.0)
    clip.set_statistics(mean=50.0)
    assert clip.statistics()["variance"] == 4.0
    clip.set_statistics(mean=10.0, variance=1.0)
    assert [min(x, clip.peek(x).limit[0]) for x in (11.0, 15.0)] == pytest.approx([11.0, 10.8])


def test_drytorch_collector() -> None:
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    their, clip = ops.StatsCollector(4), translated("drytorch", "HistClipper", n_warmup_steps=4)
    for norm in (10.0, 20.0, 35.0):
        their.append(norm)
        clip.update(norm)
    found = clip.statistics()
    assert found["count"] == len(their)
    assert found["mean"] == pytest.approx(their.mean)
    assert found["variance"] == pytest.approx(their.variance * 2 / 3)
    assert not found["ready"]


@pytest.mark.parametrize("warmup", ["GradValueClipper", "GradParamNormalizer", "NoOp"])
def test_drytorch_warm_up_by_any_operation(warmup: str) -> None:
    # As docs/coming-from.md shows it.
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    their = ops.HistClipper(ops.EMACriterion(0.9, 1.2), getattr(ops, warmup)(), 4)
    measure, other = translated("drytorch", "NoOp"), translated("drytorch", warmup)
    ours = translated(
        "drytorch",
        "HistClipper",
        criterion="EMACriterion(0.9, 1.2)",
        warmup_clip_strategy="NoOp()",
        n_warmup_steps=4,
    )
    rng = np.random.default_rng(0)
    for _ in range(30):
        step = {name: rng.lognormal(0, 1) * rng.normal(0, 1, (3, 2)) for name in "ab"}
        found = [torch.nn.Parameter(torch.tensor(value)) for value in step.values()]
        for parameter in found:
            parameter.grad = parameter.detach().clone()
        their(found)
        if ours.statistics().get("ready"):
            clipped = ours.clip(step)
        else:
            measure.clip(step)
            ours.update(measure.last.norm)
            clipped = other.clip(step)
        for parameter, value in zip(found, clipped.values(), strict=True):
            np.testing.assert_allclose(value, parameter.grad.numpy(), rtol=1e-9)


def test_torchzero_warm_up_of_the_limit() -> None:
    package = pytest.importorskip("torchzero")
    limits = (0.01 + 0.99 * t / 5 if t <= 5 else math.inf for t in range(99))
    ours = OwnLimit(lambda norm, past: next(limits))
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = package.Optimizer([parameter], package.m.WarmupNormClip(5, 0.01, 1.0))
    for t in range(9):
        parameter.data.zero_()
        parameter.grad = torch.full((3,), 1.0 + t, dtype=torch.float64)
        optimizer.step()
        clipped = ours.clip({"w": np.full(3, 1.0 + t)})["w"]
        np.testing.assert_allclose(clipped, -parameter.detach().numpy(), rtol=1e-9)


# -- smartclip: thresholds, statistics and gates on numbers --------------------------------------
GATES = {"warmup_steps": 0, "min_history": 0}


def fed(clip: Any, *norms: float, group: str | None = None) -> Any:
    for norm in norms:
        clip.update(norm if group is None else {group: norm})
    return clip


def test_smartclip_zscore() -> None:
    assert translated("smartclip", "ZScoreClip").statistics() == {}
    one = fed(translated("smartclip", "ZScoreClip", ema_decay=0.9, **GATES), *[1.0] * 5)
    found = one.statistics()
    assert (found["mean"], found["variance"], found["threshold"]) == (1.0, 0.0, 1.0)
    values = (0.0, 2.0, 0.0, 2.0, 1.0, 1.0)
    narrow, wide = (
        fed(translated("smartclip", "ZScoreClip", zmax=z, ema_decay=0.9), *values).statistics()
        for z in (1.0, 3.0)
    )
    std = math.sqrt(wide["variance"])
    assert narrow["threshold"] == pytest.approx(wide["mean"] + std)
    assert wide["threshold"] == pytest.approx(wide["mean"] + 3 * std)


def test_smartclip_keys_gates_and_state() -> None:
    clip = translated("smartclip", "ZScoreClip", ema_decay=0.8, scope="per_param")
    fed(clip, *[1.0] * 5, group="a.w")
    fed(clip, 0.0, 2.0, 0.0, 2.0, group="b.w")
    a, b = clip.statistics("a.w"), clip.statistics("b.w")
    assert a["threshold"] != b["threshold"]
    # Where there are several keys, no threshold stands for all: smartclip answers eps.
    assert clip.statistics() == {}
    only = fed(translated("smartclip", "ZScoreClip", scope="per_param"), 1.0, group="a.w")
    assert only.statistics()["threshold"] == only.statistics("a.w")["threshold"] == 1.0
    again = translated("smartclip", "ZScoreClip", ema_decay=0.8, scope="per_param")
    again.set_state(clip.get_state())
    assert (again.statistics("a.w"), again.statistics("b.w")) == (a, b)
    gated = translated("smartclip", "ZScoreClip", warmup_steps=2, min_history=2)
    with pytest.warns(FedclipWarning):
        gated.update(math.nan)
    assert gated.statistics()["count"] == 0
    assert [fed(gated, 1.0).statistics()["ready"] for _ in range(2)] == [False, True]


def test_smartclip_autoclip() -> None:
    clip = translated("smartclip", "AutoClip", **GATES)
    assert clip.statistics() == {}
    assert fed(clip, 0.0, 2.0, 0.0, 2.0, 1.0, 1.0).statistics()["threshold"] > 1.0
    same = fed(translated("smartclip", "AutoClip", **GATES), *[1.0] * 10)
    # Identical norms have a spread of at least a thousandth, so that rounding clips none.
    assert same.statistics()["threshold"] == pytest.approx(1.0, abs=0.01)
    early = fed(translated("smartclip", "AutoClip", **GATES), 1.0, 2.0, 1.5, 1.2)
    # smartclip's threshold is eps before the fifth norm, and erases the gradient; ours waits.
    assert not early.statistics()["ready"]
    assert fed(early, 1.8).statistics()["threshold"] >= 1.0
    again = translated("smartclip", "AutoClip", **GATES)
    again.set_state(early.get_state())
    assert again.statistics() == early.statistics()
    with pytest.warns(FedclipWarning):
        again.update(math.nan)
    assert again.statistics() == early.statistics()


@pytest.mark.parametrize("history", ["window", "ema"])
def test_smartclip_percentile(history: str) -> None:
    clip = translated("smartclip", "AutoClip", mode="percentile", history=history, **GATES)
    assert fed(clip, 0.5, 1.0, 2.0, 1.5, 1.0, 0.8, 3.0).statistics()["threshold"] > 0.5


def test_smartclip_agc() -> None:
    clip = translated("smartclip", "AGC", clipping=0.01, eps=1e-8)
    assert clip.limit(10.0) == pytest.approx(0.01 * (10.0 + 1e-8), abs=1e-12)
    assert clip.limit(math.nan) > 0
    made = {"w": np.full((2, 2), 10.0), "b": np.full(3, 10.0), "s": np.array(10.0)}
    weights = {name: np.ones_like(array) for name, array in made.items()}
    found = clip.clip(made, weights)
    assert float(np.linalg.norm(found["w"])) <= clip.limit(2.0)
    # Scalars and vectors are left alone.
    assert found["b"] is made["b"]
    assert found["s"] is made["s"]
    assert clip.excluded({name: array.shape for name, array in made.items()}) == ["b", "s"]
    # What smartclip's metrics hold besides.
    assert clip.last.limit[0] / clip.ratio == pytest.approx(2.0)
    assert clip.last.limit[0] / clip.last.norm_before[0] == pytest.approx(
        float(np.linalg.norm(found["w"]) / np.linalg.norm(made["w"])), rel=1e-6
    )
    all_of_them = translated("smartclip", "AGC", clipping=0.01, exclude_bias_bn=False)
    assert float(np.linalg.norm(all_of_them.clip(made, weights)["b"])) <= 0.01 * 3**0.5 + 1e-9


@pytest.mark.parametrize("scope", ["global", "per_layer", "per_param"])
@pytest.mark.parametrize("cls", ["ZScoreClip", "AutoClip", "AGC"])
def test_smartclip_in_a_torch_loop(cls: str, scope: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config: dict[str, Any] = {"clipping": 1e-3} if cls == "AGC" else GATES
    clipper, told = translated("smartclip", cls, scope=scope, **config), []
    clipper.on_record = told.append
    with attach(optimizer, clipper, model):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            before = [float(p.grad.norm()) for p in model.parameters()]
            limits = [1e-3 * float(p.detach().norm()) + 1e-6 for p in model.parameters()]
            optimizer.step()
            for p, norm, limit in zip(model.parameters(), before, limits, strict=True):
                now = float(p.grad.norm())
                assert now <= norm * (1 + 1e-6)
                if cls == "AGC" and p.dim() > 1:
                    assert now <= limit
    assert len(told) == 3
