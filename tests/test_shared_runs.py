# SPDX-License-Identifier: Apache-2.0
"""Shared statistics in real federations: server and clients are processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from federation_runs import complete, running

pytestmark = pytest.mark.slow

PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("zscore-clip", {"warmup": 10, "max_norm": None}),
    ("percentile-norm-clip", {"percentile": 80.0, "scope": "tensor"}),
    ("adaptive-clip", {"start_norm": 0.3}),
]


# A sketch has hundreds of numbers, of which Joye-Libert with its own biprime encrypts some hundred
# a second.
FEW = (PAIRS[0], PAIRS[2])
SCALE = [1.0, 3.0, 10.0]


def optim(
    client: list[Any] | None = None,
    server: list[Any] | None = None,
    pairs: Any = PAIRS,
) -> dict[str, Any]:
    shared = [[name, {**config, "shared": True}] for name, config in pairs]
    counterparts = [
        [f"{name}-server", {key: value for key, value in config.items() if key != "max_norm"}]
        for name, config in pairs
    ]
    return {
        "client_opt": {"lrate": 0.5, "modules": shared if client is None else client},
        "server_opt": {"lrate": 1.0, "modules": counterparts if server is None else server},
    }


def states(run: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(run.result()["modules"])
    return found


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the states after runs in cleartext, by the number of pairs."""

    def run(pairs: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("clear")
        return states(complete(folder, optim=optim(pairs=pairs), scale=SCALE))

    return {len(pairs): run(pairs) for pairs in (PAIRS, FEW)}


def test_in_cleartext(clear: dict[int, dict[str, Any]]) -> None:
    state = clear[len(PAIRS)]
    # The first norm of each client has nothing to be compared with, and is not learnt.
    assert state["zscore-clip-server"]["groups"]["all"]["count"] == 3 * 6 * 4 - 3
    # The groups of a scope other than "global" are known from the second round on, in which
    # clients send what they have counted in the first as well.
    levels = state["percentile-norm-clip-server"]["groups"]
    assert len(levels) == 2
    assert {group["count"] for group in levels.values()} == {3 * 6 * 4 - 3}
    assert all(group["level"] > 0 for group in levels.values())


@pytest.mark.parametrize(("secagg", "pairs"), [("masking", PAIRS), ("joye-libert", FEW)])
def test_the_same_state_under_secure_aggregation(
    tmp_path: Path, secagg: str, pairs: Any, clear: dict[int, dict[str, Any]]
) -> None:
    secure = states(complete(tmp_path, secagg=secagg, optim=optim(pairs=pairs), scale=SCALE))
    for name, wanted in clear[len(pairs)].items():
        state = secure[name]
        assert state["refused"] == 0
        assert state["version"] == wanted["version"]
        # What is counted adds up exactly; the model is quantised, and so the norms differ.
        for label, group in wanted["groups"].items():
            assert state["groups"][label] == pytest.approx(group, rel=1e-6), name


def test_pairs_that_do_not_match_end_with_a_sentence(tmp_path: Path) -> None:
    client = [["zscore-clip", {"shared": True, "decay": 0.5}]]
    sentence = "must agree on decay: the clients"
    with running(tmp_path, optim=optim(client, ["zscore-clip-server"])) as run:
        run.wait()
        for name in run.processes:
            assert sentence in run.said(name), (name, run.said(name)[-2000:])
