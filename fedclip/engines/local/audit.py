# SPDX-License-Identifier: Apache-2.0
"""``fedclip privacy audit``: attacks on the privacy that a quickrun file claims, by its own parts.

::

    one run       canaries: clients (or units of DP-SGD) whose updates (gradients) are far longer
                  than the bound, in different directions; each takes part by a fair coin. The run's
                  schedule or sampler, clip, noise and server act on them. An attacker sees every
                  release, knows the directions, and guesses the coins
    rehearsal     the same guesses, if the noise were half of what is claimed. The epsilon that they
                  would prove is the most that this audit can refute; a larger claim is not audited
    premises      accounting takes for granted how often a unit takes part, and that it is clipped

Canaries are alone in their run: the sum of all others is known to the attacker, who subtracts it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.messaging import PrivacyRequest

from fedclip import SampleClip
from fedclip.core.parameters import Config
from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample import ClippedSum
from fedclip.dpsgd.persample.base import Data, Host, HostStack
from fedclip.dpsgd.persons import Persons
from fedclip.engines.declearn.persample import Records, first_records, shapes
from fedclip.engines.declearn.private_client import PrivateTrainingManager
from fedclip.engines.declearn.quickrun import Experiment
from fedclip.engines.local.crowd import Crowd, SimulateConfig
from fedclip.engines.local.simulate import Simulation
from fedclip.errors import ToolError
from fedclip.privacy.accounting import split_noise
from fedclip.privacy.audit import FEWEST, REHEARSALS, Audit, Played, attack, likelier, unmixed
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer

# The norm of a canary before it is clipped, in bounds, for each group of tensors.
_FAR = 1e3


def audit(file: Path, seed: int | None = None) -> Audit:
    """Attack what a checked quickrun file describes.

    Raises
    ------
    ToolError
        If it claims no privacy, if no round can be played, or data or model are not where it says.
    """
    optim = FLOptimConfig.from_toml(str(file), False, "optim")
    rng = np.random.default_rng(seed)
    try:
        if any(isinstance(module, SampleClip) for module in optim.client_opt.modules):
            return _of_records(file, optim, rng)
        return _of_clients(Simulation(file, seed), rng)
    except RuntimeError as exc:
        raise ToolError(f"the claim is not audited, as the run ends: {exc}") from None


def _places(arrays: Mapping[str, Any], groups: Groups, most: int, rng: np.random.Generator) -> Host:
    """Return positions in all values, of shape (canaries, groups), no two of them the same."""
    ends = np.cumsum([math.prod(arrays[name].shape) for name in groups.names])
    of = np.split(np.arange(ends[-1]), ends[:-1])
    within = [rng.permutation(np.concatenate([of[i] for i in m])) for m in groups.members]
    return np.stack([part[: min(most, *map(len, within))] for part in within], axis=1)


def _flat(arrays: Mapping[str, Host], groups: Groups) -> Host:
    return np.concatenate([np.ravel(arrays[name]) for name in groups.names])


def _filled(places: Host, values: Any, like: Mapping[str, Any], groups: Groups) -> dict[str, Host]:
    """Return arrays of the shapes of others, with values at these places and zeros elsewhere."""
    ends = np.cumsum([math.prod(like[name].shape) for name in groups.names])
    flat = np.zeros(ends[-1])
    flat[places] = values
    named = zip(groups.names, np.split(flat, ends[:-1]), strict=True)
    return {name: part.reshape(like[name].shape) for name, part in named}


# -- clients, and noise on their average --------------------------------------------------------
def _of_clients(simulation: Simulation, rng: np.random.Generator) -> Audit:
    bound, names = simulation.bound, simulation.crowd.names
    if bound is None or bound.budget is None:
        raise ToolError("nothing here claims privacy: set noise_multiplier of update-clip-server")
    like = {n: np.zeros(x.shape) for n, x in simulation.model.get_weights(True).coefs.items()}
    turns, values = simulation.config.rounds / bound.separation, sum(x.size for x in like.values())
    play = partial(_play, simulation, bound.get_config(), like, rng)
    return attack("client", play, turns * len(names) * (3e-4 + 2e-8 * values))


def _play(
    simulation: Simulation, config: Config, like: Mapping[str, Host], rng: np.random.Generator
) -> Played:
    """Run the server with canaries alone: all take part whenever they have a turn."""
    # The ledger is for what is released.
    bound = AdaptiveBound(**{k: v for k, v in config.items() if k not in ("seed", "ledger")})
    budget, scope = cast(Any, bound.budget), simulation.aggregator.scope
    server, client = UpdateServer(bound, scope=scope), UpdateClient(scope=scope)
    groups, names = client.limits.groups(like), rng.permutation(simulation.crowd.names)
    places = _places(like, groups, len(names), rng)
    names, present = names[: len(places)], rng.random(len(places)) < 0.5
    # Who is absent sends nothing, or the opposite.
    absent = -1.0 if bound.relation == "replace-one" else 0.0
    signs = np.where(present, 1.0, absent)
    seen, due, lengths, schedule = [], [], [], simulation.schedule
    for round_ in range(simulation.config.rounds):
        sent = server.open(schedule.at(round_) if schedule else None)
        if sent.stop:
            break
        due.append(np.isin(names, schedule.due(round_) if schedule else names))
        far = _FAR * sent.bound
        replies = [
            client.clip(_filled(places[i], far * signs[i], like, groups), sent, steps=1)
            for i in np.flatnonzero(due[-1] * signs)
        ]
        probe = client.clip(_filled(places[0], far, like, groups), sent, steps=1)
        direction = _flat(probe.arrays, groups)[places[0]] / sent.bound
        # Nobody there is a reply of zeros: without any, noise ends after the first round.
        closed = server.close(replies or [Reply(like)], like)
        if refused := next(filter(None, closed.faults), ""):
            raise RuntimeError(f"the server refuses a clipped update: {refused}")
        length = float(np.linalg.norm(direction))
        unit = direction / (length or 1.0) * budget.clients / sent.bound
        seen.append(_flat(closed.average, groups)[places] @ unit)
        lengths.append(0.0 if closed.withheld else min(length, 1.0))
    if not due:
        raise RuntimeError(sent.stop)
    expected, observed = unmixed(seen, due, budget.coefficients, lengths)
    z, bits, squares = bound.noise_multiplier, budget.bits_noise, (expected**2).sum(0)
    noise = (split_noise(z, bits) if bits else z) * math.hypot(*budget.coefficients)
    draws = rng.standard_normal((REHEARSALS, len(present))) * np.sqrt(squares) * noise / 2.0
    # A canary with more turns is seen better: scores are logarithms of likelihoods.
    middle = (1.0 + absent) / 2.0 * squares
    broken = _too_often(names, np.array(due), bound.separation, budget.accountant.rounds)
    scores, half = (expected * observed).sum(0) - middle, signs * squares + draws - middle
    return budget.accountant, present, scores, half, broken


def _too_often(names: Host, due: Host, separation: int, charged: int) -> str:
    """Return who took part too early or too often; "" if nobody did."""
    for name, rounds in zip(names, due.T, strict=True):
        turns = np.flatnonzero(rounds) + 1
        if len(turns) > charged or (np.diff(turns) < separation).any():
            return f"{name} took part in rounds {turns.tolist()}; {charged} turns are charged"
    return ""


# -- records or persons, and DP-SGD -------------------------------------------------------------
class _Watched(PrivateTrainingManager):
    """Trains on canaries alone, after `watch`: each takes the place of a record, or a person."""

    drawn = steps = 0

    def watch(self, rng: np.random.Generator) -> None:
        """Replace the units by canaries, and watch the noise."""
        self._groups, self._rng, many = self.stage.groups, rng, len(self.records)
        self.broken = self._unclipped()
        self._like = self.model.get_weights(trainable=True).coefs
        self._places = _places(self._like, self._groups, min(many, FEWEST), rng)
        self._units = rng.permutation(many)[: len(self._places)]
        self.there = rng.random(len(self._places)) < 0.5
        self.scores, self.half = np.zeros(len(self.there)), np.zeros((REHEARSALS, len(self.there)))
        self._source, self.noise = self.noise, cast(Any, self)

    def _unclipped(self) -> str:
        """Return which of the first units passes the clip; "" if none does."""
        for unit in range(min(len(self.records), 16)):
            batches = self.records.take([unit], self._fail)
            bound = 1e-3 * float(np.linalg.norm(super()._clipped(batches, 1.0)[1]))
            if bound > 0.0:  # neither zeros nor NaN
                norm = np.linalg.norm(_flat(super()._clipped(batches, bound)[0], self._groups))
                if norm > bound * (1.0 + 1e-6):
                    return f"a {self.records.unit} adds {norm:.4g} to a sum, over {bound:.4g}"
        return ""

    def too_often(self) -> str:
        """Return a sentence if the sampler draws more than its rate allows; "" if not."""
        from scipy import stats

        rate, chances = self.calibration.rate, self.steps * len(self.records)
        if rate == 1.0 or stats.binom.sf(self.drawn - 1, chances, rate) > 1e-6:
            return ""
        return f"the sampler drew {self.drawn} of {chances}; the rate that is charged is {rate:.4g}"

    def _clipped(self, batches: Data, bound: float) -> tuple[dict[str, Host], Host]:
        # One canary is clipped for all: they have the same norms.
        names = self._groups.names
        firsts = [names[members[0]] for members in self._groups.members]
        canary = {name: np.full((1, 1), _FAR * bound * (name in firsts)) for name in names}
        stacks, factors = [HostStack(canary)], partial(self.clipping.factors, bound=bound)
        total = ClippedSum(dict.fromkeys(names, (1,)), factors, self._groups)
        sums, norms = total.add(stacks).result()
        self._step = np.array([float(sums[name][0]) for name in firsts]) / bound, bound
        of = [np.asarray(x.positions if x.owners is None else x.owners) for x in batches]
        units = np.unique(np.concatenate([np.zeros(0), *of]))
        self.drawn, self.steps = self.drawn + len(units), self.steps + 1
        drawn, values = self.there & np.isin(self._units, units), self._step[0] * bound
        filled = _filled(self._places[drawn], values, self._like, self._groups)
        return filled, np.repeat(norms, drawn.sum(), axis=0)

    def add(self, sums: Mapping[str, Host], std: float) -> dict[str, Host]:
        """Return the sums of a step with noise, and score the canaries by them."""
        noisy, (direction, bound), plan = self._source.add(sums, std), self._step, self.calibration
        length = float(np.linalg.norm(direction))
        noise = self.clipping.noise_multiplier(plan.noise_multiplier, plan.expected)
        score = partial(likelier, length=min(length, 1.0), noise=noise, rate=plan.rate)
        seen = _flat(noisy, self._groups)[self._places] @ direction
        self.scores += score(seen / (bound * length or 1.0))
        drawn = self.there & (self._rng.random(self.half.shape) < plan.rate)
        draws = self._rng.standard_normal(drawn.shape) * noise / 2.0
        self.half += score(drawn * min(length, 1.0) + draws)
        return noisy


def _of_records(file: Path, optim: FLOptimConfig, rng: np.random.Generator) -> Audit:
    experiment, config = Experiment(file), FLRunConfig.from_toml(str(file), False, "run")
    effort = {k: v for k, v in config.training.message_params.items() if k != "timeout"}
    crowd = Crowd(experiment, optim, effort, SimulateConfig(clients=1))
    (train, valid), persons = crowd.data[0], experiment.persons(crowd.sites[0])
    logger = logging.getLogger("declearn.client.audit")
    logger.setLevel(logging.ERROR)
    # A client that trains alone, as the server asks it to.
    parts = crowd.model, crowd.optimizer(0), optim.aggregator, train, valid
    manager = _Watched(*parts, logger=logger, verbose=False)
    records = Records(train, *first_records(valid)[:1])
    units = records if persons is None else Persons(records, persons)
    request = PrivacyRequest(rounds=config.rounds, **effort, **vars(config.privacy))

    def play() -> Played:
        manager.make_private(request, records=units)
        manager.watch(rng)
        for _ in range(config.rounds):
            manager.train_under_constraints(*effort.values())
        broken, charged = manager.broken or manager.too_often(), manager.ledger.accountant
        return charged, manager.there, manager.scores, manager.half, broken

    manager.make_private(request, records=units)
    values = sum(map(math.prod, shapes(crowd.model).values()))
    most = min(len(units), values, FEWEST)
    seconds = 0.1 + manager.calibration.steps * (3e-4 + 1e-7 * values + 5e-7 * most)
    return attack(units.unit, play, seconds)
