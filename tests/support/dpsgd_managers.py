"""Training managers and clients with DP-SGD, without a server; some without noise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import dpsgd_wire as wire
import numpy as np
import pytest
from declearn.aggregator import AveragingAggregator
from declearn.dataset import Dataset, InMemoryDataset
from declearn.messaging import (
    PrivacyRequest,
    TrainRequest,
)
from declearn.model.sklearn import SklearnSGDModel
from declearn.optimizer import Optimizer

import fedclip
from fedclip.dpsgd.step import IndependentNoise
from fedclip.engines.declearn.private_client import PrivateTrainingManager

N, D = 60, 5


def data(n: int = N, d: int = D, seed: int = 0) -> InMemoryDataset:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return InMemoryDataset(x, target=(x[:, 0] > 0).astype(int), expose_classes=True)


def request(**changes: Any) -> PrivacyRequest:
    settings: dict[str, Any] = {
        "budget": (3.0, 1e-5),
        "sclip_norm": 0.5,
        "accountant": "rdp",
        "use_csprng": False,
        "seed": 7,
        "rounds": 4,
        "batches": {"batch_size": 15},
        "n_epoch": 1,
        "n_steps": None,
    }
    return PrivacyRequest(**{**settings, **changes})


def train(**changes: Any) -> TrainRequest:
    settings: dict[str, Any] = {
        "round_i": 1,
        "weights": None,
        "aux_var": {},
        "batches": {"batch_size": 15},
        "n_epoch": 1,
        "n_steps": None,
        "timeout": None,
    }
    return TrainRequest(**{**settings, **changes})


def manager(
    modules: Any = (),
    dataset: InMemoryDataset | None = None,
    private: Any = True,
    lrate: float = 1.0,
    **kwargs: Any,
) -> PrivateTrainingManager:
    records = data() if dataset is None else dataset
    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty=None)
    model.initialize({"features_shape": (records.feats.shape[1],), "classes": [0, 1]})
    made = PrivateTrainingManager(
        model=model,
        optim=Optimizer(lrate=lrate, modules=list(modules)),
        aggrg=AveragingAggregator(),
        train_data=records,
        valid_data=data(d=records.feats.shape[1], seed=1),
        verbose=False,
    )
    if private:
        made.make_private(request() if private is True else private, **kwargs)
    return made


def coefs(made: PrivateTrainingManager) -> Any:
    return np.concatenate([np.ravel(a) for a in made.model.get_weights().coefs.values()])


class Silent(IndependentNoise):
    """No noise at all; it keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], float]] = []

    def add(self, sums: Any, std: float) -> dict[str, Any]:
        self.seen.append(({name: np.array(a) for name, a in sums.items()}, std))
        return dict(sums)


class Wire:
    """Takes the place of a client's end of a connection."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send_message(self, message: Any) -> None:
        self.sent.append(message)


NETWORK = {"protocol": "websockets", "server_uri": "ws://localhost:8765", "name": "a"}


def client(**settings: Any) -> Any:
    pytest.importorskip("websockets")
    known: dict[str, Any] = {"train_data": data(), "valid_data": data(seed=1), "verbose": False}
    if "checkpoint" not in settings:
        known["ledger"] = Path(tempfile.mkdtemp()) / "spent.json"
    made: Any = fedclip.PrivateFederatedClient(NETWORK, **{**known, **settings})
    made.netwk = Wire()
    return made


def private(source: Dataset, net: Any = None, valid: Any = None, modules: Any = ()) -> Any:
    """Return a manager that adds no noise, with the updates that it would have added noise to."""
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    model = TorchModel(net or torch.nn.Linear(wire.D, wire.CLASSES), torch.nn.CrossEntropyLoss())
    x, y = wire.arrays(20, seed=1)
    made = PrivateTrainingManager(
        *(model, Optimizer(lrate=1.0, modules=[*modules]), AveragingAggregator(), source),
        valid_data=InMemoryDataset(x, target=y) if valid is None else valid,
        verbose=False,
    )
    made.make_private(request())
    made.noise = Silent()
    return made


def total(made: Any, positions: Any) -> Any:
    """Return the clipped sum of a step, as an array."""
    made.run_train_step(made.records.take(positions, made._fail))
    return np.concatenate([a.ravel() for a in made.noise.seen[-1][0].values()])
