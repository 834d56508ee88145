# SPDX-License-Identifier: Apache-2.0
"""DP-SGD in real federations: server and clients in processes, over websockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from federation_runs import N, complete, running

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
