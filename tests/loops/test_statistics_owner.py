# SPDX-License-Identifier: Apache-2.0
"""The statistics in use were learned from this model's steps, whatever came before."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import require
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclip import EmaClip, FedclipWarning, ZScoreClip

SCALES = 1.0, 1e4
ACTIONS = ("step", "step", "use 0", "use 1", "save", "load", "by hand 0", "by hand 1")


class Loop:
    """A model of gradients of one size, and another of ten thousand times that."""

    def __init__(self) -> None:
        self.clipper = ZScoreClip(warmup=2, warmup_factor=None)
        self.now: int | None = None
        self.saved: dict[int, Any] = {}

    def check(self, model: int, limits: Sequence[float]) -> None:
        for limit in limits:
            ratio = limit / SCALES[model]
            assert not np.isfinite(limit) or 0.01 < ratio < 100, "the limit is another model's"


class Torch(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.torch = require("torch")
        self.models = [self.torch.nn.Linear(3, 2) for _ in SCALES]
        self.handle: Any = None

    def filled(self, model: int) -> Any:
        for p in self.models[model].parameters():
            p.grad = self.torch.full_like(p, SCALES[model] * np.random.uniform(0.9, 1.1))
        return self.models[model]

    def step(self) -> None:
        if self.now is not None:
            self.filled(self.now)
            self.optimizer.step()
            self.check(self.now, self.handle.last.limit)

    def use(self, model: int) -> None:
        from fedclip.loops.torch import attach

        if self.handle is not None:
            self.handle.remove()
        self.now = model
        self.optimizer = self.torch.optim.SGD(self.models[model].parameters(), lr=1e-9)
        self.handle = attach(self.optimizer, self.clipper, self.models[model])

    def save(self) -> None:
        if self.now is not None:
            self.saved[self.now] = copy.deepcopy(self.optimizer.state_dict())

    def load(self) -> None:
        if self.now in self.saved:
            self.optimizer.load_state_dict(self.saved[self.now])

    def by_hand(self, model: int) -> None:
        from fedclip.loops.torch import clip_

        if self.handle is not None:
            self.handle.remove()
            self.handle = self.now = None
        record = clip_(self.filled(model), self.clipper)
        self.check(model, record.limit if record is not None else ())


class TensorFlow(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.tf = require("tensorflow")
        self.models = [[self.tf.Variable([1.0, 2.0], name="w")] for _ in SCALES]

    def by_hand(self, model: int) -> None:
        from fedclip.loops.tensorflow import clip

        gradient = SCALES[model] * np.random.uniform(0.9, 1.1, 2).astype("float32")
        clip([(self.tf.constant(gradient), v) for v in self.models[model]], self.clipper)
        if (record := self.clipper.last) is not None:
            self.check(model, record.limit)

    def save(self) -> None:
        self.clipper.reset()


class Jax(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.numpy = require("jax").numpy
        self.models = [{name: self.numpy.ones(3)} for name in "ab"]

    def use(self, model: int) -> None:
        from fedclip.loops.jax import as_optax

        transform = as_optax(self.clipper)
        self.state = transform.init(self.models[model])
        self.transform, self.now = transform, model

    def step(self) -> None:
        if self.now is not None:
            params = self.models[self.now]
            value = SCALES[self.now] * np.random.uniform(0.9, 1.1)
            gradient = {n: value * self.numpy.ones(3) for n in params}
            _, self.state = self.transform.update(gradient, self.state, params)
            self.check(self.now, np.asarray(self.state.limit).tolist())

    def load(self) -> None:
        from fedclip.loops.jax import set_state

        if self.now is not None:
            set_state(self.clipper, self.state, self.models[self.now])


@pytest.mark.filterwarnings("ignore::fedclip.FedclipWarning")
@pytest.mark.parametrize("loop", [Torch, TensorFlow, Jax])
def test_limits_are_of_this_models_steps(loop: Callable[[], Loop]) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=25))
    def run(actions: list[str]) -> None:
        one = loop()
        for action in actions:
            verb, _, model = action.rpartition(" ") if action[-1].isdigit() else (action, "", "")
            try:
                act = getattr(one, verb.replace(" ", "_"), lambda *_: None)
                act(*map(int, model))
            except ValueError as error:
                if not re.search("each model a clipper|load the state", str(error)):
                    raise

    run()


def build(optimizer: str = "Adam", clipper: Any = None, width: int = 3) -> Any:
    torch = require("torch")
    from fedclip.loops.torch import attach

    model = torch.nn.Linear(width, 2)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    return model, made, attach(made, clipper or ZScoreClip(warmup=3), model)


def train(model: Any, optimizer: Any) -> Any:
    for _ in range(5):
        optimizer.zero_grad()
        model(require("torch").randn(4, model.in_features)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("how", ["clip_", "clip_grad_norm_"])
def test_new_tensors_replace_those_of_their_shape_only(how: str) -> None:
    torch, loops = require("torch"), pytest.importorskip("fedclip.loops.torch")
    clipper = ZScoreClip(scope="tensor")

    def step(*shape: int) -> None:
        tensor = torch.zeros(shape, requires_grad=True)
        tensor.grad = torch.ones(shape)
        getattr(loops, how)([tensor], clipper)

    step(2, 3)
    step(2, 3)
    with pytest.raises(ValueError, match="statistics of zscore-clip for '0' are of other tensors"):
        step(3, 3)
    assert clipper.metrics()["round/steps"] == 2


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
    from fedclip.loops.torch import attach

    model, optimizer, first = build("SGD")
    second = attach(optimizer, ZScoreClip(warmup=1), model)
    saved = train(model, optimizer)
    other, again, two = build("SGD", ZScoreClip(warmup=1))
    one = attach(again, ZScoreClip(warmup=3), other)
    again.load_state_dict(saved)
    assert [h.get_state()["groups"] for h in (one, two)] == [
        h.get_state()["groups"] for h in (first, second)
    ]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_state_that_is_loaded_before_attach_warns(optimizer: str) -> None:
    torch = require("torch")
    from fedclip.loops.torch import attach

    model, made, handle = build(optimizer)
    saved = train(model, made)
    handle.remove()
    fresh = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    fresh.load_state_dict(saved)
    with pytest.warns(FedclipWarning, match="attach first, and then call load_state_dict"):
        attach(fresh, "zscore-clip", model)
    assert all("fedclip" not in group for group in fresh.param_groups)


def test_steps_that_are_none_teach_nothing() -> None:
    torch = require("torch")
    state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    from fedclip.loops.torch import attach_update

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
    torch = require("torch")
    from fedclip.loops.torch import attach

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
    after = model.state_dict(), optimizer.state_dict()["state"]
    assert repr(after) == repr(before)
    step(1.0)
    assert repr(optimizer.state_dict()["state"]) != repr(before[1])


def test_a_wrapper_of_optax_keeps_its_state() -> None:
    jax = require("jax")
    import optax

    from fedclip.loops.jax import as_optax, metrics

    clipper, params = ZScoreClip(warmup=2, on_spike="skip"), {"w": jax.numpy.ones(3)}
    transform = as_optax(clipper, inner=optax.adamw(0.1))
    state, update = transform.init(params), jax.jit(transform.update)
    for value in (1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1):
        updates, state = update({"w": value * params["w"]}, state, params)
        assert updates["w"].any()
    for value in (np.nan, 1e6):
        updates, after = update({"w": value * params["w"]}, state, params)
        assert not updates["w"].any()
        assert repr(after[1]) == repr(state[1])
        state = after
    assert metrics(clipper, state, params)["round/nonfinite"] == 1
    with pytest.raises(NotImplementedError, match="use scope='global'"):
        as_optax(ZScoreClip(on_spike="skip", scope="tensor"), inner=optax.sgd(0.1))
