# SPDX-License-Identifier: Apache-2.0
"""A SuperLink and SuperNodes on this machine, and a tap on what the nodes send to the link."""

import os
import pickle
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from helpers import free_port
from hostile.hostile.client_app import BYTES, NUMBER, SECRET
from hostile.hostile.server_app import MODEL

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
NODE = ("-m", "fedclip", "site", "supernode")
LIMIT = 300.0
"""Seconds after which a test gives up; the machine may be several times slower."""


def until(ready: Callable[[], Any], *processes: Any, limit: float = LIMIT) -> None:
    """Wait for something; fail if it takes too long, or one of the processes has ended."""
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, "it took too long"
        assert all(process.poll() is None for process in processes), "a process has ended"
        time.sleep(0.1)


def leaks(sent: bytes) -> list[bytes]:
    """Return those forms of the app's secrets that are among the bytes."""
    numbers = [np.array(NUMBER, form).tobytes() for form in ("<f8", "<f4", ">f8", "<i8")]
    moved = MODEL["w"].ravel()[0] + np.float32(NUMBER)
    texts = [SECRET.encode(), SECRET.replace("-", "_").encode(), BYTES[:6].astype("<f8").tobytes()]
    listed = MetricRecord({"n": [*map(int, BYTES)]}).deflate()[-len(BYTES) :]
    few = [BYTES[:6].tobytes(), BYTES[:6].astype("<f4").tobytes(), listed]
    return [form for form in (*numbers, moved.tobytes(), *texts, *few) if form in sent]


def norm(arrays: Mapping[str, Any]) -> float:
    """Return how far a model is from the one that the app's server has sent."""
    return float(sum(np.sum((arrays[k] - m.astype(float)) ** 2) for k, m in MODEL.items()) ** 0.5)


class Tap(socketserver.ThreadingTCPServer):
    """Forwards connections to a port, and keeps each byte that goes there."""

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.sent, self._target = bytearray(), target
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        with socket.create_connection(("127.0.0.1", self._target)) as link:
            back = threading.Thread(target=self._copy, args=(link, request, bytearray()))
            back.start()
            self._copy(request, link, self.sent)
            back.join()

    @staticmethod
    def _copy(source: Any, to: Any, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Federation:
    """One SuperLink, and the SuperNodes that were started for it; all end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._tap = Tap(self.port)
        self.sent = self._tap.sent
        self._processes: list[subprocess.Popen[bytes]] = []
        home = folder / "flwr"
        self._environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        }
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n'
            f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.app = folder / "app"
        shutil.copytree(HERE / "hostile", self.app, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HERE.parents[1] / "LICENSE", self.app)
        words = ("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        self.link = self.start("link", *words, "--disable-runtime-dependency-installation")
        until(lambda: "Uvicorn running" in self.log("link"), self.link)

    def start(self, name: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process, which writes to a log of that name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **{"env": self._environment, **options},
            )
        self._processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def tap(self) -> str:
        """Return an address that leads to the link, past the tap."""
        return f"127.0.0.1:{self._tap.server_address[1]}"

    def node(self, policy: Path, *words: str) -> str:
        """Start a SuperNode and wait for it; return the address at which its apps find it."""
        port = str(free_port())
        near = ("--superlink", self.tap(), "--host", "127.0.0.1", "--port", port)
        # By its absolute path, it finds Flower's other programs nowhere but beside itself.
        env = {**self._environment, "PATH": os.defpath}
        command = (sys.executable, *NODE, str(policy), "--insecure")
        node = self.start("node", *command, *near, *words, env=env)
        until(lambda: "SuperNode ID" in self.log("node"), node)
        return f"127.0.0.1:{port}"

    def run(self, *attacks: str, targets: str = "") -> Any:
        """Run the hostile app; return what its server received, in order."""
        out = self.folder / "out"
        values = {"attacks": " ".join(attacks), "out": str(out), "targets": targets}
        config = " ".join(f"{key}={value!r}" for key, value in values.items())
        subprocess.run(
            [str(BIN / "flwr"), "run", str(self.app), "here", "--run-config", config],
            env=self._environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT,
        )
        until(out.exists, *self._processes, limit=LIMIT + 60 * len(attacks))
        return pickle.loads(out.read_bytes())

    def close(self) -> None:
        """End all processes, and what they have started."""
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._tap.shutdown()
        # It waits for the connections that there are, whose nodes have ended.
        self._tap.server_close()


@contextmanager
def federation(folder: Path) -> Iterator[Federation]:
    result = Federation(folder)
    try:
        yield result
    finally:
        result.close()
