# SPDX-License-Identifier: Apache-2.0
"""Federations of declearn whose nodes are processes: what needs sockets and signals.

`test_update_clip_runs.py` has federations in one process, `test_scripts.py` what users start.
"""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation_runs import complete, running

pytestmark = pytest.mark.slow

WATCHFUL = "fedclip-websockets"


def test_grpc_gives_the_same_model(tmp_path: Path) -> None:
    with running(tmp_path / "grpc", protocol="grpc") as run:
        assert {run.ended(name) for name in run.names} == {0}
    same = complete(tmp_path / "same")
    assert run.state() == same.state()
    for name, weights in same.result()["weights"].items():
        np.testing.assert_allclose(run.result()["weights"][name], weights, rtol=1e-9)


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
    """Its clients are of declearn's plain protocol; one of them sends anything."""
    settings: dict[str, Any] = {
        "server_protocol": WATCHFUL,
        "clients": 7,
        "network": {"heartbeat": 0.02, "kwargs": {"min_replies": 1, "patience": 10.0}},
        "faults": {str(i): fault for i, (fault, _) in enumerate(FAULTS, 1)},
        "sampler": {"strategy": "named-clients"},
        "run": {"rounds": 20},
    }
    with running(tmp_path, **settings) as run:
        for name in ("server", "client_0", "client_1"):
            assert run.ended(name) == 0, (name, run.said(name)[-3000:])
    assert run.state()["round"] == 20
    lines = [line for line in run.said("server").splitlines() if "fedclip:" in line]
    for i, (_, texts) in enumerate(FAULTS, 1):
        said = "\n".join(line for line in lines if f"'client_{i}'" in line)
        assert [text for text in texts if text not in said] == []
    assert not any("client_0" in line for line in lines)


def test_a_server_that_is_frozen(tmp_path: Path) -> None:
    """Its clients end; that of declearn's plain protocol would wait for ever."""
    settings: Any = {"client_network": {"kwargs": {"patience": 5.0}}, "run": {"rounds": 100_000}}
    with running(tmp_path, protocol=WATCHFUL, server_protocol="websockets", **settings) as run:
        run.signal("server", signal.SIGSTOP)
        assert 0 not in {run.ended(name) for name in run.names[1:]}
    for name in run.names[1:]:
        assert "no message from the server in 5 s" in run.said(name)
