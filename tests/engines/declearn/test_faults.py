# SPDX-License-Identifier: Apache-2.0
"""No fault without a name in the server's log; a run goes on without clients, where it is asked to.

Servers and clients are declearn's, over websockets, each a process; faults are real.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.declearn.test_network import WATCHFUL, ended, signalled, until
from federation_runs import ADAPTIVE, Run, running

pytestmark = pytest.mark.slow

QUORUM: dict[str, Any] = {"heartbeat": 0.02, "kwargs": {"min_replies": 1, "patience": 60.0}}


def survived(folder: Path, *dead: str, **settings: Any) -> Run:
    """Return a run whose server has ended well, and so have all clients but those."""
    with running(folder, protocol=WATCHFUL, **{"network": QUORUM, **settings}) as run:
        for name, process in run.processes.items():
            if name not in dead:
                process.join(600.0)
                assert process.exitcode == 0, (name, run.said(name)[-3000:])
    return run


def failed(folder: Path, *dead: str, **settings: Any) -> Run:
    """Return a run that has ended with an error, everywhere but on those clients."""
    with running(folder, protocol=WATCHFUL, **settings) as run:
        ended(run, *(name for name in run.processes if name not in dead))
    return run


def told(run: Run, name: str) -> str:
    """Return what the server's log says of a client, under fedclip's name."""
    lines = [line for line in run.said("server").splitlines() if "fedclip:" in line]
    return "\n".join(line for line in lines if repr(name) in line)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        # One after the other: none of them is the end of a client.
        (
            ["twice", "text for a tensor", "an error"],
            [
                "the update of 'client_1' counts as zero",
                "client 'client_1' reports an error: the disk of site B is full",
                "left out a message of client 'client_1' that nobody has asked for",
            ],
        ),
        ("no message", ['sent what can not be decoded (KeyError: "No registered Message type']),
        ("another type", ["sent InitReply in the place of TrainReply"]),
        ("killed while it sends", ["the connection of 'client_1' has ended; the run goes on"]),
        ("breaks the handler", ["connection of client 'client_1' ends with an error: TypeError"]),
    ],
    ids=str,
)
def test_a_round_goes_on_without_a_client(tmp_path: Path, what: Any, said: list[str]) -> None:
    run = survived(tmp_path, "client_1", faults={"1": ["TrainReply", what, 2]})
    assert [text for text in said if text not in told(run, "client_1")] == []
    assert run.state()["round"] == 4
    assert "client_0" not in told(run, "client_0")


def test_a_client_that_answers_too_late_is_gone(tmp_path: Path) -> None:
    network = {"heartbeat": 0.02, "kwargs": {"min_replies": 2, "patience": 10.0}}
    faults = {"1": ["TrainReply", "late", 2]}
    run = survived(tmp_path, "client_1", network=network, faults=faults, run={"rounds": 20})
    assert "no answer from 'client_1' in 10 s; the run goes on without it" in told(run, "client_1")
    assert run.state()["round"] == 20


def test_two_clients_fail_at_once_and_too_few_are_left(tmp_path: Path) -> None:
    network = {"heartbeat": 0.02, "kwargs": {"min_replies": 2}}
    faults = {"1": ["TrainReply", "no message", 2], "2": ["TrainReply", "kill", 2]}
    run = failed(tmp_path, network=network, faults=faults)
    (said,) = re.findall("fedclip:ERROR: the run has ended: (.*)", run.said("server"))
    assert said.startswith("1 of 3 clients have replied, and min_replies = 2: ")
    assert "client 'client_1' sent what can not be decoded" in said
    assert "the connection of 'client_2' has ended" in said
    assert said.endswith("; the run can not go on")
    assert "the server has ended: 1 of 3 clients have replied" in run.said("client_0")


def test_before_the_first_round(tmp_path: Path) -> None:
    run = survived(tmp_path, "client_1", faults={"1": ["InitReply", "kill", 1]})
    assert "client_1" in told(run, "client_1")
    assert run.state()["round"] == 4


def test_without_a_quorum_the_run_ends_and_names_the_client(tmp_path: Path) -> None:
    run = failed(tmp_path, faults={"1": ["InitReply", "more fields", 1]})
    assert "the run has ended: client 'client_1' sent what can" in told(run, "client_1")
    assert "the server has ended: client 'client_1' sent what" in run.said("client_0")


def test_privacy_is_charged_and_averages_divided_as_planned(tmp_path: Path) -> None:
    noise: dict[str, Any] = {"noise_multiplier": 1.0, "expected_clients": 3, "start_norm": 0.2}
    noise |= {"learning_rate": 0.0, "generator": "insecure", "seed": 1}
    server = {"lrate": 1.0, "modules": [["update-clip-server", noise]]}
    # Clients send zeros, so that the model is the sum of the noise.
    client = {"lrate": 0.0, "modules": ["update-clip-client"]}
    optim = {**ADAPTIVE, "server_opt": server, "client_opt": client}
    run = survived(
        tmp_path / "two", "client_1", optim=optim, faults={"1": ["TrainReply", "kill", 2]}
    )
    assert "clipped-averaging: 2 updates" in run.said("server")
    whole = survived(tmp_path / "three", optim=optim)
    assert run.state()["spent"] == whole.state()["spent"]
    assert run.result()["weights"] == whole.result()["weights"]
    assert any(np.any(values) for values in whole.result()["weights"].values())
    assert run.state()["round"] == 4


def test_a_sampler_does_not_choose_a_client_that_has_left(tmp_path: Path) -> None:
    """A round of one client would end the run if it were the one that has left."""
    sampler = {"strategy": "named-clients", "sampler": {"strategy": "uniform", "n_samples": 1}}
    faults = {"1": ["InitReply", "kill", 1]}
    run = survived(tmp_path, "client_1", sampler=sampler, faults=faults, run={"rounds": 10})
    assert run.state()["round"] == 10


def test_a_round_without_any_evaluation_is_never_the_best(tmp_path: Path) -> None:
    """The run goes on, says so, and early stopping sees no progress in it."""
    run = survived(
        tmp_path,
        network={"heartbeat": 0.02},
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
    assert len(losses) == 5
    assert [np.isfinite(loss) for loss in losses] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"secagg": "masking"}, "min_replies does not go with secure aggregation"),
        ({"network": {"kwargs": {"min_replies": 4}}}, "min_replies = 4, and 3 clients have"),
    ],
)
def test_a_quorum_that_can_not_be_is_refused_before_the_first_step(
    tmp_path: Path, settings: Any, why: str
) -> None:
    run = failed(tmp_path, **{"network": QUORUM, **settings})
    assert why in run.said("server")
    assert f"the server has ended: {why}" in run.said("client_0")
    assert "Initiating training round" not in run.said("server")


def test_a_server_that_is_frozen(tmp_path: Path) -> None:
    """Clients end by themselves; that of declearn's plain protocol would wait for ever."""
    settings: dict[str, Any] = {"client_network": {"kwargs": {"patience": 15.0}}}
    settings |= {"server_protocol": "websockets", "run": {"rounds": 100_000}}
    with running(tmp_path, protocol=WATCHFUL, **settings) as run:
        signalled(run, "server", signal.SIGSTOP)
        ended(run, "client_0", "client_1", "client_2")
    for name in ("client_0", "client_1", "client_2"):
        assert "no message from the server in 15 s" in run.said(name)


def test_a_name_that_no_file_can_have_does_not_join(tmp_path: Path) -> None:
    with running(tmp_path, protocol=WATCHFUL, names={"1": "a/b"}) as run:
        until(run, "refused a client whose name no file can have")


def test_who_left_does_not_come_back(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": {"rounds": 100_000}, "network": QUORUM}
    with running(tmp_path, protocol=WATCHFUL, **settings) as run:
        signalled(run, "client_1", signal.SIGKILL)
        until(run, "the connection of 'client_1' has ended; the run goes on without it")
        run._start("client_1")
        until(run, "refused 'client_1': registration is over, for those that have left too")
        until(run, "Registration was rejected", "client_1")


def test_secure_aggregation_has_no_dropouts_and_names_who_left(tmp_path: Path) -> None:
    faults = {"1": ["MaskingSecaggSetupReply", "no message", 1]}
    run = failed(tmp_path, secagg="masking", faults=faults)
    assert "client_1" in told(run, "client_1")


def test_an_error_is_logged_before_the_client_collects_the_end(tmp_path: Path) -> None:
    """Of a client that reports an error, and then never reads."""
    faults = {"1": ["TrainReply", "error, and never reads", 2]}
    run = failed(tmp_path, "client_1", network={"heartbeat": 0.02}, faults=faults)
    assert "client 'client_1' reports an error: the disk of site B is full" in run.said("server")
    assert "does not collect that the run has ended" in told(run, "client_1")


def test_all_clients_lack_fedclip(tmp_path: Path) -> None:
    """Each ends while it decodes the server's request."""
    faults = {str(i): ["InitReply", "end", 1] for i in range(3)}
    run = failed(tmp_path, faults=faults)
    assert "and the run can not go on without it: its log says why; a client" in run.said("server")
    assert "The clients set is empty" not in run.said("server")
