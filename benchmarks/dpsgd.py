"""Time a step of DP-SGD beside the plain one: ``python -m benchmarks.dpsgd``; prints ratios.

One thread, batches of 128 records, seconds of the processor. A step ends with the sum of the
clipped gradients: noise, which the last column has by itself, costs the same whatever clips. Beside
it are a step that is not private, declearn's own clipping of records, and Opacus' hooks, all in one
run, taken in turn.
"""

from __future__ import annotations

import os

os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"})
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import copy
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fedclip.dpsgd.clipping import SampleClipping
from fedclip.engines.declearn.persample import clipped_sum
from fedclip.privacy.noise import secure_normals

BATCH = 128
MODELS = (
    "torch mlp",
    "torch large mlp",
    "torch cnn",
    "jax mlp",
    "tensorflow mlp",
    "sklearn linear",
)


def images() -> Any:
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, 1, 28, 28)).astype("float32"), rng.integers(0, 10, BATCH)


def torch_model(name: str) -> Any:
    import torch
    from declearn.model.torch import TorchModel

    torch.set_num_threads(1)
    nn = torch.nn
    wide, narrow = (900, 400) if "large" in name else (104, 32)
    nets = {
        "mlp": lambda: nn.Sequential(
            *(nn.Linear(784, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU()),
            nn.Linear(narrow, 10),
        ),
        "cnn": lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10)),
        ),
    }
    x, y = images()
    # declearn can not do with a Flatten.
    x = x if "cnn" in name else x.reshape(BATCH, -1)
    return TorchModel(nets[name.split()[-1]](), nn.CrossEntropyLoss()), x, y


def jax_model(name: str) -> Any:
    import haiku as hk
    import jax
    from declearn.model.haiku import HaikuModel

    def net(x: Any) -> Any:
        flat = hk.Flatten()(x)
        return hk.nets.MLP([104, 32, 10], activation=jax.nn.relu)(flat)

    def loss(found: Any, y: Any) -> Any:
        return -jax.numpy.sum(jax.nn.log_softmax(found) * jax.nn.one_hot(y, 10), axis=-1)

    model = HaikuModel(net, loss, seed=0)
    model.initialize({"features_shape": (1, 28, 28), "data_type": "float32"})
    return model, *images()


def tensorflow_model(name: str) -> Any:
    import keras
    import tensorflow as tf
    from declearn.model.tensorflow import TensorflowModel

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    dense = keras.layers.Dense
    net = keras.Sequential(
        [keras.layers.Flatten(), dense(104, "relu"), dense(32, "relu"), dense(10)]
    )
    model = TensorflowModel(net, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.initialize({"features_shape": (1, 28, 28)})
    return model, *images()


def sklearn_model(name: str) -> Any:
    from declearn.model.sklearn import SklearnSGDModel

    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    model.initialize({"features_shape": (784,), "classes": list(range(10))})
    x, y = images()
    return model, x.reshape(BATCH, -1).astype(float), y


MAKERS: dict[str, Callable[[str], Any]] = {
    "torch": torch_model,
    "jax": jax_model,
    "tensorflow": tensorflow_model,
    "sklearn": sklearn_model,
}


def opacus(model: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Return a step of Opacus' hooks: the sum of the clipped gradients."""
    import torch
    from opacus.grad_sample import GradSampleModule

    net = GradSampleModule(copy.deepcopy(model._raw_model.module), loss_reduction="sum")
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> Any:
        torch.nn.functional.cross_entropy(net(inputs), targets, reduction="sum").backward()
        samples = [p.grad_sample for p in net.parameters()]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples], 1).norm(dim=1)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        sums = [torch.einsum("i,i...->...", factors, g) for g in samples]
        for p in net.parameters():
            p.grad_sample = p.grad = None
        return sums

    return step


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of step."""
    from declearn.utils import set_device_policy

    set_device_policy(gpu=False)
    model, x, y = MAKERS[name.split()[0]](name)
    batch, flat = (x, y, None), partial(SampleClipping().factors, bound=1.0)
    size = sum(int(np.prod(a.shape)) for a in model.get_weights(trainable=True).coefs.values())
    calls: dict[str, Callable[[], Any]] = {
        "fedclip": lambda: clipped_sum(model, [batch], flat),
        "plain": lambda: done(model.compute_batch_gradients(batch)),
        "noise": lambda: secure_normals(size),
    }
    if "cnn" not in name:  # which declearn can not do
        calls["declearn"] = lambda: done(model.compute_batch_gradients(batch, max_norm=1.0))
    if "torch" in name:
        calls["opacus"] = opacus(model, x, y)
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(rounds):
        for kind, call in calls.items():
            # Once untimed, so that what it finds in the caches is its own.
            call()
            start = time.process_time()
            call()
            times[kind].append((time.process_time() - start) * 1e3)
    return {kind: statistics.median(values) for kind, values in times.items()}


def done(gradients: Any) -> list[Any]:
    """Wait for gradients."""
    return [np.asarray(array) for array in gradients.coefs.values()]


def memory(records: int) -> float:
    """Return the most MiB that this process has held after clipping so many records."""
    model, x, y = torch_model("mlp")
    x, y = np.resize(x, (records, *x.shape[1:])), np.resize(y, records)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clipped_sum(model, [(x, y, None)], partial(SampleClipping().factors, bound=1.0))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Run each model in a process of its own, and print what was found."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    if sys.argv[1:2] == ["memory"]:
        print(json.dumps(memory(int(sys.argv[2]))))
        return
    columns = ("fedclip ms", "/ plain", "/ opacus", "/ declearn", "noise ms")
    print(f"{'':18}" + "".join(f"{column:>13}" for column in columns))
    for name in sys.argv[1:] or MODELS:
        t = ask("measure", name, "15")
        ratios = [t["fedclip"] / t[k] if k in t else None for k in ("plain", "opacus", "declearn")]
        cells = [f"{t['fedclip']:.2f}", *("-" if r is None else f"{r:.3f}" for r in ratios)]
        print(f"{name:18}" + "".join(f"{cell:>13}" for cell in [*cells, f"{t['noise']:.2f}"]))
    for records in (BATCH, 32 * BATCH):
        print(f"memory for a batch of {records}: {ask('memory', str(records)):.0f} MiB more")


def ask(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.dpsgd", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
