# SPDX-License-Identifier: Apache-2.0
"""The federation that a quickrun file describes: declearn's public parts, with a guarded server.

The server that declearn's own quickrun starts does not vet replies, and may wait for ever.
All nodes run in this process; several federations may do so one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from declearn.communication import NetworkClientConfig, NetworkServerConfig
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.utils import (
    LOGGING_LEVEL_MAJOR,
    set_device_policy,
    setup_client_loggers,
    setup_server_loggers,
)

import fedclip
from fedclip.engines.declearn.experiment import Experiment, draw_from, vectorize_gradients
from fedclip.engines.declearn.members import Members
from fedclip.engines.declearn.personal import label
from fedclip.engines.declearn.samplers import guarded, watchful
from fedclip.engines.declearn.update_modules import UpdateClipServer
from fedclip.errors import ToolError
from fedclip.privacy.ledger import FILE
from fedclip.report import Reader, ReportError
from fedclip.report.results import best_round, result_of

_LOGGER = logging.getLogger("declearn.server.fedclip")


class _ReportingServer(FederatedServer):
    """A server that reports the end of each round, and labels its checkpoints.

    Its best weights are those of the lowest mean loss of the healthy sites. Where noise protects
    clients, whose norms it does not cover, they are declearn's: of the lowest loss of all.
    """

    on_round: Callable[[int, str], None]
    results: str
    noised: bool
    reader: Reader | None = None

    async def evaluation_round(self, round_i: int, *args: Any, **kwargs: Any) -> None:
        """Run the evaluation that ends a round."""
        # By now the model knows its shapes.
        if round_i == 1 and self.ckptr and (text := label(self.ckptr.folder, self.model)):
            _LOGGER.warning("Checkpoints of the server: %s.", text)
        before, count = self._best, len(self._losses)
        await super().evaluation_round(round_i, *args, **kwargs)
        self.on_round(round_i, self._keep_best(before) if len(self._losses) > count else "")

    def _keep_best(self, before: Any) -> str:
        """Keep the best weights, and return the metrics of the sites as text."""
        try:
            self.reader = self.reader or Reader(self.results)
            report = self.reader.read()
        except ReportError:
            return ""
        # An earlier run may lie in a folder of this one.
        result = result_of(report, "")
        if not self.noised and result.outliers:
            curves = [c for c in report.curves if c.metric == "loss" and not c.experiment]
            losses = {c.node: dict(c.points) for c in curves}
            rounds = sorted({r for points in losses.values() for r in points})
            by_round = [
                {s: points.get(r, math.nan) for s, points in losses.items()} for r in rounds
            ]
            last = best_round(by_round, result.healthy) == len(by_round) - 1
            self._best = self.model.get_weights(trainable=True) if last else before
        return result.in_words()


class _QuickClient(fedclip.PersonalFederatedClient):
    """A client that takes the gradients of batches at once where it can."""

    async def initialize(self) -> None:
        """Set up training as the server asks."""
        await super().initialize()
        if self.trainmanager is not None:
            vectorize_gradients(self.trainmanager.model)


class Federation:
    """The nodes of a federation.

    Parameters
    ----------
    file
        A quickrun file.
    verbose
        Also show declearn's log on the console, not only in files.

    Attributes
    ----------
    on_round
        Called with the number of each round that has ended, and the metrics of the sites.
    clients
        The names of the clients whose data is in the data folder.
    results
        The folder of checkpoints and logs.

    Raises
    ------
    ToolError
        If the port is in use, or data or model are not where the file says.
    """

    def __init__(self, file: Path, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.on_round: Callable[[int, str], None] = lambda round_, text: None
        self.members: Callable[[], Members] = Members
        self.toml = str(file)
        self.network = watchful(NetworkServerConfig.from_toml(self.toml, False, "network"))
        host, port = self.network.host, self.network.port
        if not _is_free(host, port):
            raise ToolError(f"port {port} on {host} is in use; set another port in [network]")
        self.experiment = Experiment(file)
        self.results, self.clients = self.experiment.results, list(self.experiment.files)

    async def _run_server(self) -> None:
        """Run the server."""
        set_device_policy(gpu=False)
        checkpoint = os.path.join(self.results, "server")
        setup_server_loggers(level=logging.INFO, fpath=os.path.join(checkpoint, "logs.txt"))
        self._set_console_level("declearn.server", logging.INFO)
        optim = FLOptimConfig.from_toml(self.toml, False, "optim")
        for module in optim.server_opt.modules:
            if isinstance(module, UpdateClipServer) and not module.ledger:
                module.charge_to(self.experiment.ledger())
        server = _ReportingServer(
            model=self.experiment.model(),
            optim=optim,
            metrics=self.experiment.metrics,
            checkpoint=checkpoint,
            **guarded(self.network, optim),
        )
        server.on_round, server.results = self.on_round, self.results
        server.noised = any(getattr(m, "noise_multiplier", 0) for m in optim.server_opt.modules)
        self.members = lambda: getattr(server.netwk, "members", Members())
        await server.async_run(FLRunConfig.from_toml(self.toml, False, "run"))

    async def _run_client(self, name: str, seed: int | None) -> None:
        """Run one client; a seed, if given, decides its batches.

        With `sample-clip` in client_opt it is a private one, which takes no seed for its batches.
        """
        set_device_policy(gpu=False)
        checkpoint = os.path.join(self.results, name)
        setup_client_loggers(name, logging.INFO, os.path.join(checkpoint, "logs.txt"))
        # The file gets everything, the console, which clients may share, what matters.
        self._set_console_level(f"declearn.client-{name}", LOGGING_LEVEL_MAJOR)
        train, valid = self.experiment.data(name, seed)
        modules = FLOptimConfig.from_toml(self.toml, False, "optim").client_opt.modules
        private = any(isinstance(module, fedclip.SampleClip) for module in modules)
        server = self.network.build_server()
        # As by default, three times as long as the server waits for a client.
        patience = {"patience": 3 * server.patience} if hasattr(server, "patience") else {}
        persons = self.experiment.persons(name)
        if persons and not private:
            _LOGGER.warning("%s protects nobody: client_opt has no sample-clip.", persons)
        kind: Any = _QuickClient
        if private:
            of_valid = self.experiment.persons(name, "valid") if persons else None
            kind = partial(
                fedclip.PrivateFederatedClient,
                persons=persons,
                valid_persons=of_valid,
                ledger=self._ledger(name, Path(checkpoint)),
            )
        client = kind(
            netwk=NetworkClientConfig.from_params(
                protocol=self.network.protocol, server_uri=server.uri, name=name, kwargs=patience
            ),
            train_data=train,
            valid_data=valid,
            checkpoint=checkpoint,
            verbose=False,
        )
        await client.async_run()

    def _ledger(self, name: str, results: Path) -> Path:
        """Return the ledger of a client's records; link to it from the folder of results."""
        ledger, link = self.experiment.ledger(name), results / FILE
        if link.exists() and not link.is_symlink():
            # Each line stands alone; those of a run before are of the same records.
            with ledger.open("ab") as file:
                file.write(link.read_bytes() + b"\n")
            link.unlink()
        if not link.is_symlink():
            results.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # a disk may know no links
                link.symlink_to(ledger)
        return ledger

    def _set_console_level(self, logger: str, level: int) -> None:
        """Show messages of this level on the console, or only warnings."""
        for handler in logging.getLogger(logger).handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(level if self.verbose else logging.WARNING)

    async def run(self, seed: int | None = None) -> None:
        """Run the server and all clients in this process."""
        seeds = [None if seed is None else seed * 1_000 + i for i in range(len(self.clients))]

        async def client(name: str, seed: int | None) -> None:
            try:
                await self._run_client(name, seed)
            except Exception as exc:
                _LOGGER.error("client %r has ended: %s: %s", name, type(exc).__name__, exc)
                members = self.members()
                # For a client that has not registered, the server might wait for ever.
                if name not in members.names or members.min_replies is None:
                    raise

        try:
            await asyncio.gather(self._run_server(), *map(client, self.clients, seeds))
        finally:
            for name in ("server", *(f"client-{name}" for name in self.clients)):
                handlers = logging.getLogger(f"declearn.{name}").handlers
                while handlers:
                    handlers.pop().close()


def run(
    file: Path,
    *,
    verbose: bool = False,
    seed: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> tuple[int, str, bool]:
    """Run what a checked quickrun file describes.

    A seed decides how clients draw their batches, and what Python, NumPy and torch draw. After each
    round, `progress` is called with the rounds done, the rounds planned and the sites' metrics.

    Returns
    -------
    clients, results, finished
        How many clients took part, where the results are, and whether the run came to its end:
        not so if it was interrupted from the keyboard.
    """
    federation = Federation(file, verbose=verbose)
    if seed is not None:
        draw_from(seed)
    rounds = FLRunConfig.from_toml(federation.toml, False, "run").rounds
    finished = True
    federation.on_round = lambda done, text: progress(done, rounds, text)
    try:
        asyncio.run(federation.run(seed))
    except KeyboardInterrupt:
        finished = False
    except ModuleNotFoundError as exc:
        raise ToolError(f"a package that this run needs is missing: {exc}") from None
    return len(federation.clients), federation.results, finished


def _is_free(host: str, port: int) -> bool:
    """Whether a server could listen there; also True if `host` cannot be resolved."""
    try:
        with socket.create_server((host, port)):
            return True
    except socket.gaierror:
        return True
    except OSError:
        return False
