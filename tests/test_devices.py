# SPDX-License-Identifier: Apache-2.0
"""A gradient whose tensors lie on several devices; subprocesses, as devices are set at import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial
from typing import Any

import pytest
from helpers import PATIENCE, hiding, needs

from fedclip import (
    AGC,
    AdaptiveClip,
    AutoClip,
    EmaClip,
    EmaNormalize,
    EmaNormClip,
    MadClip,
    Normalize,
    NormClip,
    PercentileNormClip,
    ValueClip,
    ZScoreClip,
)

pytestmark = pytest.mark.slow


def python(code: str, framework: str, **environment: str) -> str:
    others = {"torch", "tensorflow", "keras", "jax"} - (
        {"tensorflow", "keras"} if framework == "tensorflow" else {framework}
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**hiding(*others), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_jax_on_two_devices() -> None:
    needs("jax")
    out = python(
        """
        import jax, numpy as np
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
        out = fedclip.NormClip(1.0).run(vector).coefs
        print(round(float(out["a"][0]), 9), round(float(out["b"][0]), 9))
        """,
        "jax",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert out == "0.6 0.8"


def test_jax_array_sharded_over_two_devices() -> None:
    needs("jax")
    out = python(
        """
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        import fedclip
        from declearn.model.haiku import JaxNumpyVector
        sharding = NamedSharding(Mesh(np.array(jax.devices("cpu")), "x"), PartitionSpec("x"))
        array = jax.device_put(np.array([3.0, 4.0]), sharding)
        out = fedclip.NormClip(1.0).run(JaxNumpyVector({"w": array})).coefs["w"]
        assert len(out.sharding.device_set) == 2
        print(np.asarray(out).round(9).tolist())
        """,
        "jax",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert out == "[0.6, 0.8]"


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
        "tensorflow",
    )
    assert out == "0.6 0.8"


@pytest.mark.parametrize("in_place", [False, True])
def test_torch_on_another_device_is_multiplied_by_a_number(in_place: bool) -> None:
    # A tensor on the host that multiplies many on a device at once is refused by torch there;
    # "meta" stands for the device, as it computes nothing.
    needs("torch")
    import torch

    from fedclip.arrays.torch import TorchBackend, TorchInPlace

    backend = TorchInPlace() if in_place else TorchBackend()
    far = [torch.empty(3, 2, device="meta"), torch.empty((), device="meta")]
    assert type(backend._number(0.5, far[0])) is float
    outputs = backend.scale(far, 0.5)
    assert [(t.device.type, t.shape) for t in outputs] == [("meta", t.shape) for t in far]
    near = [torch.ones(3), torch.tensor(2.0)]
    assert [t.tolist() for t in backend.scale(near, 0.5)] == [[0.5] * 3, 1.0]


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


@pytest.mark.parametrize(
    ("make", "most", "grows"),
    [
        (partial(NormClip, 1.0, on_nonfinite="propagate"), 15, 0),
        (partial(NormClip, 1.0), 14, 0),
        (partial(ZScoreClip, on_nonfinite="propagate"), 41, 0),
        (partial(ZScoreClip), 40, 0),
        (EmaClip, 41, 0),
        (AdaptiveClip, 71, 0),
        (PercentileNormClip, 67, 0),
        (AutoClip, 84, 0),
        (MadClip, 103, 0),
        (EmaNormClip, 65, 0),
        (Normalize, 26, 0),
        (EmaNormalize, 75, 0),
        # The extremes of each tensor.
        (partial(ValueClip, 1.0), 55, 1),
        # Two norms for each tensor: of its units, and of those of its weights.
        (partial(AGC, 0.1), 90, 2),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_number_of_operations_on_a_device(make: Any, most: int, grows: int, in_place: bool) -> None:
    """Each may be a launch; what there is for each tensor is in operations for many."""
    needs("torch")
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from fedclip.arrays.torch import TorchBackend, TorchInPlace

    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(
            self, call: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.made += 1
            return call(*args, **(kwargs or {}))

    def count(tensors: int) -> int:
        clip, backend = make(), TorchInPlace() if in_place else TorchBackend()
        gradient = {f"t{i}": torch.empty(3, 5, device="meta") for i in range(tensors)}
        weights = [{name: t.clone() for name, t in gradient.items()}] * isinstance(clip, AGC)
        # The first step makes the state on the device.
        clip.clip(gradient, *weights, backend=backend)
        with Count() as mode:
            clip.clip(gradient, *weights, backend=backend)
        return mode.made

    assert count(20) <= most
    assert count(40) - count(20) == 20 * grows
