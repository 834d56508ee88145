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


# A sketch has hundreds of numbers, of which Joye-Libert with its own biprime encrypts some hundred
# a second.
FEW = (PAIRS[0], PAIRS[2])
SKETCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("percentile-norm-clip", {"percentile": 80.0}),
    ("auto-clip", {"max_norm": None}),
)
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


def test_the_same_sketches_under_joye_libert(tmp_path: Path) -> None:
    """The clippers with the most to encrypt, 1070 numbers a round; two rounds."""
    settings = {"optim": optim(pairs=SKETCHES), "run": {"rounds": 2}, "biprime": SHORT_BIPRIME}
    runs = [
        states(complete(tmp_path / str(kind), secagg=kind, **settings))
        for kind in (None, "joye-libert")
    ]
    for name, wanted in runs[0].items():
        state = runs[1][name]
        assert (state["refused"], state["version"]) == (0, 2)
        assert state["groups"]["all"]["count"] == 3 * 6 * 2 - 3
        assert state["groups"]["all"]["level"] > 0
        # Buckets are whole numbers: the sketches are equal.
        assert state["history"] == wanted["history"]
        assert state["groups"]["all"] == pytest.approx(wanted["groups"]["all"], rel=1e-6)


@pytest.mark.parametrize("secagg", [None, "masking", "joye-libert"])
def test_two_of_three_clients_each_round(tmp_path: Path, secagg: str | None) -> None:
    sampler = {"strategy": "uniform", "n_samples": 2, "seed": 1}
    settings = {"optim": optim(pairs=FEW), "sampler": sampler, "biprime": SHORT_BIPRIME}
    run = complete(tmp_path, secagg=secagg, **settings)
    state = states(run)["zscore-clip-server"]
    assert state["groups"]["all"]["count"] == 2 * 6 * 4 - 2
    assert state["version"] == 4


def test_a_server_that_is_restarted_goes_on(tmp_path: Path) -> None:
    first = complete(tmp_path / "first", optim=optim(), checkpoint="saved")
    saved = str(tmp_path / "first" / "saved")
    again = complete(tmp_path / "again", optim=optim(), restart=saved)
    before, after = states(first), states(again)
    for name in before:
        assert after[name]["version"] == 2 * before[name]["version"] + (
            # The groups are known already.
            name == "percentile-norm-clip-server"
        )
    counted = after["zscore-clip-server"]["groups"]["all"]["count"]
    # Clients that are new, where the state is known already, learn from their first norm on.
    assert counted == before["zscore-clip-server"]["groups"]["all"]["count"] + 3 * 6 * 4


def test_without_counterparts_it_runs_and_the_clients_say_so(tmp_path: Path) -> None:
    run = complete(tmp_path, optim=optim(server=["no-op"]))
    for i in range(3):
        said = run.said(f"client_{i}")
        assert said.count("zscore-clip has shared = true and has heard from no counterpart") == 1


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (["no-op"], "No module with name 'zscore-clip-shared' is available"),
        ([["zscore-clip", {"shared": True, "decay": 0.5}]], "must agree on decay: the clients"),
    ],
    ids=["no clipper", "other settings"],
)
def test_pairs_that_do_not_match_end_with_a_sentence(
    tmp_path: Path, client: list[Any], sentence: str
) -> None:
    with running(tmp_path, optim=optim(client, ["zscore-clip-server"])) as run:
        run.wait()
        for name in run.processes:
            assert sentence in run.said(name), (name, run.said(name)[-2000:])
