# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers beside ours: what tests/golden has no numbers of.

`translate.translate` gives the clipper. docs/developers/peers-tests.md has the count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import require
from recordings import ALL

from fedclip import FedclipWarning, translate

torch = require("torch")

LIVE: dict[tuple[str, str], dict[str, Any]] = {
    ("drytorch", "NoOp"): {},
    ("drytorch", "ZStatCriterion"): {"alpha": 0.9, "z_thresh": 1.5},
    ("drytorch", "EMACriterion"): {"alpha": 0.8, "r_thresh": 1.2},
    ("torchzero", "clip_grad_value_"): {"value": 0.5},
    ("torchzero", "normalize_grads_"): {"norm_value": 0.7, "ord": 1, "dim": 0, "min_size": 2},
}


def translated(peer: str, cls: str, **config: Any) -> Any:
    kind, name, found = translate.translate(peer, cls, config)
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, found)


def compare(theirs: Callable[[Any], Any], ours: Callable[[Any], Mapping[str, Any]]) -> None:
    """Compare the gradients of parameters after each step with what a clipper makes of them."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        step = {name: rng.lognormal(0, 1) * rng.normal(0, 1, (3, 2)) for name in "ab"}
        parameters = [torch.nn.Parameter(torch.tensor(value)) for value in step.values()]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        theirs(parameters)
        for parameter, value in zip(parameters, ours(step).values(), strict=True):
            np.testing.assert_allclose(value, parameter.grad.numpy(), rtol=1e-9)


@pytest.mark.parametrize(("peer", "cls"), LIVE)
def test_same_numbers(peer: str, cls: str) -> None:
    package = {"drytorch": "drytorch.lib.gradient_ops", "torchzero": "torchzero.modules"}[peer]
    there, config = getattr(pytest.importorskip(package), cls), LIVE[peer, cls]
    if cls.endswith("_"):
        theirs = lambda parameters: there(parameters, **config)  # noqa: E731
    else:
        theirs = there(**config)
    if cls.endswith("Criterion"):
        ops = pytest.importorskip(package)
        theirs = ops.HistClipper(theirs, ops.NoOp(), 0)
    compare(theirs, translated(peer, cls, **config).clip)


def test_every_class_is_here_or_recorded() -> None:
    recorded = {(record["peer"], record["cls"]) for record in ALL}
    for peer in ("drytorch", "smartclip", "torchzero"):
        assert {(peer, cls) for cls in translate.known()[peer]} <= recorded | set(LIVE)


@pytest.mark.parametrize("warmup", ["GradValueClipper", "GradParamNormalizer", "NoOp"])
def test_drytorch_warm_up_by_any_operation(warmup: str) -> None:
    # As docs/coming-from.md shows it.
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    measure, other = translated("drytorch", "NoOp"), translated("drytorch", warmup)
    learns = {"criterion": "EMACriterion(0.9, 1.2)", "warmup_clip_strategy": "NoOp()"}
    ours = translated("drytorch", "HistClipper", **learns, n_warmup_steps=4)

    def clip(step: Any) -> Any:
        if ours.statistics().get("ready"):
            return ours.clip(step)
        measure.clip(step)
        ours.observe(measure.last.norm)
        return other.clip(step)

    compare(ops.HistClipper(ops.EMACriterion(0.9, 1.2), getattr(ops, warmup)(), 4), clip)


def test_smartclip_keys_gates_and_state() -> None:
    gates = {"warmup_steps": 0, "min_history": 0, "scope": "per_param"}
    clip = translated("smartclip", "ZScoreClip", ema_decay=0.8, **gates)
    only = translated("smartclip", "ZScoreClip", **gates)
    assert only.statistics()["threshold"] == math.inf
    for norms in ({"a.w": 1.0}, {"b.w": 0.0}, {"b.w": 2.0}, {"a.w": 1.0}):
        clip.observe(norms)
    a, b = clip.statistics("a.w"), clip.statistics("b.w")
    assert a["threshold"] != b["threshold"]
    # Where there are several keys, no threshold stands for all: smartclip answers eps.
    assert clip.statistics() == {}
    for _ in range(2):
        only.observe({"a.w": 1.0})
    assert only.statistics()["threshold"] == only.statistics("a.w")["threshold"] == 1.0
    again = translated("smartclip", "ZScoreClip", ema_decay=0.8, **gates)
    again.set_state(clip.get_state())
    assert (again.statistics("a.w"), again.statistics("b.w")) == (a, b)
    gated = translated("smartclip", "ZScoreClip", warmup_steps=2, min_history=2)
    with pytest.warns(FedclipWarning):
        gated.observe(math.nan)
    assert gated.statistics()["count"] == 0
    for ready in (False, True):
        gated.observe(1.0)
        assert gated.statistics()["ready"] is ready
