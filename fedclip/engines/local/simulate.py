# SPDX-License-Identifier: Apache-2.0
"""The federation of a quickrun file in one process, with any number of clients.

`UpdateClient` and `UpdateServer` clip, vet and average updates, or another aggregator that the file
names. declearn's model, optimizers and metrics do the rest, as in a run.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import operator
import shutil
import time
import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.main.utils import Checkpointer
from declearn.optimizer.modules import AuxVar
from declearn.utils import set_device_policy

from fedclip import ClippedAveraging, SampleClip, UpdateClipClient, UpdateClipServer, UpdateNorms
from fedclip.core.records import ALL
from fedclip.core.scopes import resolve
from fedclip.engines.declearn.experiment import Experiment, draw_from
from fedclip.engines.declearn.generics import AnyVector
from fedclip.engines.declearn.trained import label
from fedclip.engines.local.crowd import Crowd, SimulateConfig, Trained
from fedclip.errors import FedclipWarning, ToolError
from fedclip.report.norms import norms_by_stage, outliers_of, unusual_norms
from fedclip.report.results import Result, best_round
from fedclip.report.rows import Row
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.limits import norms_of
from fedclip.updates.protocol import Reply, SentBound
from fedclip.updates.schedule import Schedule
from fedclip.updates.server import UpdateServer

EARLY = "the loss stopped improving (early_stop)"
_NODES = ("server", "clients")
_ROUNDS_A_FILE = 100  # as many as a `Recorder` keeps
_MEASURED = 100  # clients whose own records are written
_LIVE = 10  # as many as are written after each evaluation


class Simulated(NamedTuple):
    """The result of a simulation."""

    clients: int
    rounds: int
    seconds: float
    """The mean duration of a round, in seconds."""
    results: str
    """The folder of records, metrics and the model."""
    ended: str
    """Why it ended early; "" if it did not."""
    best: int = 0
    """The round of the best weights: those with the lowest mean loss of the healthy sites."""


class Simulation:
    """The server of a simulated federation, and its clients.

    Parameters
    ----------
    file
        A quickrun file that has been checked.
    seed
        Takes the place of that in [simulate].

    Raises
    ------
    ToolError
        If data or model are not where the file says, or if it cannot be simulated.
    """

    def __init__(self, file: Path, seed: int | None = None) -> None:
        self.experiment = Experiment(file)
        toml = self.experiment.toml
        optim = FLOptimConfig.from_toml(toml, False, "optim")
        with file.open("rb") as text:
            config = tomllib.load(text)["run"]
        # Nobody registers here, and declearn wants to know how many do.
        self.config = FLRunConfig.from_params(**{"register": 1, **config})
        settings = SimulateConfig.from_toml(toml, False, "simulate", True)
        self.settings = settings if seed is None else replace(settings, seed=seed)
        if self.settings.seed is not None:
            draw_from(self.settings.seed)
        _refuse(optim, self.config, self.settings, self.experiment.files)
        set_device_policy(gpu=False)
        self.aggregator = cast(Any, optim.aggregator)
        self.crowd = Crowd(
            self.experiment, self.experiment.model(), optim, self.config.training, self.settings
        )
        self.model = self.crowd.model
        self.bound = _bound(optim)
        if self.bound is not None:
            # Nothing of a simulation is released.
            self.bound.charge_to(None)
        self.server = self._server() if self.bound else None
        self.schedule = _schedule(self.bound, self.crowd.names, self.settings)
        # The bound acts first, by the core; what stands after it acts on what the core releases.
        self.optim, self.rest = optim.server_opt, copy.copy(optim.server_opt)
        self.rest.modules = [m for m in self.optim.modules if not isinstance(m, UpdateClipServer)]
        self.records = UpdateClipClient()
        self.norms = {client: UpdateNorms() for client in range(len(self.crowd.names))[:_MEASURED]}
        self.losses: list[float] = []
        self.by_site: list[dict[str, float]] = []
        self.outliers: list[str] = []
        self.result = Result()
        self.rounds = self.best_round = 0
        self.best: AnyVector = self.model.get_weights(trainable=True)
        self.folder = Path(self.experiment.results, "simulated")

    def _server(self) -> UpdateServer:
        of, clients = self.aggregator, self.crowd.names
        try:
            server = UpdateServer(
                cast(AdaptiveBound, self.bound),
                scope=of.scope,
                exclude=of.exclude,
                shares=of.shares,
                combining=of.combining,
            )
        except ValueError as exc:
            raise ToolError(f"[optim.aggregator] {exc}") from None
        few = of.combining.too_few(self.settings.sampled or len(clients))
        if why := of.shares.strangers(clients) or few:
            raise ToolError(f"[optim.aggregator] {why}")
        return server

    def step(self) -> str:
        """Run a round of training; return why training ends, or ""."""
        start = self.model.get_weights(trainable=True)
        aux = self.rest.collect_aux_var()
        for module in self.rest.modules:
            if self.bound and module.aux_name in aux:
                self.bound.admit(module.name)
        turn = self.schedule.at(self.rounds) if self.schedule else None
        sent = self.server.open(turn) if self.server else None
        if sent and sent.stop:
            return sent.stop
        for records in (self.records, *self.norms.values()):
            records.recorder.start_round()
        replies, messages = [], dict[str, AuxVar]()
        due = self.schedule.due(self.rounds) if self.schedule else None
        self.rounds += 1
        for client in self.crowd.asked(due):
            trained = self.crowd.train(client, start, aux)
            reply = self._reply(client, trained, sent)
            if self.server:
                self.server.add(reply, start.coefs)
            else:
                replies.append(reply)
            for name, message in trained.aux.items():
                messages[name] = messages[name] + message if name in messages else message
        self.crowd.hand_over(None, start)
        if messages:
            self.rest.process_aux_var(messages)
        if self.server:
            closed = self.server.close(like=start.coefs)
            self.rest.apply_gradients(self.model, type(start)(closed.average))
        elif replies:
            updates = functools.reduce(operator.add, replies)
            self.rest.apply_gradients(self.model, self.aggregator.finalize_updates(updates))
        if self.records.recorder.round % _ROUNDS_A_FILE == 0:
            self._keep_records()
        return ""

    def _reply(self, client: int, trained: Trained, sent: SentBound | None) -> Any:
        """Return what a client replies; an attacker may send more than the bound allows."""
        update, steps = trained.update, trained.steps
        if sent is None:
            limits = resolve("global", None, tuple(update.coefs))
            norms = norms_of(update.coefs, limits, "simulate")
            norm = norms[0] if norms else math.nan
            self._note(client, norm, SentBound(math.inf, adaptive=False), False)
            return self.aggregator.prepare_for_sharing(update, steps)
        outcome = self.aggregator.outcome(update.coefs, sent.bound, steps)
        if steps:
            norm = math.nan if outcome.norm is None else outcome.norm
            self._note(client, norm, sent, outcome.clipped)
        reply = outcome.reply(sent)
        if client in self.crowd.hostile and not self.settings.attackers_clip:
            vote = int(sent.adaptive)
            reply = Reply(update.coefs, votes=vote, within=vote)
        return replace(reply, sender=self.crowd.names[client], steps=steps)

    def _note(self, client: int, norm: float, sent: SentBound, clipped: bool) -> None:
        for records in filter(None, (self.records, self.norms.get(client))):
            if math.isfinite(norm):
                records.note(norm, sent, clipped)
            else:
                records.recorder.add_nonfinite()

    def evaluate(self) -> None:
        """Evaluate the model, and write what a run writes: metrics, states and records."""
        weights = self.model.get_weights(trainable=True)
        metrics, sites = self.crowd.evaluate(weights, self.config.evaluate)
        checkpoints = Checkpointer(str(self.folder / "server"), max_history=1)
        first = not self.losses
        stamp = checkpoints.checkpoint(self.model, self.optim, metrics, first_call=first)
        for site, values in sites.items():
            checkpoints.save_metrics(values, f"metrics_{site}", timestamp=stamp)
        self.losses.append(float(metrics["loss"]))
        plain = {
            s: {k: v for k, v in values.items() if np.ndim(v) == 0} for s, values in sites.items()
        }
        confusions = {
            s: values["confusion"] for s, values in sites.items() if "confusion" in values
        }
        # Of 100 clients they take a fifth of a second.
        if (n := len(self.losses)) < 10 or n % 10 == 0 or self.rounds == self.config.rounds:
            self.outliers = [site for site in self._outliers() if site in sites]
        self.result = Result(plain, self.outliers, confusions=confusions)
        self.by_site.append({site: values["loss"] for site, values in plain.items()})
        if best_round(self.by_site, self.result.healthy) == len(self.by_site) - 1:
            self.best, self.best_round = weights, self.rounds
        if self.bound:
            state = {"modules": [(UpdateClipClient.name, self.records.get_state())]}
            file = self.folder / "clients" / f"optimizer_state_{self._part}.mpk"
            file.write_bytes(msgpack.packb(state))
        elif len(self.norms) <= _LIVE:
            self._keep_records()

    def _outliers(self) -> list[str]:
        """Return the clients with norms far above those of others; none with noise for clients."""
        if self.bound and self.bound.noise_multiplier:
            return []
        rows = [
            Row(self.crowd.names[client], 0, module.name, record, index=index)
            for client, norms in self.norms.items()
            for index, module in enumerate([*self.crowd.optimizer(client).modules, norms])
            for record in getattr(module, "rounds", ())
            if record.group == ALL
        ]
        return outliers_of(unusual_norms(norms_by_stage(rows)))

    def finish(self) -> None:
        """Keep the best model, as a run does at its end."""
        self._keep_records()
        self.crowd.hand_over(None, self.best)
        Checkpointer(str(self.folder / "server")).save_model(self.model, timestamp="best")
        label(self.folder / "server", self.model)

    @property
    def _part(self) -> str:
        """Number of the file of this round's records."""
        return f"{(self.records.recorder.round - 1) // _ROUNDS_A_FILE:06}"

    def _keep_records(self) -> None:
        """Write the records of the first clients' modules to the files that a run would have."""
        for client, norms in self.norms.items():
            saved = copy.copy(self.crowd.optimizer(client))
            saved.modules = [*saved.modules, norms]
            folder = str(self.folder / self.crowd.names[client])
            Checkpointer(folder).save_optimizer(saved, timestamp=self._part)


def run(
    file: Path,
    seed: int | None = None,
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Simulated:
    """Simulate what a checked quickrun file describes.

    A `seed` takes the place of that in [simulate]. Python's, NumPy's and torch's own sources start
    from it too. After each round, `progress` is called with the rounds done, the rounds planned and
    the sites' metrics.

    Raises
    ------
    ToolError
        If the simulation cannot start.
    """
    try:
        simulation = Simulation(file, seed)
    except ModuleNotFoundError as exc:
        raise ToolError(f"a package that this run needs is missing: {exc}") from None
    return _run(simulation, progress)


def _run(simulation: Simulation, progress: Callable[[int, int, str], None]) -> Simulated:
    config, folder = simulation.config, simulation.folder
    shutil.rmtree(folder, ignore_errors=True)
    for node in _NODES:
        (folder / node).mkdir(parents=True)
    early: Any = config.early_stop
    stop = early.instantiate() if early else None
    begun, ended, done = time.monotonic(), "", 0
    with _logged(folder / "server" / "logs.txt"):
        try:
            while done < config.rounds and not (ended := simulation.step()):
                done += 1
                if done % config.evaluate.frequency == 0 or done == config.rounds:
                    simulation.evaluate()
                progress(done, config.rounds, simulation.result.in_words())
                if stop and simulation.losses and not stop.update(simulation.losses[-1]):
                    ended = EARLY
                    break
        except KeyboardInterrupt:
            ended = "interrupted"
    seconds = (time.monotonic() - begun) / max(done, 1)
    simulation.finish()
    count, best = len(simulation.crowd.names), simulation.best_round
    return Simulated(count, done, seconds, str(folder), ended, best)


def _bound(optim: FLOptimConfig) -> AdaptiveBound | None:
    """Return the bound of the updates; None if the aggregator does not clip them."""
    aggregator, modules = optim.aggregator, optim.server_opt.modules
    bounds = [module for module in modules if isinstance(module, UpdateClipServer)]
    if not isinstance(aggregator, ClippedAveraging):
        return None
    if aggregator.max_norm is not None:
        most = aggregator.max_norm
        if aggregator.scope != "global":
            raise ToolError(
                "[optim.aggregator] max_norm is simulated with scope = 'global' only: instead of "
                "it, "
                "use update-clip-server with start_norm and learning_rate = 0"
            )
        return AdaptiveBound(most, learning_rate=0.0, min_norm=most, max_norm=most)
    if len(bounds) != 1 or modules[0] is not bounds[0]:
        raise ToolError(
            "[optim.server_opt] update-clip-server must be the first module, and listed once"
        )
    return bounds[0]


def _schedule(
    bound: AdaptiveBound | None, names: list[str], settings: SimulateConfig
) -> Schedule | None:
    """Return the schedule, if each client takes part in some rounds only."""
    if bound is None or bound.separation == 1:
        return None
    if settings.sampled is not None:
        raise ToolError(
            f"[simulate] sampled draws clients at random, but separation = {bound.separation} of "
            "update-clip-server needs a schedule: remove one of them"
        )
    most = bound.expected_clients or 1
    schedule = Schedule(names, most)
    if why := schedule.turns.refusal(bound.separation, most):
        raise ToolError(f"[optim.server_opt] {why}")
    return schedule


def _refuse(
    optim: FLOptimConfig, config: FLRunConfig, crowd: SimulateConfig, names: Collection[str]
) -> None:
    """Raise a `ToolError` for a configuration that cannot be simulated."""
    private = any(isinstance(module, SampleClip) for module in optim.client_opt.modules)
    if private or config.privacy is not None:
        raise ToolError("DP-SGD is not simulated: use fedclip quickrun")
    if optim.fairness is not None:
        raise ToolError("[optim] fairness is not simulated: use fedclip quickrun")
    if taken := set(names) & set(_NODES):
        raise ToolError(
            f"[data] the name {min(taken)!r} is reserved for records: rename this client's folder"
        )
    sites = len(names)
    clients = crowd.clients or sites
    if clients < sites:
        raise ToolError(
            f"[simulate] clients = {clients}, but the data folder has {sites}: raise clients"
        )
    for name in ("sampled", "attackers"):
        if (getattr(crowd, name) or 0) > clients:
            raise ToolError(
                f"[simulate] {name} = {getattr(crowd, name)} is more than clients = {clients}: "
                "lower it"
            )


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Send log messages to a file, and warnings only there."""
    logger, handler = logging.getLogger("declearn"), logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    level = logging.getLogger("declearn.server.fedclip")
    was = level.level
    level.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            yield
    finally:
        level.setLevel(was)
        logger.propagate = before
        logger.removeHandler(handler)
        handler.close()
