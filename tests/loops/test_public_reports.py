# SPDX-License-Identifier: Apache-2.0
"""Reports from the trackers of torch, Lightning, Keras, optax and others, replayed on ours.

The name of a test begins with the project and number of the report.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import require

from fedclip import AGC, NormClip, ZScoreClip

torch = require("torch")

from fedclip.loops.torch import attach, clip_, clip_grad_norm_  # noqa: E402


def layer(*gradient: float) -> Any:
    found = torch.nn.Linear(len(gradient), 1, bias=False)
    found.weight.grad = torch.tensor([gradient])
    return found


def norm_of(model: Any) -> float:
    return float(
        torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    )


@pytest.mark.parametrize("value", [1e20, 1e30])
def test_pytorch_46849_a_norm_that_overflows_is_clipped_not_erased(value: float) -> None:
    model = layer(value, value)
    assert clip_grad_norm_(model, 1.0).isfinite()
    assert norm_of(model) == pytest.approx(1.0, rel=1e-5)


def test_lvsm_19_weathergenerator_356_slime_1762_a_scaler_goes_on_after_a_skipped_step() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    clipper = ZScoreClip(warmup=2, on_spike="skip")
    for factor in (1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1e6, 1.0):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.unscale_(optimizer)
        record, before = clip_(model, clipper), model.weight.detach().clone()
        assert record is not None
        assert math.isfinite(float(record))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor > 2)


def test_pytorch_67590_a_step_that_the_scaler_skips_is_none() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    handle = attach(optimizer, ZScoreClip(), model)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.metrics()["round/steps"] == 2


def test_pytorch_optimizer_431_zero_gradients_stay_zero() -> None:
    for clipper in (NormClip(1.0), AGC(), ZScoreClip()):
        model = layer(0.0, 0.0)
        clip_(model, clipper)
        assert not model.weight.grad.any()
