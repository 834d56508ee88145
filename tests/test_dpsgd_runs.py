# SPDX-License-Identifier: Apache-2.0
"""DP-SGD in real federations: server and clients in processes, over websockets."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from federation_runs import PATIENCE, N, complete, running
from helpers import hiding

pytestmark = pytest.mark.slow

OPTIM: dict[str, Any] = {
    "client_opt": {"lrate": 0.5, "modules": [["sample-clip", {"max_norm": 0.5}]]},
    "server_opt": {"lrate": 1.0},
}
PRIVACY: dict[str, Any] = {"budget": [3.0, 1e-3], "sclip_norm": 0.5, "accountant": "rdp"}


def settings(**more: Any) -> dict[str, Any]:
    """Return what every run has: three clients of sixty records each."""
    run = {"rounds": 3, "training": {"batch_size": 20, "n_steps": 4}, "privacy": PRIVACY}
    return {"optim": OPTIM, "run": {**run, **more.pop("run", {})}, **more}


def test_three_private_clients_train_within_their_budget(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    run = complete(tmp_path, **settings(private={"max_budget": [2.0, 1e-3]}))
    for i in range(N):
        spent, delta = json.loads((tmp_path / f"client_{i}.json").read_text())["spent"]
        # The client's own budget holds, not the server's larger one.
        assert 1.9 < spent <= 2.0
        assert delta == 1e-3
    (weights,) = (w for name, w in run.result()["weights"].items() if "coef" in name)
    assert any(weights)


def test_a_private_client_takes_no_part_in_a_run_without_privacy(tmp_path: Path) -> None:
    public = settings(private={}, run={"privacy": None})
    with running(tmp_path, **public) as run:
        assert run.wait()["server"] != 0
    assert "would not be private" in run.said("client_0")


def test_a_run_does_not_look_private_that_is_not(tmp_path: Path) -> None:
    with running(tmp_path, **settings(run={"privacy": None})) as run:
        assert run.wait()["server"] != 0
    assert "PrivateFederatedClient" in run.said("client_0") + run.said("server")


QUICKRUN = Path(__file__).parents[1] / "examples" / "quickrun"


def test_quickrun_starts_private_clients_if_records_are_to_be_clipped(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    folder = tmp_path / "quickrun"
    shutil.copytree(QUICKRUN, folder, ignore=shutil.ignore_patterns("data", "result"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    config = folder / "config.toml"
    text = config.read_text().replace("port = 8765", f"port = {port}")
    text = text.replace(
        "rounds = 5", "rounds = 2\nprivacy = {budget = [3.0, 1e-5], sclip_norm = 0.5}"
    )
    config.write_text(text.replace('["zscore-clip", { z_max = 2.0 }]', '"sample-clip"'))

    def call(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            # Opacus needs torch.
            env={**hiding("tensorflow", "jax", "haiku", "keras"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return str(done.stdout)

    call("prepare.py")
    said = call("-m", "fedclip", "quickrun", "config.toml")
    assert said.endswith("and what was spent:  fedclip privacy spent result\n")
    found = json.loads(call("-m", "fedclip", "privacy", "spent", "result", "--json"))
    assert [one["where"] for one in found] == [f"client_{i}/privacy_spent.json" for i in range(3)]
    assert all(2.9 < one["epsilons"]["pld"] <= 3.0 for one in found)
