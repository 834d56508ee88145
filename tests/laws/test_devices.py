# SPDX-License-Identifier: Apache-2.0
"""Torch on a device: few operations, no waiting, the numbers of the host; others: tests/loops."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import SPECIMENS, Specimen, require

torch = require("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fedclip import NormClip, ValueClip, ZScoreClip  # noqa: E402
from fedclip.arrays.torch import TorchBackend, TorchInPlace  # noqa: E402
from fedclip.loops.torch import PureClipping, clip_  # noqa: E402

pytestmark = pytest.mark.slow
BACKENDS = {False: TorchBackend(), True: TorchInPlace()}


def dispatched(call: Callable[[], Any]) -> int:
    """Return how many operations of torch a call makes, each of which may be a launch."""
    # What looks at the same memory in another way, and numbers of the host.
    launch_nothing = {"unbind", "view", "unsqueeze", "select", "expand", "split_with_sizes"}
    launch_nothing |= {"scalar_tensor", "lift_fresh", "promote_types", "detach", "alias", "slice"}

    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(
            self, call: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.made += call.__name__.split(".")[0] not in launch_nothing
            return call(*args, **(kwargs or {}))

    with Count() as mode:
        call()
    return mode.made


# How many operations there are for 20 tensors, and how many more for each further one.
OPERATIONS = {
    "norm-clip": (22, 0),
    "zscore-clip": (66, 0),
    "ema-clip": (58, 0),
    "adaptive-clip": (79, 0),
    "percentile-norm-clip": (83, 0),
    "auto-clip": (99, 0),
    "mad-clip": (119, 0),
    "ema-norm-clip": (70, 0),
    "normalize": (34, 0),
    "ema-normalize": (77, 0),
    # The extremes of each tensor.
    "value-clip": (29, 0),
    "standardize": (73, 0),
    "ema-value-clip": (62, 0),
    # Torch sums along dimensions, compares, and sorts in one tensor at a time.
    "centralize": (70, 2),
    "growth-value-clip": (132, 4),
    "percentile-clip": (96, 3),
    # Two norms for each tensor: of its units, and of those of its weights.
    "agc": (106, 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("in_place", [False, True])
def test_number_of_operations_on_a_device(name: str, in_place: bool) -> None:
    """Each may be a launch; what there is for each tensor is in operations for many."""
    most, grows = OPERATIONS[name]

    def count(tensors: int) -> int:
        kind = "regularizer" if name == "agc" else "module"
        clip, backend = Specimen(name, kind=kind).make(), BACKENDS[in_place]
        gradient = {f"t{i}": torch.empty(3, 5, device="meta") for i in range(tensors)}
        weights = [{name: t.clone() for name, t in gradient.items()}] * (name == "agc")
        # The first step makes the state on the device.
        clip.clip(gradient, *weights, backend=backend)
        return dispatched(lambda: clip.clip(gradient, *weights, backend=backend))

    assert count(20) <= most
    assert count(40) - count(20) == 20 * grows


ELEMENTWISE = "value-clip percentile-clip ema-value-clip growth-value-clip standardize centralize"
TOGETHER = [s for s in SPECIMENS if s.name in ELEMENTWISE.split()]


@pytest.mark.parametrize("most", [1 << 17, 100])
@pytest.mark.parametrize("specimen", TOGETHER, ids=str)
def test_tensors_worked_on_together_are_clipped_as_on_the_host(
    specimen: Specimen, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedclip.arrays.torch._MOST", {True: most})
    dtypes = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-9}
    shapes = [(16, 8), (4, 3, 3, 3), (9,), (1,), (), (0, 3), (5, 7)]
    pure, host, state = PureClipping(specimen.make()), specimen.make(), None
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        given = {
            f"{dtype}-{i}": torch.randn(shape, generator=generator).mul(1 + step).to(dtype)
            for dtype in dtypes
            for i, shape in enumerate([*shapes, *shapes])
        }
        given |= {f"same{i}": torch.full((3,), -0.1) for i in range(2)}
        # Too large for half precision, which lies beside it.
        given["large"] = torch.tensor([1e6, -3.0])
        given["transposed"] = torch.randn((6, 5), generator=generator).T
        before = {name: tensor.clone() for name, tensor in given.items()}
        state = state or pure.init(given)
        outputs, state = pure.update(given, state)
        for name, wanted in host.clip(given).items():
            assert outputs[name].dtype == wanted.dtype
            error = dtypes[wanted.dtype]
            torch.testing.assert_close(outputs[name], wanted, rtol=error, atol=error)
            assert torch.equal(given[name], before[name])


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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


@on_cuda
@pytest.mark.parametrize(("name", "dtype"), [*zip(CLIPPERS, RTOL, strict=True)])
def test_cuda_gives_what_cpu_gives(name, dtype):
    on_cpu, on_cuda = CLIPPERS[name](), CLIPPERS[name]()
    for gradient in stream(dtype):
        expected = on_cpu.clip(gradient)
        found = on_cuda.clip({k: v.cuda() for k, v in gradient.items()})
        for key, value in expected.items():
            assert found[key].is_cuda
            torch.testing.assert_close(found[key].cpu(), value, rtol=RTOL[dtype], atol=1e-7)
    a, b = on_cpu.get_state()["groups"], on_cuda.get_state()["groups"]
    assert a.keys() == b.keys()
    for label in a:
        assert a[label] == pytest.approx(b[label], rel=1e-5)
    assert [r.clipped for r in on_cpu.rounds] == [r.clipped for r in on_cuda.rounds]


@on_cuda
@pytest.mark.parametrize("name", CLIPPERS)
def test_no_step_waits_for_the_device(name):
    # A loop that skips steps has to know which ones: "skip" waits once a step.
    clipper, first = CLIPPERS[name](on_nonfinite="propagate"), next(stream(torch.float32))
    parameters = {key: torch.nn.Parameter(value.cuda()) for key, value in first.items()}
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    with no_synchronisation():
        for _ in range(100):
            clip_(parameters, clipper)
    assert clipper.rounds[0].steps == 100


@on_cuda
def test_devices_may_be_mixed():
    out = NormClip(1.0).clip({"a": torch.tensor([3.0], device="cuda"), "b": torch.tensor([4.0])})
    assert (out["a"].is_cuda, out["b"].is_cuda) == (True, False)
    assert [*map(float, out.values())] == pytest.approx([0.6, 0.8], rel=3e-6)


@on_cuda
@pytest.mark.parametrize(
    ("dtype", "size", "count"),
    [(torch.float32, 1e20, 1000), (torch.float16, 300, 1000), (torch.float32, 0.1, 100_000_000)],
)
def test_extremes_and_a_large_tensor(dtype, size, count):
    gradient = {"w": torch.full((count,), size, dtype=dtype, device="cuda")}
    limit = 0.5 * float(gradient["w"][0].double()) * count**0.5
    out = NormClip(limit).clip(gradient)["w"].double()
    norm = float((out / size).norm()) * size
    assert limit * (1 - (2e-6 if dtype != torch.float16 else 2e-3)) <= norm <= limit
