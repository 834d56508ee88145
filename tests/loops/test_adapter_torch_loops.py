"""Each ordinary PyTorch loop is clipped right, or refused in words."""

import copy
import pickle

import pytest
from helpers import require

torch = require("torch")

from fedclip import AGC, FedclipWarning, NormClip, ZScoreClip  # noqa: E402
from fedclip.loops.torch import (  # noqa: E402
    attach,
    attach_update,
    clip_,
    get_state,
    handles,
)
from fedclip.loops.torch.clip import share_memory  # noqa: E402


def build(seed=0, optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return model, optimizer(model.parameters(), **{"lr": 0.1, **settings})


def loss_of(model):
    return (100 * model(torch.ones(3, 5))).square().sum()


def closure_of(model, optimizer, norms=None):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if norms is not None:
            norms.append(total(model))
        return loss

    return closure


def total(model):
    gradients = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    return float(torch.cat(gradients).detach().double().norm())


# -- looks ---------------------------------------------------------------------------------------
def test_equal_clippers_and_handles_are_not_confused():
    """Who acts with which clipper goes by identity, though equal ones are equal."""
    clipper, twin = ZScoreClip(), ZScoreClip()
    (first, one), (second, other) = build(), build()
    for model in (first, second):
        loss_of(model).backward()
    clip_(first, clipper)
    clip_(second, twin)
    outer = attach(one, clipper, first)
    with pytest.warns(FedclipWarning, match="of another model"):
        inner = attach(one, twin, first)
    assert repr(outer) == "ClipHandle(SGD, ZScoreClip())"
    assert copy.copy(inner) is inner
    inner.remove()
    (left,) = handles(one)
    assert left is outer
    attach(other, twin, second)
    with pytest.raises(ValueError, match="already attached to"):
        attach(other, clipper, second)


# -- steps with a closure ------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"optimizer": torch.optim.Adam, "fused": True}])
def test_a_closure_in_the_step_of_a_scaler_is_refused(settings):
    # The scaler refuses closures itself, but only by name; unscaled are gradients from before.
    model, optimizer = build(**settings)
    handle = attach(optimizer, NormClip(1.0), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        return loss

    closure()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="still scaled by the GradScaler: call closure"):
        scaler.step(optimizer, closure)
    assert handle.last is None
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.step(optimizer, closure)
    assert total(model) <= 1.0


# -- parameters that come, go and are copied -----------------------------------------------------


def test_parameters_without_a_name_are_refused():
    model, optimizer = build()
    extra = torch.nn.Parameter(torch.ones(3, 7))
    with pytest.raises(ValueError, match="1 parameters without a name"):
        attach(torch.optim.SGD([*model.parameters(), extra], lr=1), NormClip(1.0), model)
    with pytest.raises(ValueError, match="holds no parameter of those given"):
        attach(optimizer, NormClip(1.0), build()[0].named_parameters())
    attach(optimizer, NormClip(1.0), model.named_parameters())
    loss_of(model).backward()
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match=r"without a name \(of shape \(3, 7\)\)"):
        optimizer.step()


def test_names_that_the_optimizer_has_or_numbers():
    model, _ = build()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    handle = attach(named, NormClip(1.0, scope="layer"))
    loss_of(model).backward()
    named.step()
    assert handle.last.groups == ("0", "2")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(plain, NormClip(1.0, scope="tensor"))
    plain.step()
    assert handle.last.groups == ("0", "1", "2", "3")
    with pytest.raises(TypeError, match="by name"):
        attach(plain, NormClip(1.0, scope="layer"))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_a_copy_of_the_optimizer_and_its_handles_clips_too(how):
    model, optimizer = build(optimizer=torch.optim.Adam)
    attach(optimizer, ZScoreClip(warmup=2, max_norm=0.5, scope="layer"), model)
    handle = attach(optimizer, NormClip(0.4), model)
    attach_update(optimizer, NormClip(0.1), model)
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
    second, other, twin = how((handle, model, optimizer))
    first, norm, update = handles(twin)
    assert norm is second
    assert first.get_state() == handles(optimizer)[0].get_state()
    assert first.clipper is not handles(optimizer)[0].clipper
    twin.step(closure_of(other, twin))
    assert (update.metrics()["round/steps"], handle.metrics()["round/steps"]) == (4, 3)
    optimizer.step(closure_of(model, optimizer))
    assert total(other) <= 0.4
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for held in (update, second, first):
        held.remove()
    assert handles(twin) == handles(copy.deepcopy(twin)) == []
    with pytest.raises(TypeError, match=r"norm-clip was removed .* keep handle\.get_state"):
        how(second)


@pytest.mark.slow
def test_wrapped_and_compiled_models_have_the_same_names():
    model, _ = build()
    loss_of(model).backward()
    names = clip_(model, NormClip(1.0, scope="tensor")).groups
    wrapped = torch.nn.Module()
    wrapped.module = torch.compile(model, backend="eager")
    assert clip_(wrapped, NormClip(1.0, scope="tensor")).groups == names
    assert clip_(wrapped.named_parameters(), NormClip(1.0, scope="tensor")).groups == names
    fabric = torch.nn.Module()
    fabric._forward_module = wrapped
    assert clip_(fabric, NormClip(1.0, scope="tensor")).groups == names
    # A child that is called so keeps its place.
    wrapped.head = torch.nn.Linear(1, 1)
    wrapped.head(torch.ones(1)).backward()
    groups = clip_(wrapped, NormClip(1.0, scope="layer")).groups
    assert groups == ("module.0", "module.2", "head")


# -- states --------------------------------------------------------------------------------------
def test_a_state_from_before_is_a_fresh_start_said_once():
    model, optimizer = build()
    saved = optimizer.state_dict()
    handle = attach(optimizer, ZScoreClip(), model)
    optimizer.step(closure_of(model, optimizer))
    assert handle.get_state()["groups"]
    with pytest.warns(FedclipWarning, match="starts anew") as said:
        optimizer.load_state_dict(saved)
    assert len(said) == 1
    assert {**handle.get_state(), "owner": 0} == {**get_state(ZScoreClip()), "owner": 0}


# -- graphs, pure functions, updates -------------------------------------------------------------


def test_a_step_that_a_cuda_graph_captures_is_refused(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones(2, device="cuda")
        with pytest.raises(RuntimeError, match="a CUDA graph does not replay: clip outside"):
            clip_([weight], NormClip(1.0))


@pytest.mark.parametrize(("kind", "rate"), [("Adam", 5.0), ("LBFGS", 1.0)])
def test_updates_are_clipped_after_the_optimizer(kind, rate):
    model, optimizer = build(optimizer=getattr(torch.optim, kind), lr=rate)
    with attach_update(optimizer, NormClip(0.125), model) as handle:
        for _ in range(5):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step(closure_of(model, optimizer))
            moved = [(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
            assert float(torch.cat(moved).detach().norm()) <= 0.125 * (1 + 1e-4)
    assert handle.metrics()["round/steps"] == 5
    assert handle.metrics()["round/clipped"] > 0
    optimizer.step(closure_of(model, optimizer))
    assert handle.metrics()["round/steps"] == 5
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


class Wrapper:
    """Holds optimizers, and is none."""

    def __init__(self, *inside):
        self.first, *self.others = inside
        self.param_groups = [group for o in inside for group in o.param_groups]

    def step(self):
        for optimizer in (self.first, *self.others):
            optimizer.step()


def test_a_wrapper_is_clipped_or_refused():
    model, optimizer = build()
    handle = attach(Wrapper(optimizer), NormClip(1e-3), model)
    loss_of(model).backward()
    optimizer.step()
    assert handle.clipper.rounds[0].steps == 1
    wrapper = Wrapper(optimizer, build()[1])
    wrapper.second = wrapper.others[0]
    with pytest.raises(TypeError, match=r"Wrapper has no hooks .* attach to each optimizer"):
        attach(wrapper, NormClip(1e-3))


# -- gradients over shared memory ----------------------------------------------------------------
KINDS = ["one twice", "the same view", "overlap", "rows and columns", "two arrays", "other dtype"]
KINDS += ["expanded", "strides", "beside a sparse one", "interleaved"]


def _shared(kind):
    """Return gradients over one memory, of one of the KINDS."""
    flat = torch.full((6,), 3.0)
    return {
        "one twice": (tied := flat[:4], tied),
        "the same view": (flat[:4], flat[:4]),
        "overlap": (flat[:4], flat[2:]),
        "rows and columns": (flat.view(2, 3), flat.view(2, 3)[:, 1]),
        "two arrays": (torch.from_numpy(flat.numpy()), torch.from_numpy(flat.numpy())),
        "other dtype": (flat[:4], flat.view(torch.float64)[1:]),
        "expanded": (torch.full((1,), 3.0).expand(5),),
        "strides": (torch.as_strided(flat, (3, 3), (1, 1)),),
        "beside a sparse one": (flat[:4], flat[2:], torch.eye(3).to_sparse()),
        "interleaved": (flat[::2], flat[1::2]),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_share_memory_are_clipped_once(kind):
    make = {"overlap": ZScoreClip, "expanded": AGC}.get(kind, NormClip)
    alone, together = {}, {}
    for i, gradient in enumerate(_shared(kind)):
        weight = torch.ones(gradient.shape, dtype=gradient.dtype)
        for parameters, own in ((alone, gradient.clone()), (together, gradient)):
            parameters[f"w{i}"] = torch.nn.Parameter(weight.clone())
            parameters[f"w{i}"].grad = own
    wanted, found = clip_(alone, make()), clip_(together, make())
    assert float(found) == float(wanted)
    for name, parameter in together.items():
        assert torch.equal(parameter.grad.to_dense(), alone[name].grad.to_dense())


def test_views_of_a_flat_buffer_stay_in_it():
    flat = torch.full((2, 24), 3.0)
    # Channels last, and side by side.
    own = [flat[0].view(1, 2, 3, 4).permute(0, 3, 1, 2), flat[1, :4].view(2, 2).T, flat[1, 4:]]
    parameters = {f"w{i}": torch.nn.Parameter(torch.ones(g.shape)) for i, g in enumerate(own)}
    for parameter, gradient in zip(parameters.values(), own, strict=True):
        parameter.grad = gradient
    clip_(parameters, NormClip(1.0))
    # The norm below is of float32, and the margin 9e-7.
    assert float(flat.norm()) == pytest.approx(1.0, rel=3e-6)


@pytest.mark.parametrize("by_name", [False, True])
def test_lbfgs_sees_clipped_gradients_only(by_name):
    model, optimizer = build(optimizer=torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")
    norms = []
    handle = attach(optimizer, NormClip(0.1), model)
    closure = closure_of(model, optimizer, norms)
    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.item() > 1
    assert len(norms) > 1
    assert handle.metrics()["round/steps"] == len(norms)
    # What a run of its own sees, whose closure clips by hand.
    other, second = build(optimizer=torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")
    again = closure_of(other, second)

    def closure():
        loss = again()
        clip_(other, NormClip(0.1))
        return loss

    second.step(closure)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_is_clipped():
    model, optimizer = build()
    attach(optimizer, NormClip(1.0), model)
    loss_of(model).backward(create_graph=True)
    optimizer.step()
    assert total(model) <= 1.0
    optimizer.zero_grad()


def test_parameters_added_later_are_clipped():
    model, optimizer = build()
    model.add_module("late", torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    handle = attach(optimizer, NormClip(1.0, scope="tensor"), model)
    loss_of(model).backward()
    optimizer.step()
    assert handle.last.groups == ("0.weight", "0.bias")
    optimizer.add_param_group({"params": model.late.parameters()})
    optimizer.step()
    assert handle.last.groups == ("0.weight", "0.bias", "late.weight", "late.bias")


def test_tensors_without_an_address_are_left_as_they_are():
    found = []

    def look(x):
        found.append(share_memory([x, 2 * x]))
        return x

    torch.func.vmap(look)(torch.ones(2, 3))
    assert found == [False]
