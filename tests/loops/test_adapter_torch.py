"""PyTorch loops: pure functions, clippers of one model, and steps that are seen to act."""

import pytest
from helpers import require

torch = require("torch")

from torch_loops import backward, build  # noqa: E402

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


# -- what is attached is seen to act -------------------------------------------------------------


def test_another_optimizer_that_steps_with_the_parameters_is_seen():
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = attach(optimizer, ZScoreClip(), model)
    stepping = torch.optim.Adam(model.parameters(), lr=1e-3)
    backward(model)
    with pytest.warns(FedclipWarning, match="Adam steps with parameters of SGD") as said:
        stepping.step()
    stepping.step()
    assert len(said) == 1
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


@pytest.mark.parametrize("loop", [_skipping, _adversary])
def test_ordinary_loops_raise_no_alarm(loop):
    model = build()
    optimizer = SGD(model.parameters(), lr=1e-3)
    handle = attach(optimizer, ZScoreClip(), model)
    loop(model, optimizer)
    assert handle.metrics()["round/steps"] > 0
