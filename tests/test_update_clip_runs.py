"""Update clipping in real federations: server and clients are processes of their own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation_runs import ADAPTIVE, PATIENCE, N, complete, running

from fedclip.federation.restart import load_round
from fedclip.federation.update.secagg import plan

pytestmark = pytest.mark.slow


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
BESIDE_NOISE = server_with(noise_multiplier=1.0, expected_clients=N)
BESIDE_NOISE["server_opt"]["modules"].append("zscore-clip-server")
BESIDE_NOISE["client_opt"] = {
    "lrate": 0.5,
    "modules": [["zscore-clip", {"shared": True}], "update-clip-client"],
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
            BESIDE_NOISE, "zscore-clip-server sends what it has learnt", id="beside noise"
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


def killed(folder: Path, rounds: int, **settings: Any) -> int:
    """Kill all processes of a run after so many rounds or more, and return how many are saved."""
    with running(folder, **{**settings, "checkpoint": "saved"}) as run:
        end = time.monotonic() + PATIENCE
        while f"Initiating training round {rounds + 1}" not in run.said("server"):
            assert time.monotonic() < end, run.said("server")[-3000:]
            assert run.running("server"), run.said("server")[-3000:]
            time.sleep(0.02)
    # A checkpoint takes the place of one of the same second, so that the last one is to be asked.
    modules = load_round(folder / "saved").optimizer.get_state()["modules"]
    saved = next(state["round"] for name, state in modules if name == "update-clip-server")
    assert saved >= rounds
    return int(saved)


NOISED = server_with(noise_multiplier=2.0, expected_clients=N, generator="insecure", seed=5)
EVERY: dict[str, Any] = {"evaluate": {"batch_size": 60, "frequency": 1}}


def test_kill_and_restart_of_the_server_continues_bound_and_budget(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optim": NOISED, "run": {**EVERY, "rounds": 1000}}
    rounds = killed(tmp_path / "first", 2, **settings)
    saved = str(tmp_path / "first" / "saved")
    settings["run"]["rounds"] = 3
    again = complete(tmp_path / "second", **settings, restart=saved)
    settings["run"]["rounds"] = rounds + 3
    whole = complete(tmp_path / "whole", **settings)
    assert again.state() == whole.state()
    assert again.state()["spent"] == [[2.0, rounds + 3]]
    for name, weights in whole.result()["weights"].items():
        np.testing.assert_allclose(again.result()["weights"][name], weights, rtol=1e-12)


def assert_same(found: Any, wanted: Any) -> None:
    """Compare states, to within rounding: declearn adds up replies in any order."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    else:
        assert found == wanted


SHARED: list[tuple[str, dict[str, Any]]] = [
    ("zscore-clip", {"max_norm": None}),
    ("percentile-norm-clip", {"scope": "tensor"}),
    ("adaptive-clip", {"start_norm": 0.3}),
]
# A clipper with statistics of its own, and a module of declearn's that remembers.
OWN = ["ema-clip", ["momentum", {"beta": 0.5}]]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "and their own"])
def test_all_killed_and_restarted_go_on_as_if_uninterrupted(tmp_path: Path, own: bool) -> None:
    """Clients need their checkpoints for what is theirs; what is shared comes from the server."""
    shared = [[name, {**config, "shared": True}] for name, config in SHARED]
    counterparts = [
        [f"{name}-server", {key: value for key, value in config.items() if key != "max_norm"}]
        for name, config in SHARED
    ]
    optim: dict[str, Any] = {**NOISED, "client_opt": {"lrate": 0.5}}
    optim["client_opt"]["modules"] = [*shared, *(OWN if own else []), "update-clip-client"]
    name, config = NOISED["server_opt"]["modules"][0]
    noised = [name, {**config, "unnoised": [f"{name}-server" for name, _ in SHARED]}]
    optim["server_opt"] = {"lrate": 1.0, "modules": [noised, *counterparts]}
    # Rounds that take a second or so, in which no checkpoint is written.
    training = {"training": {"batch_size": 10, "n_epoch": 12}}
    settings: dict[str, Any] = {"optim": optim, "run": {**EVERY, **training, "rounds": 1000}}
    rounds = killed(tmp_path / "first", 2, **settings)
    saved = str(tmp_path / "first" / "saved")
    settings["run"]["rounds"] = 2
    restart = {"restart": saved, **({"client_restart": saved} if own else {})}
    again = complete(tmp_path / "again", **settings, **restart)
    settings["run"]["rounds"] = rounds + 2
    whole = complete(tmp_path / "whole", **settings)
    assert_same(again.result()["modules"], whole.result()["modules"])
    assert again.state()["spent"] == [[2.0, rounds + 2]]
    for name, weights in whole.result()["weights"].items():
        np.testing.assert_allclose(again.result()["weights"][name], weights, rtol=1e-9)
    for i in range(N):
        after, wanted = (
            json.loads((run.folder / f"client_{i}.json").read_text()) for run in (again, whole)
        )
        for name, state in wanted.items():
            # What else a clipper has counted for its reports is its own, too.
            keys = state if own else ("groups", "shared")
            for key in keys:
                assert_same(after[name][key], state[key])
        assert ("ema-clip" in wanted) == own


LIAR: dict[str, Any] = {
    "aggregator": "clipped-averaging",
    "client_opt": {
        "lrate": 0.5,
        "modules": [["zscore-clip", {"shared": True}], "update-clip-client"],
    },
    "server_opt": {
        "lrate": 1.0,
        "modules": ["zscore-clip-server", ["update-clip-server", {"start_norm": 0.2}]],
    },
}


def test_a_hostile_client_is_counted_and_named(tmp_path: Path) -> None:
    run = complete(tmp_path, optim=LIAR, liar=1, sampler={"strategy": "named-clients"})
    said = " ".join(run.said("server").split())
    assert "the update of 'client_1' counts as zero: it holds NaN" in said
    assert "no proper vote in 1 of 3 replies (of 'client_1')" in said
    assert "zscore-clip-server: left out what 1 of 3 messages say" in said
    assert "(1×: 'client_1')" in said
    ours = [line for line in run.said("server").splitlines() if "fedclip" in line]
    assert not any("client_0" in line or "client_2" in line for line in ours)
    assert all(np.isfinite(w).all() for w in run.result()["weights"].values())
