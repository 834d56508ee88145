# SPDX-License-Identifier: Apache-2.0
"""``fedclip privacy audit``: attacks on the privacy that a quickrun file claims, by its own parts.

::

    one run       canaries: clients (or units of DP-SGD) whose updates (gradients) are far longer
                  than the bound, in different directions; each takes part by a fair coin. The run's
                  schedule or sampler, clip, noise and server act on them. An attacker sees every
                  release, knows the directions, and guesses the coins
    rehearsal     the same guesses, if the noise were half of what is claimed. What they would prove
                  is the most that this audit can refute. A claim above that is not audited
    premises      accounting takes for granted how often a unit takes part, and that it is clipped
    membership    the model is trained as the file says; an attacker guesses by the loss of a record
                  whether it was trained on

Canaries are alone in their run: the sum of all others is known to the attacker, who subtracts it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.main.utils import aggregate_clients_data_info
from declearn.messaging import PrivacyRequest
from declearn.optimizer import Optimizer

from fedclip import SampleClip
from fedclip.dpsgd import persample
from fedclip.dpsgd.manager import PrivateTrainingManager
from fedclip.dpsgd.noise import Noise
from fedclip.dpsgd.persample.base import Data, Host, HostStack, shapes
from fedclip.dpsgd.persons import Persons
from fedclip.dpsgd.records import Records, first_records
from fedclip.federation.generics import AnyModel
from fedclip.federation.update.adaptive import AdaptiveBound
from fedclip.federation.update.clipping import UpdateClient
from fedclip.federation.update.engine import UpdateServer
from fedclip.federation.update.exchange import Reply
from fedclip.privacy.accounting import Accountant, epsilon, split_noise
from fedclip.privacy.auditing import Claim, Guesses, guess
from fedclip.privacy.gaussian import epsilon_of, mu_of
from fedclip.scopes import Groups
from fedclip.tools.output import ToolError
from fedclip.tools.quickrun import Experiment
from fedclip.tools.simulate import Simulation

_FEWEST, _MOST = 1000, 8000
"""Canaries, in one run or several: twice as many until the claim can be refuted."""
_WORK, _RUNS = 2e10, 1000
"""About how many values all runs may draw, and how many runs there may be."""
_REHEARSALS = 30
_SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
_FAR = 1e3
"""Length of a canary before it is clipped, in bounds."""


class Membership(NamedTuple):
    """How well losses tell records that were trained on from others."""

    auc: float
    low: float
    high: float


class Played(NamedTuple):
    """The canaries of a run."""

    accountant: Accountant
    """What the run has charged."""
    there: Host
    """Whether each canary took part."""
    scores: Host
    half: Host
    """Scores in rehearsals with half the noise that is claimed, of shape (rehearsals, canaries)."""
    broken: str = ""
    """Which premise of accounting the run has broken; "" if none."""


class Audit(NamedTuple):
    """The result of the attacks."""

    protects: str
    accountant: Accountant
    """All that the run has charged, and the delta of the claim."""
    guesses: Guesses
    refuted: float
    """The largest factor on the noise that the guesses refute, in terms of the claimed mu."""
    refutable: float
    """The same of the rehearsal."""
    broken: str
    membership: Membership

    @property
    def delta(self) -> float:
        """The delta of the claim."""
        return self.accountant.delta

    @property
    def claimed(self) -> float:
        """The claimed epsilon."""
        return epsilon(self.accountant.spent, self.delta, self.accountant.relation)

    @property
    def least(self) -> float:
        """The lower bound on epsilon, which is too high in at most one audit of twenty."""
        return self._times(self.refuted)

    @property
    def most(self) -> float:
        """The largest claim that this audit can refute if the noise is half of what is claimed."""
        return self._times(self.refutable)

    def _times(self, factor: float) -> float:
        return epsilon_of(factor * mu_of(max(self.claimed, 1e-9), self.delta), self.delta)

    @property
    def fault(self) -> bool:
        """Whether the claim is refuted."""
        return self.refuted > 1.0 or bool(self.broken)

    @property
    def audited(self) -> bool:
        """Whether the audit would have refuted the claim, if the noise were half."""
        return self.fault or self.refutable > 1.0

    def in_words(self) -> Iterator[str]:
        """Yield the result, sentence by sentence."""
        canaries, guesses, right = self.guesses
        yield (
            f"one run: {canaries:,} {self.protects}s, each clipped to the bound; of "
            f"{guesses:,} guesses which of them took part, {right:,} were right"
        )
        yield (
            f"  epsilon is at least {self.least:.3g} (95 % confidence); claimed is "
            f"{self.claimed:.4g} at delta {self.delta:g}"
        )
        yield f"  with half the noise, this audit can refute at most {self.most:.3g}"
        if self.broken:
            yield f"  {self.broken}"
        verdict = "THE CLAIM IS REFUTED" if self.fault else "no fault was found"
        yield f"  {verdict if self.audited else 'NOT AUDITED: the claim is above that'}"
        auc, low, high = self.membership
        yield (
            f"membership: by its loss, a record that was trained on is told from another with AUC "
            f"{auc:.3f} ({low:.3f} to {high:.3f}, 95 %); 0.5 is no better than a coin"
        )
        yield (
            "what this does not show: that epsilon is as small as claimed (attacks give lower "
            "bounds, and one of 20 is too high); what goes out besides the model, as losses, "
            "votes, logs and numbers of records do; and the generator, whose draws are taken as "
            "random"
        )


def audit(file: Path, seed: int | None = None) -> Audit:
    """Attack what a checked quickrun file describes.

    Raises
    ------
    ToolError
        If it claims no privacy, if no round can be played, or data or model are not where it says.
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


def _attack(protects: str, play: Callable[[], Played], work: float) -> Callable[..., Audit]:
    """Play runs until the guesses can refute the claim, or enough were played.

    How many runs there are and which share of the canaries is guessed depends on rehearsals alone.
    """
    runs, goal, most = [play()], _FEWEST, min(max(int(_WORK / work), 10), _RUNS)
    spent, relation = runs[0].accountant.spent, runs[0].accountant.relation
    if not spent:
        raise ToolError("the run charges nothing, so that its claim is not audited: run `check`")
    claim = Claim(lambda delta: epsilon(spent, delta, relation))
    while True:
        there, scores, half = (np.concatenate(x, axis=-1) for x in [*zip(*runs, strict=True)][1:4])
        last = len(runs) == most or len(there) >= _MOST
        if len(there) >= goal or last:
            options = [(claim.factor(_unlucky(there, half, share)), share) for share in _SHARES]
            refutable, share = max(options)
            if refutable > 1.0 or last:
                break
            goal *= 2
        runs.append(play())
    guesses = guess(there, scores, share)
    broken = next((run.broken for run in runs if run.broken), "")
    found = runs[0].accountant, guesses, claim.factor(guesses), refutable, broken
    return partial(Audit, protects, *found)


def _unlucky(there: Host, half: Host, share: float) -> Guesses:
    """Return the guesses of a rehearsal with fewer right ones than in 999 of 1,000."""
    found = [guess(there, scores, share) for scores in half]
    right = np.array([one.right for one in found])
    many, mean = found[0].guesses, float(right.mean())
    spread = max(float(right.std()), math.sqrt(mean * (1.0 - mean / many)))
    return found[0]._replace(right=max(math.floor(mean - 3.3 * spread), 0))


def _places(
    sizes: Mapping[str, int], groups: Groups, most: int, rng: np.random.Generator
) -> tuple[Host, list[str]]:
    """Return positions in all values, of shape (canaries, groups): no two have one in common.

    Groups that have too few values for so many canaries are left out, at most a fifth of them. Of
    each other group, the name of a tensor is returned too.
    """
    ends = np.cumsum([sizes[name] for name in groups.names])
    within = [
        np.concatenate([np.arange(ends[i] - sizes[groups.names[i]], ends[i]) for i in members])
        for members in groups.members
    ]
    many = min(most, sorted(map(len, within))[len(within) // 5])
    used = [i for i, found in enumerate(within) if len(found) >= many]
    places = np.stack([rng.permutation(within[i])[:many] for i in used], axis=1)
    return places, [groups.names[groups.members[i][0]] for i in used]


def _flat(arrays: Mapping[str, Host], names: Sequence[str]) -> Host:
    return np.concatenate([np.ravel(arrays[name]) for name in names])


def _split(flat: Host, like: Mapping[str, Any], names: Sequence[str]) -> dict[str, Host]:
    """Return arrays of the shapes of others."""
    sizes = [math.prod(like[name].shape) for name in names]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return {n: part.reshape(like[n].shape) for n, part in zip(names, parts, strict=True)}


# -- clients, and noise on their average --------------------------------------------------------
def _of_clients(simulation: Simulation, rng: np.random.Generator) -> Audit:
    values = sum(math.prod(x.shape) for x in simulation.model.get_weights(True).coefs.values())
    work = values * simulation.config.rounds * len(simulation.crowd.names)
    found = _attack("client", partial(_play, simulation, rng), work)
    for _ in range(simulation.config.rounds):
        if simulation.step():
            break
    losses = [[_losses(simulation.model, part) for part in pair] for pair in simulation.crowd.data]
    return found(_membership(losses))


def _play(simulation: Simulation, rng: np.random.Generator) -> Played:
    """Run the server with canaries alone: all take part whenever they have a turn."""
    config = cast(AdaptiveBound, simulation.bound).get_config()
    # The ledger is for what is released.
    bound = AdaptiveBound(**{k: v for k, v in config.items() if k not in ("seed", "ledger")})
    budget, scope = cast(Any, bound.budget), simulation.aggregator.scope
    server, client = UpdateServer(bound, scope=scope), UpdateClient(scope)
    like = {n: np.zeros(x.shape) for n, x in simulation.model.get_weights(True).coefs.items()}
    groups, names = client.limits.groups(like), simulation.crowd.names
    order = groups.names
    places, _ = _places({n: x.size for n, x in like.items()}, groups, len(names), rng)
    names = [names[i] for i in rng.permutation(len(names))[: len(places)]]
    there = rng.random(len(places)) < 0.5
    absent = -1.0 if bound.relation == "replace-one" else 0.0
    seen, due, lengths = [], [], []
    schedule = simulation.schedule
    for round_ in range(simulation.config.rounds):
        sent = server.open(schedule.turns if schedule else None)
        if sent.stop:
            break
        turn = set(schedule.due(round_)) if schedule else names
        mine = np.array([name in turn for name in names])
        replies, direction = [], np.zeros(places.shape[1])
        for i in np.flatnonzero(mine):
            flat = np.zeros(sum(x.size for x in like.values()))
            flat[places[i]] = _FAR * sent.bound
            reply = client.clip(_split(flat, like, order), sent, steps=1)
            direction = _flat(reply.arrays, order)[places[i]] / sent.bound
            if not there[i]:
                other = {name: absent * array for name, array in reply.arrays.items()}
                reply = dataclasses.replace(reply, arrays=other) if absent else Reply(like)
            replies.append(reply)
        closed = server.close(replies, like)
        length = float(np.linalg.norm(direction))
        flat = _flat(closed.average, order) * (budget.clients / sent.bound)
        seen.append(flat[places] @ (direction / (length or 1.0)))
        due.append(mine)
        lengths.append(0.0 if closed.withheld or any(closed.faults) else min(length, 1.0))
    if not due:
        raise ToolError(f"no round can be played, so that the claim is not audited: {sent.stop}")
    expected, found = unmixed(np.array(seen), np.array(due), budget.coefficients, np.array(lengths))
    charged, squares = budget.accountant, (expected**2).sum(0)
    z = charged.spent[0].noise_multiplier
    noise = split_noise(z, budget.bits_noise) if budget.bits_noise else z
    noise *= math.hypot(*budget.coefficients)
    draws = rng.standard_normal((_REHEARSALS, len(there))) * np.sqrt(squares) * noise / 2.0
    middle = (1.0 + absent) / 2.0 * squares
    half = np.where(there, 1.0, absent) * squares + draws - middle
    scores = (expected * found).sum(0) - middle
    broken = _too_often(names, np.array(due), bound.separation, charged.rounds)
    return Played(charged, there, scores, half, broken)


def unmixed(seen: Host, due: Host, c: tuple[float, ...], lengths: Host) -> tuple[Host, Host]:
    """Return what canaries add to each round and what was seen of them, with independent noise.

    Noise that was taken back is put together again. What follows up to a band after a round
    without a release is left out.
    """
    from scipy.signal import lfilter

    usable = np.convolve(lengths == 0.0, np.ones(len(c)))[: len(seen)] == 0
    expected: Host = lfilter(c, [1.0], due * lengths[:, None], axis=0) * usable[:, None]
    return expected, lfilter(c, [1.0], seen, axis=0)


def _too_often(names: Sequence[str], due: Host, separation: int, charged: int) -> str:
    """Return who took part too early or too often; "" if nobody did."""
    for name, rounds in zip(names, due.T, strict=True):
        turns = np.flatnonzero(rounds) + 1
        if len(turns) > charged or (np.diff(turns) < separation).any():
            return (
                f"{name!r} took part in rounds {turns.tolist()}; {charged} turns are charged, with "
                f"a separation of {separation}"
            )
    return ""


# -- records or persons, and DP-SGD -------------------------------------------------------------
class _Drawn:
    """In the place of the units of DP-SGD: a batch is the positions that the sampler has drawn."""

    def __init__(self, units: Records | Persons) -> None:
        self.unit, self.mean, self._many = units.unit, units.mean, len(units)

    def __len__(self) -> int:
        return self._many

    def take(self, positions: Host, failed: object = None) -> Host:
        return positions


class _Watched(PrivateTrainingManager):
    """Trains on canaries alone, after `watch`: each is a unit of the data, if its coin says so."""

    _rng: np.random.Generator | None = None
    drawn = steps = 0

    def watch(self, rng: np.random.Generator) -> None:
        """Replace the units by canaries, and watch the noise."""
        self.broken = self._unclipped()
        self._like = self.model.get_weights(trainable=True).coefs
        self._groups = self._place.groups
        sizes = {name: math.prod(shape) for name, shape in shapes(self.model).items()}
        many = len(self.records)
        self._places, self._firsts = _places(sizes, self._groups, min(many, _FEWEST), rng)
        canaries = len(self._places)
        self._units = rng.permutation(many)[:canaries]
        self.there = rng.random(canaries) < 0.5
        self.scores, self.half = np.zeros(canaries), np.zeros((_REHEARSALS, canaries))
        self._rng, self._source = rng, self.noise
        self.records, self.noise = cast(Any, _Drawn(self.records)), cast(Noise, self)

    def _unclipped(self) -> str:
        """Return which unit passes the clip, of the first ones."""
        for unit in range(min(len(self.records), 16)):
            batches = self.records.take([unit], self._fail)
            norm = np.linalg.norm(super()._clipped(batches, 1.0)[1])
            if norm > 0.0:  # not NaN
                bound = 1e-3 * float(norm)
                sums, _ = super()._clipped(batches, bound)
                found = float(np.linalg.norm(_flat(sums, [*sums])))
                if found > bound * (1.0 + 1e-6):
                    return (
                        f"{self.records.unit} {unit} moves a sum by {found:.4g}, with a bound of "
                        f"{bound:.4g}"
                    )
        return ""

    def _clipped(self, batches: Data, bound: float) -> tuple[dict[str, Host], Host]:
        if self._rng is None:
            return super()._clipped(batches, bound)
        # One canary is clipped for all: they have the same norms.
        names = self._groups.names
        one = {name: np.full((1, 1), _FAR * bound * (name in self._firsts)) for name in names}
        factors = partial(self.clipping.factors, bound=bound)
        ones = dict.fromkeys(names, (1,))
        sums, norms = persample.add_up([HostStack(one)], ones, factors, self._groups)
        self._step = np.array([float(sums[name][0]) for name in self._firsts]), bound
        drawn = self.there & np.isin(self._units, batches)
        flat = np.zeros(sum(x.size for x in self._like.values()))
        flat[self._places[drawn]] = self._step[0]
        self.drawn, self.steps = self.drawn + len(batches), self.steps + 1
        return _split(flat, self._like, names), np.repeat(norms, drawn.sum(), axis=0)

    def too_often(self) -> str:
        """Return a sentence if the sampler draws more than its rate allows; "" if not."""
        from scipy import stats

        rate, chances = self.calibration.rate, self.steps * len(self.records)
        if rate == 1.0 or stats.binom.sf(self.drawn - 1, chances, rate) > 1e-6:
            return ""
        return f"the sampler drew {self.drawn} of {chances}; the rate that is charged is {rate:.4g}"

    def add(self, sums: Mapping[str, Host], std: float) -> dict[str, Host]:
        """Return the sums of a step with noise, and score the canaries by them."""
        noisy = self._source.add(sums, std)
        (direction, bound), plan, rng = self._step, self.calibration, cast(Any, self._rng)
        length = float(np.linalg.norm(direction)) / bound
        noise = self.clipping.noise_multiplier(plan.noise_multiplier, plan.expected)
        seen = _flat(noisy, self._groups.names)[self._places] @ direction
        self.scores += _likelier(
            seen / (bound**2 * length or 1.0), min(length, 1.0), noise, plan.rate
        )
        drawn = self.there & (rng.random(self.half.shape) < plan.rate)
        half = drawn * min(length, 1.0) + noise / 2.0 * rng.standard_normal(self.half.shape)
        self.half += _likelier(half, min(length, 1.0), noise, plan.rate)
        return noisy


def _likelier(seen: Host, length: float, noise: float, rate: float) -> Host:
    """Return the logarithm of how much likelier this is with a canary that is drawn at a rate."""
    without = math.log1p(-rate) if rate < 1.0 else -math.inf
    shifted = (seen - length / 2.0) * length / noise**2
    found: Host = np.logaddexp(without, math.log(rate) + shifted)
    return found


def _of_records(file: Path, optim: FLOptimConfig, rng: np.random.Generator) -> Audit:
    experiment = Experiment(file)
    config = FLRunConfig.from_toml(str(file), False, "run")
    if config.privacy is None:
        raise ToolError("sample-clip needs [run.privacy], and nothing claims privacy without")
    site = next(iter(experiment.files))
    data, persons = experiment.data(site), experiment.persons(site)
    manager, begin = _private(experiment, optim, config, data, persons)
    effort = config.training.message_params
    limits = effort["batches"], effort["n_epoch"], effort["n_steps"]
    for _ in range(config.rounds):
        manager.train_under_constraints(*limits)
    losses = [_losses(manager.model, part) for part in data]

    def play() -> Played:
        begin()
        manager.watch(rng)
        for _ in range(config.rounds):
            manager.train_under_constraints(*limits)
        broken = manager.broken or manager.too_often()
        return Played(
            manager.ledger.accountant, manager.there, manager.scores, manager.half, broken
        )

    values = sum(map(math.prod, shapes(manager.model).values()))
    many, unit = len(manager.records), manager.records.unit
    work = manager.calibration.steps * (3.0 * values + _REHEARSALS * min(many, values, _FEWEST))
    return _attack(unit, play, work)(_membership([losses]))


def _private(
    experiment: Experiment,
    optim: FLOptimConfig,
    config: FLRunConfig,
    data: Sequence[InMemoryDataset],
    persons: Path | None,
) -> tuple[_Watched, Callable[[], None]]:
    """Return a client that trains alone, as the server asks it to, and how it begins again."""
    model = experiment.model()
    if model.required_data_info:
        specs = {"site": vars(data[0].get_data_specs())}
        model.initialize(aggregate_clients_data_info(specs, model.required_data_info))
    manager = _Watched(
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
    begin = partial(manager.make_private, request, records=units)
    begin()
    return manager, begin


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
