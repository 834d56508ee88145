"""Training managers and clients with DP-SGD, without a server; some without noise."""

import asyncio
import tempfile
import warnings
from pathlib import Path
from typing import Any

import dpsgd_wire as wire
import numpy as np
import pytest
from declearn import messaging
from declearn.aggregator import AveragingAggregator
from declearn.dataset import Dataset, InMemoryDataset
from declearn.messaging import EvaluationRequest, InitRequest, PrivacyRequest, TrainRequest
from declearn.metrics import MetricSet
from declearn.model.sklearn import SklearnSGDModel
from declearn.optimizer import Optimizer
from hostile_server import Wire

import fedclip
from fedclip.dpsgd.step import IndependentNoise
from fedclip.engines.declearn.private_client import PrivateTrainingManager

N, D = 60, 5


def data(n: int = N, d: int = D, seed: int = 0) -> InMemoryDataset:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return InMemoryDataset(x, target=(x[:, 0] > 0).astype(int), expose_classes=True)


STEPS = {"batches": {"batch_size": 15}, "n_epoch": 1, "n_steps": None}
SPENT = {"budget": (3.0, 1e-5), "sclip_norm": 0.5, "accountant": "rdp", "rounds": 4}


def request(**changes: Any) -> PrivacyRequest:
    settings: dict[str, Any] = {**STEPS, **SPENT, "use_csprng": False, "seed": 7, **changes}
    return PrivacyRequest(**settings)


def train(**changes: Any) -> TrainRequest:
    settings: dict[str, Any] = {"round_i": 1, "weights": None, "aux_var": {}, "timeout": None}
    return TrainRequest(**{**settings, **STEPS, **changes})


def manager_of(model: Any, train: Any, valid: Any, modules: Any) -> Any:
    parts = model, Optimizer(lrate=1.0, modules=[*modules]), AveragingAggregator(), train, valid
    return PrivateTrainingManager(*parts, verbose=False)


def manager(modules: Any = (), dataset: Any = None, private: Any = True, **kwargs: Any) -> Any:
    records = data() if dataset is None else dataset
    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty=None)
    size = records.feats.shape[1]
    model.initialize({"features_shape": (size,), "classes": [0, 1]})
    made = manager_of(model, records, data(d=size, seed=1), modules)
    if private:
        made.make_private(request() if private is True else private, **kwargs)
    return made


BOUND = 3.0


def noised_sums(states: Any) -> Any:
    """Return the noised sums of an evaluation: losses, right classes, records."""
    bounds, count = {"loss": BOUND, "accuracy": 1.0}, states["loss"].divisor
    sums = [states[name].num_sum / bound - count / 2 for name, bound in bounds.items()]
    return np.array([*sums, count / 2])


def coefs(made: PrivateTrainingManager) -> Any:
    return np.concatenate([np.ravel(a) for a in made.model.get_weights().coefs.values()])


class Silent(IndependentNoise):
    """No noise at all; it keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], float]] = []

    def add(self, sums: Any, std: float) -> dict[str, Any]:
        self.seen.append(({name: np.array(a) for name, a in sums.items()}, std))
        return dict(sums)


def client(**settings: Any) -> Any:
    known: dict[str, Any] = {"train_data": data(), "valid_data": data(seed=1), "verbose": False}
    if "checkpoint" not in settings:
        known["ledger"] = Path(tempfile.mkdtemp()) / "spent.json"
    return fedclip.PrivateFederatedClient(Wire(), **{**known, **settings})


def linear(net: Any = None) -> Any:
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    return TorchModel(net or torch.nn.Linear(wire.D, wire.CLASSES), torch.nn.CrossEntropyLoss())


def private(source: Dataset, net: Any = None, valid: Any = None, modules: Any = ()) -> Any:
    """Return a manager that adds no noise, with the updates that it would have added noise to."""
    x, y = wire.arrays(20, seed=1)
    valid = InMemoryDataset(x, target=y) if valid is None else valid
    made = manager_of(linear(net), source, valid, modules)
    made.make_private(request())
    made.noise = Silent()
    return made


def total(made: Any, positions: Any) -> Any:
    made.run_train_step(made.records.take(positions, made._fail))
    return np.concatenate([a.ravel() for a in made.noise.seen[-1][0].values()])


def conversation(kind: str, folder: Path) -> list[Any]:
    """Return what a client sends in two rounds; its draws are the same whatever its kind."""
    model = linear()
    clip = ("sample-clip", {"evaluation_share": 0.2, "loss_bound": BOUND})
    limits = [("value-clip", {"max_value": 0.05}), ("norm-clip", {"max_norm": 0.07})]
    optim = Optimizer(lrate=0.5, modules=[*limits, clip, "momentum"])
    metrics = MetricSet(["accuracy"]).get_config()["metrics"]
    of_round: dict[str, Any] = {"batches": {"batch_size": 20}, "n_epoch": 2, "n_steps": 3}
    weights = model.get_weights(trainable=True)
    kinds = ("plain", kind) if kind in wire.VALIDATION else (kind, "plain")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # A model of torch is pickled.
        warnings.simplefilter("ignore")
        wire.seeded(patch.setattr)
        # The first three validation records, on which the model is tried, are always the same.
        valid = wire.dataset(kinds[1], wire.N - 1, expose_data_type=True)
        settings = {"train_data": wire.dataset(kinds[0]), "valid_data": valid}
        made = client(**settings, checkpoint=str(folder / kind))
        made.netwk.left = [
            messaging.MetadataQuery(["n_samples", "features_shape", "data_type"]),
            InitRequest(model, optim, AveragingAggregator(), metrics, dpsgd=True),
            request(budget=(50.0, 1e-3), rounds=2, **of_round),
        ]
        asyncio.run(made.initialize())
        for i in (1, 2):
            made.netwk.left = [
                train(round_i=i, weights=weights, **of_round),
                EvaluationRequest(i, weights, {"batch_size": 20}, None, None),
            ]
            for _ in range(2):
                asyncio.run(made.handle_message(asyncio.run(made.netwk.recv_message())))
    return made.netwk.messages
