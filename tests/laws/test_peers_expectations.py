# SPDX-License-Identifier: Apache-2.0
"""What other packages test of their clippers, asked of ours in our own words: a sample.

`translate.translate` gives the clipper. docs/developers/peers-tests.md has the count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import require

from fedclip import FedclipWarning, OwnLimit, translate

torch = require("torch")


def translated(peer: str, cls: str, **config: Any) -> Any:
    kind, name, found = translate.translate(peer, cls, config)
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, found)


# -- warm-ups ------------------------------------------------------------------------------------


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
            ours.observe(measure.last.norm)
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
        clip.observe(norm if group is None else {group: norm})
    return clip


def test_smartclip_keys_gates_and_state() -> None:
    clip = translated("smartclip", "ZScoreClip", ema_decay=0.8, scope="per_param", **GATES)
    fed(clip, *[1.0] * 5, group="a.w")
    fed(clip, 0.0, 2.0, 0.0, 2.0, group="b.w")
    a, b = clip.statistics("a.w"), clip.statistics("b.w")
    assert a["threshold"] != b["threshold"]
    # Where there are several keys, no threshold stands for all: smartclip answers eps.
    assert clip.statistics() == {}
    only = translated("smartclip", "ZScoreClip", scope="per_param", **GATES)
    assert only.statistics()["threshold"] == math.inf
    fed(only, 1.0, 1.0, group="a.w")
    assert only.statistics()["threshold"] == only.statistics("a.w")["threshold"] == 1.0
    again = translated("smartclip", "ZScoreClip", ema_decay=0.8, scope="per_param", **GATES)
    again.set_state(clip.get_state())
    assert (again.statistics("a.w"), again.statistics("b.w")) == (a, b)
    gated = translated("smartclip", "ZScoreClip", warmup_steps=2, min_history=2)
    with pytest.warns(FedclipWarning):
        gated.observe(math.nan)
    assert gated.statistics()["count"] == 0
    assert [fed(gated, 1.0).statistics()["ready"] for _ in range(2)] == [False, True]
