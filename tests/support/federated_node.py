"""One node of a real federation, in a process of its own: see `federation_runs`.

What a user of declearn writes; the settings say which protocol, secure aggregation and sampling.
A server that ends, however it ends, leaves what it knows in ``server.json``; a client that has
come to the end of its run, in ``client_i.json``.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import random
import signal
from pathlib import Path
from typing import Any

import federation_faults
import federation_liars
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.main.utils import Checkpointer
from declearn.messaging import Error, TrainReply, TrainRequest
from declearn.model.sklearn import SklearnSGDModel
from declearn.secagg.utils import IdentityKeys
from declearn.training import TrainingManager
from declearn.utils import setup_client_loggers, setup_server_loggers

import fedclip
from fedclip.engines.declearn.restart import load_round
from fedclip.privacy.ledger import Ledger
from fedclip.updates import client_noise as site_noise

Settings = dict[str, Any]


def main(name: str, folder: Path) -> None:
    """Be the server or a client, in a folder with its settings; the log takes all output."""
    with (folder / f"{name}.txt").open("wb") as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # A shell that starts the tests in the background lets its processes ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    settings = json.loads(Path("settings.json").read_text())
    if name == "server":
        server(settings)
    else:
        client(name, settings)


def server(settings: Settings) -> None:
    setup_server_loggers(level=logging.INFO)
    protocol = settings.get("server_protocol", settings["protocol"])
    address = {"protocol": protocol, "port": settings["port"]}
    secagg = settings.get("secagg")
    saved = load_round(settings["restart"]) if settings.get("restart") else None
    fresh = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    node = FederatedServer(
        model=fresh if saved is None else saved.model,
        netwk={**address, "host": "127.0.0.1", **settings.get("network", {})},
        optim=settings["optim"],
        client_sampler=settings.get("sampler"),
        secagg=secagg and {"secagg_type": secagg, **settings.get("secagg_settings", {})},
        checkpoint=settings.get("checkpoint"),
        metrics=settings.get("metrics"),
    )
    if "held" in settings:
        hold(settings["held"])
    if "killed" in settings:
        kill_at(settings["killed"])
    if saved is not None:
        node.optim.set_state(saved.optimizer.get_state())
    try:
        node.run(settings["run"])
    finally:
        coefs = node.model.get_weights().coefs
        result = {
            "weights": {name: np.asarray(value).ravel().tolist() for name, value in coefs.items()},
            "modules": node.optim.get_state()["modules"],
        }
        Path("server.json").write_text(json.dumps(result))


def kill_at(point: int) -> None:
    """End this process as kill -9 does, before or after one of the steps of its rounds."""
    passed = itertools.count(1)

    def reach() -> None:
        if next(passed) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(step: Any) -> Any:
        @functools.wraps(step)
        def sync(*args: Any, **kwargs: Any) -> Any:
            reach()
            found = step(*args, **kwargs)
            reach()
            return found

        @functools.wraps(step)
        async def later(*args: Any, **kwargs: Any) -> None:
            reach()
            await step(*args, **kwargs)
            reach()

        return later if asyncio.iscoroutinefunction(step) else sync

    steps: list[tuple[Any, str]] = [(FederatedServer, name) for name in SERVER_STEPS]
    steps += [(Checkpointer, f"save_{name}") for name in ("model", "optimizer", "metrics")]
    for owner, name in [(Ledger, "reserve"), (fedclip.UpdateClipServer, "run"), *steps]:
        setattr(owner, name, around(getattr(owner, name)))


SERVER_STEPS = (
    "_send_training_instructions",
    "_conduct_global_update",
    "_send_evaluation_instructions",
    "_aggregate_evaluation_results",
)


def note_rounds(name: str, file: Path) -> None:
    """Write to a file which rounds of which schedules this client is asked for."""
    receive = fedclip.UpdateClipClient.process_aux_var

    def noting(self: Any, aux_var: Any) -> None:
        with file.open("a") as lines:
            lines.write(f"{name} {aux_var.schedule} {aux_var.round}\n")
        receive(self, aux_var)

    fedclip.UpdateClipClient.process_aux_var = noting  # type: ignore[method-assign]


def hold(round_i: int) -> None:
    """Stand still before a round: all that is saved of the last one is written."""
    honest = FederatedServer.training_round

    async def training_round(self: FederatedServer, number: int, *settings: Any) -> None:
        if number == round_i:
            self.logger.info("held before round %d", number)
            await asyncio.Event().wait()
        await honest(self, number, *settings)

    FederatedServer.training_round = training_round  # type: ignore[method-assign]


class RestartedClient(FederatedClient):
    """A client that goes on with the state that its optimizer has had."""

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.state = load_round(folder).optimizer.get_state()

    async def initialize(self) -> None:
        """Make model and optimizer as the server says, and give the optimizer its state."""
        await super().initialize()
        assert self.trainmanager is not None
        self.trainmanager.optim.set_state(self.state)


def forge_replies(seed: int) -> None:
    """Send anything in the place of a reply, each round something else."""
    rng = random.Random(seed)

    def lying(self: TrainingManager, message: TrainRequest) -> TrainReply | Error:
        reply = honest(self, message)
        assert isinstance(reply, TrainReply)
        federation_liars.SHAPES = dict(reply.updates.updates.shapes())
        forged = federation_liars.forge(rng, reply)
        reply.serialize = lambda: forged  # type: ignore[method-assign]
        return reply

    honest = TrainingManager.training_round
    TrainingManager.training_round = lying  # type: ignore[method-assign]


def client(name: str, settings: Settings) -> None:
    setup_client_loggers(name)
    i = int(name.rpartition("_")[2])
    secagg = settings.get("secagg")
    if str(i) in settings.get("faults", {}):
        federation_faults.show(*settings["faults"][str(i)])
    if settings.get("silent") == i:
        site_noise.draws = lambda variance, size: np.zeros(size, np.int64)  # type: ignore
    if "asked" in settings:
        note_rounds(name, Path(settings["asked"]))
    if settings.get("forger") == i:
        forge_replies(settings["seed"])
    rng = np.random.default_rng(i)
    columns = settings.get("columns", 4)
    data = rng.normal(size=(60, columns))
    labels = (data[:, 0] > 0).astype(int)
    data *= settings.get("scale", [1.0] * 9)[i]
    keys: Any = None
    if secagg:
        private = [bytes.fromhex(key) for key in settings["keys"]]
        own = Ed25519PrivateKey.from_private_bytes(private[i])
        trusted: list[Ed25519PublicKey | str] = [
            Ed25519PrivateKey.from_private_bytes(key).public_key() for key in private
        ]
        keys = {"secagg_type": secagg, "id_keys": IdentityKeys(own, trusted)}
        if "biprime" in settings:
            keys["biprime"] = settings["biprime"]
    uri = f"127.0.0.1:{settings['port']}"
    if settings["protocol"].endswith("websockets"):
        uri = "ws://" + uri
    specs: dict[str, Any] = {
        "netwk": {
            "protocol": settings["protocol"],
            "server_uri": uri,
            "name": settings.get("names", {}).get(str(i), name),
            **settings.get("client_network", {}),
        },
        "train_data": InMemoryDataset(data, target=labels, expose_classes=True),
        "secagg": keys,
        "checkpoint": f"saved_{name}" if settings.get("checkpoint") else None,
        "verbose": False,
    }
    saved, private = settings.get("client_restart"), settings.get("private")
    node: FederatedClient
    if private is not None:
        held = rng.normal(size=(30, columns))
        right = (held[:, 0] > 0).astype(int)
        specs["valid_data"] = InMemoryDataset(held, target=right, expose_classes=True)
        node = fedclip.PrivateFederatedClient(ledger=f"{name}_spent.json", **private, **specs)
    elif "wanted" in settings:
        node = fedclip.PersonalFederatedClient(noise=settings["wanted"], **specs)
    else:
        node = RestartedClient(f"{saved}_{name}", **specs) if saved else FederatedClient(**specs)
    node.run()
    if isinstance(node, fedclip.PrivateFederatedClient):
        Path(f"{name}.json").write_text(json.dumps({"spent": node.spent}))
        return
    assert node.trainmanager is not None
    modules = [m for m in node.trainmanager.optim.modules if isinstance(m, fedclip.Clipper)]
    Path(f"{name}.json").write_text(json.dumps({m.name: m.get_state() for m in modules}))
