# SPDX-License-Identifier: Apache-2.0
"""The watchful server on serialized messages, without sockets; `test_federations.py` has those."""

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from declearn import messaging
from declearn.aggregator import AveragingAggregator, ModelUpdates, SumAggregator
from declearn.communication import NetworkClientConfig, NetworkServerConfig
from declearn.communication.api.backend.actions import Drop, Join
from declearn.messaging import CancelTraining, Error, EvaluationReply, InitReply, TrainReply
from declearn.metrics._mean import MeanState
from declearn.model.sklearn import NumpyVector
from declearn.version import VERSION
from federation_faults import content

import fedclip  # noqa: F401  (registers the protocol)
from fedclip.engines.declearn import network
from fedclip.engines.declearn.context import ROUND, change
from fedclip.engines.declearn.members import Members

pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger'")

WATCHFUL = "fedclip-websockets"
INIT = messaging.InitRequest.__new__(messaging.InitRequest)
TRAIN = messaging.TrainRequest(round_i=1, weights=None, aux_var={}, batches={"batch_size": 1})
GONE = "the connection of {client} has ended"


def built(**settings: Any) -> Any:
    config = NetworkServerConfig(WATCHFUL, "127.0.0.1", 8765, heartbeat=0.01, **settings)
    return config.build_server()


def serving(names: str = "abc", **kwargs: Any) -> Any:
    """Return a server with registered clients, which are never connected."""
    server = built(kwargs=kwargs)
    server.handler.registered_clients |= {name: name for name in names}
    server.members = Members(names, server.min_replies)
    return server


def reply(kind: type = TrainReply) -> Any:
    if kind is InitReply:
        return InitReply()
    updates = ModelUpdates(NumpyVector({"w": np.ones(2)}), 1)
    return TrainReply(n_epoch=1, n_steps=1, t_spent=0.0, updates=updates, aux_var={})


def heard(server: Any, asked: Any, faults: Mapping[str, str]) -> set[str]:
    """Return whose replies a server takes, if some clients reply with a fault, or "nothing"."""
    kind = InitReply if asked is INIT else TrainReply
    server._asked = dict.fromkeys(server.client_names, asked)
    server.handler.incoming_messages |= {
        name: content(faults.get(name, ""), reply(kind))
        for name in server.client_names
        if faults.get(name) != "nothing"
    }
    return {*asyncio.run(server.wait_for_messages(server.client_names))}


BYTES = "client 'b' sent bytes that cannot be decoded"
FAULTS = [
    ("no message", TRAIN, f'{BYTES} (KeyError: "No registered Message type'),
    ("half a message", TRAIN, BYTES),
    ("nested", TRAIN, BYTES),
    ("more fields", INIT, BYTES),
    ("another type", TRAIN, "client 'b' sent InitReply instead of TrainReply"),
    ("another type", INIT, "client 'b' sent EvaluationReply instead of InitReply"),
]


@pytest.mark.parametrize(("what", "asked", "said"), FAULTS)
def test_a_fault_has_the_name_of_its_client(what: str, asked: Any, said: str, caplog: Any) -> None:
    server = serving(min_replies=1)
    assert heard(server, asked, {"b": what}) == {"a", "c"}
    assert said in caplog.text
    assert not any(other in caplog.text for other in ("'a'", "'c'"))
    # It has left, and gets the reason if it is connected.
    assert server.client_names == {"a", "c"}
    assert b"the server goes on without 'b'" in server.handler.outgoing_messages["b"]
    # Without min_replies, the run ends.
    with pytest.raises(RuntimeError, match="the run cannot go on without it") as caught:
        heard(serving(), asked, {"b": what})
    assert said in str(caught.value)


def test_an_error_in_training_costs_a_round_and_before_it_the_run(caplog: Any) -> None:
    server = serving(min_replies=1)
    assert heard(server, TRAIN, {"b": "an error"}) == {"a", "c"}
    assert "client 'b' reports an error: the disk of site B is full" in caplog.text
    assert heard(server, TRAIN, {}) == {"a", "b", "c"}
    assert heard(server, INIT, {"b": "an error"}) == {"a", "c"}
    assert server.client_names == {"a", "c"}
    # declearn ends the run itself.
    assert heard(serving(), TRAIN, {"b": "an error"}) == {"a", "b", "c"}


def test_too_few_replies_end_the_run_and_name_all_that_failed() -> None:
    server = serving(min_replies=2)
    server._leave("c", GONE)
    with pytest.raises(RuntimeError) as caught:
        heard(server, TRAIN, {"b": "no message"})
    said = str(caught.value)
    assert said.startswith("1 of 2 clients have replied, and min_replies = 2: ")
    assert BYTES in said
    assert said.endswith("the connection of 'c' has ended; the run cannot go on")


def test_clients_that_lack_fedclip_leave_before_they_are_asked() -> None:
    server = serving()
    for name in "abc":
        server._leave(name, GONE)
    with pytest.raises(RuntimeError, match="cannot go on without it: see its log; a client that"):
        asyncio.run(server.send_message(INIT, "a"))


def begin(server: Any, **request: Any) -> None:
    aggregator = AveragingAggregator()
    usual = {"secagg": None, "metrics": [], "fairness": False, "aggrg": aggregator}
    server._begin(SimpleNamespace(**{**usual, **request}))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"secagg": {"secagg_type": "masking"}}, "does not go with secure aggregation"),
        ({"fairness": True}, "does not go with fairness"),
        ({"aggrg": SumAggregator()}, "does not go with the aggregator 'sum'"),
    ],
)
def test_a_quorum_where_all_replies_are_needed_is_refused(request_: Any, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"min_replies {said}"):
        begin(serving(min_replies=1), **request_)
    begin(serving(), **request_)
    begin(serving(min_replies=1))
    change(evaluations=None)


async def registered(server: Any, *joins: Join) -> list[str]:
    """Let clients join while a server waits for three; return its answers."""
    waiting = asyncio.create_task(server.wait_for_clients(3, 3, timeout=5.0))
    await asyncio.sleep(0)
    answers = [await server.handler._handle_join_request(j, i) for i, j in enumerate(joins)]
    await waiting
    return [type(answer).__name__ for answer in answers]


def test_more_replies_than_clients_are_refused_when_they_have_registered() -> None:
    joins = [Join(name, VERSION) for name in "abc"]
    with pytest.raises(RuntimeError, match="min_replies = 4, and 3 clients have registered: lower"):
        asyncio.run(registered(built(kwargs={"min_replies": 4}), *joins))


@pytest.mark.parametrize("name", ["a/b", "a\\b", "", "a\n", "x" * 201, 3])
def test_who_joins_has_a_name_for_a_file_and_nobody_joins_late(name: Any, caplog: Any) -> None:
    # declearn numbers clients that share a name, without a look at those that are there.
    names, server = ["x", name, "x.2", "x", "y"], built()
    answers = asyncio.run(registered(server, *(Join(name, VERSION) for name in names)))
    assert answers == ["Accept", "Reject", "Accept", "Reject", "Accept"]
    assert server.handler.client_names == {"x", "x.2", "y"}
    assert "refused a client whose name no file can have" in caplog.text
    assert "refused a client 'x', which would be taken for 'x.2'" in caplog.text
    asyncio.run(server.handler._handle_join_request(Join("x", VERSION), 9))
    assert "refused 'x': registration is over, also for clients that have left" in caplog.text


def test_a_failed_run_gives_each_client_the_reason(caplog: Any) -> None:
    server, sent = serving(), dict[str, Any]()

    async def stop() -> None:
        sent.update(server.handler.outgoing_messages)

    server.stop = stop
    fault = RuntimeError("declearn's own text")
    fault.__cause__ = ValueError("client 'b' is at fault")
    asyncio.run(server.__aexit__(RuntimeError, fault, None))
    for message in sent.values():
        cancel = messaging.SerializedMessage.from_bin_message(message).deserialize()
        assert isinstance(cancel, CancelTraining)
        reason = "the server has ended: declearn's own text: client 'b' is at fault"
        assert cancel.reason == reason
    assert sent.keys() == {*"abc"}
    assert "the run has ended: declearn's own text" in caplog.text


def test_a_client_that_does_not_collect_the_end_is_named(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(network, "_GRACE", 0.05)
    server = serving()
    asyncio.run(server.send_message(Error("the end"), "b"))
    assert "client 'b' does not collect that the run has ended" in caplog.text
    assert server.client_names == {"a", "c"}
    # Nor does it collect a request, in time.
    quick = serving(patience=0.05)
    with pytest.raises(RuntimeError, match=r"no answer from 'b' in 0.05 s, .*raise patience in"):
        asyncio.run(quick.send_message(TRAIN, "b"))


WRITTEN = "full\n2026-01-01 ERROR client 'b'\r\x1b[2J\u202e\x08"


def test_what_a_client_writes_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it move the cursor of who reads it."""
    server = built()
    handler = server.handler
    handler.open_clients_registration()
    odd = EvaluationReply(0.5, 1, 0.0, {"loss": MeanState(1.0, np.full((9, 9), 0.5))})
    head = (message := InitReply().serialize())[: 1 + message[0]]

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
        for data in (head + msgpack.packb({WRITTEN: 1}), WRITTEN.encode()):
            with pytest.raises(ValueError, match="cannot be decoded") as caught:
                server._read("a", data)
            assert str(caught.value).isprintable()
    assert "reports an error: full 2026-01-01 ERROR client 'b' [2J" in caplog.text
    assert "dropped with reason: 'full 2026-01-01" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_patience_of_a_server_whose_heart_beats_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    server = serving("a", patience=60.0)
    server.handler.heartbeat = 30.0
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(network.asyncio, "sleep", sleep)
    with pytest.raises(RuntimeError, match="no answer from 'a' in 60 s"):
        server.wait_for_messages({"a"}).send(None)
    assert 60.0 <= now[0] <= 90.0
    # Of a client.
    for kwargs, seconds in (({}, 10800.0), ({"patience": 5.0}, 5.0)):
        config: Any = NetworkClientConfig(WATCHFUL, "ws://127.0.0.1:1", "a", kwargs=kwargs)
        assert config.build_client().patience == seconds


def test_a_server_that_stops_forgets_its_run() -> None:
    async def run() -> None:
        server = serving()
        begin(server)
        assert ROUND.get().evaluations is not None
        await server.stop()
        assert ROUND.get().evaluations is ROUND.get().members is None

    asyncio.run(run())
