"""PyTorch loops: pure functions, clippers of one model, and steps that are seen to act."""

import gc
import math
from contextlib import nullcontext

import pytest
from helpers import require

torch = require("torch")

from torch_loops import backward, build, closure_of, total  # noqa: E402

from fedclip import AGC, EmaNormClip, EmaValueClip, NormClip, PercentileNormClip, ZScoreClip  # noqa: E402
from fedclip.arrays.torch import TorchBackend  # noqa: E402
from fedclip.clippers.growth_value_clip import GrowthValueClip  # noqa: E402
from fedclip.errors import FedclipWarning, NonFiniteError  # noqa: E402
from fedclip.loops.torch import PureClipping, attach, clip_, clip_grad_norm_  # noqa: E402

SGD = torch.optim.SGD


class Half(TorchBackend):
    """Every other tensor lies on the device."""

    def dense_views(self, arrays):
        return None

    def views(self, arrays):
        return [None if i % 2 else view for i, view in enumerate(super().views(arrays))]


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


@pytest.mark.parametrize("clipper", [ZScoreClip(scope="tensor"), EmaValueClip()], ids=str)
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


@pytest.mark.parametrize("how", [clip_, clip_grad_norm_])
def test_parameters_may_be_left_out_of_a_norm_and_made_anew_in_their_shape(how):
    model, clipper = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)]), ZScoreClip()
    for without in ((), (0, 1), (4,)):
        how(_filled(model, without), clipper)
    clipper = ZScoreClip(scope="tensor")
    for shape in ((3,), (3,), (3,), (4,)):
        weight = torch.zeros(shape, requires_grad=True)
        weight.grad = torch.ones(shape)
        words = "statistics of zscore-clip for '0' are of other tensors"
        with pytest.raises(ValueError, match=words) if shape == (4,) else nullcontext():
            how([weight], clipper)
    assert clipper.metrics()["round/steps"] == 3


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
        shapes = {n: p.shape for n, p in model.named_parameters()}
        assert NormClip(1.0, scope="layer").groups(shapes).labels == ("0", "1")


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
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        for p, g in zip(model.parameters(), gradients, strict=True):
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
    optimizer.own = closure_of(model, optimizer, norms)
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


# -- what torch expects of its own functions, written anew: docs/developers/peers-tests.md ---------
ORDERS = [0.5, 1.5, 2, 4, math.inf, "inf"]


def layer_with(*gradients):
    layer = torch.nn.Linear(10, 10)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone().view_as(parameter)
    return layer


def norm_of(parameters, order):
    values = torch.cat([p.grad.reshape(-1) for p in parameters]).double()
    return float(torch.linalg.vector_norm(values, float(order)))


LARGE = torch.arange(1.0, 101).view(10, 10), torch.ones(10) / 1000
SMALL = torch.eye(10) / 10_000, torch.ones(10) / 500


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_any_order_is_returned_and_brought_to_the_limit(order):
    layer = layer_with(*LARGE)
    before = norm_of(layer.parameters(), order)
    found = clip_grad_norm_(layer.parameters(), 2.0, norm_type=order)
    assert float(found) == pytest.approx(before, rel=1e-6)
    assert norm_of(layer.parameters(), order) == pytest.approx(2.0, rel=1e-5)
    # Small gradients stay the same.
    layer = layer_with(*SMALL)
    clip_grad_norm_(layer.parameters(), 2.0 * norm_of(layer.parameters(), order), norm_type=order)
    for parameter, gradient in zip(layer.parameters(), SMALL, strict=True):
        assert torch.equal(parameter.grad, gradient.view_as(parameter))


def test_a_tensor_is_taken_and_parameters_without_a_gradient_are_left_out():
    alone = torch.nn.Parameter(torch.zeros(10, 10))
    alone.grad = LARGE[0].clone()
    clip_grad_norm_(alone, 1.0, foreach=True)
    layer = layer_with(LARGE[0], None)
    assert float(clip_grad_norm_(layer.parameters(), 1.0)) == pytest.approx(float(LARGE[0].norm()))
    assert layer.bias.grad is None
    assert torch.equal(alone.grad, layer.weight.grad)
    assert float(clip_grad_norm_(layer_with(None, None).parameters(), 1.0)) == 0.0


@pytest.mark.parametrize(
    ("order", "bad"),
    [(0.1, math.inf), (1, math.nan), (2, -math.inf), (2, math.nan), (math.inf, math.nan)],
)
def test_an_error_if_not_finite(order, bad):
    gradient = torch.ones(10)
    gradient[3] = bad
    parameter = torch.nn.Parameter(torch.ones(10))
    parameter.grad = gradient.clone()
    # As in torch, the gradient stays as it was.
    with pytest.raises(RuntimeError) as error:
        clip_grad_norm_(parameter, 1.0, norm_type=order, error_if_nonfinite=True)
    assert error.type is NonFiniteError
    torch.testing.assert_close(parameter.grad, gradient, equal_nan=True, rtol=0, atol=0)


def test_no_error_if_not_finite_skips_the_step():
    # torch: multiplies by 0 or NaN.
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    with pytest.warns(FedclipWarning, match="set to zero"):
        assert not math.isfinite(clip_grad_norm_(parameter, 1.0))
    assert parameter.grad is None


def test_an_iterator_that_is_used_up_warns_as_in_torch():
    layer = layer_with(*LARGE)
    for parameters in (layer.parameters(), layer.named_parameters(), iter([])):
        list(parameters)
        with pytest.warns(UserWarning, match="no gradient clipping will occur"):
            assert float(clip_grad_norm_(parameters, 1.0)) == 0.0
        with pytest.raises(ValueError, match="the second time"):
            clip_(parameters, NormClip(1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_has_the_dtype_of_the_gradient(dtype):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    norm = clip_grad_norm_(parameter, 1.0)
    # torch: float16 too, which ends at 65,504.
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm == 5.0
    assert 0.99 < norm_of([parameter], 2) <= 1.0
    parameter.grad = None
    assert clip_grad_norm_(parameter, 1.0).dtype == torch.float32


@pytest.mark.parametrize("limit", [True, [1.0], None, "1", (1.0,), {"max_norm": 1.0}])
def test_what_is_no_limit_or_no_norm_is_refused_after_one_that_is_equal_to_it(limit):
    layer = layer_with(*LARGE)
    clip_grad_norm_(layer.parameters(), 1.0)
    with pytest.raises(TypeError, match="max_norm must be a finite number > 0, got"):
        clip_grad_norm_(layer.parameters(), limit)
    # torch: an order of 0 counts what is not 0, and scaling does not change that.
    for order in (0, -1, -math.inf):
        with pytest.raises(ValueError, match="ord must be a number > 0"):
            clip_grad_norm_(layer.parameters(), 1.0, norm_type=order)
