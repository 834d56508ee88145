"""Update clipping in real federations: server and clients are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedclip.federation.secagg import plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NODE = Path(__file__).with_name("federated_node.py")
N = 3
ADAPTIVE: dict[str, Any] = {
    "aggregator": "clipped-averaging",
    "client_opt": {"lrate": 0.5, "modules": ["update-clip-client"]},
    "server_opt": {"lrate": 1.0, "modules": [["update-clip-server", {"start_norm": 0.2}]]},
}


class Run:
    """The processes of one federation, each with its output in a file."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.settings = {
            "protocol": "websockets",
            "network": {"heartbeat": 0.02},
            "port": port,
            "optim": ADAPTIVE,
            "keys": [Ed25519PrivateKey.generate().private_bytes_raw().hex() for _ in range(N)],
            **settings,
            "run": {
                "rounds": 4,
                "register": {"min_clients": N, "max_clients": N, "timeout": 120},
                "training": {"batch_size": 10},
                # With all clients, which declearn's secure aggregation over some does not survive.
                "evaluate": {"batch_size": 60, "frequency": 1000},
                **settings.get("run", {}),
            },
        }
        (folder / "settings.json").write_text(json.dumps(self.settings))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ["server", *(f"client_{i}" for i in range(N))]:
            with (self.folder / f"{name}.txt").open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, str(NODE), name, "settings.json"],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                        "OMP_NUM_THREADS": "1",
                    },
                )

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text(errors="replace")

    def wait(self) -> dict[str, int]:
        """Return the exit codes; nobody may wait for ever, on a busy machine either."""
        end = time.monotonic() + 150
        return {n: p.wait(max(0.1, end - time.monotonic())) for n, p in self.processes.items()}

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "server.json").read_text())
        return found

    def state(self) -> dict[str, Any]:
        """Return the state of update-clip-server."""
        return next(s for name, s in self.result()["modules"] if name == "update-clip-server")


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
            process.wait()


def complete(folder: Path, **settings: Any) -> Run:
    with running(folder, **settings) as run:
        codes = run.wait()
        assert set(codes.values()) == {0}, {name: run.said(name)[-3000:] for name in codes}
    return run


def test_equal_results_in_cleartext_and_under_secure_aggregation(tmp_path: Path) -> None:
    runs = {
        kind: complete(tmp_path / str(kind), secagg=kind)
        for kind in (None, "masking", "joye-libert")
    }
    clear = runs[None]
    said = clear.said("server")
    assert "clipped-averaging: 3 updates, 3 clipped, 0 zeroed" in said
    assert "update-clip-server: round 4" in said
    for kind in ("masking", "joye-libert"):
        assert runs[kind].state() == clear.state()
        assert runs[kind].state()["bound"] != 0.2
        error = 4 * plan(1e4, N, 5, kind=kind, clipval=1e5).error
        for name, weights in clear.result()["weights"].items():
            other = runs[kind].result()["weights"][name]
            # Each round adds its error to the weights; training on them hardly amplifies it.
            np.testing.assert_allclose(other, weights, rtol=0, atol=10 * error)


@pytest.mark.parametrize("secagg", [None, "masking", "joye-libert"])
def test_two_of_three_clients_each_round(tmp_path: Path, secagg: str | None) -> None:
    run = complete(
        tmp_path, secagg=secagg, sampler={"strategy": "uniform", "n_samples": 2, "seed": 1}
    )
    assert run.state()["round"] == 4
    assert "clipped-averaging: 2 updates" in run.said("server")


def test_over_grpc(tmp_path: Path) -> None:
    run = complete(tmp_path, protocol="grpc")
    assert run.state()["round"] == 4


def server_with(**config: Any) -> dict[str, Any]:
    modules = [["update-clip-server", {"start_norm": 0.2, **config}]]
    return {**ADAPTIVE, "server_opt": {"lrate": 1.0, "modules": modules}}


NO_COUNTERPART = {**ADAPTIVE, "server_opt": 1.0}
NO_CLIENT = {**ADAPTIVE, "client_opt": 0.5}
TWICE = {
    **ADAPTIVE,
    "server_opt": {"lrate": 1.0, "modules": ["update-clip-server", "update-clip-server"]},
}
AFTER_MOMENTUM = server_with(noise_multiplier=1.0, expected_clients=N)
AFTER_MOMENTUM["server_opt"]["modules"].insert(0, "momentum")


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        pytest.param(NO_COUNTERPART, "put update-clip-server into server_opt", id="no counterpart"),
        pytest.param(NO_CLIENT, "'update-clip' is available to receive", id="no client module"),
        pytest.param(
            {**ADAPTIVE, "aggregator": "averaging"}, "'clipped-averaging'", id="averaging"
        ),
        pytest.param(TWICE, "two update-clip-server", id="twice"),
        pytest.param(AFTER_MOMENTUM, "put update-clip-server first", id="after momentum"),
        pytest.param(
            {**ADAPTIVE, "client_opt": 0.5, "server_opt": 1.0}, "has no bound", id="no bound"
        ),
        pytest.param(
            server_with(noise_multiplier=3.0, expected_clients=N, max_epsilon=2.2),
            "the privacy budget is spent; epsilon is",
            id="budget",
        ),
    ],
)
def test_ends_in_a_sentence_on_the_server_and_on_each_client(
    tmp_path: Path, optim: dict[str, Any], text: str
) -> None:
    with running(tmp_path, optim=optim) as run:
        codes = run.wait()
    assert 0 not in codes.values()
    for name in codes:
        assert text in run.said(name), run.said(name)[-3000:]


def test_kill_and_restart_of_the_server_continues_bound_and_budget(tmp_path: Path) -> None:
    optim = server_with(noise_multiplier=2.0, expected_clients=N, generator="insecure", seed=5)
    run = {"evaluate": {"batch_size": 60, "frequency": 1}}
    whole = complete(tmp_path / "whole", optim=optim, run={**run, "rounds": 5})
    # Killed in the middle of a longer run, once a few rounds have been saved.
    first = tmp_path / "first"
    with running(first, optim=optim, run={**run, "rounds": 1000}, checkpoint="saved") as killed:
        end = time.monotonic() + 150
        while "Initiating training round 3" not in killed.said("server"):
            assert time.monotonic() < end, killed.said("server")[-3000:]
            time.sleep(0.05)
    folder = first / "saved"
    # As if it had been killed right after the second round: what came later is taken away.
    for prefix in ("optimizer_state", "model_state"):
        states = sorted(folder.glob(f"{prefix}_*"))
        for path in states[3:]:
            path.unlink()
    shutil.copytree(folder, tmp_path / "second" / "saved")
    again = complete(tmp_path / "second", optim=optim, run={**run, "rounds": 3}, restart="saved")
    assert again.state() == whole.state()
    assert again.state()["spent"] == [[2.0, 5]]
    for name, weights in whole.result()["weights"].items():
        np.testing.assert_allclose(again.result()["weights"][name], weights, rtol=1e-12)
