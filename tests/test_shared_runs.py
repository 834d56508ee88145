# SPDX-License-Identifier: Apache-2.0
"""Shared statistics in real federations: server and clients are processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from federation_helpers import SHORT_BIPRIME
from federation_runs import complete, running

pytestmark = pytest.mark.slow

PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("zscore-clip", {"warmup": 10, "max_norm": None}),
    ("percentile-norm-clip", {"percentile": 80.0, "scope": "tensor"}),
    ("adaptive-clip", {"start_norm": 0.3}),
]
SCALE = [1.0, 3.0, 10.0]


def optim(client: list[Any] | None = None, server: list[Any] | None = None) -> dict[str, Any]:
    shared = [[name, {**config, "shared": True}] for name, config in PAIRS]
    counterparts = [
        [f"{name}-server", {key: value for key, value in config.items() if key != "max_norm"}]
        for name, config in PAIRS
    ]
    return {
        "client_opt": {"lrate": 0.5, "modules": client or shared},
        "server_opt": {"lrate": 1.0, "modules": server or counterparts},
    }


def states(folder: Path, **settings: Any) -> dict[str, Any]:
    return dict(complete(folder, optim=optim(), scale=SCALE, **settings).result()["modules"])


def test_the_same_state_in_cleartext_and_under_secure_aggregation(tmp_path: Path) -> None:
    clear = states(tmp_path / "clear")
    # The first norm of each client has nothing to be compared with, and is not learnt.
    assert clear["zscore-clip-server"]["groups"]["all"]["count"] == 3 * 6 * 4 - 3
    # The groups of a scope other than "global" are known from the second round on, in which
    # clients send what they have counted in the first as well.
    levels = clear["percentile-norm-clip-server"]["groups"]
    assert len(levels) == 2
    assert {group["count"] for group in levels.values()} == {3 * 6 * 4 - 3}
    assert all(group["level"] > 0 for group in levels.values())
    masked = states(tmp_path / "masked", secagg="masking")
    encrypted = states(tmp_path / "encrypted", secagg="joye-libert", biprime=SHORT_BIPRIME)
    for secure in (masked, encrypted):
        for name, wanted in clear.items():
            assert secure[name]["refused"] == 0
            assert secure[name]["version"] == wanted["version"]
            # What is counted adds up exactly; the model is quantised, and so the norms differ.
            for label, group in wanted["groups"].items():
                assert secure[name]["groups"][label] == pytest.approx(group, rel=1e-6), name


def test_pairs_that_do_not_match_end_with_a_sentence(tmp_path: Path) -> None:
    client = [["zscore-clip", {"shared": True, "decay": 0.5}]]
    sentence = "must agree on decay: the clients"
    with running(tmp_path, optim=optim(client, ["zscore-clip-server"])) as run:
        run.wait()
        for name in run.processes:
            assert sentence in run.said(name), (name, run.said(name)[-2000:])
