"""Update clipping in real federations: server and clients are processes of their own."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation_runs import ADAPTIVE, N, complete, running

from fedclip.engines.declearn.restart import load_round
from fedclip.errors import StateError
from fedclip.privacy.accounting import state_of
from fedclip.privacy.ledger import read_entries, total

pytestmark = pytest.mark.slow


def server_with(**config: Any) -> dict[str, Any]:
    modules = [["update-clip-server", {"start_norm": 0.2, **config}]]
    return {**ADAPTIVE, "server_opt": {"lrate": 1.0, "modules": modules}}


def test_a_spent_budget_ends_in_a_sentence_on_the_server_and_on_each_client(
    tmp_path: Path,
) -> None:
    optim = server_with(noise_multiplier=3.0, expected_clients=N, max_epsilon=2.2)
    with running(tmp_path, optim=optim) as run:
        codes = run.wait()
    assert 0 not in codes.values()
    for name in codes:
        text = "the privacy budget is spent; epsilon is"
        assert text in run.said(name), run.said(name)[-3000:]


def killed(folder: Path, rounds: int, **settings: Any) -> None:
    """Kill all processes of a run after so many rounds."""
    with running(folder, **settings, checkpoint="saved", held=rounds + 1) as run:
        run.until("held")
    modules = load_round(folder / "saved").optimizer.get_state()["modules"]
    assert dict(modules)["update-clip-server"]["round"] == rounds


NOISED = server_with(noise_multiplier=2.0, expected_clients=N, generator="insecure", seed=5)
EVERY: dict[str, Any] = {"evaluate": {"batch_size": 60, "frequency": 1}}


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


def test_all_killed_and_restarted_go_on_as_if_uninterrupted(tmp_path: Path) -> None:
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
    settings: dict[str, Any] = {"optim": optim, "run": {**EVERY, "rounds": 5}}
    killed(tmp_path / "first", 3, **settings)
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
        after, wanted = (
            json.loads((run.folder / f"client_{i}.json").read_text()) for run in (again, whole)
        )
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
