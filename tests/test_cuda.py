"""Tensors on CUDA: the same results, and nothing in a step that waits for the device."""

import numpy as np
import pytest
from helpers import require

torch = require("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from declearn.model.torch import TorchVector  # noqa: E402

from fedclip import NoOp, NormClip, ValueClip, ZScoreClip  # noqa: E402
from fedclip.adapters.torch import attach, clip_  # noqa: E402
from fedclip.errors import FedclipWarning  # noqa: E402

CLIPPERS = {
    "norm": lambda **kw: NormClip(1.0, **kw),
    "norm by tensor": lambda **kw: NormClip(1.0, scope="tensor", **kw),
    "norm by table": lambda **kw: NormClip(1.0, scope={"p1*": 0.5}, **kw),
    "z-score": lambda **kw: ZScoreClip(warmup=4, max_norm=None, **kw),
    "z-score by tensor": lambda **kw: ZScoreClip(warmup=4, max_norm=None, scope="tensor", **kw),
    "no-op": lambda **kw: NoOp(2.0),
}


def stream(dtype, steps=30):
    rng = np.random.default_rng(0)
    for t in range(steps):
        size = 20.0 if t % 9 == 7 else 1.0
        yield {
            f"p{i}": torch.tensor(size * rng.standard_normal(shape), dtype=dtype)
            for i, shape in enumerate([(64, 33), (33,), (), (5, 4, 3)])
        }


@pytest.mark.parametrize("name", CLIPPERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_cuda_gives_what_cpu_gives(name, dtype):
    on_cpu, on_cuda = CLIPPERS[name](), CLIPPERS[name]()
    rtol = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    for gradient in stream(dtype):
        expected = on_cpu.run(TorchVector(gradient)).coefs
        found = on_cuda.run(TorchVector({k: v.cuda() for k, v in gradient.items()})).coefs
        for key, value in expected.items():
            assert found[key].is_cuda
            assert found[key].dtype == dtype
            assert found[key].shape == value.shape
            torch.testing.assert_close(found[key].cpu(), value, rtol=rtol[dtype], atol=1e-7)
    a, b = on_cpu.get_state()["groups"], on_cuda.get_state()["groups"]
    assert a.keys() == b.keys()
    for label in a:
        assert a[label] == pytest.approx(b[label], rel=1e-5)
    assert [r.clipped for r in on_cpu.rounds] == [r.clipped for r in on_cuda.rounds]


@pytest.mark.parametrize("name", CLIPPERS)
@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_no_step_waits_for_the_device(name, policy):
    clipper = CLIPPERS[name](on_nonfinite=policy)
    parameters = {}
    for key, value in next(stream(torch.float32)).items():
        parameters[key] = torch.nn.Parameter(torch.zeros_like(value, device="cuda"))
        parameters[key].grad = value.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            clip_(parameters, clipper)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert clipper.rounds[0].steps == 100


def test_a_hooked_optimizer_does_not_wait_either():
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(optimizer, ZScoreClip(warmup=3), model.named_parameters())
    batch = torch.randn(4, 8, device="cuda")
    model(batch).square().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(handle.last.norm_before) == 1


def test_nonfinite_on_cuda_is_zeroed_and_counted():
    clipper = ZScoreClip(warmup=2, max_norm=None)
    good = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    good.grad = torch.ones(4, device="cuda")
    for _ in range(3):
        clip_({"w": good}, clipper)
    before = clipper.get_state()["groups"]
    good.grad = torch.tensor([1.0, float("nan"), float("inf"), 2.0], device="cuda")
    clip_({"w": good}, clipper)
    assert good.grad.eq(0).all()
    assert clipper.get_state()["groups"] == before
    assert clipper.rounds[0].nonfinite == 1
    good.grad = torch.tensor([1.0, float("nan"), 1.0, 2.0], device="cuda")
    raising = NormClip(1.0, on_nonfinite="raise")
    with pytest.raises(ValueError, match="'w'"):
        clip_({"w": good}, raising)


def test_devices_may_be_mixed():
    gradient = {"a": torch.tensor([3.0], device="cuda"), "b": torch.tensor([4.0])}
    out = NormClip(1.0).run(TorchVector(gradient)).coefs
    assert out["a"].is_cuda
    assert not out["b"].is_cuda
    assert float(out["a"]) == pytest.approx(0.6, rel=3e-6)
    assert float(out["b"]) == pytest.approx(0.8, rel=3e-6)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 1e-30), (torch.float16, 300), (torch.float64, 1e200)],
)
def test_extremes(dtype, size):
    gradient = {"w": torch.full((1000,), size, dtype=dtype, device="cuda")}
    limit = 0.5 * float(gradient["w"][0].double()) * 1000**0.5
    limit = min(limit, 1e300)
    out = NormClip(limit).run(TorchVector(gradient)).coefs["w"].double()
    norm = float((out / size).norm()) * size
    assert norm <= limit
    assert norm >= limit * (1 - (2e-6 if dtype != torch.float16 else 2e-3))


def test_a_large_tensor():
    big = torch.full((100_000_000,), 0.1, device="cuda")
    clipper = NormClip(1.0)
    out = clipper.run(TorchVector({"w": big})).coefs["w"]
    exact = float(np.float32(0.1)) * 1e4
    assert clipper.last.norm_before[0] == pytest.approx(exact, rel=1e-6)
    assert 1 - 2e-6 <= float(out.double().norm()) <= 1


def test_values():
    with pytest.warns(FedclipWarning):
        ValueClip(1.0).run(TorchVector({"w": torch.tensor([float("nan")], device="cuda")}))
    out = ValueClip(1.0).run(TorchVector({"w": torch.tensor([-3.0, 0.5], device="cuda")})).coefs
    assert out["w"].tolist() == [-1.0, 0.5]
