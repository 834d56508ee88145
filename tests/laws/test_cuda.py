"""Tensors on CUDA: the same results, and nothing in a step that waits for the device."""

import contextlib

import numpy as np
import pytest
from helpers import require

torch = require("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from declearn.model.torch import TorchVector  # noqa: E402

from fedclip import NormClip, ValueClip, ZScoreClip  # noqa: E402
from fedclip.loops.torch import clip_  # noqa: E402

CLIPPERS = {
    "norm by tensor": lambda **kw: NormClip(1.0, scope="tensor", **kw),
    "norm by table": lambda **kw: NormClip(1.0, scope={"p1*": 0.5}, **kw),
    "values": lambda **kw: ValueClip(0.5, **kw),
    "z-score": lambda **kw: ZScoreClip(warmup=4, max_norm=None, **kw),
}
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def stream(dtype, steps=30):
    rng = np.random.default_rng(0)
    for t in range(steps):
        size = 20.0 if t % 9 == 7 else 1.0
        yield {
            f"p{i}": torch.tensor(size * rng.standard_normal(shape), dtype=dtype)
            for i, shape in enumerate([(64, 33), (33,), (), (5, 4, 3)])
        }


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("name", "dtype"), [*zip(CLIPPERS, RTOL, strict=True)])
def test_cuda_gives_what_cpu_gives(name, dtype):
    on_cpu, on_cuda = CLIPPERS[name](), CLIPPERS[name]()
    for gradient in stream(dtype):
        expected = on_cpu.run(TorchVector(gradient)).coefs
        found = on_cuda.run(TorchVector({k: v.cuda() for k, v in gradient.items()})).coefs
        for key, value in expected.items():
            assert found[key].is_cuda
            torch.testing.assert_close(found[key].cpu(), value, rtol=RTOL[dtype], atol=1e-7)
    a, b = on_cpu.get_state()["groups"], on_cuda.get_state()["groups"]
    assert a.keys() == b.keys()
    for label in a:
        assert a[label] == pytest.approx(b[label], rel=1e-5)
    assert [r.clipped for r in on_cpu.rounds] == [r.clipped for r in on_cuda.rounds]


@pytest.mark.parametrize("name", CLIPPERS)
def test_no_step_waits_for_the_device(name):
    # A loop that skips steps has to know which ones: "skip" waits once a step.
    clipper = CLIPPERS[name](on_nonfinite="propagate")
    parameters = {}
    for key, value in next(stream(torch.float32)).items():
        parameters[key] = torch.nn.Parameter(torch.zeros_like(value, device="cuda"))
        parameters[key].grad = value.cuda()
    with no_synchronisation():
        for _ in range(100):
            clip_(parameters, clipper)
    assert clipper.rounds[0].steps == 100


def test_devices_may_be_mixed():
    gradient = {"a": torch.tensor([3.0], device="cuda"), "b": torch.tensor([4.0])}
    out = NormClip(1.0).run(TorchVector(gradient)).coefs
    assert out["a"].is_cuda
    assert not out["b"].is_cuda
    assert float(out["a"]) == pytest.approx(0.6, rel=3e-6)
    assert float(out["b"]) == pytest.approx(0.8, rel=3e-6)


@pytest.mark.parametrize(
    ("dtype", "size", "count"),
    [(torch.float32, 1e20, 1000), (torch.float16, 300, 1000), (torch.float32, 0.1, 100_000_000)],
)
def test_extremes_and_a_large_tensor(dtype, size, count):
    gradient = {"w": torch.full((count,), size, dtype=dtype, device="cuda")}
    limit = 0.5 * float(gradient["w"][0].double()) * count**0.5
    out = NormClip(limit).run(TorchVector(gradient)).coefs["w"].double()
    norm = float((out / size).norm()) * size
    assert limit * (1 - (2e-6 if dtype != torch.float16 else 2e-3)) <= norm <= limit
