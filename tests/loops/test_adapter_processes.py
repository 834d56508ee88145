"""Models that are spread over processes or devices are clipped like whole ones."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import ended, hiding, require

torch = require("torch")
pytest.importorskip("torch.distributed.tensor")
if not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

import federation_runs  # noqa: E402, F401
import sharded_cases  # noqa: E402

pytestmark = pytest.mark.slow
SPREAD = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all cases in four processes; return for each what went wrong, by process."""
    folder = tmp_path_factory.mktemp("sharded")
    # If one fails, the files say in which case.
    with contextlib.suppress(torch.multiprocessing.ProcessRaisedException):
        # Forked from a process that has imported torch: see `federation_runs`.
        torch.multiprocessing.start_processes(
            *(sharded_cases.main, (str(folder),)),
            nprocs=sharded_cases.WORLD,
            start_method="forkserver",
        )
    return [folder / str(rank) for rank in range(sharded_cases.WORLD)]


@pytest.mark.parametrize("name", list(sharded_cases.CASES))
def test_sharded(outcomes: list[Path], name: str) -> None:
    for rank, folder in enumerate(outcomes):
        file = folder / name
        assert file.exists(), f"process {rank} did not come so far"
        said = file.read_text()
        assert not said, f"process {rank}:\n{said}"


@pytest.mark.soak
def test_the_digits_in_two_processes_are_learnt_as_in_one() -> None:
    pytest.importorskip("sklearn")
    loops = Path(__file__).parents[2] / "examples" / "loops"
    said = [
        ended(*command).stdout.splitlines()[-1]
        for command in ([*SPREAD, loops / "torch_fsdp.py"], [loops / "torch_loop.py"])
    ]
    # Accuracy and number of clipped steps; then the last limit.
    (words, limit), (expected, alone) = (line.rsplit(" ", 1) for line in said)
    assert words == expected
    assert float(limit) == pytest.approx(float(alone), rel=1e-5)
    assert " 0 of them clipped" not in words


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name)
    from loops.transformers_processes import trained

    ended(*SPREAD, Path(__file__).with_name("transformers_processes.py"), tmp_path)
    runs, others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert runs == others
    model, clipper = trained(str(tmp_path))
    for kind, run in runs.items():
        assert run["sharded"] == ("sharded" in kind)
        for found, expected in zip(run["weights"], model.parameters(), strict=True):
            np.testing.assert_allclose(found, expected.detach().flatten(), rtol=1e-4, atol=1e-6)
        assert run["state"]["all"] == pytest.approx(clipper.get_state()["groups"]["all"], rel=1e-4)
        # The spike, and the step after it.
        assert run["clipped"] == clipper.rounds[-1].clipped == 2


def test_meshes_and_shard_map_do_what_one_device_does():
    require("jax")
    result = ended(
        Path(__file__).with_name("jax_devices.py"),
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            # What is spread over devices is the same with and without; it compiles in less time.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        },
    )
    assert result.stdout.splitlines()[-1] == "all as on one device"


@pytest.mark.parametrize(
    ("backend", "more"),
    [pytest.param("jax", "pickle", marks=pytest.mark.soak), ("torch", "save or clipvalue")],
)
def test_keras_is_the_same_on_other_backends(backend, more):
    require("keras")
    require(backend)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-m", ""]
    # Where fedclip or Keras does something else on each: steps, fit, variables.
    parts = f"fit_does or accumulated or history or {more}"
    ended(
        *(*command, "-k", parts, Path(__file__).with_name("test_adapter_keras.py")),
        # What Keras calls is the same with and without; it compiles in less time.
        env={
            **hiding(*(["torch"] if backend == "jax" else ["jax", "haiku", "optax"])),
            "KERAS_BACKEND": backend,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        },
    )


MIRRORED = """
import json, sys
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, numpy as np
from fedclip import AGC, Centralize, EmaValueClip, NormClip, ValueClip, ZScoreClip
from fedclip.loops.keras import ClippedOptimizer

def run(strategy, make):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        net = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4)])
        net.compile(make(), "mse")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 5)).astype("float32")
    net.fit(x, 3 * x[:, :4], epochs=2, batch_size=32, shuffle=False, verbose=0)
    return net

SGD, Scaled = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
makers = {
    "z-score": lambda: ClippedOptimizer(SGD(0.1), ZScoreClip(warmup=1, scope="tensor")),
    "agc": lambda: ClippedOptimizer(SGD(0.1), AGC(0.01)),
    "scaled": lambda: Scaled(ClippedOptimizer(SGD(0.1), NormClip(0.1))),
    "keras": lambda: SGD(0.1, global_clipnorm=0.1),
}
# Outside of fit: a gradient whose tensors lie on two devices.
gradient = {}
for place, value in enumerate((3.0, 4.0)):
    with tf.device(f"CPU:{place}"):
        gradient[str(place)] = tf.constant([value])
for clipper in (ZScoreClip(), ValueClip(), EmaValueClip(), Centralize()):
    clipper.clip(gradient)
np.testing.assert_allclose([*NormClip(1.0).clip(gradient).values()], [[0.6], [0.8]], rtol=1e-5)
two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
for name, make in makers.items():
    one, both = (run(s, make).get_weights() for s in (tf.distribute.get_strategy(), two))
    print(name, max(float(np.abs(a - b).max()) for a, b in zip(one, both)), sep="=")
"""


def test_two_replicas_clip_the_sum_of_their_gradients_as_one_would():
    require("keras")
    said = ended("-c", MIRRORED).stdout.splitlines()
    found = dict(line.split("=") for line in said if "=" in line)
    # Keras' own clip is of each replica's part, which changes the step by more than a tenth.
    assert float(found.pop("keras")) > 1e-3
    assert len(found) == 3
    assert all(float(difference) < 1e-6 for difference in found.values()), found
