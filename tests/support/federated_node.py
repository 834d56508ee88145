"""One node of a federation of declearn, as its settings say: see `federation_runs`.

A server that ends, however it ends, leaves what it knows in ``server.json``; a client that has
come to the end of its run, in ``client_i.json``.
"""

import asyncio
import functools
import itertools
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import federation_faults
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.main.config import FLRunConfig
from declearn.main.utils import Checkpointer
from declearn.model.sklearn import SklearnSGDModel
from declearn.secagg.utils import IdentityKeys
from declearn.utils import setup_client_loggers, setup_server_loggers
from federation_helpers import SHORT_BIPRIME

import fedclip
from fedclip.engines.declearn.restart import load_round
from fedclip.privacy.ledger import Ledger

Settings = dict[str, Any]


def main(name: str, folder: Path) -> None:
    """Be a node in a process of its own, in a folder with the settings; the log has all output."""
    with (folder / f"{name}.txt").open("wb") as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # A shell that starts the tests in the background lets its processes ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    settings = json.loads(Path("settings.json").read_text())
    if name == "server":
        setup_server_loggers(level=logging.INFO)
    else:
        setup_client_loggers(name)
    if "killed" in settings:
        kill_at(settings["killed"])
    if "asked" in settings:
        note_rounds(name, Path(settings["asked"]))
    node = made(name, settings)
    asyncio.run(take_part(name, node, settings))


def made(name: str, settings: Settings) -> Any:
    return server(settings) if name == "server" else client(int(name[-1]), settings)


async def take_part(name: str, node: Any, settings: Settings) -> None:
    """Run a node to its end, in the folder where it writes what it knows."""
    if name == "server":
        try:
            await node.async_run(FLRunConfig.from_params(**settings["run"]))
        finally:
            coefs = node.model.get_weights().coefs
            known = {
                "weights": {n: np.asarray(value).ravel().tolist() for n, value in coefs.items()},
                "modules": node.optim.get_state()["modules"],
            }
            Path("server.json").write_text(json.dumps(known))
        return
    await node.async_run()
    modules = [m for m in node.trainmanager.optim.modules if isinstance(m, fedclip.Clipper)]
    Path(f"{name}.json").write_text(json.dumps({m.name: m.get_state() for m in modules}))


def server(settings: Settings) -> FederatedServer:
    protocol = settings.get("server_protocol", settings["protocol"])
    address = {"protocol": protocol, "port": settings["port"], "host": "127.0.0.1"}
    secagg = settings.get("secagg")
    saved = load_round(settings["restart"]) if settings.get("restart") else None
    fresh = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    node = FederatedServer(
        model=settings.get("model", fresh) if saved is None else saved.model,
        netwk={**address, **settings.get("network", {})},
        optim=settings["optim"],
        client_sampler=settings.get("sampler"),
        secagg=secagg and {"secagg_type": secagg, **settings.get("secagg_settings", {})},
        checkpoint=settings.get("checkpoint"),
        metrics=settings.get("metrics"),
    )
    if "ends before" in settings:
        end_before(settings["ends before"], node)
    if saved is not None:
        node.optim.set_state(saved.optimizer.get_state())
    return node


def end_before(round_i: int, node: Any) -> None:
    """Let a server fail before a round: all that is saved of the last one is written."""
    honest = node.training_round

    async def training_round(number: int, *settings: Any) -> None:
        if number == round_i:
            raise RuntimeError(f"ended before round {number}")
        await honest(number, *settings)

    node.training_round = training_round


def kill_at(point: int) -> None:
    """End this process as kill -9 does, before or after one of the steps of its rounds."""
    passed = itertools.count(1)

    def reach() -> None:
        if next(passed) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    async def awaited(step: Any) -> None:
        await step
        reach()

    def around(step: Any) -> Any:
        @functools.wraps(step)
        def reaching(*args: Any, **kwargs: Any) -> Any:
            reach()
            found = step(*args, **kwargs)
            if asyncio.iscoroutine(found):
                return awaited(found)
            reach()
            return found

        return reaching

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


class RestartedClient(FederatedClient):
    """A client that goes on with the state that its optimizer has had."""

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.state = load_round(folder).optimizer.get_state()

    async def initialize(self) -> None:
        await super().initialize()
        assert self.trainmanager is not None
        self.trainmanager.optim.set_state(self.state)


def records(i: int, columns: int) -> dict[str, Any]:
    """Return the records of a client: the sign of the first column is the label."""
    data = np.random.default_rng(i).normal(size=(60, columns))
    target = (data[:, 0] > 0).astype(int)
    return {"train_data": InMemoryDataset(data, target=target, expose_classes=True)}


def client(i: int, settings: Settings) -> FederatedClient:
    name, protocol, secagg = f"client_{i}", settings["protocol"], settings.get("secagg")
    uri = f"127.0.0.1:{settings['port']}"
    address = {"protocol": protocol, "name": name, **settings.get("client_network", {})}
    given = settings.get("data", records)(i, settings.get("columns", 4))
    if secagg:
        private = [Ed25519PrivateKey.from_private_bytes(bytes.fromhex(k)) for k in settings["keys"]]
        trusted: list[Ed25519PublicKey | str] = [key.public_key() for key in private]
        given["secagg"] = {"secagg_type": secagg, "id_keys": IdentityKeys(private[i], trusted)}
        if secagg == "joye-libert":
            given["secagg"]["biprime"] = SHORT_BIPRIME
    specs: dict[str, Any] = {
        "netwk": {**address, "server_uri": f"ws://{uri}" if "websock" in protocol else uri},
        "checkpoint": f"saved_{name}" if settings.get("checkpoint") else None,
        "verbose": False,
        **given,
        **settings.get("client", {}),
    }
    if folder := settings.get("client_restart"):
        node: FederatedClient = RestartedClient(f"{folder}_{name}", **specs)
    else:
        node = getattr(fedclip, settings.get("kind", ""), FederatedClient)(**specs)
    if fault := settings.get("faults", {}).get(str(i)):
        federation_faults.show(node.netwk, *fault)
    return node
