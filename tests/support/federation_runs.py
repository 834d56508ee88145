"""Federations of declearn: in this process without sockets, or in processes that talk over them.

Processes are forked from one that has imported everything, which saves most of their time.
"""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import federated_node
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from declearn.messaging import Message
from helpers import PATIENCE, free_port
from memory import without_sockets

N = 3
ADAPTIVE: dict[str, Any] = {
    "aggregator": "clipped-averaging",
    "client_opt": {"lrate": 0.5, "modules": ["update-clip-client"]},
    "server_opt": {"lrate": 1.0, "modules": [["update-clip-server", {"start_norm": 0.2}]]},
}
"""The optimizers of a run whose settings name none."""
NODE = ContextVar("NODE", default="")
"""The node that this process is at work for, where one process has all of them."""

_context: Any = multiprocessing.get_context("forkserver")
# What a node imports, but for the file next to this one, which the server does not find.
_context.set_forkserver_preload(["fedclip", "declearn.main", "declearn.model.sklearn"])


class Run:
    """One federation, and what its nodes have said, each in a file."""

    def __init__(self, folder: Path, port: int, clients: int = N, **settings: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.names = ["server", *(f"client_{i}" for i in range(clients))]
        keys = [Ed25519PrivateKey.generate().private_bytes_raw().hex() for _ in range(clients)]
        self.settings = {
            "protocol": "websockets",
            "network": {"heartbeat": 0.02},
            "port": port,
            "optim": ADAPTIVE,
            "keys": keys,
            **settings,
            "run": {
                "rounds": 4,
                "register": {"timeout": PATIENCE, "min_clients": clients, "max_clients": clients},
                "training": {"batch_size": 10},
                # With all clients, which declearn's secure aggregation over some does not survive.
                "evaluate": {"batch_size": 60, "frequency": 1000},
                **settings.get("run", {}),
            },
        }

    def said(self, name: str) -> str:
        log = self.folder / f"{name}.txt"
        return log.read_text(errors="replace") if log.exists() else ""

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "server.json").read_text())
        return found

    def state(self) -> dict[str, Any]:
        return next(s for name, s in self.result()["modules"] if name == "update-clip-server")


class Together(Run):
    """A federation of which all nodes have ended, in this process."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, 1, **{"network": {"heartbeat": 0.002}, **settings})
        self.nodes: dict[str, Any] = {}
        self.sent: list[tuple[Message, bytes]] = []
        self.errors: dict[str, BaseException] = {}
        notes = logging.Formatter("%(levelname)s %(name)s: %(message)s")
        handler = logging.Handler()
        handler.emit = lambda record: self._note(notes.format(record))  # type: ignore[method-assign]
        root = logging.getLogger()
        both = {"declearn", "fedclip"}
        names = [n for n in {*root.manager.loggerDict} | both if n.partition(".")[0] in both]
        own = [logging.getLogger(name) for name in names]
        # A quickrun in this process has set those of its server and clients apart.
        before = [(logger, logger.level, logger.propagate) for logger in own]
        for logger in own:
            logger.setLevel(logging.NOTSET if "." in logger.name else logging.INFO)
            logger.propagate = True
        root.addHandler(handler)
        try:
            with without_sockets(), contextlib.chdir(folder), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                asyncio.run(asyncio.wait_for(self._run(), PATIENCE))
        finally:
            root.removeHandler(handler)
            for logger, level, propagate in before:
                logger.setLevel(level)
                logger.propagate = propagate

    def _note(self, line: str) -> None:
        with (self.folder / f"{NODE.get() or 'others'}.txt").open("a") as log:
            log.write(f"{line}\n")

    async def _run(self) -> None:
        await asyncio.gather(*(self._take_part(name) for name in self.names))

    async def _take_part(self, name: str) -> None:
        NODE.set(name)
        try:
            node = self.nodes[name] = federated_node.made(name, self.settings)
            if name != "server":
                self._keep(node)
            await federated_node.take_part(name, node, self.settings)
        except Exception as exc:
            self.errors[name] = exc
            self._note("".join(traceback.format_exception(exc)))

    def _keep(self, node: Any) -> None:
        send = node.netwk.send_message

        async def noted(message: Message) -> None:
            self.sent.append((message, message.serialize()))
            await send(message)

        node.netwk.send_message = noted


def complete(folder: Path, **settings: Any) -> Together:
    """Return a federation that has ended well in this process."""
    run = Together(folder, **settings)
    assert not run.errors, {name: run.said(name)[-3000:] for name in run.errors}
    return run


class Processes(Run):
    """A federation of processes, which talk over sockets."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, free_port(), **settings)
        (folder / "settings.json").write_text(json.dumps(self.settings))
        self.processes: dict[str, BaseProcess] = {}

    def start(self) -> None:
        for name in self.names:
            given = {"target": federated_node.main, "args": (name, self.folder)}
            process = self.processes[name] = _context.Process(**given, daemon=True)
            process.start()
            # A client of declearn's that comes too early over gRPC tries again after a minute.
            if name == "server":
                self.until("clients registration")

    def until(self, text: str, name: str = "server") -> None:
        end = time.monotonic() + PATIENCE
        while text not in self.said(name) and self.processes[name].exitcode is None:
            assert time.monotonic() < end, self.said(name)[-3000:]
            time.sleep(0.02)

    def ended(self, name: str) -> int:
        """Return the exit code of one node; nobody may wait for ever."""
        self.processes[name].join(PATIENCE)
        code = self.processes[name].exitcode
        assert code is not None, (name, self.said(name)[-3000:])
        return code

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a node, in the second round."""
        self.until("Initiating training round 2")
        os.kill(self.processes[name].pid or 0, number)


@contextlib.contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Processes]:
    """Start a federation of processes, and end what still runs of it."""
    run = Processes(folder, **settings)
    try:
        run.start()
        yield run
    finally:
        for process in run.processes.values():
            process.kill()
            process.join()
