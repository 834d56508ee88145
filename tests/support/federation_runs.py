"""Real federations: server and clients are processes of their own, that talk over sockets.

The processes are forked from one that has imported everything, which saves most of their time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import federated_node
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import PATIENCE, free_port

N = 3
MOST = ("min_clients", "max_clients")
ADAPTIVE: dict[str, Any] = {
    "aggregator": "clipped-averaging",
    "client_opt": {"lrate": 0.5, "modules": ["update-clip-client"]},
    "server_opt": {"lrate": 1.0, "modules": [["update-clip-server", {"start_norm": 0.2}]]},
}
"""The optimizers of a run whose settings name none."""

_context: Any = multiprocessing.get_context("forkserver")
# What a node imports, but for the file next to this one, which the server does not find.
_context.set_forkserver_preload(["fedclip", "declearn.main", "declearn.model.sklearn"])


class Run:
    """The processes of one federation, each with its output in a file."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.clients = settings.pop("clients", N)
        self.settings = {
            "protocol": "websockets",
            "network": {"heartbeat": 0.02},
            "port": free_port(),
            "optim": ADAPTIVE,
            "keys": [
                Ed25519PrivateKey.generate().private_bytes_raw().hex() for _ in range(self.clients)
            ],
            **settings,
            "run": {
                "rounds": 4,
                "register": {"timeout": PATIENCE} | dict.fromkeys(MOST, self.clients),
                "training": {"batch_size": 10},
                # With all clients, which declearn's secure aggregation over some does not survive.
                "evaluate": {"batch_size": 60, "frequency": 1000},
                **settings.get("run", {}),
            },
        }
        (folder / "settings.json").write_text(json.dumps(self.settings))
        self.processes: dict[str, BaseProcess] = {}

    def start(self) -> None:
        self._start("server")
        # A client of declearn's that comes too early over gRPC tries again after a minute.
        end = time.monotonic() + PATIENCE
        while "clients registration" not in self.said("server") and self.running("server"):
            assert time.monotonic() < end, self.said("server")[-3000:]
            time.sleep(0.02)
        for i in range(self.clients):
            self._start(f"client_{i}")

    def _start(self, name: str) -> None:
        process = _context.Process(
            target=federated_node.main, args=(name, self.folder), daemon=True
        )
        process.start()
        self.processes[name] = process

    def said(self, name: str) -> str:
        log = self.folder / f"{name}.txt"
        return log.read_text(errors="replace") if log.exists() else ""

    def running(self, name: str) -> bool:
        return self.processes[name].exitcode is None

    def wait(self) -> dict[str, int]:
        """Return the exit codes; nobody may wait for ever."""
        return {name: self.ended(name) for name in self.processes}

    def ended(self, name: str) -> int:
        """Return the exit code of one node."""
        self.processes[name].join(PATIENCE)
        code = self.processes[name].exitcode
        assert code is not None, (name, self.said(name)[-3000:])
        return code

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "server.json").read_text())
        return found

    def state(self) -> dict[str, Any]:
        """Return the state of update-clip-server."""
        return next(s for name, s in self.result()["modules"] if name == "update-clip-server")

    def until(self, text: str, name: str = "server") -> None:
        """Wait until a node has logged a text."""
        end = time.monotonic() + PATIENCE
        while text not in self.said(name):
            assert time.monotonic() < end, self.said(name)[-3000:]
            time.sleep(0.02)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a node, in the second round."""
        self.until("Initiating training round 2")
        os.kill(self.processes[name].pid or 0, number)


@contextlib.contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Run]:
    """Start a federation, and end what still runs of it."""
    run = Run(folder, **settings)
    try:
        run.start()
        yield run
    finally:
        for process in run.processes.values():
            process.kill()
            process.join()


def complete(folder: Path, **settings: Any) -> Run:
    """Return a run that has ended well."""
    with running(folder, **settings) as run:
        codes = run.wait()
        assert set(codes.values()) == {0}, {name: run.said(name)[-3000:] for name in codes}
    return run
