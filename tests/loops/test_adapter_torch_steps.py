"""What is attached acts once in each step of an optimizer, is saved, and is seen to act."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
from helpers import require

torch = require("torch")


from fedclip import FedclipWarning, GrowthValueClip, NormClip, ZScoreClip  # noqa: E402
from fedclip.loops.torch import (  # noqa: E402
    attach,
    attach_update,
    clip_,
    clip_grad_norm_,
    get_state,
    handles,
)

SGD = torch.optim.SGD


@pytest.fixture(autouse=True, scope="module")
def _hooked():
    """Make an optimizer, as torch puts its hooks into the step of a class with the first of it."""
    SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def build(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def backward(model, scale=100.0):
    loss = (scale * model(torch.ones(3, 5))).square().sum()
    loss.backward()
    return loss


def total(model):
    return float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double().norm())


# -- steps that call one another -----------------------------------------------------------------
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


class Bare(SGD):
    """Has a step without hooks of its own, put into the class later."""


def _bare_step(self, closure=None):
    return SGD.step(self, closure)


class Fails(Twice):
    """Fails once, after everything."""

    fails = False

    def step(self, closure=None):
        loss = super().step(closure)
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return loss


@pytest.mark.parametrize("kind", [Derived, Twice, Bare, Fails])
@pytest.mark.parametrize(
    ("closure", "scheduler"),
    [(False, "none"), (False, "before"), (True, "after")],
)
def test_a_step_is_clipped_once_however_many_steps_it_calls(kind, closure, scheduler):
    model, other = build(), build()
    optimizer, plain = kind(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    if kind is Bare:
        Bare.step = _bare_step
    if scheduler == "before":
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    handle = attach(optimizer, ZScoreClip(max_norm=3.0), model)
    second = attach(optimizer, NormClip(2.0), model)
    if scheduler == "after":
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    byhand, norms = ZScoreClip(max_norm=3.0), []

    def compute():
        optimizer.zero_grad()
        loss = backward(model)
        norms.append(total(model))
        return loss

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
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [SGD, Twice, Fails])
def test_an_update_is_that_of_the_outermost_step(kind):
    model = build()
    optimizer = kind(model.parameters(), lr=0.1)
    handle = attach_update(optimizer, NormClip(0.01), model)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        backward(model)
        optimizer.fails = step == 1
        if kind is Fails and step == 1:
            with pytest.raises(RuntimeError, match="memory"):
                optimizer.step()
            continue
        optimizer.step()
        moved = [(p - b).detach().reshape(-1) for p, b in zip(model.parameters(), before)]  # noqa: B905
        assert 0 < float(torch.cat(moved).norm()) <= 0.01001
    assert handle.metrics()["round/steps"] == (2 if kind is Fails else 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.parametrize("how", [attach, attach_update, None])
def test_a_compiled_step_does_what_an_eager_one_does(how):
    found = []
    for compiled in (False, True):
        model = build()
        optimizer = Twice(model.parameters(), lr=0.1)
        clipper = ZScoreClip(max_norm=0.5) if how else GrowthValueClip()

        def step(model=model, optimizer=optimizer, clipper=clipper):
            if how is None:
                clip_(model, clipper)
            optimizer.step()

        if how:
            how(optimizer, clipper, model)
        step = torch.compile(step, backend="eager") if compiled else step
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            step()
        found.append((repr(get_state(clipper)), [*model.parameters()]))
        assert sum(r.steps for r in clipper.rounds) == 3
    (eager, expected), (learnt, weights) = found
    assert learnt == eager
    assert all(map(torch.equal, weights, expected))


# -- what is saved comes back --------------------------------------------------------------------


class OwnBoth(SGD):
    """Loads and saves without torch's hooks, as optimizers of 8 bits do."""

    def load_state_dict(self, state_dict, strict=True):
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=strict):
            group |= {key: value for key, value in saved.items() if key != "params"}

    def state_dict(self):
        return {"param_groups": [{"lr": group["lr"]} for group in self.param_groups]}


class Nested:
    """No optimizer of torch; the state of the one inside is in its own."""

    def __init__(self, parameters, lr):
        self.optimizer = SGD(parameters, lr=lr)
        self.param_groups = self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)

    def state_dict(self):
        return {"slow": {}, "fast": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["fast"])


class Forgets(Nested):
    def state_dict(self):
        return {"slow": {}}


@pytest.mark.parametrize("kind", [OwnBoth, Nested])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_saved_comes_back_by_the_optimizers_own_loader(kind, wrapped):
    def made():
        model = build()
        optimizer = inner = kind(model.parameters(), lr=0.1)
        if wrapped and kind is not Nested:
            optimizer = Nested(model.parameters(), 0.1)
            optimizer.optimizer, optimizer.param_groups = inner, inner.param_groups
        return model, optimizer, [attach(optimizer, make(), model) for make in (ZScoreClip,) * 2]

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
    assert "load_state_dict" not in vars(handles_of(other))
    assert not any(key.startswith("fedclip") for key in handles_of(other).state_dict())


def handles_of(optimizer):
    """Return the innermost optimizer."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def test_a_wrapper_that_does_not_save_what_is_inside_is_told():
    model = build()
    with pytest.warns(FedclipWarning, match=r"state_dict\(\) of Forgets lacks .* save handle"):
        attach(Forgets(model.parameters(), 0.1), ZScoreClip(), model)


# -- one clipper, one place ----------------------------------------------------------------------
def _attach(clipper, how=attach):
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    return optimizer, how(optimizer, clipper, model)


def _clip(clipper, how=clip_):
    model = build()
    backward(model)
    how(model, clipper)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_attach, _attach),
        (_attach, _clip),
        (partial(_attach, how=attach_update), partial(_clip, how=clip_grad_norm_)),
    ],
)
def test_a_clipper_that_is_attached_acts_nowhere_else(first, second):
    clipper = ZScoreClip()
    optimizer, handle = first(clipper)
    sentence = rf"{clipper.name} is already attached to an optimizer \(SGD\).*copy.deepcopy"
    with pytest.raises(ValueError, match=sentence):
        second(clipper)
    with pytest.raises(ValueError, match=sentence):
        attach(optimizer, clipper)
    assert handles(optimizer) == [handle]
    second(copy.deepcopy(clipper))
    handle.remove()
    second(clipper)


@pytest.mark.parametrize("how", ["dropped", "shallow", "by name"])
def test_uses_of_a_clipper_that_are_one_after_the_other(how):
    clipper = ZScoreClip()
    optimizer, handle = _attach(clipper)
    gone = weakref.ref(optimizer)
    if how == "dropped":
        # As where a notebook runs its cell again: the handle is still known.
        optimizer.itself = optimizer
        del optimizer
        _, again = _attach(clipper)
        gc.collect()
        assert gone() is None
        assert again.clipper is handle.clipper
    elif how == "by name":
        assert _attach("zscore-clip")[1].clipper is not _attach("zscore-clip")[1].clipper
    else:
        (twin,) = handles(copy.copy(optimizer))
        assert twin.clipper is not clipper
        assert twin.get_state() == handle.get_state()
