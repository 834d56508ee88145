# SPDX-License-Identifier: Apache-2.0
"""The federation that a quickrun file describes: declearn's public parts, with a guarded server.

The server that declearn's own quickrun starts does not vet replies, and may wait for ever.
All nodes run in this process; several federations may do so one after the other.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from declearn.communication import NetworkClientConfig, NetworkServerConfig
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import DataSourceConfig, ExperimentConfig, ModelConfig, parse_data_folder
from declearn.utils import (
    LOGGING_LEVEL_MAJOR,
    make_importable,
    set_device_policy,
    setup_client_loggers,
    setup_server_loggers,
)

import fedclip
from fedclip.cli.output import ToolError
from fedclip.cli.progress import progress
from fedclip.cli.trained import label
from fedclip.engines.declearn.generics import AnyModel
from fedclip.engines.declearn.quorum import Members
from fedclip.engines.declearn.serving import guarded, watchful
from fedclip.engines.declearn.update_server import UpdateClipServer
from fedclip.engines.local.linear import quicken
from fedclip.privacy.ledger import FILE
from fedclip.report import Reader, ReportError
from fedclip.report.results import best_round, result_of

PERSONS = "train_persons.csv"
"""In a client's folder of data: a line for each training record, which says whose it is."""

_LOGGER = logging.getLogger("declearn.server.fedclip")


class Experiment:
    """What a quickrun file says of data, model and results, without the network.

    Attributes
    ----------
    toml, folder
        The file, and the folder that holds it.
    files
        The files of each client, by its name.
    metrics
        What is measured besides the loss.
    results
        The folder of checkpoints and logs.

    Raises
    ------
    ToolError
        If data or model are not where the file says.
    """

    def __init__(self, file: Path) -> None:
        self.toml, self.folder = str(file), file.resolve().parent
        data = DataSourceConfig.from_toml(self.toml, False, "data")
        experiment = ExperimentConfig.from_toml(self.toml, False, "experiment", True)
        model = ModelConfig.from_toml(self.toml, False, "model", True)
        self.metrics = experiment.metrics
        default = self.folder / time.strftime("result_%y-%m-%d_%H-%M")
        # Next to the file, from wherever it is run.
        self.results = str(self.folder / (experiment.checkpoint or default))
        self._name, self._file = model.model_name, model.model_file or self.folder / "model.py"
        try:
            # In order, so that a seed does not depend on that of the file system.
            found: dict[str, dict[str, str]] = parse_data_folder(data, str(self.folder))
            self.files = dict(sorted(found.items()))
        except (OSError, ValueError) as exc:
            raise ToolError(f"[data] {exc}") from None
        if not self.files:
            raise ToolError("[data] the data folder holds no client's folder")
        if not str(self._file).endswith(".py"):
            raise ToolError(f"[model] {str(self._file)!r} must be a Python file, model.py")
        if not os.path.isfile(self._file):
            raise ToolError(f"[model] there is no model file {str(self._file)!r}")

    def data(self, site: str, seed: int | None = None) -> tuple[InMemoryDataset, InMemoryDataset]:
        """Return what a client trains on, in batches that a seed decides, and evaluates on."""
        train, valid = (
            InMemoryDataset(
                self.files[site][f"{of}_data"],
                target=self.files[site][f"{of}_target"],
                expose_classes=True,
                seed=seed if of == "train" else None,
            )
            for of in ("train", "valid")
        )
        for one in (train, valid):
            # Models of JAX need it. Where columns are of several types, declearn raises for it.
            types = getattr(one.feats, "dtypes", None)
            one.expose_data_type = types is None or len({*map(str, types)}) == 1
        return train, valid

    def persons(self, site: str, of: str = "train") -> Path | None:
        """Return the file that says whose a client's training records are, if it has one.

        With `of` = "valid", that of its validation records.
        """
        file = Path(self.files[site][f"{of}_data"]).with_name(PERSONS.replace("train", of))
        return file if file.exists() else None

    def ledger(self, site: str = "") -> Path:
        """Return the ledger of a client's records, next to them; or that of all clients."""
        records = Path(self.files[site or next(iter(self.files))]["train_data"])
        return (records if site else records.parent).resolve().with_name(FILE)

    def model(self) -> AnyModel:
        """Return a new model, as its file makes it."""
        folder, name = os.path.split(os.path.abspath(self._file))
        # An earlier federation may have had another model of this name.
        sys.modules.pop(name.removesuffix(".py"), None)
        with make_importable(folder):
            module = importlib.import_module(name.removesuffix(".py"))
            made: AnyModel = getattr(module, self._name)
            return made


class _Watched(FederatedServer):
    """A server that tells how each round ended, and labels its checkpoints.

    Its best weights are those of the lowest mean loss of the healthy sites. Where noise protects
    clients, whose norms it does not cover, they are declearn's: of the lowest loss of all.
    """

    told: Callable[[int, str], None]
    results: str
    noised: bool
    reader: Reader | None = None

    async def evaluation_round(self, round_i: int, *args: Any, **kwargs: Any) -> None:
        """Run the evaluation that ends a round."""
        # By now the model knows its shapes.
        if round_i == 1 and self.ckptr and (said := label(self.ckptr.folder, self.model)):
            _LOGGER.warning("Checkpoints of the server: %s.", said)
        before, count = self._best, len(self._losses)
        await super().evaluation_round(round_i, *args, **kwargs)
        self.told(round_i, self._look(before) if len(self._losses) > count else "")

    def _look(self, before: Any) -> str:
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
            own = [{s: points.get(r, math.nan) for s, points in losses.items()} for r in rounds]
            last = best_round(own, result.healthy) == len(own) - 1
            self._best = self.model.get_weights(trainable=True) if last else before
        return result.in_words()


class _Quick(fedclip.PersonalFederatedClient):
    """A client whose model is quickened."""

    async def initialize(self) -> None:
        """Set up what trains, as the server says."""
        await super().initialize()
        if self.trainmanager is not None:
            quicken(self.trainmanager.model)


class Federation:
    """The nodes of a federation.

    Parameters
    ----------
    file
        A quickrun file.
    verbose
        Let declearn log to the console too, and not to files only.

    Attributes
    ----------
    told
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
        self.told: Callable[[int, str], None] = lambda round_, text: None
        self.members: Callable[[], Members] = Members
        self.toml = str(file)
        self.network = watchful(NetworkServerConfig.from_toml(self.toml, False, "network"))
        host, port = self.network.host, self.network.port
        if not _is_free(host, port):
            raise ToolError(f"port {port} on {host} is in use; set another port in [network]")
        self.experiment = Experiment(file)
        self.results, self.clients = self.experiment.results, list(self.experiment.files)

    async def _serve(self) -> None:
        """Run the server."""
        set_device_policy(gpu=False)
        checkpoint = os.path.join(self.results, "server")
        setup_server_loggers(level=logging.INFO, fpath=os.path.join(checkpoint, "logs.txt"))
        self._hush("declearn.server", logging.INFO)
        optim = FLOptimConfig.from_toml(self.toml, False, "optim")
        for module in optim.server_opt.modules:
            if isinstance(module, UpdateClipServer) and not module.ledger:
                module.charge_to(self.experiment.ledger())
        server = _Watched(
            model=self.experiment.model(),
            optim=optim,
            metrics=self.experiment.metrics,
            checkpoint=checkpoint,
            **guarded(self.network, optim),
        )
        server.told, server.results = self.told, self.results
        server.noised = any(getattr(m, "noise_multiplier", 0) for m in optim.server_opt.modules)
        self.members = lambda: getattr(server.netwk, "members", Members())
        await server.async_run(FLRunConfig.from_toml(self.toml, False, "run"))

    async def _take_part(self, name: str, seed: int | None) -> None:
        """Run one client, whose batches are drawn from a seed if there is one.

        With `sample-clip` in client_opt it is a private one, which takes no seed for its batches.
        """
        set_device_policy(gpu=False)
        checkpoint = os.path.join(self.results, name)
        setup_client_loggers(name, logging.INFO, os.path.join(checkpoint, "logs.txt"))
        # The file gets everything, the console, which clients may share, what matters.
        self._hush(f"declearn.client-{name}", LOGGING_LEVEL_MAJOR)
        train, valid = self.experiment.data(name, seed)
        modules = FLOptimConfig.from_toml(self.toml, False, "optim").client_opt.modules
        private = any(isinstance(module, fedclip.SampleClip) for module in modules)
        server = self.network.build_server()
        # As by default, three times as long as the server waits for a client.
        patience = {"patience": 3 * server.patience} if hasattr(server, "patience") else {}
        persons = self.experiment.persons(name)
        if persons and not private:
            _LOGGER.warning("%s protects nobody: client_opt has no sample-clip.", persons)
        kind: Any = _Quick
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
        """Return the ledger of a client's records; the one in a folder of results leads there."""
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

    def _hush(self, logger: str, level: int) -> None:
        """Let only what is of this level get to the console, or only warnings."""
        for handler in logging.getLogger(logger).handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(level if self.verbose else logging.WARNING)

    async def run(self, seed: int | None = None) -> None:
        """Run the server and all clients in this process."""
        seeds = [None if seed is None else seed * 1_000 + i for i in range(len(self.clients))]

        async def client(name: str, seed: int | None) -> None:
            try:
                await self._take_part(name, seed)
            except Exception as exc:
                _LOGGER.error("client %r has ended: %s: %s", name, type(exc).__name__, exc)
                members = self.members()
                # For a client that has not registered, the server might wait for ever.
                if name not in members.names or members.min_replies is None:
                    raise

        try:
            await asyncio.gather(self._serve(), *map(client, self.clients, seeds))
        finally:
            for name in ("server", *(f"client-{name}" for name in self.clients)):
                handlers = logging.getLogger(f"declearn.{name}").handlers
                while handlers:
                    handlers.pop().close()


def run(file: Path, *, verbose: bool = False, seed: int | None = None) -> tuple[int, str, bool]:
    """Run what a checked quickrun file describes, and show its progress.

    A seed decides how clients draw their batches, and what Python, NumPy and torch draw.

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
    tell = progress({"quickrun": rounds}, quiet=verbose)
    federation.told = lambda done, text: tell("quickrun", done, text)
    try:
        asyncio.run(federation.run(seed))
    except KeyboardInterrupt:
        finished = False
    except ModuleNotFoundError as exc:
        raise ToolError(f"a package that this run needs is missing: {exc}") from None
    return len(federation.clients), federation.results, finished


def draw_from(seed: int) -> None:
    """Let what Python, NumPy and torch draw from now on, such as a model's weights, be a seed's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # declearn has imported it, where it is installed.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _is_free(host: str, port: int) -> bool:
    """Whether a server could listen there; True as well where `host` can not be resolved."""
    try:
        with socket.create_server((host, port)):
            return True
    except socket.gaierror:
        return True
    except OSError:
        return False
