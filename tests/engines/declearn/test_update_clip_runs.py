# SPDX-License-Identifier: Apache-2.0
"""Federations of declearn in one process, on serialized messages: update clipping as it runs."""

import contextlib
import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation_runs import ADAPTIVE, N, Together, complete, running

from fedclip.engines.declearn.restart import load_round
from fedclip.engines.declearn.secagg import plan
from fedclip.errors import StateError
from fedclip.privacy.accounting import state_of
from fedclip.privacy.ledger import read_entries, total

pytestmark = pytest.mark.slow

WATCHFUL = "fedclip-websockets"
PROTOCOLS: dict[str, dict[str, Any]] = {
    # Its clients may be those of declearn's plain protocol.
    "watched": {"server_protocol": WATCHFUL},
    "masking": {"secagg": "masking", "protocol": WATCHFUL},
    "joye-libert": {"secagg": "joye-libert"},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return complete(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_every_protocol_gives_the_same_model(kind: str, plain: Together, tmp_path: Path) -> None:
    run = complete(tmp_path, **PROTOCOLS[kind])
    assert "clipped-averaging: 3 updates, 3 clipped, 0 zeroed" in plain.said("server")
    assert "update-clip-server: round 4" in plain.said("server")
    assert run.state() == plain.state()
    assert run.state()["bound"] != 0.2
    # Under secure aggregation, each round adds its error; training on them hardly amplifies it.
    secure = "secagg" in PROTOCOLS[kind]
    error = 40 * plan(1e4, N, 5, kind=kind, clipval=1e5).error if secure else 0.0
    for name, weights in plain.result()["weights"].items():
        other = run.result()["weights"][name]
        np.testing.assert_allclose(other, weights, rtol=0 if secure else 1e-9, atol=error)
    assert "has ended, and the run" not in run.said("server")


def test_a_round_without_any_evaluation_is_never_the_best(tmp_path: Path) -> None:
    """The run goes on, says so, and early stopping sees no progress in it."""
    run = complete(
        tmp_path,
        protocol=WATCHFUL,
        checkpoint="saved",
        metrics=["binary-classif"],
        run={
            "rounds": 9,
            "evaluate": {"batch_size": 60},
            "early_stop": {"tolerance": 0.0, "patience": 3, "relative": True},
        },
        faults={
            "0": ["EvaluationReply", ["loss NaN", "", "loss text", "loss text", "loss NaN"], 1],
            "1": ["EvaluationReply", ["loss NaN", "", "an error", "an error", "nested"], 1],
            "2": ["EvaluationReply", ["loss NaN", "", "no steps", "half a message", "loss NaN"], 1],
        },
    )
    said = run.said("server")
    assert said.count("no client has sent an evaluation that counts") == 4
    assert "Early stopping criterion reached" in said
    rows = (tmp_path / "saved" / "metrics.csv").read_text().splitlines()[1:]
    losses = [float(row.split(",")[-1]) for row in rows]
    assert [np.isfinite(loss) for loss in losses] == [False, True, False, False, False]


@pytest.mark.parametrize("clipval", [32.0, 256.0])
def test_no_mean_of_an_evaluation_is_of_clipped_counts(tmp_path: Path, clipval: float) -> None:
    """Sixty records count as 32 in a sum of that range: the mean was a wrong one."""
    settings: dict[str, Any] = {
        "protocol": WATCHFUL,
        "secagg": "masking",
        "secagg_settings": {"bitsize": 32, "clipval": clipval},
        "kind": "PersonalFederatedClient",
        "run": {"rounds": 1, "evaluate": {"batch_size": 60}},
    }
    run = Together(tmp_path, **settings)
    assert bool(run.errors) == (clipval == 32.0)
    said = "refused by fedclip: an evaluation is on more records than the range ±32 of secure"
    assert (said in run.said("server")) == (clipval == 32.0)


def server_with(**config: Any) -> dict[str, Any]:
    modules = [["update-clip-server", {"start_norm": 0.2, **config}]]
    return {**ADAPTIVE, "server_opt": {"lrate": 1.0, "modules": modules}}


def failed(folder: Path, rounds: int, **settings: Any) -> None:
    """Let a run fail after so many rounds, of which its checkpoints are left."""
    settings = {**settings, "checkpoint": "saved", "ends before": rounds + 1}
    assert "server" in Together(folder, **settings).errors
    modules = load_round(folder / "saved").optimizer.get_state()["modules"]
    assert dict(modules)["update-clip-server"]["round"] == rounds


NOISED = server_with(noise_multiplier=2.0, expected_clients=N, generator="insecure", seed=5)
EVERY: dict[str, Any] = {"evaluate": {"batch_size": 60, "frequency": 1}}


def leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Return what a state holds, by where it is."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(parts, dict):
        return {at: value}
    return {k: v for n, part in parts.items() for k, v in leaves(part, f"{at}/{n}").items()}


def assert_same(found: Any, wanted: Any) -> None:
    # declearn adds up replies in any order.
    near = {
        at: pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
        for at, value in leaves(wanted).items()
    }
    assert leaves(found) == near


SHARED: list[tuple[str, dict[str, Any]]] = [
    ("zscore-clip", {"max_norm": None}),
    ("percentile-norm-clip", {"scope": "tensor"}),
    ("adaptive-clip", {"start_norm": 0.3}),
]
# A clipper with statistics of its own, and a module of declearn's that remembers.
OWN = ["ema-clip", ["momentum", {"beta": 0.5}]]


def test_all_that_start_again_go_on_as_if_uninterrupted(tmp_path: Path) -> None:
    """Clients need their checkpoints for what is theirs; what is shared comes from the server."""
    shared = [[name, {**config, "shared": True}] for name, config in SHARED]
    counterparts = [
        [f"{name}-server", {key: value for key, value in config.items() if key != "max_norm"}]
        for name, config in SHARED
    ]
    optim: dict[str, Any] = {**NOISED, "client_opt": {"lrate": 0.5}}
    optim["client_opt"]["modules"] = [*shared, *OWN, "update-clip-client"]
    name, config = NOISED["server_opt"]["modules"][0]
    config = {**config, "unnoised": [f"{name}-server" for name, _ in SHARED]}
    noised = [name, {**config, "ledger": str(tmp_path / "ledger")}]
    optim["server_opt"] = {"lrate": 1.0, "modules": [noised, *counterparts]}
    settings: dict[str, Any] = {"optim": optim, "protocol": WATCHFUL}
    settings["run"] = {**EVERY, "rounds": 5}
    failed(tmp_path / "first", 3, **settings)
    noised[1] = {**config, "ledger": str(tmp_path / "other")}
    whole = complete(tmp_path / "whole", **settings)
    noised[1] = {**config, "ledger": str(tmp_path / "ledger")}
    saved = str(tmp_path / "first" / "saved")
    settings["run"]["rounds"] = 2
    again = complete(tmp_path / "again", **settings, restart=saved, client_restart=saved)
    of_again, of_whole = (dict(run.result()["modules"]) for run in (again, whole))
    of_again[name]["ledger"] = of_whole[name]["ledger"]
    assert_same(of_again, of_whole)
    assert again.state()["spent"] == [[2.0, 5]]
    for name, weights in whole.result()["weights"].items():
        np.testing.assert_allclose(again.result()["weights"][name], weights, rtol=1e-9)
    for i in range(N):
        files = (run.folder / f"client_{i}.json" for run in (again, whole))
        after, wanted = (json.loads(file.read_text()) for file in files)
        for name, state in wanted.items():
            assert_same(after[name], state)
        assert "ema-clip" in wanted


TURNS = {"separation": 2, "expected_clients": 2}
NOISES: dict[str, dict[str, Any]] = {
    "independent": {"expected_clients": N},
    "turns": TURNS,
    "banded": {**TURNS, "noise": "banded", "rounds": 6},
    "one by one": {**TURNS, "separation": 3, "expected_clients": 1},
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("seed", range(4))
def test_what_clients_were_asked_for_is_charged_wherever_the_server_dies(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """Killed at up to four random points, it goes on from the checkpoint that it finds."""
    config = {**NOISES[kind], "noise_multiplier": 2.0, "ledger": str(tmp_path / "ledger")}
    saved, asked = tmp_path / "saved", tmp_path / "asked"
    per_round = config["expected_clients"]
    turns = {"strategy": "round-robin", "per_round": per_round}
    settings: dict[str, Any] = {
        "optim": server_with(**config),
        "sampler": {"strategy": "named-clients", "sampler": turns if per_round < N else None},
        "checkpoint": str(saved),
        "asked": str(asked),
        "run": {**EVERY, "rounds": 3},
    }
    rng = random.Random(f"{kind} {seed}")
    for life in range(5):
        where: dict[str, Any] = {"killed": rng.randint(1, 50)} if life < 4 else {}
        with contextlib.suppress(StateError):
            load_round(saved)
            where["restart"] = str(saved)
        with running(tmp_path / f"life_{life}", **settings, **where) as run:
            code = run.ended("server")
        assert code == (-signal.SIGKILL if "killed" in where else 0), run.said("server")[-3000:]
        ledger = Path(config["ledger"])
        charged = [*read_entries(ledger).values()] if ledger.exists() else []
        rounds = [(entry.schedule, entry.round) for entry in charged]
        lines = [line.split() for line in asked.read_text().splitlines()] if asked.exists() else []
        # Each message repeats an entry, and nobody has had more turns than were charged.
        assert {(schedule, int(round_)) for _, schedule, round_ in lines} <= set(rounds)
        of_clients = Counter(name for name, *_ in lines)
        assert sum(r.steps for e in charged for r in e.spent) >= max(of_clients.values(), default=0)
    assert run.state()["spent"] == state_of(total(charged).spent)
