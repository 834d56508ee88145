# SPDX-License-Identifier: Apache-2.0
"""What users start: scripts with ``fedclip run``, and the quickrun example, with DP-SGD too."""

from __future__ import annotations

import json
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from declearn.dataset.utils import load_data_array
from helpers import PATIENCE, ended, free_port, hiding
from report_runs import call

from fedclip.cli.check.configuration import check_config
from fedclip.engines.declearn.quickrun import Experiment
from fedclip.report import read_report

pytestmark = pytest.mark.slow

WATCHFUL = "fedclip-websockets"
EXAMPLES = Path(__file__).parents[3] / "examples"
ENVIRONMENT = {**hiding(), "OMP_NUM_THREADS": "1"}

SCRIPTS = {
    "server.py": """
import sys
from declearn.main import FederatedServer
from declearn.model.sklearn import SklearnSGDModel

port, config, protocol = sys.argv[1:]
FederatedServer(
    model=SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss"),
    netwk={"protocol": protocol, "host": "127.0.0.1", "port": int(port), "heartbeat": 0.02},
    optim=config,
    checkpoint="result/server",
).run({
    "rounds": 3,
    "register": {"min_clients": 2, "max_clients": 2, "timeout": 600},
    "training": {"batch_size": 10},
})
""",
    "client.py": """
import sys
import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient

port, name = sys.argv[1:]
rng = np.random.default_rng(int(name[-1]))
data = rng.normal(size=(60, 4))
client = FederatedClient(
    netwk={"protocol": "websockets", "server_uri": "ws://127.0.0.1:" + port, "name": name},
    train_data=InMemoryDataset(data, target=(data[:, 0] > 0).astype(int), expose_classes=True),
    checkpoint="result/" + name,
    verbose=False,
)
print("patience", getattr(client.netwk, "patience", None))
client.run()
""",
}
OPTIM = """
[client_opt]
lrate = 0.5
modules = [["norm-clip", {max_norm = 0.2}], "zscore-clip", ["value-clip", {max_value = 0.1}]]
[server_opt]
lrate = 1.0
modules = ["no-op"]
"""
PYTHON = [sys.executable]
FEDCLIP_RUN = [sys.executable, "-m", "fedclip", "run"]
CLIENTS = ("client_0", "client_1")


def scripts(folder: Path, *starts: list[str], protocol: str = "websockets") -> list[int]:
    """Run the scripts of a server and two clients, each with its command; return their codes."""
    for name, text in {**SCRIPTS, "optim.toml": OPTIM}.items():
        (folder / name).write_text(text)
    port, processes = str(free_port()), list[subprocess.Popen[bytes]]()
    end = time.monotonic() + PATIENCE
    lines = [["server.py", port, "optim.toml", protocol]]
    lines += [["client.py", port, name] for name in CLIENTS]
    try:
        for name, start, line in zip(("server", *CLIENTS), starts, lines, strict=True):
            # A client tries for ten seconds, which a server on a busy machine needs to start.
            while processes and not listens(int(port)):
                assert processes[0].poll() is None, said(folder, "server")[-2000:]
                assert time.monotonic() < end, said(folder, "server")[-2000:]
                time.sleep(0.1)
            with (folder / f"{name}.txt").open("wb") as log:
                command, silent = [*start, *line], subprocess.DEVNULL
                processes.append(
                    subprocess.Popen(
                        *(command, -1, None, silent, log, log), cwd=folder, env=ENVIRONMENT
                    )
                )
        return [process.wait(PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    """Whether a server listens on a port, which cannot be bound then."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.txt").read_text(errors="replace")


def test_clippers_on_every_client_and_on_the_server(tmp_path: Path) -> None:
    """The scripts do not import fedclip: ``fedclip run`` starts them."""
    codes = scripts(tmp_path, FEDCLIP_RUN, FEDCLIP_RUN, FEDCLIP_RUN)
    assert codes == [0, 0, 0], said(tmp_path, "server")[-3000:]
    assert check_config(tmp_path / "optim.toml").ok
    report = read_report(tmp_path / "result")
    assert report.nodes == (*CLIENTS, "server")
    for client in CLIENTS:
        assert "patience 10800.0" in said(tmp_path, client)
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
    """The server ends, and names the client; the other client gets the reason."""
    codes = scripts(tmp_path, FEDCLIP_RUN, FEDCLIP_RUN, PYTHON, protocol=WATCHFUL)
    assert codes[:2] == [1, 1]
    assert "the connection of 'client_1' has ended" in said(tmp_path, "server")
    assert "a client that does not import fedclip ends" in said(tmp_path, "server")
    assert "the server has ended: the connection of 'client_1'" in said(tmp_path, "client_0")


BROKEN = """
from declearn.main import FederatedClient
from fedclip.cli.main import main

honest = FederatedClient.training_round

async def training_round(self, message):
    if self.netwk.name == "client_1" and message.round_i == 2:
        raise OSError("the disk is full")
    await honest(self, message)

FederatedClient.training_round = training_round
main()
"""


def copied(folder: Path) -> Path:
    made = shutil.ignore_patterns("data", "result")
    return shutil.copytree(EXAMPLES / "quickrun", folder / "quickrun", ignore=made)


def test_the_quickrun_example_goes_on_without_a_client(tmp_path: Path) -> None:
    """In one process too, one client's end is not that of the run where not all are needed."""
    folder = copied(tmp_path)
    ended("prepare.py", cwd=folder, env=ENVIRONMENT)
    for file in folder.glob("data/*/*.npy"):
        # scikit-learn's gradients are of one record after the other.
        np.save(file, np.load(file)[:100])
    config = folder / "config.toml"
    text = config.read_text().replace(
        "port = 8765", f"port = {free_port()}\nkwargs = {{ min_replies = 2 }}"
    )
    config.write_text(text.replace("rounds = 5", "rounds = 3"))
    findings = check_config(config).findings
    assert {f.level for f in findings if f.level != "ok"} == {"note"}
    done = ended("-c", BROKEN, "quickrun", "config.toml", cwd=folder, env=ENVIRONMENT)
    assert done.stdout.endswith("fedclip: 3 clients; see  fedclip report result\n"), done.stderr
    # declearn's log goes to files; of the rest, one line is for each round.
    lines = [line[:28] for line in done.stderr.splitlines() if line.startswith("quickrun")]
    assert lines == [f"quickrun: {i} of 3 rounds done" for i in (1, 2, 3)]
    log = (folder / "result/server/logs.txt").read_text()
    assert "Initiating training round 2" in log
    assert "client 'client_1' has ended: OSError: the disk is full" in log
    assert "the connection of 'client_1' has ended; the run goes on without it" in log
    report = read_report(folder / "result")
    assert {"client_0", "client_1", "client_2"} <= {*report.nodes}
    assert report.servers == {"server"}


def test_quickrun_starts_private_clients_if_records_are_to_be_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    folder = copied(tmp_path)
    config = folder / "config.toml"
    text = config.read_text().replace("port = 8765", f"port = {free_port()}")
    text = text.replace("timeout = 30", f"timeout = {PATIENCE}")
    text = text.replace(
        "rounds = 5", "rounds = 2\nprivacy = {budget = [3.0, 1e-5], sclip_norm = 0.5}"
    )
    config.write_text(text.replace('["norm-clip", { max_norm = 1.0 }]', '"sample-clip"'))

    monkeypatch.chdir(folder)
    runpy.run_path("prepare.py")
    # One client's records are of persons, with four each.
    (targets,) = folder.glob("data*/client_0/train_target.*")
    lines = len(load_data_array(str(targets)))
    whose = "".join(f"p{i // 4}\n" for i in range(lines))
    targets.with_name("train_persons.csv").write_text(f"person\n{whose}")
    assert f"client_0: DP-SGD protects {-(-lines // 4)} persons" in call("check", config).stdout
    # Opacus needs torch.
    env = {**hiding("tensorflow", "jax", "haiku", "keras"), "OMP_NUM_THREADS": "1"}
    output = ended("-m", "fedclip", "quickrun", "config.toml", env=env).stdout
    assert output.endswith("and what was spent:  fedclip privacy spent result\n")
    ledgers = json.loads(call("privacy", "spent", "result", "--json").stdout)
    assert [ledger["where"] for ledger in ledgers] == [
        f"client_{i}/privacy_spent.json" for i in range(3)
    ]
    assert all(2.9 < ledger["epsilons"]["pld"] <= 3.0 for ledger in ledgers)
    assert [ledger["protects"] for ledger in ledgers] == ["person", "record", "record"]
    # The ledgers are next to the records: another run reads them first, wherever its results are.
    kept = targets.with_name("privacy_spent.json")
    assert not kept.is_symlink()
    assert Path("result/client_0/privacy_spent.json").resolve() == kept.resolve()
    experiment = Experiment(config)
    assert experiment.ledger() == kept.parent.with_name("privacy_spent.json").resolve()
