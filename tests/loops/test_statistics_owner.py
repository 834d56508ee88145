# SPDX-License-Identifier: Apache-2.0
"""The statistics in use were learned from this model's steps, whatever came before."""

import copy
import re
import warnings
from typing import Any

import numpy as np
import pytest
from helpers import require
from hypothesis import given, settings
from hypothesis import strategies as st

torch = require("torch")

from fedclip import EmaClip, FedclipWarning, ZScoreClip  # noqa: E402
from fedclip.loops.torch import attach, attach_update, clip_  # noqa: E402

SCALES = 1.0, 1e4
ACTIONS = [("step",), ("step",), ("use", 0), ("use", 1), ("save",), ("load",)]
ACTIONS += [("by_hand", 0), ("by_hand", 1)]


class Loop:
    """A model of gradients of one size, and another of ten thousand times that."""

    def __init__(self) -> None:
        self.clipper = ZScoreClip(warmup=2, warmup_factor=None)
        self.models = [torch.nn.Linear(3, 2) for _ in SCALES]
        self.saved: dict[int, Any] = {}
        self.now: int | None = None
        self.handle: Any = None

    def filled(self, model: int) -> Any:
        for p in self.models[model].parameters():
            p.grad = torch.full_like(p, SCALES[model] * np.random.uniform(0.9, 1.1))
        return self.models[model]

    def check(self, model: int, record: Any) -> None:
        for limit in record.limit if record is not None else ():
            ratio = limit / SCALES[model]
            assert not np.isfinite(limit) or 0.01 < ratio < 100, "the limit is another model's"

    def release(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.now = None

    def step(self) -> None:
        if self.now is not None:
            self.filled(self.now)
            self.optimizer.step()
            self.check(self.now, self.handle.last)

    def use(self, model: int) -> None:
        self.release()
        self.now = model
        self.optimizer = torch.optim.SGD(self.models[model].parameters(), lr=1e-9)
        self.handle = attach(self.optimizer, self.clipper, self.models[model])

    def save(self) -> None:
        if self.now is not None:
            self.saved[self.now] = copy.deepcopy(self.optimizer.state_dict())

    def load(self) -> None:
        if self.now in self.saved:
            self.optimizer.load_state_dict(self.saved[self.now])

    def by_hand(self, model: int) -> None:
        self.release()
        self.check(model, clip_(self.filled(model), self.clipper))


@pytest.mark.filterwarnings("ignore::fedclip.FedclipWarning")
@settings(max_examples=60)
@given(st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=25))
def test_limits_are_of_this_models_steps(actions: list[Any]) -> None:
    one = Loop()
    for verb, *model in actions:
        try:
            getattr(one, verb)(*model)
        except ValueError as error:
            if not re.search("each model a clipper|load the state", str(error)):
                raise


def build(optimizer: str = "Adam", clipper: Any = None, width: int = 3) -> Any:
    model = torch.nn.Linear(width, 2)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    return model, made, attach(made, clipper or ZScoreClip(warmup=3), model)


def train(model: Any, optimizer: Any) -> Any:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, model.in_features)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def test_a_state_of_another_configuration_optimizer_or_model() -> None:
    model, optimizer, handle = build()
    saved = train(model, optimizer)
    _, other, again = build()
    other.load_state_dict(saved)
    assert again.get_state()["groups"] == handle.get_state()["groups"]
    state = saved["fedclip:zscore-clip"]
    for third in (build(clipper=ZScoreClip(warmup=4)), build("SGD")):
        with pytest.warns(FedclipWarning, match="it starts anew"):
            third[2].set_state(state)
        assert not third[2].get_state()["groups"]
    wider = build(width=4)
    with pytest.raises(ValueError, match="other names or shapes of parameters"):
        wider[2].set_state(state)
    # Older, or from a federation.
    del state["owner"]
    other.load_state_dict(saved)
    assert again.get_state()["groups"] == handle.get_state()["groups"]
    with pytest.raises(ValueError, match="'owner' must be a dict of strings"):
        again.clipper.set_state({**state, "owner": {"model": 1}})


def test_two_of_one_kind_get_their_own_in_any_order() -> None:
    model, optimizer, first = build("SGD")
    second = attach(optimizer, ZScoreClip(warmup=1), model)
    saved = train(model, optimizer)
    other, again, two = build("SGD", ZScoreClip(warmup=1))
    one = attach(again, ZScoreClip(warmup=3), other)
    again.load_state_dict(saved)
    for found, expected in ((one, first), (two, second)):
        assert found.get_state()["groups"] == expected.get_state()["groups"]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_state_that_is_loaded_before_attach_warns(optimizer: str) -> None:
    model, made, handle = build(optimizer)
    saved = train(model, made)
    handle.remove()
    fresh = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    fresh.load_state_dict(saved)
    with pytest.warns(FedclipWarning, match="attach first, and then call load_state_dict"):
        attach(fresh, "zscore-clip", model)
    assert all("fedclip" not in group for group in fresh.param_groups)


def test_steps_that_are_none_teach_nothing() -> None:
    state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    for make in (None, attach_update):
        model, optimizer, handle = build(clipper=EmaClip())
        if make is not None:
            handle.remove()
            handle = make(optimizer, EmaClip(), model)
        state_dict.get_optimizer_state_dict(model, optimizer)
        assert handle.last is None
        assert not handle.get_state()["rounds"]
    # A rate of zero alone, as at the begin of a warm-up, is a step.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert handle.last is not None


@pytest.mark.parametrize("kind", ["nan", "spike"])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_step_that_is_skipped_changes_nothing(options: Any, closure: bool, kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **options)
    attach(optimizer, ZScoreClip(warmup=2, on_spike="skip"), model)

    def step(factor: float) -> None:
        def loss() -> Any:
            optimizer.zero_grad()
            value = model(torch.ones(4, 3)).square().mean() * factor + model.weight.sum() * factor
            value.backward()
            return value

        if not closure:
            loss()
        optimizer.step(*[loss] * closure)

    for _ in range(8):
        step(1.0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedclipWarning)
        step(float("nan") if kind == "nan" else 1e6)
    assert repr((model.state_dict(), optimizer.state_dict()["state"])) == repr(before)
    step(1.0)
    assert repr(optimizer.state_dict()["state"]) != repr(before[1])
