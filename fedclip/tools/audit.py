# SPDX-License-Identifier: Apache-2.0
"""``fedclip privacy audit``: attacks on the privacy that a quickrun file claims, by its own parts.

::

    one run       canaries: clients (or records) whose updates (gradients) are as long as the bound
                  lets them be, in directions of their own; each takes part by a fair coin. Whoever
                  sees every release and knows the directions guesses which did
    membership    the model is trained as the file says; whoever has it guesses by the loss of a
                  record whether it was trained on

The first is as strong as accounting assumes, and tests noise, turns, sampling and the divisor. The
second is what somebody with the model can do.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.main.utils import aggregate_clients_data_info
from declearn.messaging import PrivacyRequest
from declearn.optimizer import Optimizer

from fedclip import SampleClip
from fedclip.dpsgd.manager import PrivateTrainingManager
from fedclip.dpsgd.noise import IndependentNoise
from fedclip.dpsgd.persample.base import Host
from fedclip.dpsgd.persons import Persons
from fedclip.dpsgd.records import Records, first_records
from fedclip.federation.generics import AnyModel
from fedclip.federation.update.adaptive import AdaptiveBound
from fedclip.federation.update.clipping import UpdateClient
from fedclip.federation.update.engine import UpdateServer
from fedclip.federation.update.exchange import Reply
from fedclip.privacy.accounting import Accountant, epsilon
from fedclip.privacy.auditing import Guesses, guessed
from fedclip.tools.output import ToolError
from fedclip.tools.quickrun import Experiment
from fedclip.tools.simulate import Simulation

CANARIES = 1000
"""About as many in all: clients in several runs, or records in one."""
_MOST_RUNS = 10
DELTA = 1e-6
"""Guesses of so many say little at a larger delta, and each noise has an epsilon for each delta."""


class Membership(NamedTuple):
    """How well losses tell records that were trained on from others."""

    auc: float
    low: float
    high: float


class Audit(NamedTuple):
    """What the attacks have reached."""

    protects: str
    accountant: Accountant
    """All that the run may spend, and the delta of the claim."""
    guesses: Guesses
    membership: Membership

    @property
    def delta(self) -> float:
        """The delta at which it is attacked."""
        return min(self.accountant.delta, DELTA)

    @property
    def claimed(self) -> float:
        """The epsilon at that delta."""
        return epsilon(self.accountant.spent, self.delta, self.accountant.relation)

    @property
    def least(self) -> float:
        """The lower bound on epsilon, which is too high in one audit of twenty."""
        return self.guesses.least(self.delta)

    @property
    def fault(self) -> bool:
        """Whether the claim is refuted."""
        return self.least > self.claimed

    def in_words(self) -> Iterator[str]:
        """Yield the result, sentence by sentence."""
        canaries, guesses, right = self.guesses
        yield (
            f"one run: {canaries:,} {self.protects}s as conspicuous as the bound allows; of "
            f"{guesses} guesses which of them took part, {right} were right"
        )
        whole = self.accountant
        yield (
            f"  epsilon is at least {self.least:.3g} (95 % confidence); claimed is "
            f"{self.claimed:.4g} at delta {self.delta:g}, which is {whole.epsilon():.4g} at "
            f"{whole.delta:g}: " + ("THE CLAIM IS REFUTED" if self.fault else "no fault was found")
        )
        auc, low, high = self.membership
        yield (
            f"membership: by its loss, a record that was trained on is told from another with AUC "
            f"{auc:.3f} ({low:.3f} to {high:.3f}, 95 %); 0.5 is no better than a coin"
        )
        yield (
            "what this does not show: that epsilon is as small as claimed (attacks give lower "
            "bounds, and one of 20 is too high); what goes out besides the model, as losses, "
            "logs and numbers of records do; and the generator, whose draws are taken as random"
        )


def audit(file: Path, seed: int | None = None) -> Audit:
    """Attack what a checked quickrun file describes.

    Raises
    ------
    ToolError
        If it claims no privacy, or data or model are not where it says.
    """
    optim = FLOptimConfig.from_toml(str(file), False, "optim")
    rng, logger = np.random.default_rng(seed), logging.getLogger("declearn")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if any(isinstance(module, SampleClip) for module in optim.client_opt.modules):
            return _of_records(file, optim, rng)
        simulation = Simulation(file, seed)
        if simulation.bound is None or simulation.bound.budget is None:
            raise ToolError(
                "nothing here claims privacy: neither update-clip-server with noise_multiplier, "
                "nor sample-clip with [run.privacy]"
            )
        return _of_clients(simulation, rng)
    finally:
        logger.setLevel(before)


# -- clients, and noise on their average --------------------------------------------------------
def _of_clients(simulation: Simulation, rng: np.random.Generator) -> Audit:
    bound, names = simulation.bound, simulation.crowd.names
    assert bound is not None
    assert bound.budget is not None
    turns = -(-simulation.config.rounds // bound.separation)
    whole = Accountant(bound.delta, bound.relation)
    whole.add(bound.budget.noise_multiplier, turns)
    values = sum(math.prod(x.shape) for x in simulation.model.get_weights(True).coefs.values())
    there, scores = [], []
    for _ in range(math.ceil(CANARIES / min(len(names), values))):
        places = rng.permutation(values)[: len(names)]
        coins = rng.random(len(places)) < 0.5
        there += coins.tolist()
        scores += _play(simulation, places, coins).tolist()
    found = guessed(there, scores)
    for _ in range(simulation.config.rounds):
        if simulation.step():
            break
    losses = [[_losses(simulation.model, part) for part in pair] for pair in simulation.crowd.data]
    return Audit("client", whole, found, _membership(losses))


def _play(simulation: Simulation, places: Host, coins: Host) -> Host:
    """Run the server with canaries alone, and return the score of each."""
    origin = simulation.bound
    assert origin is not None
    bound = AdaptiveBound(**{k: v for k, v in origin.get_config().items() if k != "seed"})
    assert bound.budget is not None
    scope = simulation.aggregator.scope
    server, client = UpdateServer(bound, scope=scope), UpdateClient(scope)
    like = {n: np.zeros(x.shape) for n, x in simulation.model.get_weights(True).coefs.items()}
    names = simulation.crowd.names[: len(places)]
    at = {name: i for i, name in enumerate(names)}
    seen, due, released = [], [], []
    for round_ in range(simulation.config.rounds):
        sent = server.open(simulation.schedule.at(round_) if simulation.schedule else None)
        if sent.stop:
            break
        turn = simulation.schedule.due(round_) if simulation.schedule else names
        mine = [at[name] for name in turn if name in at]
        replies = [
            client.clip(_canary(like, places[i], 1e3 * sent.bound), sent, steps=1)
            if coins[i]
            else Reply(like)
            for i in mine
        ]
        closed = server.close(replies, like)
        flat = np.concatenate([np.ravel(closed.average[name]) for name in like])
        seen.append(flat[places] / sent.bound)
        due.append(np.isin(np.arange(len(places)), mine))
        released.append(not closed.withheld)
    return matched(np.array(seen), np.array(due), bound.budget.coefficients, np.array(released))


def _canary(like: Mapping[str, Host], place: int, length: float) -> dict[str, Host]:
    """Return an update that is so long in one value, and zero elsewhere."""
    found = {name: np.zeros(x.shape) for name, x in like.items()}
    for array in found.values():
        if place < array.size:
            array.flat[place] = length
            break
        place -= array.size
    return found


def matched(seen: Host, due: Host, c: tuple[float, ...], released: Host) -> Host:
    """Return how much of each canary is in what was seen of it, round by round.

    Noise that was taken back is put together again; then that of each round is independent. What
    follows up to a band after a round that was withheld is left out.
    """
    from scipy.signal import lfilter

    usable = np.convolve(~released, np.ones(len(c)))[: len(seen)] == 0
    expected = lfilter(c, [1.0], due.astype(float), axis=0) * usable[:, None]
    found: Host = (expected * lfilter(c, [1.0], seen, axis=0)).sum(0)
    return found


# -- records, and DP-SGD ------------------------------------------------------------------------
class _Watched(IndependentNoise):
    """Adds canaries to each step's sum before the noise, and looks for them after it."""

    def __init__(self, manager: PrivateTrainingManager, rng: np.random.Generator) -> None:
        super().__init__()
        self._noise, self._manager, self._rng = manager.noise, manager, rng
        shapes = manager.model.get_weights(trainable=True).coefs.values()
        values = sum(math.prod(x.shape) for x in shapes)
        self._places = rng.permutation(values)[:CANARIES]
        self.there = rng.random(len(self._places)) < 0.5
        self.scores = np.zeros(len(self._places))

    def add(self, sums: Mapping[str, Host], std: float) -> dict[str, Host]:
        """Return the sums of a step with noise."""
        manager = self._manager
        plan = manager.calibration
        bound = std / manager.clipping.noise_multiplier(plan.noise_multiplier, plan.expected)
        drawn = self.there & (self._rng.random(len(self.there)) < plan.rate)
        flat = np.concatenate([np.ravel(x) for x in sums.values()])
        flat[self._places[drawn]] += bound
        ends = np.cumsum([x.size for x in sums.values()])[:-1]
        parts = np.split(flat, ends)
        given = {n: p.reshape(x.shape) for (n, x), p in zip(sums.items(), parts, strict=True)}
        noisy = self._noise.add(given, std)
        seen = np.concatenate([np.ravel(x) for x in noisy.values()])
        self.scores += seen[self._places] / bound
        return dict(noisy)


def _of_records(file: Path, optim: FLOptimConfig, rng: np.random.Generator) -> Audit:
    experiment = Experiment(file)
    config = FLRunConfig.from_toml(str(file), False, "run")
    if config.privacy is None:
        raise ToolError("sample-clip needs [run.privacy], and nothing claims privacy without")
    site = next(iter(experiment.files))
    data, persons = experiment.data(site), experiment.persons(site)
    there, scores, losses = list[bool](), list[float](), list[list[Host]]()
    # Of a small model, a run has only as many directions as values.
    while len(there) < CANARIES and len(losses) < _MOST_RUNS:
        manager = _private(experiment, optim, config, data, persons)
        watched = _Watched(manager, rng)
        manager.noise = watched
        effort = config.training.message_params
        for _ in range(config.rounds):
            manager.train_under_constraints(effort["batches"], effort["n_epoch"], effort["n_steps"])
        there += watched.there.tolist()
        scores += watched.scores.tolist()
        losses.append([_losses(manager.model, part) for part in data])
    found = guessed(there, scores)
    return Audit(manager.records.unit, manager.ledger.accountant, found, _membership(losses[:1]))


def _private(
    experiment: Experiment,
    optim: FLOptimConfig,
    config: FLRunConfig,
    data: Sequence[InMemoryDataset],
    persons: Path | None,
) -> PrivateTrainingManager:
    """Return a client that trains alone, as the server asks it to."""
    model = experiment.model()
    if model.required_data_info:
        specs = {"site": vars(data[0].get_data_specs())}
        model.initialize(aggregate_clients_data_info(specs, model.required_data_info))
    manager = PrivateTrainingManager(
        model,
        Optimizer.from_config(optim.client_opt.get_config()),
        optim.aggregator,
        data[0],
        data[1],
        logger=logging.getLogger("declearn.client.audit"),
        verbose=False,
    )
    effort = config.training.message_params
    steps = {name: effort[name] for name in ("batches", "n_epoch", "n_steps")}
    assert config.privacy is not None
    asked = dataclasses.asdict(config.privacy)
    records = Records(data[0], *first_records(data[1])[:1])
    units = records if persons is None else Persons(records, persons)
    request = PrivacyRequest(rounds=config.rounds, **steps, **asked)
    manager.make_private(request, records=units)
    return manager


# -- membership ---------------------------------------------------------------------------------
def _losses(model: AnyModel, records: InMemoryDataset) -> Host:
    """Return the loss of each record."""
    found = []
    for batch in records.generate_batches(256, drop_remainder=False):
        truth, said, _ = model.compute_batch_predictions(batch)
        found.append(np.ravel(model.loss_function(truth, said)))
    return np.concatenate(found)


def _membership(losses: list[list[Host]]) -> Membership:
    """Return how often a trained record has the lower loss of two, site by site; Hanley & McNeil.

    A site's records are compared with its own others: sites may be unlike.
    """
    from scipy import stats

    areas, weights, variances = [], [], []
    for trained, others in losses:
        m, n = len(trained), len(others)
        auc = float(stats.mannwhitneyu(others, trained).statistic) / (m * n)
        q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
        spread = auc * (1 - auc) + (m - 1) * (q1 - auc**2) + (n - 1) * (q2 - auc**2)
        areas.append(auc)
        weights.append(m * n)
        variances.append(max(spread, 0.25) / (m * n))
    share = np.array(weights) / sum(weights)
    mean = float(share @ np.array(areas))
    half = 1.96 * math.sqrt(float(share**2 @ np.array(variances)))
    return Membership(mean, max(mean - half, 0.0), min(mean + half, 1.0))
