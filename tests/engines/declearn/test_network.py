# SPDX-License-Identifier: Apache-2.0
"""The server that watches its clients: it ends, in words, and otherwise does what declearn's does.

All clients and the server are processes; who dies, falls silent or is interrupted is real.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from declearn.communication import NetworkServerConfig
from declearn.communication.api.backend.actions import Drop, Join
from declearn.messaging import Error, EvaluationReply, InitReply
from declearn.metrics._mean import MeanState
from declearn.version import VERSION
from federation_runs import PATIENCE, N, Run, complete, running

import fedclip  # noqa: F401  (registers the protocol)
from fedclip.engines.declearn import network
from fedclip.engines.declearn.quorum import Members

WATCHFUL = "fedclip-websockets"


def until(run: Run, text: str, name: str = "server") -> None:
    """Wait until a node has said something."""
    end = time.monotonic() + PATIENCE
    while text not in run.said(name):
        assert time.monotonic() < end, run.said(name)[-3000:]
        time.sleep(0.02)


def ended(run: Run, *names: str) -> None:
    """Wait until these nodes have ended, each with an error."""
    end = time.monotonic() + PATIENCE
    for name in names:
        process = run.processes[name]
        process.join(max(0.1, end - time.monotonic()))
        assert process.exitcode not in (None, 0), (name, run.said(name)[-3000:])


@pytest.mark.slow
def test_a_run_ends_as_with_declearns_own_server(tmp_path: Path) -> None:
    # Its clients may be those of declearn's plain protocol.
    watched = complete(tmp_path / "watched", server_protocol=WATCHFUL)
    plain = complete(tmp_path / "plain")
    assert watched.state() == plain.state()
    for name, weights in plain.result()["weights"].items():
        np.testing.assert_allclose(watched.result()["weights"][name], weights, rtol=1e-9)
    assert "has ended, and the run" not in watched.said("server")


def signalled(run: Run, name: str, number: int) -> None:
    """Send a signal to a node of a run that has begun."""
    until(run, "Initiating training round 2")
    pid = run.processes[name].pid
    assert pid is not None
    os.kill(pid, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "secagg", "why"),
    [
        (signal.SIGKILL, "masking", "the connection of 'client_1' has ended"),
        (signal.SIGSTOP, None, "no answer from 'client_1' in 10 s"),
    ],
)
def test_a_client_that_is_killed_or_falls_silent(
    tmp_path: Path, number: int, secagg: str | None, why: str
) -> None:
    network = {"heartbeat": 0.02, "kwargs": {"patience": 10.0}}
    settings: dict[str, Any] = {"network": network, "secagg": secagg, "run": {"rounds": 100_000}}
    with running(tmp_path, protocol=WATCHFUL, **settings) as run:
        signalled(run, "client_1", number)
        ended(run, "server", "client_0", "client_2")
    assert f"{why}, and the run can not go on" in run.said("server")
    for name in ("client_0", "client_2"):
        assert f"the server has ended: {why}" in run.said(name)


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


@pytest.mark.slow
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
    ours = [line for line in run.said("server").splitlines() if "fedclip" in line]
    assert any("client_1" in line for line in ours)
    assert not any("client_0" in line or "client_2" in line for line in ours)


@pytest.mark.slow
def test_an_interrupt_of_the_server_ends_everybody(tmp_path: Path) -> None:
    with running(tmp_path, protocol=WATCHFUL, run={"rounds": 100_000}) as run:
        signalled(run, "server", signal.SIGINT)
        ended(run, *run.processes)
    assert len(run.processes) == N + 1


@pytest.mark.filterwarnings("ignore:Argument 'logger'")
def test_no_two_clients_have_one_name(caplog: pytest.LogCaptureFixture) -> None:
    """declearn numbers clients that share a name, without a look at those that are there."""
    config = NetworkServerConfig(WATCHFUL, "127.0.0.1", 8765)
    handler = config.build_server().handler
    handler.open_clients_registration()

    async def join() -> list[str]:
        names = ["x", "x.2", "x", "y"]
        joins = [Join(name, VERSION) for name in names]
        found = [await handler._handle_join_request(j, i) for i, j in enumerate(joins)]
        return [type(answer).__name__ for answer in found]

    assert asyncio.run(join()) == ["Accept", "Accept", "Reject", "Accept"]
    assert handler.client_names == {"x", "x.2", "y"}
    assert "refused a client 'x', which would be taken for 'x.2'" in caplog.text


WRITTEN = "full\n2026-01-01 ERROR client 'b'\r\x1b[2J\u202e\x08"


@pytest.mark.filterwarnings("ignore:Argument 'logger'")
def test_what_a_client_writes_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it move the cursor of who reads it."""
    server: Any = NetworkServerConfig(WATCHFUL, "127.0.0.1", 8765).build_server()
    handler = server.handler
    handler.open_clients_registration()
    odd = EvaluationReply(0.5, 1, 0.0, {"loss": MeanState(1.0, np.full((9, 9), 0.5))})
    reply = InitReply().serialize()
    head = reply[: 1 + reply[0]]

    async def speak() -> None:
        await handler._handle_join_request(Join("a", VERSION + WRITTEN), 0)
        await handler._handle_join_request(Join("b" + WRITTEN, VERSION), 1)
        await handler._handle_join_request(Join("a", VERSION), 2)
        await handler._handle_join_request(Join("z", "0.1" + WRITTEN), 3)
        await handler._handle_drop_request(Drop(WRITTEN), 2)

    with caplog.at_level(logging.INFO):
        asyncio.run(speak())
        server._read("a", Error(WRITTEN).serialize())
        server._evaluations({"a": odd})
        for content in (head + msgpack.packb({WRITTEN: 1}), WRITTEN.encode()):
            with pytest.raises(ValueError, match="can not be decoded") as caught:
                server._read("a", content)
            assert str(caught.value).isprintable()
    assert "reports an error: full 2026-01-01 ERROR client 'b' [2J" in caplog.text
    assert "dropped with reason: 'full 2026-01-01" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.filterwarnings("ignore:Argument 'logger'")
def test_patience_of_a_server_whose_heart_beats_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NetworkServerConfig(
        WATCHFUL, "127.0.0.1", 8765, heartbeat=30.0, kwargs={"patience": 60.0}
    )
    server: Any = config.build_server()
    server.members = Members({"a"})
    server.handler.registered_clients[0] = "a"
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(network.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(network.asyncio, "sleep", sleep)
    coroutine = server.wait_for_messages({"a"})
    with pytest.raises(RuntimeError, match="no answer from 'a' in 60 s"):
        coroutine.send(None)
    assert 60.0 <= now[0] <= 90.0
