# SPDX-License-Identifier: Apache-2.0
"""The federation of a quickrun file in one process, with any number of clients.

`UpdateClient` and `UpdateServer` clip, vet and average updates, or another aggregator that the file
names. declearn's model, optimizers and metrics do the rest, as in a run.
"""

from __future__ import annotations

import copy
import logging
import shutil
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.main.utils import Checkpointer
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import AuxVar
from declearn.utils import set_device_policy

from fedclip import ClippedAveraging, SampleClip, UpdateClipClient, UpdateClipServer, UpdateNorms
from fedclip.engines.declearn.personal import label
from fedclip.engines.declearn.quickrun import Experiment, draw_from
from fedclip.engines.local.crowd import Crowd, SimulateConfig
from fedclip.errors import FedclipWarning, ToolError
from fedclip.report import Reader, ReportError
from fedclip.report.results import Result, best_round, result_of
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import Arrays, Reply, Schedule, SentBound
from fedclip.updates.server import UpdateServer

EARLY = "the loss stopped improving (early_stop)"
_NODES = ("server", "clients")
_ROUNDS_A_FILE = 100  # as many as a `Recorder` keeps
_MEASURED = 100  # clients whose own records are written


class Simulated(NamedTuple):
    """The result of a simulation.

    Attributes
    ----------
    seconds
        The mean duration of a round, in seconds.
    results
        The folder of records, metrics and the model.
    ended
        Why it ended early; "" if it did not.
    best
        The round of the best weights: those with the lowest mean loss of the healthy sites.
    """

    clients: int
    rounds: int
    seconds: float
    results: str
    ended: str
    best: int = 0


class Simulation:
    """The server of a simulated federation, and its clients.

    Parameters
    ----------
    file
        A quickrun file that has been checked.
    seed
        Takes the place of that in [simulate]. Python's, NumPy's and torch's own sources start from
        it too.

    Raises
    ------
    ToolError
        If data or model are not where the file says, or if it cannot be simulated.
    """

    def __init__(self, file: Path, seed: int | None = None) -> None:
        self.experiment = Experiment(file)
        toml = self.experiment.toml
        optim = FLOptimConfig.from_toml(toml, False, "optim")
        run = tomllib.loads(file.read_text("utf-8"))["run"]
        # Nobody registers here, and declearn wants to know how many do.
        self.config = FLRunConfig.from_params(**{"register": 1, **run})
        self.settings = self._settings(toml, seed)
        modules = optim.client_opt.modules
        if self.config.privacy or any(isinstance(module, SampleClip) for module in modules):
            raise ToolError("DP-SGD is not simulated: use fedclip quickrun")
        if self.settings.seed is not None:
            draw_from(self.settings.seed)
        set_device_policy(gpu=False)
        self.aggregator = cast(Any, optim.aggregator)
        effort = self.config.training.message_params
        self.crowd = Crowd(self.experiment, optim, effort, self.settings)
        self.model = self.crowd.model
        self.bound = _bound(optim)
        self.server = self._server(self.bound) if self.bound else None
        self.schedule: Schedule | None = None
        if self.bound and self.bound.separation > 1:
            if self.settings.sampled is not None:
                raise ToolError("[simulate] remove sampled: with separation > 1 clients take turns")
            self.schedule = Schedule(self.crowd.names, self.bound.expected_clients or 1)
        # The bound acts first, by the core; what stands after it acts on what the core releases.
        self.optim, self.rest = optim.server_opt, copy.copy(optim.server_opt)
        self.rest.modules = [m for m in self.optim.modules if not isinstance(m, UpdateClipServer)]
        self.records = UpdateClipClient()
        self.norms = {client: UpdateNorms() for client in range(len(self.crowd.names))[:_MEASURED]}
        self.losses: list[dict[str, float]] = []
        self.result = Result()
        self.reader: Reader | None = None
        self.rounds = self.best_round = 0
        self.best = self.model.get_weights(trainable=True)
        self.folder = Path(self.experiment.results, "simulated")

    def _settings(self, toml: str, seed: int | None) -> SimulateConfig:
        """Return the section [simulate], with a number of clients."""
        settings = SimulateConfig.from_toml(toml, False, "simulate", True)
        sites = self.experiment.files
        if taken := sites.keys() & set(_NODES):
            raise ToolError(f"[data] rename the client {min(taken)!r}: the name is for records")
        clients = len(sites) if settings.clients is None else settings.clients
        if clients < len(sites):
            text = f"clients = {clients}, but the data folder has {len(sites)}: raise clients"
            raise ToolError(f"[simulate] {text}")
        try:
            return replace(settings, clients=clients, seed=settings.seed if seed is None else seed)
        except ValueError as exc:
            raise ToolError(f"[simulate] {exc}: lower it") from None

    def _server(self, bound: AdaptiveBound) -> UpdateServer:
        # Nothing of a simulation is released.
        bound.charge_to(None)
        of, clients = self.aggregator, self.crowd.names
        few = of.combining.too_few(self.settings.sampled or len(clients))
        parts = {name: getattr(of, name) for name in ("scope", "exclude", "shares", "combining")}
        try:
            if why := of.shares.strangers(clients) or few:
                raise ValueError(why)
            return UpdateServer(bound, **parts)
        except ValueError as exc:
            raise ToolError(f"[optim.aggregator] {exc}") from None

    def step(self) -> str:
        """Run a round of training; return why training ends, or ""."""
        start = self.model.get_weights(trainable=True)
        aux = self.rest.collect_aux_var()
        for module in self.rest.modules:
            if self.bound and module.aux_name in aux:
                self.bound.admit(module.name)
        turn = self.schedule.at(self.rounds) if self.schedule else None
        due = self.schedule.due(self.rounds) if self.schedule else None
        sent = self.server.open(turn) if self.server else None
        if sent and sent.stop:
            return sent.stop
        for records in (self.records, *self.norms.values()):
            records.recorder.start_round()
        updates, messages = None, dict[str, AuxVar]()
        self.rounds += 1
        for client in self.crowd.asked(due):
            update, steps, answers = self.crowd.train(client, start, aux)
            if self.server and sent:
                self.server.add(self._reply(client, update.coefs, steps, sent), start.coefs)
            else:
                if client in self.norms:
                    self.norms[client].measure(update)
                shared = self.aggregator.prepare_for_sharing(update, steps)
                updates = shared if updates is None else updates + shared
            for name, message in answers.items():
                messages[name] = messages[name] + message if name in messages else message
        self.crowd.hand_over(None, start)
        self.rest.process_aux_var(messages)
        if self.server:
            closed = self.server.close(like=start.coefs)
            self.rest.apply_gradients(self.model, type(start)(closed.average))
        elif updates is not None:
            self.rest.apply_gradients(self.model, self.aggregator.finalize_updates(updates))
        if self.records.recorder.round % _ROUNDS_A_FILE == 0:
            self.keep_records()
        return ""

    def _reply(self, client: int, update: Arrays, steps: int, sent: SentBound) -> Reply:
        """Return what a client replies; an attacker may send more than the bound allows."""
        outcome = self.aggregator.outcome(update, sent.bound, steps)
        for records in filter(None, (self.records, self.norms.get(client))) if steps else ():
            if outcome.norm is None:
                records.recorder.add_nonfinite()
            else:
                records.note(outcome.norm, sent, outcome.clipped)
        reply: Reply = outcome.reply(sent)
        if client in self.crowd.hostile and not self.settings.attackers_clip:
            vote = int(sent.adaptive)
            reply = Reply(update, votes=vote, within=vote)
        return replace(reply, sender=self.crowd.names[client], steps=steps)

    def evaluate(self) -> None:
        """Evaluate the model, and write what a run writes: metrics, states and records."""
        weights = self.model.get_weights(trainable=True)
        metrics, sites = self.crowd.evaluate(weights, self.config.evaluate)
        checkpoints = Checkpointer(str(self.folder / "server"), max_history=1)
        first = not self.losses
        stamp = checkpoints.checkpoint(self.model, self.optim, metrics, first_call=first)
        for site, values in sites.items():
            checkpoints.save_metrics(values, f"metrics_{site}", timestamp=stamp)
        self.losses.append({"": float(metrics["loss"])} | {s: v["loss"] for s, v in sites.items()})
        # Of 100 clients it takes a fifth of a second.
        if (n := len(self.losses)) < 10 or n % 10 == 0 or self.rounds == self.config.rounds:
            self.keep_records()
            self.reader = self.reader or Reader(self.folder)
            with suppress(ReportError):
                self.result = result_of(self.reader.read(), "")
            if self.bound and self.bound.noise_multiplier:
                # Noise does not cover the clients' norms.
                self.result = self.result._replace(outliers=())
        if best_round(self.losses, self.result.healthy or sites) == n - 1:
            self.best, self.best_round = weights, self.rounds

    def keep_records(self) -> None:
        """Write the records of the first clients' modules to the files that a run would have."""
        part = f"{(self.records.recorder.round - 1) // _ROUNDS_A_FILE:06}"
        saved = {self.crowd.names[i]: (self.crowd.optimizer(i), n) for i, n in self.norms.items()}
        if self.bound:
            saved["clients"] = Optimizer(0.0), self.records
        for name, (optimizer, norms) in saved.items():
            optimizer = copy.copy(optimizer)
            optimizer.modules = [*optimizer.modules, norms]
            Checkpointer(str(self.folder / name)).save_optimizer(optimizer, timestamp=part)


def run(
    file: Path,
    seed: int | None = None,
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Simulated:
    """Simulate what a checked quickrun file describes.

    A `seed` takes the place of that in [simulate]. After each round, `progress` is called with the
    rounds done, the rounds planned and the sites' metrics.

    Raises
    ------
    ToolError
        If the simulation cannot start.
    """
    try:
        simulation = Simulation(file, seed)
    except ModuleNotFoundError as exc:
        raise ToolError(f"a package that this run needs is missing: {exc}") from None
    config, folder = simulation.config, simulation.folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "server").mkdir(parents=True)
    early: Any = config.early_stop
    stop = early.instantiate() if early else None
    begun, ended, done = time.monotonic(), "", 0
    with _logged(folder / "server" / "logs.txt"), suppress(KeyboardInterrupt):
        ended = "interrupted"
        while done < config.rounds and not (why := simulation.step()):
            done += 1
            if done % config.evaluate.frequency == 0 or done == config.rounds:
                simulation.evaluate()
            progress(done, config.rounds, simulation.result.in_words())
            if stop and simulation.losses and not stop.update(simulation.losses[-1][""]):
                why = EARLY
                break
        ended = why
    seconds = (time.monotonic() - begun) / max(done, 1)
    simulation.keep_records()
    # The best model is kept, as a run does at its end.
    simulation.crowd.hand_over(None, simulation.best)
    Checkpointer(str(folder / "server")).save_model(simulation.model, timestamp="best")
    label(folder / "server", simulation.model)
    count = len(simulation.crowd.names)
    return Simulated(count, done, seconds, str(folder), ended, simulation.best_round)


def _bound(optim: FLOptimConfig) -> AdaptiveBound | None:
    """Return the bound of the updates; None if the aggregator does not clip them."""
    aggregator, modules = optim.aggregator, optim.server_opt.modules
    if not isinstance(aggregator, ClippedAveraging):
        return None
    if (most := aggregator.max_norm) is not None:
        if aggregator.scope != "global":
            raise ToolError("[optim.aggregator] max_norm is simulated with scope = 'global' only")
        return AdaptiveBound(most, learning_rate=0.0, min_norm=most, max_norm=most)
    if not modules or not isinstance(modules[0], UpdateClipServer):
        raise ToolError("[optim.server_opt] update-clip-server must be the first module")
    return modules[0]


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Send log messages to a file, and warnings only there."""
    logger, handler = logging.getLogger("declearn"), logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    with closing(handler), warnings.catch_warnings(action="ignore", category=FedclipWarning):
        try:
            yield
        finally:
            logger.removeHandler(handler)
