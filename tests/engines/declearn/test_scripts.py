# SPDX-License-Identifier: Apache-2.0
"""What users start: a script with ``fedclip run``, and quickruns, with DP-SGD too."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import ended, free_port, hiding
from quickruns import write_config, write_sites
from report_runs import call

from fedclip.cli.check.configuration import check_config
from fedclip.engines.declearn.quickrun import Experiment
from fedclip.report import read_report

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickrun"
ENVIRONMENT = {**hiding(), "OMP_NUM_THREADS": "1"}

CLIENT = """
from declearn.communication import NetworkClientConfig
print(NetworkClientConfig("websockets", "ws://127.0.0.1:1", "a").build_client().patience)
"""


def test_a_client_that_fedclip_run_starts_does_not_wait_for_ever(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    said = ended("-m", "fedclip", "run", "client.py", cwd=tmp_path, env=ENVIRONMENT).stdout
    assert said == "10800.0\n"


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


def test_the_quickrun_example_goes_on_without_a_client(tmp_path: Path) -> None:
    """In one process too, one client's end is not that of the run where not all are needed."""
    made = shutil.ignore_patterns("data", "result")
    folder = shutil.copytree(EXAMPLE, tmp_path / "quickrun", ignore=made)
    ended("prepare.py", cwd=folder, env=ENVIRONMENT)
    for file in folder.glob("data/*/*.npy"):
        # scikit-learn's gradients are of one record after the other.
        np.save(file, np.load(file)[:100])
    config, network = folder / "config.toml", f"port = {free_port()}\nkwargs.min_replies = 2"
    text = config.read_text().replace("port = 8765", network)
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


def test_quickrun_starts_private_clients_if_records_are_to_be_clipped(tmp_path: Path) -> None:
    write_sites(tmp_path)
    # One client's records are of persons, with four each.
    whose = "".join(f"p{i // 4}\n" for i in range(40))
    (tmp_path / "data" / "a" / "train_persons.csv").write_text(f"person\n{whose}")
    privacy = "[run.privacy]\nbudget = [3.0, 1e-5]\nsclip_norm = 0.5"
    changes = {"aggregator": '"averaging"', "client": '["sample-clip"]', "server": "[]"}
    config = write_config(tmp_path / "config.toml", **changes, more=privacy, port=free_port())
    ended("-m", "fedclip", "quickrun", str(config), env=ENVIRONMENT)
    ledgers = json.loads(call("privacy", "spent", tmp_path / "out", "--json").stdout)
    assert [ledger["where"] for ledger in ledgers] == [f"{s}/privacy_spent.json" for s in "abc"]
    assert all(2.9 < ledger["epsilons"]["pld"] <= 3.0 for ledger in ledgers)
    assert [ledger["protects"] for ledger in ledgers] == ["person", "record", "record"]
    # The ledgers are next to the records: another run reads them first, wherever its results are.
    kept = tmp_path / "data" / "a" / "privacy_spent.json"
    assert not kept.is_symlink()
    assert (tmp_path / "out" / "a" / "privacy_spent.json").resolve() == kept.resolve()
    ledger = Experiment(config).ledger()
    assert ledger == (tmp_path / "data" / "privacy_spent.json").resolve()
