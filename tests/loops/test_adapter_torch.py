"""PyTorch loops: pure functions, clippers of one model, and steps that are seen to act."""

import gc
import pickle

import pytest
from helpers import require

torch = require("torch")

from fedclip import (  # noqa: E402
    AGC,
    EmaNormClip,
    EmaValueClip,
    FedclipWarning,
    GrowthValueClip,
    NonFiniteError,
    NormClip,
    PercentileNormClip,
    ZScoreClip,
)
from fedclip.arrays.torch import TorchBackend  # noqa: E402
from fedclip.loops.torch import PureClipping, attach, clip_  # noqa: E402

SGD = torch.optim.SGD


class Half(TorchBackend):
    """Every other tensor lies on the device."""

    def dense_views(self, arrays):
        return None

    def views(self, arrays):
        return [None if i % 2 else view for i, view in enumerate(super().views(arrays))]


def test_gradients_that_are_still_scaled_are_refused():
    model = torch.nn.Linear(5, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    attach(optimizer, NormClip(1.0), model.named_parameters())
    model(torch.ones(1, 5)).sum().backward()
    # What GradScaler.step does to optimizers that unscale by themselves.
    optimizer.grad_scale = torch.tensor(1024.0)
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_"):
        optimizer.step()


@pytest.mark.slow
def test_compiled_once_without_graph_breaks():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    clipper, reference, elsewhere = (ZScoreClip(warmup=4, scope="layer") for _ in range(3))
    pure = PureClipping(clipper)
    update = torch.compile(pure.update, fullgraph=True, backend="eager")
    gradients = [{"0.w": s * torch.randn(7, 5), "1.w": s * torch.randn(2)} for s in (1, 1, 20) * 4]
    # A state from elsewhere.
    state = PureClipping(elsewhere).init(gradients[0])
    for gradient in gradients:
        clipped, state = update(gradient, state)
        torch.testing.assert_close(clipped, reference.clip(gradient), rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert clipper.rounds == []


@pytest.mark.parametrize("make", [lambda: NormClip(1.0), ZScoreClip, EmaNormClip])
def test_pure_clipping_refuses_the_state_of_another_clipper(make):
    pure, gradients = PureClipping(make()), {"w": torch.ones(2)}
    pure.update(gradients, pure.init(gradients))
    for other in (PercentileNormClip(window=8), PercentileNormClip(window=16), GrowthValueClip()):
        state = PureClipping(other).init(gradients)
        with pytest.raises(TypeError, match=r"another clipper's, or of .* with other parameters"):
            pure.update(gradients, state)
    for wrong in (None, (), state[0]):
        with pytest.raises(TypeError, match="needs the ClipState that init returned"):
            pure.update(gradients, wrong)
    agc = PureClipping(AGC(0.05))
    with pytest.raises(ValueError, match=r"agc has no weights for .*; it was given none"):
        agc.update(gradients, agc.init(gradients))


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def backward(model, scale=100.0):
    loss = (scale * model(torch.ones(3, 5))).square().sum()
    loss.backward()
    return loss


def total(model):
    return float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double().norm())


def _filled(model, without=()):
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = None if i in without else torch.randn_like(parameter)
    return [p for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "clipper", [ZScoreClip(scope="tensor"), EmaValueClip()], ids=lambda c: c.name
)
def test_a_list_whose_members_change_is_refused(clipper):
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    clip_(_filled(model), clipper)
    with pytest.raises(ValueError, match=r"named_parameters\(\), at each step"):
        clip_(_filled(model, without=(2, 3)), clipper)
    clipper.reset()
    clip_(_filled(model, without=(2, 3)), clipper)


def test_one_clipper_for_two_models_is_refused():
    one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    clipper, fixed = ZScoreClip(), NormClip(1.0)
    for model in (one, other):
        clip_(_filled(model), fixed)
    clip_(_filled(one), clipper)
    with pytest.warns(FedclipWarning, match="of another model or optimizer: it starts anew"):
        clip_(_filled(other), clipper)
    clip_(one, fixed)
    with pytest.raises(ValueError, match="give each model a clipper"):
        clip_(one, clipper)


def test_parameters_may_be_left_out_of_a_norm_and_made_anew():
    model, clipper = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)]), ZScoreClip()
    for without in ((), (0, 1), (4,)):
        clip_(_filled(model, without), clipper)
    clipper, weight = ZScoreClip(scope="tensor"), torch.ones(3)
    for _ in range(4):
        weight = (weight * 2.0).detach().requires_grad_()
        weight.grad = torch.ones(3)
        clip_([weight], clipper)


def test_a_number_is_a_fixed_limit():
    model = torch.nn.Linear(3, 3)
    _filled(model)
    assert float(clip_(model, 1e-3)) > 1e-3
    assert torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm() <= 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(optimizer, 2.0, model) as handle:
        optimizer.step()
        assert handle.clipper.get_config()["max_norm"] == 2.0
    with pytest.raises(TypeError, match="make one before the first step"):
        clip_(model, "zscore-clip")


def test_a_layer_is_one_whatever_stands_for_its_weight():
    for made in (torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.spectral_norm):
        model = torch.nn.Sequential(made(torch.nn.Linear(3, 3)), torch.nn.Linear(3, 3))
        groups = NormClip(1.0, scope="layer").groups(
            {n: p.shape for n, p in model.named_parameters()}
        )
        assert groups.labels == ("0", "1")


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_with_raise_what_lies_on_a_device_is_measured_there(scope):
    # To raise, the host has to know the norm, of what it can not read as of what it can.
    gradient = {f"t{i}": torch.full((5,), 10.0 + i) for i in range(4)}
    found = NormClip(1.0, scope=scope, on_nonfinite="raise").clip(gradient, backend=Half())
    expected = NormClip(1.0, scope=scope).clip(gradient)
    for name in gradient:
        torch.testing.assert_close(found[name], expected[name], rtol=3e-6, atol=0)
    gradient["t1"][2] = torch.nan
    with pytest.raises(NonFiniteError, match="'t1'"):
        NormClip(1.0, scope=scope, on_nonfinite="raise").clip(gradient, backend=Half())


def test_pure_clipping_gives_each_group_its_own_statistics():
    pure = PureClipping(ZScoreClip(warmup=1, scope="tensor"))
    small, large = torch.ones(2), torch.full((2,), 50.0)
    state = pure.init({"a": small, "b": large})
    for order in ("ab", "ab", "ba"):
        found, state = pure.update({n: {"a": small, "b": large}[n] for n in order}, state)
        assert [*found] == [*order]
        assert torch.equal(found["b"], large)
    for others in ({"b": large}, {"a": small, "b": large, "c": small}):
        with pytest.raises(ValueError, match="the state is of 2 groups of tensors"):
            pure.update(others, state)


# -- what is attached is seen to act -------------------------------------------------------------


@torch.no_grad()
def _by_hand(model):
    for p in model.parameters():
        p -= 1e-3 * p.grad
        p.grad = None


def _pasts_hooks(model, optimizer):
    optimizer.step = lambda: _by_hand(model)
    return lambda: (backward(model), optimizer.step())


def _without_grad(model, optimizer):
    @torch.no_grad()
    def round_():
        with torch.enable_grad():
            loss = model(torch.ones(3, 5)).square().sum()
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            p -= 1e-3 * g

    return round_


@pytest.mark.parametrize("past", [_pasts_hooks, _without_grad])
def test_weights_that_learn_past_the_steps_are_seen_in_the_second_round(past):
    model = build()
    optimizer = type("Own", (SGD,), {})(model.parameters(), lr=0.1)
    handle = attach(optimizer, ZScoreClip(), model)
    one_round = past(model, optimizer)
    one_round()
    with pytest.warns(FedclipWarning, match=r"no step of the optimizer \(Own\).* was seen") as said:
        one_round()
    assert len(said) == 1
    one_round()
    assert handle.last is None


def test_a_block_without_a_step_is_told():
    model = build()
    sentence = r"zscore-clip has clipped nothing: no step of an optimizer \(SGD\) was seen"
    handle = attach(SGD(model.parameters(), lr=0.1), ZScoreClip(), model)
    with pytest.warns(FedclipWarning, match=sentence), handle:
        backward(model)
    with pytest.raises(KeyError), attach(SGD(model.parameters(), lr=0.1), ZScoreClip(), model):
        raise KeyError


def _skipping(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for _ in range(130):
        optimizer.zero_grad()
        scaler.scale(backward(model, 1e-3).detach() * model[0].bias.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _adversary(model, optimizer):
    # Frees the critic many times before the other side has its turn.
    critic = torch.nn.Linear(2, 1)
    other = SGD(critic.parameters(), lr=0.01)
    with attach(other, ZScoreClip(), critic):
        for _ in range(10):
            other.zero_grad()
            critic(model(torch.ones(3, 5))).sum().backward()
            other.step()
            optimizer.zero_grad()
    backward(model)
    optimizer.step()


def _two_phases(model, optimizer):
    first = torch.optim.Adam(model.parameters(), lr=1e-3)
    with attach(first, ZScoreClip(), model):
        for _ in range(3):
            first.zero_grad()
            backward(model)
            first.step()
    optimizer.step()


def _tried_and_moved(model, optimizer):
    backward(model)
    optimizer.zero_grad()
    model.double()
    model(torch.ones(3, 5).double()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("loop", [_skipping, _adversary, _two_phases, _tried_and_moved])
def test_ordinary_loops_raise_no_alarm(loop):
    model = build()
    optimizer = SGD(model.parameters(), lr=1e-3)
    handle = attach(optimizer, ZScoreClip(), model)
    loop(model, optimizer)
    assert handle.metrics()["round/steps"] > 0
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_closure_that_the_step_brings_itself_is_clipped():
    class Brings(SGD):
        def step(self, closure=None):
            return super().step(self.own)

    model, norms = build(), []
    optimizer = Brings(model.parameters(), lr=0.1)

    def own():
        optimizer.zero_grad()
        loss = backward(model)
        norms.append(total(model))
        return loss

    optimizer.own = own
    handle = attach(optimizer, NormClip(1e-3), model)
    optimizer.step()
    assert float(handle.last) == pytest.approx(norms[0])
    assert total(model) <= 1e-3


def test_an_optimizer_that_is_gone_raises_no_alarm():
    model = build()
    attach(SGD(model.parameters(), lr=0.1), ZScoreClip(), model)
    gc.collect()
    for _ in range(3):
        backward(model)
        _by_hand(model)
    assert not any(p._backward_hooks for p in model.parameters())


def test_tensors_that_are_watched_are_saved_without_a_word():
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    attach(optimizer, NormClip())
    for twin, other in (pickle.loads(pickle.dumps((weight, optimizer))), (weight, optimizer)):
        other.zero_grad()
        (100 * twin).sum().backward()
        other.step()
        assert float(twin.grad.norm()) <= 1.0
