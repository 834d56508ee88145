# SPDX-License-Identifier: Apache-2.0
"""The federation that a quickrun file describes: declearn's public parts, with a guarded server.

The server that declearn's own quickrun starts does not vet replies, and may wait for ever.
All nodes run in this process; several federations may do so one after the other.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from declearn.communication import NetworkServerConfig
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.model.sklearn import SklearnSGDModel
from declearn.quickrun import DataSourceConfig, ExperimentConfig, ModelConfig, parse_data_folder
from declearn.typing import Batch
from declearn.utils import LOGGING_LEVEL_MAJOR, make_importable, set_device_policy, setup_logger

import fedclip
from fedclip.core.parameters import Config
from fedclip.engines.declearn.context import LOGGER, AnyModel, AnyVector
from fedclip.engines.declearn.members import Members
from fedclip.engines.declearn.persample import clipped_sum, vector
from fedclip.engines.declearn.personal import label
from fedclip.engines.declearn.samplers import guarded, watchful
from fedclip.engines.declearn.update_modules import UpdateClipServer
from fedclip.errors import ToolError
from fedclip.privacy.ledger import FILE
from fedclip.report import Reader, ReportError
from fedclip.report.results import best_round, result_of

# A file in a client's data folder: the person of each training record, one a line.
PERSONS = "train_persons.csv"


class Experiment:
    """The data, the model and the results of a quickrun file, without the network.

    Attributes
    ----------
    toml
        The file.
    files
        The files of each client, by its name.
    metrics
        The metrics besides the loss.
    results
        The folder of checkpoints and logs.

    Raises
    ------
    ToolError
        If data or model are not where the file says.
    """

    def __init__(self, file: Path) -> None:
        self.toml, folder = str(file), file.resolve().parent
        data = DataSourceConfig.from_toml(self.toml, False, "data")
        experiment = ExperimentConfig.from_toml(self.toml, False, "experiment", True)
        model = ModelConfig.from_toml(self.toml, False, "model", True)
        self.metrics = experiment.metrics
        # Next to the file, from wherever it is run.
        results = experiment.checkpoint or time.strftime("result_%y-%m-%d_%H-%M")
        self.results = str(folder / results)
        self._name, self._file = model.model_name, Path(model.model_file or folder / "model.py")
        try:
            # In order, so that a seed does not depend on that of the file system.
            files: dict[str, dict[str, str]] = parse_data_folder(data, str(folder))
        except (OSError, ValueError) as exc:
            raise ToolError(f"[data] {exc}") from None
        if not files:
            raise ToolError("[data] the data folder holds no client's folder")
        self.files = dict(sorted(files.items()))
        if self._file.suffix != ".py" or not self._file.is_file():
            raise ToolError(f"[model] there is no model file {self._file}: it is a Python file")

    def data(self, site: str, seed: int | None = None) -> Iterator[InMemoryDataset]:
        """Yield training data, in batches that a seed decides, and validation data of a client."""
        for of, drawn in (("train", seed), ("valid", None)):
            arrays = self.files[site][f"{of}_data"], self.files[site][f"{of}_target"]
            part = InMemoryDataset(*arrays, expose_classes=True, seed=drawn)
            # Models of JAX need it. Where columns are of several types, declearn raises for it.
            types = getattr(part.feats, "dtypes", None)
            part.expose_data_type = types is None or len({*map(str, types)}) == 1
            yield part

    def persons(self, site: str, of: str = "train") -> Path | None:
        """Return the file with the person of each training record of a client, if it exists.

        With `of` = "valid", that of its validation records.
        """
        file = Path(self.files[site][f"{of}_data"]).with_name(PERSONS.replace("train", of))
        return file if file.exists() else None

    def ledger(self, site: str = "") -> Path:
        """Return the ledger of a client's records, next to them; or that of all clients."""
        records = Path(self.files[site or next(iter(self.files))]["train_data"])
        return (records if site else records.parent).resolve().with_name(FILE)

    def model(self) -> AnyModel:
        """Return a new model, made by the model file."""
        # An earlier federation may have had another model of this name.
        sys.modules.pop(self._file.stem, None)
        with make_importable(str(self._file.resolve().parent)):
            made: AnyModel = getattr(importlib.import_module(self._file.stem), self._name)
            return made


def draw_from(seed: int) -> None:
    """Seed Python, NumPy and torch, which draw such values as the weights of a new model."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # declearn has imported it, where it is installed.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def vectorize_gradients(model: AnyModel) -> None:
    """Make a linear model of scikit-learn compute the gradient of a whole batch at once.

    declearn calls `partial_fit` for each record, which takes far longer. The gradients differ by
    rounding only; type and configuration of the model do not change.
    """
    if type(model) is SklearnSGDModel:
        parameters = model.get_wrapped_model().get_params()
        if parameters.get("class_weight") is None and not parameters["average"]:
            vars(model)["compute_batch_gradients"] = partial(_gradients, model)


def _gradients(model: SklearnSGDModel, batch: Batch, max_norm: float | None = None) -> AnyVector:
    sums, norms = ({}, np.array(np.nan)) if max_norm else clipped_sum(model, [batch], np.ones_like)
    # Records with NaN are left out of such a sum; scikit-learn refuses them.
    if np.isnan(norms).any():
        return SklearnSGDModel.compute_batch_gradients(model, batch, max_norm)
    targets, predictions, _ = model.compute_batch_predictions(batch)
    model._loss_history.append(float(model.loss_function(targets, predictions).mean()))
    return vector(model, {name: total / len(norms) for name, total in sums.items()})


class _ReportingServer(FederatedServer):
    """A server that reports the end of each round, and labels its checkpoints.

    Its best weights are those of the lowest mean loss of the healthy sites. Where noise protects
    clients, whose norms it does not cover, they are declearn's: of the lowest loss of all.
    """

    of: Federation
    noised: bool
    reader: Reader | None = None
    by_site: list[dict[str, float]]

    async def evaluation_round(self, round_i: int, *args: Any, **kwargs: Any) -> None:
        """Run the evaluation that ends a round."""
        # By now the model knows its shapes.
        if round_i == 1 and self.ckptr and (text := label(self.ckptr.folder, self.model)):
            LOGGER.warning("Checkpoints of the server: %s.", text)
        before, count = self._best, len(self._losses)
        await super().evaluation_round(round_i, *args, **kwargs)
        self.of.on_round(round_i, self._keep_best(before) if len(self._losses) > count else "")

    def _keep_best(self, before: Any) -> str:
        """Keep the best weights, and return the metrics of the sites as text."""
        try:
            self.reader = self.reader or Reader(self.of.results)
            # An earlier run may lie in a folder of this one.
            result = result_of(self.reader.read(), "")
        except ReportError:
            return ""
        self.by_site.append({s: last.get("loss", np.nan) for s, last in result.sites.items()})
        if not self.noised and result.outliers:
            last = best_round(self.by_site, result.healthy) == len(self.by_site) - 1
            self._best = self.model.get_weights(trainable=True) if last else before
        return result.in_words()


class _QuickClient(fedclip.PersonalFederatedClient):
    """A client that takes the gradients of batches at once where it can."""

    async def initialize(self) -> None:
        """Set up training as the server asks."""
        await super().initialize()
        if self.trainmanager is not None:
            vectorize_gradients(self.trainmanager.model)


class Federation(Experiment):
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

    Raises
    ------
    ToolError
        If the port is in use, or data or model are not where the file says.
    """

    def __init__(self, file: Path, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.on_round: Callable[[int, str], None] = lambda round_, text: None
        self.members: Callable[[], Members] = Members
        self.network = watchful(NetworkServerConfig.from_toml(str(file), False, "network"))
        host, port = self.network.host, self.network.port
        try:
            socket.create_server((host, port)).close()
        except OSError as exc:
            # Of a host without an address, the server will say so.
            if not isinstance(exc, socket.gaierror):
                text = f"port {port} on {host} is in use; set another port in [network]"
                raise ToolError(text) from None
        super().__init__(file)

    async def _run_server(self) -> None:
        set_device_policy(gpu=False)
        self._log("declearn.server", "server", logging.INFO)
        optim = FLOptimConfig.from_toml(self.toml, False, "optim")
        for module in optim.server_opt.modules:
            if isinstance(module, UpdateClipServer) and not module.ledger:
                module.charge_to(self.ledger())
        server = _ReportingServer(
            model=self.model(),
            optim=optim,
            metrics=self.metrics,
            checkpoint=os.path.join(self.results, "server"),
            **guarded(self.network, optim),
        )
        server.of, server.by_site = self, []
        server.noised = any(getattr(m, "noise_multiplier", 0) for m in optim.server_opt.modules)
        self.members = lambda: getattr(server.netwk, "members", Members())
        await server.async_run(FLRunConfig.from_toml(self.toml, False, "run"))

    async def _run_client(self, name: str, seed: int | None) -> None:
        """Run one client; a seed, if given, decides its batches.

        With `sample-clip` in client_opt it is a private one, which takes no seed for its batches.
        """
        set_device_policy(gpu=False)
        # The file gets everything, the console, which clients may share, what matters.
        self._log(f"declearn.client-{name}", name, LOGGING_LEVEL_MAJOR)
        train, valid = self.data(name, seed)
        modules = FLOptimConfig.from_toml(self.toml, False, "optim").client_opt.modules
        server, persons = self.network.build_server(), self.persons(name)
        network: Config = {"server_uri": server.uri, "name": name, "protocol": server.protocol}
        if hasattr(server, "patience"):
            # As by default, three times as long as the server waits for a client.
            network["kwargs"] = {"patience": 3 * server.patience}
        kind: type[fedclip.PersonalFederatedClient] = _QuickClient
        private: Config = {}
        folder = Path(self.results, name)
        if any(isinstance(module, fedclip.SampleClip) for module in modules):
            kind, private = fedclip.PrivateFederatedClient, {"ledger": self.ledger(name)}
            private["persons"] = persons
            private["valid_persons"] = persons and self.persons(name, "valid")
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # it may be there, and a disk may know no links
                (folder / FILE).symlink_to(self.ledger(name))
        elif persons:
            LOGGER.warning("%s protects nobody: client_opt has no sample-clip.", persons)
        await kind(network, train, valid, str(folder), verbose=False, **private).async_run()

    def _log(self, logger: str, node: str, level: int) -> None:
        """Log to a file; show messages of this level on the console, or only warnings."""
        file = os.path.join(self.results, node, "logs.txt")
        setup_logger(logger, level=logging.INFO, fpath=file, propagate=False)
        for handler in logging.getLogger(logger).handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(level if self.verbose else logging.WARNING)

    async def run(self, seed: int | None = None) -> None:
        """Run the server and all clients in this process."""

        async def client(place: int, name: str) -> None:
            try:
                await self._run_client(name, None if seed is None else seed * 1_000 + place)
            except Exception as exc:
                LOGGER.error("client %r has ended: %s: %s", name, type(exc).__name__, exc)
                members = self.members()
                # For a client that has not registered, the server might wait for ever.
                if name not in members.names or members.min_replies is None:
                    raise

        try:
            await asyncio.gather(self._run_server(), *starmap(client, enumerate(self.files)))
        finally:
            for name in ("server", *(f"client-{name}" for name in self.files)):
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
    federation.on_round = lambda done, text: progress(done, rounds, text)
    finished = True
    try:
        asyncio.run(federation.run(seed))
    except KeyboardInterrupt:
        finished = False
    except ModuleNotFoundError as exc:
        raise ToolError(f"a package that this run needs is missing: {exc}") from None
    return len(federation.files), federation.results, finished
