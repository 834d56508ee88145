# SPDX-License-Identifier: Apache-2.0
"""DP-SGD in real federations: server and clients in processes, over websockets."""

from __future__ import annotations

import json
import runpy
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from declearn.dataset.utils import load_data_array
from federation_runs import PATIENCE, running
from helpers import ended, hiding
from report_runs import call

from fedclip.cli.quickrun import Experiment, Federation
from fedclip.privacy.ledger import read_entries

pytestmark = pytest.mark.slow

QUICKRUN = Path(__file__).parents[3] / "examples" / "quickrun"


def test_a_private_client_takes_no_part_in_a_run_without_privacy(tmp_path: Path) -> None:
    modules = [["sample-clip", {"max_norm": 0.5}]]
    settings: dict[str, Any] = {
        "optim": {"client_opt": {"lrate": 0.5, "modules": modules}, "server_opt": {"lrate": 1.0}},
        "run": {"rounds": 3, "training": {"batch_size": 20, "n_steps": 4}, "privacy": None},
    }
    with running(tmp_path, **settings, private={}) as run:
        assert run.wait()["server"] != 0
    assert "would not be private" in run.said("client_0")


def test_quickrun_starts_private_clients_if_records_are_to_be_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    folder = tmp_path / "quickrun"
    shutil.copytree(QUICKRUN, folder, ignore=shutil.ignore_patterns("data", "result"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    config = folder / "config.toml"
    text = config.read_text().replace("port = 8765", f"port = {port}")
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
    assert f"client_0: {-(-lines // 4)} persons are protected" in call("check", config).stdout
    # Opacus needs torch.
    env = {**hiding("tensorflow", "jax", "haiku", "keras"), "OMP_NUM_THREADS": "1"}
    said = ended("-m", "fedclip", "quickrun", "config.toml", env=env).stdout
    assert said.endswith("and what was spent:  fedclip privacy spent result\n")
    found = json.loads(call("privacy", "spent", "result", "--json").stdout)
    assert [one["where"] for one in found] == [f"client_{i}/privacy_spent.json" for i in range(3)]
    assert all(2.9 < one["epsilons"]["pld"] <= 3.0 for one in found)
    assert [one["protects"] for one in found] == ["person", "record", "record"]
    # The ledgers are next to the records: another run reads them first, wherever its results are.
    kept = targets.with_name("privacy_spent.json")
    assert not kept.is_symlink()
    assert Path("result/client_0/privacy_spent.json").resolve() == kept.resolve()
    experiment = Experiment(config)
    assert experiment.ledger() == kept.parent.with_name("privacy_spent.json").resolve()
    # What a run of an earlier version has written next to its results is of the same records.
    one = next(iter(read_entries(kept)))
    earlier = Path("earlier", "privacy_spent.json")
    earlier.parent.mkdir()
    earlier.write_text(one.replace('"id": "', '"id": "other'))
    before, nodes = read_entries(kept), cast(Any, SimpleNamespace(experiment=experiment))
    for _ in range(2):
        assert Federation._ledger(nodes, "client_0", earlier.parent) == kept.resolve()
        assert len(read_entries(kept)) == len(before) + 1
