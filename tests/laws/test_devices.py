# SPDX-License-Identifier: Apache-2.0
"""A gradient whose tensors lie on several devices; subprocesses, as devices are set at import."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers import SPECIMENS, Specimen, needs, python

from fedclip import (
    AGC,
    AdaptiveClip,
    AutoClip,
    Centralize,
    EmaClip,
    EmaNormalize,
    EmaNormClip,
    EmaValueClip,
    GrowthValueClip,
    MadClip,
    Normalize,
    NormClip,
    PercentileClip,
    PercentileNormClip,
    Standardize,
    ValueClip,
    ZScoreClip,
)

pytestmark = pytest.mark.slow


def others(framework: str) -> set[str]:
    own = {"tensorflow", "keras"} if framework == "tensorflow" else {framework}
    return {"torch", "tensorflow", "keras", "jax"} - own


def test_jax_on_two_devices() -> None:
    needs("jax")
    out = python(
        """
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        import fedclip
        from declearn.model.haiku import JaxNumpyVector
        first, second = jax.devices("cpu")
        vector = JaxNumpyVector({
            "a": jax.device_put(np.array([3.0]), first),
            "b": jax.device_put(np.array([4.0]), second),
        })
        for name in ("norm-clip", "zscore-clip", "value-clip", "ema-value-clip", "centralize"):
            clip = fedclip.Clipper.from_specs(name, {})
            out = clip.run(clip.run(vector)).coefs
            assert out["a"].devices() == {first}, name
            assert out["b"].devices() == {second}, name
        sharding = NamedSharding(Mesh(np.array(jax.devices("cpu")), "x"), PartitionSpec("x"))
        array = jax.device_put(np.array([3.0, 4.0]), sharding)
        shared = fedclip.NormClip(1.0).run(JaxNumpyVector({"w": array})).coefs["w"]
        assert len(shared.sharding.device_set) == 2
        out = fedclip.NormClip(1.0).run(vector).coefs
        assert np.asarray(shared).round(9).tolist() == [0.6, 0.8]
        print(round(float(out["a"][0]), 9), round(float(out["b"][0]), 9))
        """,
        *others("jax"),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert out == "0.6 0.8"


def test_tensorflow_on_two_logical_devices() -> None:
    needs("tensorflow")
    out = python(
        """
        import tensorflow as tf
        cpu, = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        import fedclip
        from declearn.model.tensorflow import TensorflowVector
        with tf.device("CPU:0"):
            a = tf.constant([3.0], tf.float64)
        with tf.device("CPU:1"):
            b = tf.constant([4.0], tf.float64)
        assert a.device != b.device
        vector = TensorflowVector({"a": a, "b": b})
        for name in ("norm-clip", "zscore-clip", "value-clip", "ema-value-clip", "centralize"):
            clip = fedclip.Clipper.from_specs(name, {})
            clip.run(clip.run(vector))
        out = fedclip.NormClip(1.0).run(vector).coefs
        print(round(float(out["a"][0]), 9), round(float(out["b"][0]), 9))
        """,
        *others("tensorflow"),
    )
    assert out == "0.6 0.8"


def dispatched(call: Callable[[], Any]) -> int:
    """Return how many operations of torch a call makes, each of which may be a launch."""
    from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize(
    ("make", "most", "grows"),
    [
        (partial(NormClip, 1.0, on_nonfinite="propagate"), 24, 0),
        (partial(NormClip, 1.0), 22, 0),
        (partial(ZScoreClip, on_nonfinite="propagate"), 67, 0),
        (partial(ZScoreClip), 65, 0),
        (EmaClip, 58, 0),
        (AdaptiveClip, 79, 0),
        (PercentileNormClip, 83, 0),
        (AutoClip, 99, 0),
        (MadClip, 119, 0),
        (EmaNormClip, 70, 0),
        (Normalize, 34, 0),
        (EmaNormalize, 77, 0),
        # The extremes of each tensor.
        (partial(ValueClip, 1.0), 29, 0),
        (Standardize, 73, 0),
        (EmaValueClip, 62, 0),
        # Torch sums along dimensions, compares, and sorts in one tensor at a time.
        (Centralize, 70, 2),
        (GrowthValueClip, 129, 4),
        (PercentileClip, 96, 3),
        # Two norms for each tensor: of its units, and of those of its weights.
        (partial(AGC, 0.1), 106, 2),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_number_of_operations_on_a_device(make: Any, most: int, grows: int, in_place: bool) -> None:
    """Each may be a launch; what there is for each tensor is in operations for many."""
    needs("torch")
    import torch

    from fedclip.arrays.torch import TorchBackend, TorchInPlace

    def count(tensors: int) -> int:
        clip, backend = make(), TorchInPlace() if in_place else TorchBackend()
        gradient = {f"t{i}": torch.empty(3, 5, device="meta") for i in range(tensors)}
        weights = [{name: t.clone() for name, t in gradient.items()}] * isinstance(clip, AGC)
        # The first step makes the state on the device.
        clip.clip(gradient, *weights, backend=backend)
        return dispatched(lambda: clip.clip(gradient, *weights, backend=backend))

    assert count(20) <= most
    assert count(40) - count(20) == 20 * grows


ELEMENTWISE = (
    "value-clip",
    "percentile-clip",
    "ema-value-clip",
    "growth-value-clip",
    "standardize",
    "centralize",
)


@pytest.mark.parametrize("most", [1 << 17, 100])
@pytest.mark.parametrize("specimen", [s for s in SPECIMENS if s.name in ELEMENTWISE], ids=str)
def test_tensors_worked_on_together_are_clipped_as_on_the_host(
    specimen: Specimen, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("torch")
    import torch

    import fedclip.arrays.torch as backend
    from fedclip.loops.torch import PureClipping

    monkeypatch.setattr(backend, "_MOST", {True: most})
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
        given["transposed"] = torch.randn((6, 5), generator=generator).T
        before = {name: tensor.clone() for name, tensor in given.items()}
        state = state or pure.init(given)
        outputs, state = pure.update(given, state)
        for name, wanted in host.clip(given).items():
            assert outputs[name].dtype == wanted.dtype
            error = dtypes[wanted.dtype]
            torch.testing.assert_close(outputs[name], wanted, rtol=error, atol=error)
            assert torch.equal(given[name], before[name])
    # NaN in one tensor: nothing of the step is left, and nothing is learnt.
    given["same0"] = torch.tensor([1.0, torch.nan, 0.0])
    outputs, state = pure.update(given, state)
    assert not any(output.any() for output in outputs.values())
    outputs, _ = pure.update(before, state)
    for name, wanted in host.clip(before).items():
        error = dtypes[wanted.dtype]
        torch.testing.assert_close(outputs[name], wanted, rtol=error, atol=error)


def test_the_largest_element_may_be_too_large_for_half_precision_beside_it() -> None:
    needs("torch")
    import torch

    from fedclip.loops.torch import PureClipping

    given = {
        "half": torch.tensor([1.0, 2.0], dtype=torch.float16),
        "single": torch.tensor([1e6, -3.0]),
    }
    for clipper in (NormClip(2.0, ord="inf"), ValueClip(2.0)):
        pure = PureClipping(clipper)
        outputs, _ = pure.update(given, pure.init(given))
        assert outputs["single"].tolist() == pytest.approx(
            [2.0, -6e-6] if isinstance(clipper, NormClip) else [2.0, -2.0], rel=1e-5
        )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_a_skipped_step_is_zero_and_another_one_is_kept_to_the_bit(
    in_place: bool, kept: bool
) -> None:
    needs("torch")
    import torch

    from fedclip.arrays.torch import TorchBackend, TorchInPlace

    backend = TorchInPlace() if in_place else TorchBackend()
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    given = [torch.tensor([-0.0, 3.0, -torch.inf, torch.nan], dtype=d) for d in dtypes]
    given += [torch.tensor(5.0), torch.empty(0), torch.ones(3, 2).T]
    outputs = backend.keep_if(torch.tensor(kept), [t.clone() for t in given])
    for output, tensor in zip(outputs, given, strict=True):
        wanted = tensor if kept else torch.zeros_like(tensor)
        assert output.dtype == tensor.dtype
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        assert torch.equal(output.view(bits), wanted.view(bits))
