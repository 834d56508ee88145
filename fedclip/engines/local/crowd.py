# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulated federation: sampling, drop-out and training.

They share one model. Each has data, a source of its batches, and what its optimizer's modules keep.
"""

# ruff: noqa: UP045  (declearn reads the types of a section from its fields, and knows no `|`)
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.main.config import EvaluateConfig, FLOptimConfig
from declearn.main.utils import aggregate_clients_data_info
from declearn.metrics import MetricState
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import AuxVar
from declearn.training import TrainingManager
from declearn.utils import TomlConfig

from fedclip import UpdateClipClient
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.engines.declearn.context import AnyVector
from fedclip.engines.declearn.personal import PersonalModel
from fedclip.engines.declearn.quickrun import Experiment, vectorize_gradients


@dataclasses.dataclass
class SimulateConfig(TomlConfig):
    """The section [simulate] of a quickrun file; all of it is optional.

    Attributes
    ----------
    clients
        Number of clients, at least one for each in the data folder, which is the default. More
        share the data of those: the first has that of the first folder, and so on, in turn.
    records
        Number of records that each client trains on, drawn from those of its folder. None: all.
    sampled
        Number of clients that are asked in a round, drawn anew each time. None: all.
    drop_out
        Probability with which a client that was asked does not reply.
    attackers
        Number of malicious clients, drawn once. None: 0.
    factor
        Attackers multiply their update by it.
    attackers_clip
        Whether attackers clip their update afterwards, as the others do. Otherwise they send it
        unclipped, and report that it was within the bound.
    seed
        Decides all that is drawn here, and the batches. None: another run each time.
    """

    clients: Optional[int] = None
    records: Optional[int] = None
    sampled: Optional[int] = None
    drop_out: float = 0.0
    attackers: Optional[int] = None
    factor: float = -10.0
    attackers_clip: bool = True
    seed: Optional[int] = None

    def __post_init__(self) -> None:
        parameters.share(drop_out=self.drop_out)
        parameters.optional(parameters.integer, 0, seed=self.seed)
        for name in ("sampled", "attackers"):
            many = getattr(self, name) or 0
            if self.clients is not None and many > self.clients:
                raise ValueError(f"{name} = {many} is more than clients = {self.clients}")


class Crowd:
    """The clients, and the one model that they share.

    Parameters
    ----------
    experiment
        Where data and model are.
    optim, effort
        The section [optim], and how long clients train. The module `update-clip-client` takes no
        part: it only carries what the caller knows.
    settings
        The section [simulate], with a number of clients.

    Attributes
    ----------
    model
        The model; whoever trains or evaluates leaves its own weights in it.
    """

    def __init__(
        self, experiment: Experiment, optim: FLOptimConfig, effort: Config, settings: SimulateConfig
    ) -> None:
        self.settings, self.sites, self._effort = settings, list(experiment.files), effort
        rounds = [divmod(i, len(self.sites)) for i in range(settings.clients or 0)]
        self.names = [self.sites[i] + f"-{turn}" * bool(turn) for turn, i in rounds]
        self.data = [tuple(experiment.data(site)) for site in self.sites]
        self._rng = np.random.default_rng(settings.seed)
        hostile = self._rng.permutation(len(self.names))[: settings.attackers or 0]
        self.hostile = frozenset(hostile.tolist())
        self._config = config = optim.client_opt.get_config()
        config["modules"] = [m for m in config["modules"] if m[0] != UpdateClipClient.name]
        rates = isinstance(config["lrate"], float) and isinstance(config["w_decay"], float)
        self._stateless = rates and not config["modules"] and not config["regularizers"]
        self._optims: dict[int, Optimizer] = {}
        self._sources: dict[int, InMemoryDataset] = {}
        self.model = model = experiment.model()
        if model.required_data_info:
            pairs = zip(self.sites, self.data, strict=True)
            specs = {name: vars(train.get_data_specs()) for name, (train, _) in pairs}
            model.initialize(aggregate_clients_data_info(specs, model.required_data_info))
        # Personal layers are trained too, by the model within.
        inner = model.model if isinstance(model, PersonalModel) else model
        vectorize_gradients(inner)
        parts = inner, self.optimizer(0), optim.aggregator, self.data[0][0]
        self._manager = TrainingManager(*parts, metrics=experiment.metrics, verbose=False)
        # A client also keeps values that are not trained, such as running means.
        self._first = model.get_weights()
        self._has_unshared = {*self._first.coefs} != {*model.get_weights(trainable=True).coefs}
        self._unshared: dict[int, AnyVector] = {}

    def asked(self, due: Sequence[str] | None = None) -> list[int]:
        """Draw the clients of a round, and drop-outs; return those that reply.

        If clients take turns, those that are `due` are asked.
        """
        chosen = np.arange(len(self.names))
        if due is not None:
            chosen = np.flatnonzero(np.isin(self.names, due))
        elif self.settings.sampled is not None:
            chosen = np.sort(self._rng.choice(chosen, self.settings.sampled, replace=False))
        stays = self._rng.random(len(chosen)) >= self.settings.drop_out
        return list(chosen[stays].tolist())

    def optimizer(self, client: int) -> Optimizer:
        """Return a client's optimizer; all share one if it has no state."""
        key = 0 if self._stateless else client
        if key not in self._optims:
            self._optims[key] = Optimizer.from_config(self._config)
        return self._optims[key]

    def train(
        self, client: int, start: AnyVector, aux: Mapping[str, AuxVar]
    ) -> tuple[AnyVector, int, dict[str, AuxVar]]:
        """Train a client from these weights, as [run.training] says.

        Return its update, which is the model before the round minus that after it; its number of
        steps; and the messages of its optimizer's modules to those of the server.
        """
        self.hand_over(client, start)
        manager = self._manager
        manager.optim, manager.train_data = self.optimizer(client), self._records(client)
        manager.optim.process_aux_var(dict(aux))
        manager.optim.start_round()
        effort = manager.train_under_constraints(*self._effort.values())
        manager.model.collect_training_losses()  # they would pile up
        if self._has_unshared:
            self._unshared[client] = self.model.get_weights()
        update = start - self.model.get_weights(trainable=True)
        if client in self.hostile:
            update = update * self.settings.factor
        return update, int(effort["n_steps"]), manager.optim.collect_aux_var()

    def evaluate(self, start: AnyVector, how: EvaluateConfig) -> tuple[Config, dict[str, Config]]:
        """Return loss and metrics over the validation data of all folders, and of each."""
        manager, by_site = self._manager, {}
        total: dict[str, MetricState] = {}
        for place, (site, (_, valid)) in enumerate(zip(self.sites, self.data, strict=True)):
            self.hand_over(place, start)
            manager.valid_data = valid
            measured = manager.evaluate_under_constraints(*how.message_params.values())
            by_site[site], states, _ = measured
            total = {k: total[k] + v if total else v for k, v in states.items()}
        manager.metrics.set_states(total)
        self.hand_over(None, start)
        return manager.metrics.get_result(), by_site

    def _records(self, client: int) -> InMemoryDataset:
        """Return the training records of a client."""
        if client not in self._sources:
            seed, count = self.settings.seed, self.settings.records
            of = self.data[client % len(self.sites)][0]
            data, target = of.data, of.target
            if count is not None:
                rng = np.random.default_rng(None if seed is None else [seed, client])
                rows = rng.choice(len(target), count, replace=count > len(target))
                data, target = (getattr(x, "iloc", x)[rows] for x in (data, target))
            # The seeds of the batches are those of quickrun.
            client_seed = None if seed is None else seed * 1_000 + client
            self._sources[client] = InMemoryDataset(data, target=target, seed=client_seed)
        return self._sources[client]

    def hand_over(self, client: int | None, start: AnyVector) -> None:
        """Give the model a client's weights at the start of a round; for None, the server's."""
        if self._has_unshared:
            weights = None if client is None else self._unshared.get(client)
            self.model.set_weights(self._first if weights is None else weights)
        self.model.set_weights(start, trainable=True)
