"""Each ordinary PyTorch loop is clipped right, or refused in words."""

import copy
import math
import pickle

import pytest
from helpers import require

torch = require("torch")

from torch_loops import backward, closure_of, total  # noqa: E402
from torch_loops import build as build_model  # noqa: E402

from fedclip import AGC, FedclipWarning, NormClip, ZScoreClip  # noqa: E402
from fedclip.loops.torch import attach, attach_update, clip_, get_state, handles  # noqa: E402


def build(optimizer=torch.optim.SGD, **settings):
    model = build_model()
    return model, optimizer(model.parameters(), **{"lr": 0.1, **settings})


def test_equal_clippers_and_handles_are_not_confused():
    """Who acts with which clipper goes by identity, though equal ones are equal."""
    clipper, twin = ZScoreClip(), ZScoreClip()
    (first, one), (second, other) = build(), build()
    for model in (first, second):
        backward(model)
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


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("settings", [{}, {"optimizer": torch.optim.Adam, "fused": True}])
def test_gradients_with_a_graph_are_clipped_and_those_still_scaled_refused(settings):
    model, optimizer = build(**settings)
    handle = attach(optimizer, NormClip(1.0), model)
    backward(model, create_graph=True)
    # What GradScaler.step does to optimizers that unscale by themselves.
    optimizer.grad_scale = torch.tensor(1024.0)
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_"):
        optimizer.step()
    del optimizer.grad_scale
    optimizer.step()
    assert total(model) <= 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def closure():
        optimizer.zero_grad()
        scaler.scale((100 * model(torch.ones(3, 5))).square().sum()).backward()

    closure()
    # The scaler refuses closures itself, but only by name; unscaled are gradients from before.
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="still scaled by the GradScaler: call closure"):
        scaler.step(optimizer, closure)
    assert handle.metrics()["round/steps"] == 1
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.step(optimizer, closure)
    assert total(model) <= 1.0


def test_parameters_added_later_are_clipped_and_refused_without_a_name():
    model, optimizer = build()
    extra = torch.nn.Parameter(torch.ones(3, 7))
    with pytest.raises(ValueError, match="1 parameters without a name"):
        attach(torch.optim.SGD([*model.parameters(), extra], lr=1), NormClip(1.0), model)
    with pytest.raises(ValueError, match="holds no parameter of those given"):
        attach(optimizer, NormClip(1.0), build()[0].named_parameters())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    handle = attach(optimizer, NormClip(1.0, scope="tensor"), model.named_parameters())
    backward(model)
    optimizer.step()
    assert handle.last.groups == ("0.weight", "0.bias")
    optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.step()
    assert handle.last.groups == ("0.weight", "0.bias", "2.weight", "2.bias")
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match=r"without a name \(of shape \(3, 7\)\)"):
        optimizer.step()


def test_names_that_the_optimizer_has_or_numbers():
    model, plain = build()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    backward(model)
    for optimizer, scope, groups in ((named, "layer", "02"), (plain, "tensor", "0123")):
        handle = attach(optimizer, NormClip(1.0, scope=scope))
        optimizer.step()
        assert handle.last.groups == (*groups,)
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
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for held in (update, second, first):
        held.remove()
    assert handles(twin) == handles(copy.deepcopy(twin)) == []
    with pytest.raises(TypeError, match=r"norm-clip was removed .* keep handle\.get_state"):
        how(second)


@pytest.mark.slow
def test_wrapped_and_compiled_models_have_the_same_names():
    model, _ = build()
    backward(model)
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
    assert clip_(wrapped, NormClip(1.0, scope="layer")).groups == ("module.0", "module.2", "head")


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


def test_a_step_that_a_cuda_graph_captures_is_refused(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones(2, device="cuda")
        with pytest.raises(RuntimeError, match="a CUDA graph does not replay: clip outside"):
            clip_([weight], NormClip(1.0))


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
    backward(model)
    optimizer.step()
    assert handle.clipper.rounds[0].steps == 1
    wrapper = Wrapper(optimizer, build()[1])
    wrapper.second = wrapper.others[0]
    with pytest.raises(TypeError, match=r"Wrapper has no hooks .* attach to each optimizer"):
        attach(wrapper, NormClip(1e-3))


SHARED = {
    "one twice": lambda flat: (flat, flat),
    "overlap": lambda flat: (flat[:4], flat[2:]),
    "rows and columns": lambda flat: (flat.view(2, 3), flat.view(2, 3)[:, 1]),
    "two arrays": lambda flat: [torch.from_numpy(flat.numpy()) for _ in range(2)],
    "other dtype": lambda flat: (flat[:4], flat.view(torch.float64)[1:]),
    "expanded": lambda flat: (flat[:1].expand(5),),
    "strides": lambda flat: (torch.as_strided(flat, (3, 3), (1, 1)),),
    "beside a sparse one": lambda flat: (flat[:4], flat[2:], torch.eye(3).to_sparse()),
    "interleaved": lambda flat: (flat[::2], flat[1::2]),
}


@pytest.mark.parametrize("kind", SHARED)
def test_gradients_that_share_memory_are_clipped_once(kind):
    make = {"overlap": ZScoreClip, "expanded": AGC}.get(kind, NormClip)
    alone, together = {}, {}
    for i, gradient in enumerate(SHARED[kind](torch.full((6,), 3.0))):
        weight = torch.ones(gradient.shape, dtype=gradient.dtype)
        for parameters, own in ((alone, gradient.clone()), (together, gradient)):
            parameters[f"w{i}"] = torch.nn.Parameter(weight.clone())
            parameters[f"w{i}"].grad = own
    wanted, found = clip_(alone, make()), clip_(together, make())
    assert float(found) == float(wanted)
    for name, parameter in together.items():
        assert torch.equal(parameter.grad.to_dense(), alone[name].grad.to_dense())


def test_gradients_that_come_to_share_memory_are_clipped_once():
    flat, clipper = torch.full((6,), 3.0), NormClip(1.0)
    weights = {name: torch.nn.Parameter(torch.ones(size)) for name, size in (("a", 4), ("b", 2))}
    for size in (4, 4, 6):
        if size > 4:
            weights["a"] = torch.nn.Parameter(torch.ones(size))
        for name, gradient in (("a", flat.fill_(3.0)[:size]), ("b", flat[4:])):
            weights[name].grad = gradient
        clip_(weights, clipper)
        norms = [float(p.grad.norm()) for p in weights.values()]
        assert math.hypot(*norms) == pytest.approx(1.0, rel=1e-5)


def test_lbfgs_sees_clipped_gradients_only():
    model, optimizer = build(optimizer=torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")
    norms = []
    handle = attach(optimizer, NormClip(0.1), model)
    closure = closure_of(model, optimizer, norms)
    assert optimizer.step(closure=closure).item() > 1
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
    assert all(map(torch.equal, model.parameters(), other.parameters()))
