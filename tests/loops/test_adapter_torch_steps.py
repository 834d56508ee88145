"""What is attached acts once in each step of an optimizer, is saved, and is seen to act."""

import copy
import gc
import math
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
from helpers import require

torch = require("torch")

from torch_loops import backward, build, closure_of  # noqa: E402

from fedclip import FedclipWarning, NormClip, ZScoreClip  # noqa: E402
from fedclip.loops.torch import attach, attach_update, clip_, clip_grad_norm_, get_state, handles  # noqa: E402

SGD = torch.optim.SGD


@pytest.fixture(autouse=True, scope="module")
def _hooked():
    """Make an optimizer, as torch puts its hooks into the step of a class with the first of it."""
    SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


class Derived(SGD):
    """Calls the closure itself."""

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class Twice(Derived):
    """One level more, which hands the closure on."""

    def step(self, closure=None):
        return super().step(closure)


class Fails(Twice):
    """Fails once, after everything."""

    fails = False

    def step(self, closure=None):
        loss = super().step(closure)
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return loss


@pytest.mark.parametrize("kind", [Derived, Twice, Fails])
@pytest.mark.parametrize(("closure", "made"), [(False, ""), (False, "before"), (True, "after")])
def test_a_step_is_clipped_once_however_many_steps_it_calls(kind, closure, made):
    """With a scheduler that is made before or after the clipper is attached, and without one."""
    model, other = build(), build()
    optimizer, plain = kind(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    if made == "before":
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    handle = attach(optimizer, ZScoreClip(max_norm=3.0), model)
    second = attach(optimizer, NormClip(2.0), model)
    if made == "after":
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    byhand, norms = ZScoreClip(max_norm=3.0), []
    compute = closure_of(model, optimizer, norms)
    for step in range(4):
        optimizer.fails = kind is Fails and step == 1
        if not closure:
            compute()
        with pytest.raises(RuntimeError, match="memory") if optimizer.fails else nullcontext():
            optimizer.step(*[compute] * closure)
        plain.zero_grad()
        backward(other)
        clip_(other, byhand)
        clip_(other, NormClip(2.0))
        plain.step()
        assert float(handle.last) == pytest.approx(norms[-1])
    assert handle.metrics()["round/steps"] == second.metrics()["round/steps"] == len(norms) == 4
    assert {**handle.clipper.get_state(), "owner": 0} == {**byhand.get_state(), "owner": 0}
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("kind", "rate"),
    [(SGD, 0.1), (Twice, 0.1), (Fails, 0.1), (torch.optim.Adam, 5.0), (torch.optim.LBFGS, 1.0)],
)
def test_an_update_is_that_of_the_outermost_step(kind, rate):
    model = build()
    optimizer = kind(model.parameters(), lr=rate)
    compute = closure_of(model, optimizer)
    with attach_update(optimizer, NormClip(0.01), model) as handle:
        for step in range(5):
            before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            optimizer.fails = fails = kind is Fails and step == 1
            compute()
            with pytest.raises(RuntimeError, match="memory") if fails else nullcontext():
                optimizer.step(*[compute] * (kind is torch.optim.LBFGS))
            moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
            assert fails or 0 < float(moved.norm()) <= 0.01 * (1 + 1e-4)
    found = handle.metrics()
    assert found["round/steps"] == 5 - (kind is Fails)
    assert found["round/clipped"] > 0
    optimizer.step(compute)
    assert handle.metrics() == found
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.parametrize("how", [attach, attach_update])
def test_a_compiled_step_does_what_an_eager_one_does(how):
    found = []
    for compiled in (False, True):
        model, clipper = build(), ZScoreClip(max_norm=0.5)
        optimizer = Twice(model.parameters(), lr=0.1)
        how(optimizer, clipper, model)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            step()
        assert sum(r.steps for r in clipper.rounds) == 3
        found.append((repr(get_state(clipper)), [*model.parameters()]))
    (eager, expected), (learnt, weights) = found
    assert learnt == eager
    assert all(map(torch.equal, weights, expected))


class OwnBoth(SGD):
    """Loads and saves without torch's hooks, as optimizers of 8 bits do."""

    def load_state_dict(self, state_dict, strict=True):
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=strict):
            group |= {key: value for key, value in saved.items() if key != "params"}

    def state_dict(self):
        return {"param_groups": [{"lr": group["lr"]} for group in self.param_groups]}


class Nested:
    """No optimizer of torch; the state of the one inside is in its own."""

    inside = SGD

    def __init__(self, parameters, lr):
        self.optimizer = self.inside(parameters, lr=lr)
        self.param_groups = self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)

    def state_dict(self):
        return {"slow": {}, "fast": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["fast"])


@pytest.mark.parametrize("kind", [OwnBoth, Nested, type("Both", (Nested,), {"inside": OwnBoth})])
def test_what_is_saved_comes_back_by_the_optimizers_own_loader(kind):
    def made():
        model = build()
        optimizer = kind(model.parameters(), lr=0.1)
        return model, optimizer, [attach(optimizer, ZScoreClip(), model) for _ in range(2)]

    model, optimizer, learnt = made()
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step(lambda: backward(model))
    saved = optimizer.state_dict()
    # Part of the format of what is saved.
    assert [h._key for h in learnt] == ["fedclip:zscore-clip", "fedclip:zscore-clip#1"]
    _, other, loaded = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    assert [h.get_state() for h in loaded] == [h.get_state() for h in learnt]
    assert loaded[0].get_state()["groups"]
    for handle in loaded:
        handle.remove()
    innermost = getattr(other, "optimizer", other)
    assert "load_state_dict" not in vars(innermost)
    assert not any(key.startswith("fedclip") for key in innermost.state_dict())


def test_a_wrapper_that_does_not_save_what_is_inside_is_told():
    model, forgets = build(), type("Forgets", (Nested,), {"state_dict": lambda self: {"slow": {}}})
    with pytest.warns(FedclipWarning, match=r"state_dict\(\) of Forgets lacks .* save handle"):
        attach(forgets(model.parameters(), 0.1), ZScoreClip(), model)


def _attach(clipper, how=attach):
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    return optimizer, how(optimizer, clipper, model)


def _clip(clipper, how=clip_):
    model = build()
    backward(model)
    how(model, clipper)


@pytest.mark.parametrize(
    ("how", "second"),
    [(attach, _attach), (attach, _clip), (attach_update, partial(_clip, how=clip_grad_norm_))],
)
def test_a_clipper_that_is_attached_acts_nowhere_else(how, second):
    clipper = ZScoreClip()
    optimizer, handle = _attach(clipper, how)
    sentence = rf"{clipper.name} is already attached to an optimizer \(SGD\).*copy.deepcopy"
    with pytest.raises(ValueError, match=sentence):
        second(clipper)
    with pytest.raises(ValueError, match=sentence):
        attach(optimizer, clipper)
    assert handles(optimizer) == [handle]
    second(copy.deepcopy(clipper))
    handle.remove()
    second(clipper)


def test_uses_of_a_clipper_that_are_one_after_the_other():
    clipper = ZScoreClip()
    optimizer, handle = _attach(clipper)
    (twin,) = handles(copy.copy(optimizer))
    assert twin.clipper is not clipper
    assert twin.get_state() == handle.get_state()
    del twin
    gone = weakref.ref(optimizer)
    # As where a notebook runs its cell again: the handle is still known.
    optimizer.itself = optimizer
    del optimizer
    _, again = _attach(clipper)
    gc.collect()
    assert gone() is None
    assert again.clipper is handle.clipper
    assert _attach("zscore-clip")[1].clipper is not _attach("zscore-clip")[1].clipper


# -- public reports, by project and number --------------------------------------------------------
def test_lvsm_19_weathergenerator_356_slime_1762_a_scaler_goes_on_after_a_skipped_step():
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    clipper = ZScoreClip(warmup=2, on_spike="skip")
    for factor in (1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1e6, 1.0):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.unscale_(optimizer)
        before = model.weight.detach().clone()
        assert math.isfinite(float(clip_(model, clipper)))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor > 2)
