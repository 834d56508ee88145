"""PyTorch loops: the adapter does what the declearn module does, at the right moment."""

import contextlib
import math
import warnings

import numpy as np
import pytest
from helpers import require

torch = require("torch")

from declearn.model.torch import TorchVector  # noqa: E402

from fedclip import (  # noqa: E402
    EmaNormClip,
    EmaValueClip,
    FedclipWarning,
    GrowthValueClip,
    NonFiniteError,
    NoOp,
    NormClip,
    PercentileNormClip,
    ValueClip,
    ZScoreClip,
)
from fedclip.arrays.torch import TorchBackend, TorchInPlace  # noqa: E402
from fedclip.loops.torch import PureClipping, attach, clip_  # noqa: E402


class Half(TorchBackend):
    """Every other tensor lies on the device."""

    def dense_views(self, arrays):
        return None

    def views(self, arrays):
        return [None if i % 2 else view for i, view in enumerate(super().views(arrays))]


# Arithmetic on devices and in compiled code is compared with all clippers in test_compiled.py.
CLIPPERS = {
    "norm by table": lambda **kw: NormClip(1.0, scope={"1.*": 0.5}, **kw),
    "norm, both sides": lambda **kw: NormClip(2.0, min_norm=1.5, scope="tensor", **kw),
    "values": lambda **kw: ValueClip(0.5, **kw),
    "z-score by layer": lambda **kw: ZScoreClip(warmup=4, max_norm=None, scope="layer", **kw),
    "z-score, skip": lambda **kw: ZScoreClip(warmup=4, max_norm=None, on_spike="skip", **kw),
    "no-op": lambda **kw: NoOp(1.0),
}


def stream(dtype=torch.float64, steps=30, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"0.weight": (7, 5), "0.bias": (7,), "1.weight": (2, 7), "1.scale": ()}
    for t in range(steps):
        size = 20.0 if t % 9 == 7 else 1.0
        yield {
            name: torch.tensor(size * rng.standard_normal(shape), dtype=dtype)
            for name, shape in shapes.items()
        }


def as_parameters(gradient):
    parameters = {}
    for name, value in gradient.items():
        parameters[name] = torch.zeros_like(value).requires_grad_()
        parameters[name].grad = value.clone()
    return parameters


class Device(TorchBackend):
    """CPU tensors treated as if they lay on a device that the host can not read."""

    def dense_views(self, arrays):
        return None

    def views(self, arrays):
        return [None] * len(arrays)


class DeviceInPlace(TorchInPlace):
    """The same, for gradients that are changed in place."""

    dense_views, views = Device.dense_views, Device.views


@pytest.mark.parametrize("name", CLIPPERS)
def test_clip_in_place_does_what_the_module_does(name):
    module, loop = CLIPPERS[name](), CLIPPERS[name]()
    for gradient in stream():
        parameters = as_parameters(gradient)
        before = {key: p.grad for key, p in parameters.items()}
        record = clip_(parameters, loop)
        expected = module.run(TorchVector(gradient)).coefs
        for key, value in expected.items():
            if parameters[key].grad is None:
                # A spike that is skipped.
                assert not value.any()
                continue
            assert parameters[key].grad is before[key]
            torch.testing.assert_close(parameters[key].grad, value, rtol=1e-12, atol=0)
        assert record.norm_before == module.last.norm_before
        assert record.limit == module.last.limit
        assert record.clipped == module.last.clipped
    assert {**loop.get_state(), "owner": 0} == {**module.get_state(), "owner": 0}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("norm by table", "skip"), ("z-score by layer", "skip")),
        *(("values", "propagate"), ("z-score by layer", "propagate")),
    ],
)
def test_what_stays_on_its_device_gives_the_same(name, policy):
    backend = DeviceInPlace() if policy == "skip" else Device()
    on_host, on_device = CLIPPERS[name](on_nonfinite=policy), CLIPPERS[name](on_nonfinite=policy)
    for t, gradient in enumerate(stream()):
        if t == 20:
            gradient["0.bias"][2] = float("inf")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            expected = on_host.clip(gradient)
        # What was learnt on a device goes on on the host.
        there = backend if t < 25 else None
        found = on_device.clip({k: v.clone() for k, v in gradient.items()}, backend=there)
        for key, value in expected.items():
            if t == 20 and policy == "propagate":
                assert torch.isnan(found[key]).any() == torch.isnan(value).any() or name == "values"
            else:
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    a, b = on_host.get_state(), on_device.get_state()
    for label, fields in a["groups"].items():
        for field, value in fields.items():
            assert b["groups"][label][field] == pytest.approx(value, rel=1e-9), field
    for one, other in zip(on_host.rounds, on_device.rounds, strict=True):
        assert (one.group, one.steps, one.clipped) == (other.group, other.steps, other.clipped)
        assert one.nonfinite == other.nonfinite
        assert one.norm_max == pytest.approx(other.norm_max)


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
    clipper, reference, elsewhere = (CLIPPERS["z-score by layer"]() for _ in range(3))
    pure = PureClipping(clipper)
    update = torch.compile(pure.update, fullgraph=True, backend="eager")
    # A state from elsewhere.
    state = PureClipping(elsewhere).init(next(stream()))
    for gradient in stream(steps=20):
        found, state = update(gradient, state)
        for key, value in reference.clip(gradient).items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert clipper.rounds == []


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_pure_clipping_tells_what_happened(scope):
    clipper = ZScoreClip(warmup=2, scope=scope)
    reference = ZScoreClip(warmup=2, scope=scope)
    pure = PureClipping(clipper)
    gradients = {"a": torch.ones(3), "b": torch.full((2, 2), 2.0)}
    state = pure.init(gradients)
    assert pure.metrics(state, gradients)["round/steps"] == 0
    assert "norm" not in pure.metrics(state, gradients)
    for factor in (1.0, 1.1, 0.9, 50.0, math.nan, 60.0):
        given = {name: factor * gradient for name, gradient in gradients.items()}
        _, state = pure.update(given, state)
        finite = math.isfinite(factor)
        with contextlib.nullcontext() if finite else pytest.warns(FedclipWarning, match="NaN"):
            reference.clip(given)
        found = pure.metrics(state, gradients, "clip/")
        assert {*map(type, found.values())} <= {int, float}
        if finite:
            expected = reference.metrics("clip/")
            assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)
    assert (found["clip/round/steps"], found["clip/round/nonfinite"]) == (6, 1)
    pure.set_state(state, gradients)
    for group in reference.get_state()["groups"]:
        assert clipper.statistics(group) == pytest.approx(reference.statistics(group), rel=1e-6)
    again = PureClipping(clipper)
    assert all(
        torch.allclose(a, b) for a, b in zip(again.init(gradients)[0], state[0], strict=True)
    )


STATES = {
    "none": lambda: NormClip(1.0),
    "z-score": ZScoreClip,
    "window": lambda: PercentileNormClip(window=8),
    "longer": lambda: PercentileNormClip(window=16),
    "averages": EmaNormClip,
    "values": GrowthValueClip,
}


@pytest.mark.parametrize("name", STATES)
def test_pure_clipping_refuses_the_state_of_another_clipper(name):
    pure, gradients = PureClipping(STATES[name]()), {"w": torch.ones(2)}
    pure.update(gradients, pure.init(gradients))
    for other in STATES.keys() - {name}:
        given = PureClipping(STATES[other]()).init(gradients)
        with pytest.raises(TypeError, match=r"another clipper's, or of .* with other parameters"):
            pure.update(gradients, given)
    for wrong in (None, (), given[0]):
        with pytest.raises(TypeError, match="needs the ClipState that init returned"):
            pure.update(gradients, wrong)


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
@pytest.mark.parametrize("backend", [Device(), Half()])
def test_with_raise_what_lies_on_a_device_is_measured_there(backend, scope):
    # To raise, the host has to know the norm, of what it can not read as of what it can.
    gradient = {f"t{i}": torch.full((5,), 10.0 + i) for i in range(4)}
    found = NormClip(1.0, scope=scope, on_nonfinite="raise").clip(gradient, backend=backend)
    expected = NormClip(1.0, scope=scope).clip(gradient)
    for name in gradient:
        torch.testing.assert_close(found[name], expected[name], rtol=3e-6, atol=0)
    gradient["t1"][2] = torch.nan
    with pytest.raises(NonFiniteError, match="'t1'"):
        NormClip(1.0, scope=scope, on_nonfinite="raise").clip(gradient, backend=backend)


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
