"""Time clipped sums of records, next to those of peers: ``python -m benchmarks.dpsgd [MODEL ...]``.

One thread, seconds of the processor, batches of 64 and 256 records. A step ends with the sum of
the clipped gradients: noise, which has a column, costs the same whatever clips. Peers run in the
same process, in turn: a step that is not private, declearn's clipping, Opacus in its four modes,
and jax_privacy with and without micro-batches. A peer that is not installed, or cannot do a model,
is left out.
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

from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import clipped_sum
from fedclip.privacy.noise import secure_normals

BATCHES = (64, 256)
MODELS = (
    "torch mlp",
    "torch large mlp",
    "torch cnn",
    "torch lstm",
    "torch transformer",
    "jax mlp",
    "jax cnn",
    "tensorflow mlp",
    "sklearn linear",
)


def images(batch: int) -> Any:
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, 1, 28, 28)).astype("float32"), rng.integers(0, 10, batch)


def sequences(kind: str) -> Any:
    """Return a torch model of tokens: an embedding, an LSTM or two encoder layers, a classifier."""
    import torch

    class Sequences(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            nn = torch.nn
            self.embed, self.out = nn.Embedding(100, 64), nn.Linear(64, 10)
            self.mix = nn.LSTM(64, 64, batch_first=True)
            if kind == "transformer":
                layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
                self.mix = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, tokens: Any) -> Any:
            mixed = self.mix(self.embed(tokens))
            return self.out(mixed.mean(1) if kind == "transformer" else mixed[0][:, -1])

    return Sequences()


def torch_model(name: str, batch: int) -> Any:
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
    x, y = images(batch)
    if name.endswith(("lstm", "transformer")):
        tokens = np.random.default_rng(0).integers(0, 100, (batch, 32))
        return TorchModel(sequences(name.split()[-1]), nn.CrossEntropyLoss()), tokens, y
    # declearn's clipping does not know a Flatten.
    x = x if "cnn" in name else x.reshape(batch, -1)
    return TorchModel(nets[name.split()[-1]](), nn.CrossEntropyLoss()), x, y


def jax_model(name: str, batch: int) -> Any:
    import haiku as hk
    import jax
    from declearn.model.haiku import HaikuModel

    def net(x: Any) -> Any:
        if "cnn" in name:
            convolved = jax.nn.relu(hk.Conv2D(16, 5, 2, data_format="NCHW")(x))
            return hk.Linear(10)(hk.Flatten()(convolved))
        flat = hk.Flatten()(x)
        return hk.nets.MLP([104, 32, 10], activation=jax.nn.relu)(flat)

    def loss(found: Any, y: Any) -> Any:
        return -jax.numpy.sum(jax.nn.log_softmax(found) * jax.nn.one_hot(y, 10), axis=-1)

    model = HaikuModel(net, loss, seed=0)
    model.initialize({"features_shape": (1, 28, 28), "data_type": "float32"})
    return model, *images(batch)


def tensorflow_model(name: str, batch: int) -> Any:
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
    return model, *images(batch)


def sklearn_model(name: str, batch: int) -> Any:
    from declearn.model.sklearn import SklearnSGDModel

    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    model.initialize({"features_shape": (784,), "classes": list(range(10))})
    x, y = images(batch)
    return model, x.reshape(batch, -1).astype(float), y


MAKERS: dict[str, Callable[[str, int], Any]] = {
    "torch": torch_model,
    "jax": jax_model,
    "tensorflow": tensorflow_model,
    "sklearn": sklearn_model,
}


def exchanged(layer: Any, other: Any) -> Any:
    """Return another layer, with the weights of the first."""
    other.load_state_dict(layer.state_dict())
    return other


def opacus(model: Any, x: Any, y: Any, mode: str) -> Callable[[], Any]:
    """Return a step of one of Opacus' modes: the sum of the clipped gradients."""
    import torch
    from opacus import grad_sample, layers, optimizers
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    net = copy.deepcopy(model._raw_model.module)
    # Opacus' hooks know its own LSTM and attention only.
    if isinstance(getattr(net, "mix", None), torch.nn.LSTM):
        net.mix = exchanged(net.mix, layers.DPLSTM(64, 64, batch_first=True))
    for layer in getattr(getattr(net, "mix", None), "layers", ()):
        attention = layers.DPMultiheadAttention(64, 4, batch_first=True)
        layer.self_attn = exchanged(layer.self_attn, attention)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    criterion = torch.nn.CrossEntropyLoss()
    if mode == "ghost":
        ghost: Any = grad_sample.GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0)
        ghost_optimizer = optimizers.DPOptimizerFastGradientClipping(
            torch.optim.SGD(ghost.parameters(), 0.1),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=len(y),
        )
        ghost_loss = DPLossFastGradientClipping(ghost, ghost_optimizer, criterion)

        def ghost_step() -> Any:
            ghost_optimizer.zero_grad()
            ghost_loss(ghost(inputs), targets).backward()

        return ghost_step
    wrapped: Any = grad_sample.wrap_model(net, mode, batch_first=True, loss_reduction="mean")

    def step() -> Any:
        criterion(wrapped(inputs), targets).backward()
        samples = [p.grad_sample for p in net.parameters()]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples], 1).norm(dim=1)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        sums = [torch.einsum("i,i...->...", factors, g) for g in samples]
        for p in net.parameters():
            p.grad_sample = p.grad = None
        return sums

    return step


def jax_privacy(model: Any, x: Any, y: Any, micro_batch: int | None) -> Callable[[], Any]:
    """Return a step of jax_privacy."""
    import jax
    from jax_privacy.clipping import clipped_grad

    key = jax.random.PRNGKey(0)

    def loss(params: Any, batch: Any) -> Any:
        return model._forward(params, {}, key, ([batch[0]], batch[1], None))

    step = jax.jit(clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=micro_batch))
    arguments = model._params, (jax.numpy.asarray(x), jax.numpy.asarray(y))
    return lambda: jax.block_until_ready(step(*arguments))


PEERS: dict[str, Callable[[Any, Any, Any], Callable[[], Any]]] = {
    **{f"opacus {m}": partial(opacus, mode=m) for m in ("hooks", "ew", "functorch", "ghost")},
    "jax_privacy": partial(jax_privacy, micro_batch=None),
    "jax_privacy 16": partial(jax_privacy, micro_batch=16),
}


def measure(name: str, batch: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of step."""
    from declearn.utils import set_device_policy

    set_device_policy(gpu=False)
    model, x, y = MAKERS[name.split()[0]](name, batch)
    records, flat = (x, y, None), partial(SampleClipping().factors, bound=1.0)
    size = sum(int(np.prod(a.shape)) for a in model.get_weights(trainable=True).coefs.values())
    calls: dict[str, Callable[[], Any]] = {
        "fedclip": lambda: clipped_sum(model, [records], flat, micro_batch=batch),
        "plain": lambda: done(model.compute_batch_gradients(records)),
        "noise": lambda: secure_normals(size),
    }
    if name.endswith(("mlp", "linear")):
        calls["declearn"] = lambda: done(model.compute_batch_gradients(records, max_norm=1.0))
    for peer, make in PEERS.items():
        if peer.startswith({"torch": "opacus", "jax": "jax"}.get(name.split()[0], "none")):
            try:
                calls[peer] = make(model, x, y)
                calls[peer]()
            except Exception as error:
                calls.pop(peer, None)
                print(f"{peer} is left out: {error!r:.150}", file=sys.stderr)
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
    model, x, y = torch_model("mlp", BATCHES[0])
    x, y = np.resize(x, (records, *x.shape[1:])), np.resize(y, records)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clipped_sum(model, [(x, y, None)], partial(SampleClipping().factors, bound=1.0))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Run each model in a process of its own, and print what was found."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        return
    if sys.argv[1:2] == ["memory"]:
        print(json.dumps(memory(int(sys.argv[2]))))
        return
    for name in sys.argv[1:] or MODELS:
        for batch in BATCHES:
            times = ask("measure", name, str(batch), "9")
            ours = times.pop("fedclip")
            noise = times.pop("noise")
            private = (ours + noise) / times["plain"]
            print(f"{name}, {batch} records: {ours:.2f} ms, noise {noise:.2f} ms")
            print(f"  clipped and noised / plain {private:.2f}; clipped / ", end="")
            print(", ".join(f"{peer} {ours / t:.2f}" for peer, t in times.items()))
    for records in (BATCHES[0], 64 * BATCHES[0]):
        print(f"memory for a batch of {records}: {ask('memory', str(records)):.0f} MiB more")


def ask(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.dpsgd", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
