# SPDX-License-Identifier: Apache-2.0
"""States are saved, loaded, resumed from, and refused if they are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.optimizer import Optimizer
from helpers import MODULES, Specimen, assert_same, gradient, run, specimens

from fedclip import ZScoreClip
from fedclip.testing import gradient_stream, to_vector


@specimens(MODULES)
def test_state_is_a_copy_and_a_clippers_own(specimen: Specimen) -> None:
    clipper, other = specimen.make(), specimen.make()
    run(clipper, gradient_stream(6))
    state = clipper.get_state()
    kept = repr(state)
    run(clipper, gradient_stream(6, seed=1))
    assert repr(state) == kept
    assert other.get_state() == specimen.make().get_state()


@specimens(MODULES)
def test_rounds_continue_each_other(specimen: Specimen) -> None:
    stream = gradient_stream(12)
    clipper = specimen.make()
    got: list[Any] = []
    for start in range(0, 12, 4):
        clipper.on_round_start()
        got += run(clipper, stream[start : start + 4])
    assert_same(got, run(specimen.make(), stream))


@specimens(MODULES, stateful=True)
def test_state_of_another_model_is_refused_at_the_first_gradient(specimen: Specimen) -> None:
    if specimen.config.get("scope", "global") == "global":
        return
    clipper, other = specimen.make(), specimen.make()
    run(other, gradient_stream(5))
    clipper.set_state(other.get_state())
    with pytest.raises(ValueError, match="stranger"):
        clipper.run(to_vector({"stranger": np.ones(3)}))


def test_missing_tensor_finds_its_statistics_again() -> None:
    clipper = ZScoreClip(warmup=2, scope="tensor")
    for step in gradient_stream(8):
        clipper.run(to_vector(step))
    before = clipper.get_state()["groups"]["enc.bias"]
    some = {k: v for k, v in gradient(9).items() if k != "enc.bias"}
    clipper.run(to_vector(some))
    assert clipper.get_state()["groups"]["enc.bias"] == before
    clipper.run(to_vector(gradient(10)))
    assert clipper.get_state()["groups"]["enc.bias"]["count"] == before["count"] + 1


def test_optimizer_restores_all_modules_if_one_state_is_wrong() -> None:
    optimizer = Optimizer(lrate=0.1, modules=[("zscore-clip", {"warmup": 2}), "norm-clip"])
    for step in gradient_stream(5):
        optimizer.modules[0].run(to_vector(step))
    state = optimizer.get_state()
    wrong = {"config": optimizer.get_config(), "states": {"modules": []}}
    with pytest.raises(KeyError):
        optimizer.set_state(wrong)
    assert optimizer.get_state() == state
