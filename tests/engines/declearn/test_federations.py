# SPDX-License-Identifier: Apache-2.0
"""Real federations of declearn: server and clients are processes, and so are their faults.

`test_network.py` shows what needs no sockets, `test_scripts.py` what users start.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation_runs import ADAPTIVE, N, Run, complete, running

from fedclip.engines.declearn.secagg import plan

pytestmark = pytest.mark.slow

WATCHFUL = "fedclip-websockets"
LONG: dict[str, Any] = {"run": {"rounds": 100_000}}


# -- one run of each protocol -------------------------------------------------------------------
PROTOCOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Its clients may be those of declearn's plain protocol.
    "watched": {"server_protocol": WATCHFUL},
    "masking": {"secagg": "masking", "protocol": WATCHFUL},
    "joye-libert": {"secagg": "joye-libert"},
    "grpc": {"protocol": "grpc"},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return complete(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("kind", list(PROTOCOLS)[1:])
def test_every_protocol_gives_the_same_model(kind: str, plain: Run, tmp_path: Path) -> None:
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


def test_two_of_three_clients_each_round_under_secure_aggregation(tmp_path: Path) -> None:
    sampler = {"strategy": "uniform", "n_samples": 2, "seed": 1}
    run = complete(tmp_path, secagg="masking", sampler=sampler)
    assert run.state()["round"] == 4
    assert "clipped-averaging: 2 updates" in run.said("server")


# -- one run with every fault -------------------------------------------------------------------
# Of each client but the first: its fault, from which message on, and the server's words.
FAULTS: list[tuple[list[Any], tuple[str, ...]]] = [
    (
        # One after the other: none of them is the end of a client.
        ["TrainReply", ["twice", "text for a tensor", "an error"], 2],
        (
            "the update of 'client_1' counts as zero",
            "client 'client_1' reports an error: the disk of site B is full",
            "a message of client 'client_1' that the server has not asked for",
        ),
    ),
    (["TrainReply", "no message", 2], ("'client_2' sent bytes that cannot be decoded",)),
    (["InitReply", "kill", 1], ("the connection of 'client_3' has ended; the run goes on",)),
    (
        ["TrainReply", "killed while it sends", 3],
        ("the connection of 'client_4' has ended; the run goes on",),
    ),
    (
        ["TrainReply", "breaks the handler", 3],
        ("the connection of client 'client_5' ends with an error: TypeError",),
    ),
    (["TrainReply", "late", 2], ("no answer from 'client_6' in 10 s; the run goes on without",)),
]


def test_a_run_goes_on_without_clients_and_names_each_fault(tmp_path: Path) -> None:
    run = complete_but(
        tmp_path,
        *(f"client_{i}" for i in range(2, 7)),
        clients=7,
        network={"heartbeat": 0.02, "kwargs": {"min_replies": 1, "patience": 10.0}},
        faults={str(i): fault for i, (fault, _) in enumerate(FAULTS, 1)},
        sampler={"strategy": "named-clients"},
        run={"rounds": 20},
    )
    assert run.state()["round"] == 20
    lines = [line for line in run.said("server").splitlines() if "fedclip:" in line]
    for i, (_, texts) in enumerate(FAULTS, 1):
        said = "\n".join(line for line in lines if f"'client_{i}'" in line)
        assert [text for text in texts if text not in said] == []
    assert not any("client_0" in line for line in lines)


def complete_but(folder: Path, *dead: str, **settings: Any) -> Run:
    """Return a run whose server has ended well, and so have all clients but those."""
    with running(folder, protocol=WATCHFUL, **settings) as run:
        for name in run.processes.keys() - {*dead}:
            assert run.ended(name) == 0, (name, run.said(name)[-3000:])
    return run


SHARED: dict[str, Any] = {
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


def test_a_client_that_sends_anything_ends_nothing(tmp_path: Path) -> None:
    """Over real sockets, from the first round on; honest clients are not even warned of."""
    rounds = 25
    run = complete(
        tmp_path,
        protocol=WATCHFUL,
        optim=SHARED,
        forger=1,
        seed=2,
        sampler={"strategy": "named-clients"},
        run={"rounds": rounds},
    )
    assert run.state()["round"] == rounds
    weights = run.result()["weights"]
    assert all(np.isfinite(w).all() for w in weights.values())
    # Each round moves the model by no more than its bound.
    assert np.linalg.norm(np.concatenate(list(weights.values()))) < rounds
    shared = next(s for name, s in run.result()["modules"] if name == "zscore-clip-server")
    # Two honest clients, six steps each.
    assert shared["groups"]["all"]["count"] >= 12
    lines = [line for line in run.said("server").splitlines() if "fedclip" in line]
    assert any("client_1" in line for line in lines)
    assert not any("client_0" in line or "client_2" in line for line in lines)


def test_a_round_without_any_evaluation_is_never_the_best(tmp_path: Path) -> None:
    """The run goes on, says so, and early stopping sees no progress in it."""
    run = complete_but(
        tmp_path,
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


# -- runs that end with an error ----------------------------------------------------------------
def failed(run: Run, *names: str) -> None:
    for name in names:
        assert run.ended(name) != 0, (name, run.said(name)[-3000:])


@pytest.mark.parametrize(
    ("number", "secagg", "why"),
    [
        (signal.SIGKILL, "masking", "the connection of 'client_1' has ended"),
        pytest.param(
            *(signal.SIGSTOP, None, "no answer from 'client_1' in 10 s"), marks=pytest.mark.soak
        ),
    ],
)
def test_a_client_that_is_killed_or_falls_silent(
    tmp_path: Path, number: int, secagg: str | None, why: str
) -> None:
    network = {"heartbeat": 0.02, "kwargs": {"patience": 10.0}}
    with running(tmp_path, protocol=WATCHFUL, network=network, secagg=secagg, **LONG) as run:
        run.signal("client_1", number)
        failed(run, "server", "client_0", "client_2")
    assert f"{why}, and the run cannot go on" in run.said("server")
    for name in ("client_0", "client_2"):
        assert f"the server has ended: {why}" in run.said(name)


def test_a_server_that_is_frozen(tmp_path: Path) -> None:
    """Its clients end; that of declearn's plain protocol would wait for ever."""
    settings: dict[str, Any] = {"client_network": {"kwargs": {"patience": 5.0}}, **LONG}
    with running(tmp_path, protocol=WATCHFUL, server_protocol="websockets", **settings) as run:
        run.signal("server", signal.SIGSTOP)
        failed(run, "client_0", "client_1", "client_2")
    for name in ("client_0", "client_1", "client_2"):
        assert "no message from the server in 5 s" in run.said(name)


@pytest.mark.soak
def test_an_interrupt_of_the_server_ends_everybody(tmp_path: Path) -> None:
    with running(tmp_path, protocol=WATCHFUL, **LONG) as run:
        run.signal("server", signal.SIGINT)
        failed(run, *run.processes)


@pytest.mark.soak
def test_an_error_is_logged_before_the_client_collects_the_end(tmp_path: Path) -> None:
    """Of a client that reports an error, and then never reads."""
    faults = {"1": ["TrainReply", "error, and never reads", 2]}
    with running(tmp_path, protocol=WATCHFUL, faults=faults) as run:
        failed(run, "server", "client_0", "client_2")
    assert "client 'client_1' reports an error: the disk of site B is full" in run.said("server")
    assert "does not collect that the run has ended" in run.said("server")


@pytest.mark.parametrize("clipval", [32.0, 256.0])
def test_no_mean_of_an_evaluation_is_of_clipped_counts(tmp_path: Path, clipval: float) -> None:
    """Sixty records count as 32 in a sum of that range: the mean was a wrong one."""
    settings: dict[str, Any] = {
        "protocol": WATCHFUL,
        "secagg": "masking",
        "secagg_settings": {"bitsize": 32, "clipval": clipval},
        "wanted": None,
        "run": {"rounds": 1, "evaluate": {"batch_size": 60}},
    }
    with running(tmp_path, **settings) as run:
        codes = run.wait()
    assert (0 in codes.values()) == (clipval == 256.0)
    said = "refused by fedclip: an evaluation is on more records than the range ±32 of secure"
    assert (said in run.said("server")) == (clipval == 32.0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optim": {**ADAPTIVE, "client_opt": 0.5}}, "'update-clip' is available to receive"),
        (
            {
                "optim": {
                    "client_opt": {"lrate": 0.5, "modules": [["sample-clip", {"max_norm": 0.5}]]},
                    "server_opt": {"lrate": 1.0},
                },
                "run": {"rounds": 3, "training": {"batch_size": 20, "n_steps": 4}, "privacy": None},
                "private": {},
            },
            "would not be private",
        ),
    ],
    ids=["no client module", "no privacy"],
)
def test_what_does_not_go_together_ends_the_run_with_a_reason(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with running(tmp_path, **settings) as run:
        codes = run.wait()
    assert codes["server"] != 0
    assert text in run.said("client_0"), run.said("client_0")[-3000:]
