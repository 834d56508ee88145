# SPDX-License-Identifier: Apache-2.0
"""Real federations: a declearn server and clients, processes of their own, over websockets.

The scripts are what a user of declearn writes; none of them imports fedclip. Whoever is to
know the clippers is started with ``fedclip run``.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE, ended, free_port, hiding

from fedclip.cli.check.configuration import check_config
from fedclip.report import read_report

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"

SERVER = """
import sys
from declearn.main import FederatedServer
from declearn.model.sklearn import SklearnSGDModel

port, config, folder = sys.argv[1:]
FederatedServer(
    model=SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss"),
    netwk={"protocol": PROTOCOL, "host": "127.0.0.1", "port": int(port), "heartbeat": 0.02},
    optim=config,
    checkpoint=folder + "/server",
).run({
    "rounds": 3,
    "register": {"min_clients": 2, "max_clients": 2, "timeout": 600},
    "training": {"batch_size": 10},
})
"""

CLIENT = """
import sys
import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient

port, name, folder = sys.argv[1:]
rng = np.random.default_rng(int(name[-1]))
data = rng.normal(size=(60, 4))
client = FederatedClient(
    netwk={"protocol": "websockets", "server_uri": "ws://127.0.0.1:" + port, "name": name},
    train_data=InMemoryDataset(data, target=(data[:, 0] > 0).astype(int), expose_classes=True),
    checkpoint=folder + "/" + name,
    verbose=False,
)
client.run()
"""

PYTHON = [sys.executable]
FEDCLIP_RUN = [sys.executable, "-m", "fedclip", "run"]
CLIENTS = ("client_0", "client_1")
ENVIRONMENT = {**hiding(), "OMP_NUM_THREADS": "1"}


class Federation:
    """The processes of one federation, each with its output in a file."""

    def __init__(self, folder: Path, optim: str, protocol: str = "websockets") -> None:
        self.folder = folder
        self.config = folder / "optim.toml"
        self.config.write_text(optim)
        (folder / "server.py").write_text(SERVER.replace("PROTOCOL", repr(protocol)))
        (folder / "client.py").write_text(CLIENT)
        self.port = str(free_port())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def listens(self) -> bool:
        """Whether the server does: a port that it listens on can not be bound."""
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", int(self.port)))
            except OSError:
                return True
        return False

    def start(self, name: str, command: list[str]) -> None:
        end = time.monotonic() + PATIENCE
        # declearn's client tries for ten seconds, which a server on a busy machine needs to start.
        while name != "server" and not self.listens():
            assert time.monotonic() < end, self.said("server")[-2000:]
            assert self.processes["server"].poll() is None, self.said("server")[-2000:]
            time.sleep(0.1)
        script, third = ("server.py", str(self.config)) if name == "server" else ("client.py", name)
        with (self.folder / f"{name}.txt").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*command, script, self.port, third, "result"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
            )

    def wait(self, name: str, seconds: float = PATIENCE) -> int:
        return self.processes[name].wait(seconds)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text(errors="replace")

    def run(self, server: list[str], clients: list[str]) -> None:
        self.start("server", server)
        for name in CLIENTS:
            self.start(name, clients)
        codes = {name: self.wait(name) for name in self.processes}
        assert set(codes.values()) == {0}, {name: self.said(name)[-2000:] for name in codes}


@contextlib.contextmanager
def federation(folder: Path, optim: str, protocol: str = "websockets") -> Iterator[Federation]:
    """Set up a federation, and end what still runs of it."""
    made = Federation(folder, optim, protocol)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


def test_clippers_on_every_client_and_on_the_server(tmp_path: Path) -> None:
    optim = """
    [client_opt]
    lrate = 0.5
    modules = [["norm-clip", {max_norm = 0.2}], "zscore-clip", ["value-clip", {max_value = 0.1}]]
    [server_opt]
    lrate = 1.0
    modules = ["no-op"]
    """
    with federation(tmp_path, optim) as fed:
        assert check_config(fed.config).ok
        fed.run(FEDCLIP_RUN, FEDCLIP_RUN)
    report = read_report(tmp_path / "result")
    assert report.nodes == (*CLIENTS, "server")
    for client in CLIENTS:
        rows = report.select(client, "norm-clip")
        assert [row.record.round for row in rows] == [1, 2, 3]
        assert [row.record.steps for row in rows] == [6, 6, 6]
        assert rows[0].record.clipped > 0
        assert {row.record.limit for row in rows} == {0.2}
        # What the next module sees is within the limit of the one before.
        for row in report.select(client, "zscore-clip"):
            assert row.record.norm_max is not None
            assert row.record.norm_max <= 0.2
    assert sum(row.record.steps for row in report.select("server")) == 3


def test_a_client_without_fedclip_under_a_server_that_watches(tmp_path: Path) -> None:
    """The server ends, and says which client it was; the other client is told."""
    optim = "[client_opt]\nlrate = 0.5\nmodules = ['zscore-clip']"
    with federation(tmp_path, optim, "fedclip-websockets") as fed:
        fed.start("server", FEDCLIP_RUN)
        fed.start("client_0", FEDCLIP_RUN)
        fed.start("client_1", PYTHON)
        assert fed.wait("server") == 1
        assert fed.wait("client_0") == 1
    assert "the connection of 'client_1' has ended" in fed.said("server")
    assert "a client that does not import fedclip ends" in fed.said("server")
    assert "the server has ended: the connection of 'client_1'" in fed.said("client_0")


def call(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return ended(*command, cwd=folder, env=ENVIRONMENT, well=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the example, with its data."""
    folder = tmp_path_factory.mktemp("example") / "quickrun"
    shutil.copytree(EXAMPLES / "quickrun", folder, ignore=shutil.ignore_patterns("data", "result"))
    assert call(folder, "prepare.py").returncode == 0
    for file in folder.glob("data/*/*.npy"):
        # scikit-learn's gradients are of one record after the other.
        np.save(file, np.load(file)[:100])
    return folder


def quickrun_example(prepared: Path, tmp_path: Path, rounds: int, kwargs: str = "") -> Path:
    """Return a folder with the example, on a port of its own."""
    folder = shutil.copytree(prepared, tmp_path / "quickrun")
    config = folder / "config.toml"
    text = config.read_text().replace("port = 8765", f"port = {free_port()}\n{kwargs}")
    config.write_text(text.replace("rounds = 5", f"rounds = {rounds}"))
    return folder


def test_the_quickrun_example(prepared: Path, tmp_path: Path) -> None:
    folder = quickrun_example(prepared, tmp_path, 2)
    found = check_config(folder / "config.toml").findings
    assert [f.level for f in found if f.level != "ok"] == ["note"]
    done = call(folder, "-m", "fedclip", "quickrun", "config.toml")
    assert done.stdout.endswith("fedclip: 3 clients; see  fedclip report result\n"), done.stderr
    # declearn's log goes to files; what remains is one line a round.
    assert [line[:28] for line in done.stderr.splitlines()] == [
        f"quickrun: {done} of 2 rounds done" for done in (1, 2)
    ]
    assert "Initiating training round 2" in (folder / "result/server/logs.txt").read_text()
    report = read_report(folder / "result")
    assert {"client_0", "client_1", "client_2"} <= {*report.nodes}
    assert report.servers == {"server"}


BROKEN = """
import sys
from pathlib import Path
from declearn.main import FederatedClient
from fedclip.cli.quickrun import run

honest = FederatedClient.training_round

async def training_round(self, message):
    if self.netwk.name == "client_1" and message.round_i == 2:
        raise OSError("the disk is full")
    await honest(self, message)

FederatedClient.training_round = training_round
print(run(Path("config.toml")))
"""


def test_quickrun_without_a_client(prepared: Path, tmp_path: Path) -> None:
    """In one process too, one client's end is not that of the run where not all are needed."""
    folder = quickrun_example(prepared, tmp_path, 3, "kwargs = { min_replies = 2 }")
    done = call(folder, "-c", BROKEN)
    log = (folder / "result" / "server" / "logs.txt").read_text()
    assert "client 'client_1' has ended: OSError: the disk is full" in log
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the connection of 'client_1' has ended; the run goes on without it" in log
    assert done.stdout.endswith("result', True)\n")


PATIENT = """
import sys
from declearn.communication import NetworkClientConfig
for protocol in ("websockets", "fedclip-websockets"):
    config = NetworkClientConfig(protocol, "ws://127.0.0.1:1", "a", kwargs={"patience": 5.0})
    print(config.build_client().patience)
print(NetworkClientConfig("websockets", "ws://127.0.0.1:1", "a").build_client().patience)
"""


def test_fedclip_run_gives_clients_patience(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(PATIENT)
    done = call(tmp_path, *FEDCLIP_RUN[1:], script)
    assert done.stdout.split() == ["5.0", "5.0", "10800.0"], done.stderr[-2000:]
