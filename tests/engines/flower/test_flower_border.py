# SPDX-License-Identifier: Apache-2.0
"""What passes between a SuperNode and its SuperLink, through flwr's own functions."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from flower_site import leaks, norm
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable import inflatable_object as objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from hostile.hostile.client_app import ATTACKS, NUMBER, SECRET, Arrays, record, trained
from hostile.hostile.server_app import MODEL, plain

from fedclip.engines.flower import UpdateClipMod
from fedclip.engines.flower.supernode import Border
from fedclip.site.gate import Gate
from fedclip.site.policy import Policy
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import bound_to, reply_from
from fedclip.updates.server import UpdateServer

PLAIN = Policy(max_norm=0.5, allow_metrics=["num-examples"])
IDS = itertools.count(1)


def asked(kind: str = "train", model: Arrays = MODEL, run: int = 1, **records: Any) -> Message:
    """Return a server's message, as the SuperLink hands it out."""
    metadata = Metadata(run, "", 1, 2, "", str(next(IDS)), 1e9, 1e9, kind)
    message = make_message(metadata, RecordDict({"arrays": record(model), **records}))
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


class Link:
    """The SuperLink's end of a connection: it hands out messages, and keeps what comes."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.objects: dict[str, Any] = {}
        self.left = b""
        self.durations: list[float] = []
        self.replies: list[Message] = []
        self.pull: Any = lambda _, name: self.objects[name].deflate()
        self.confirmed: list[str] = []
        self._came: dict[str, bytes] = {}

    def receive(self) -> Any:
        message = self.messages.pop(0)
        self.objects |= objects.get_all_nested_objects(message)
        return message, objects.get_object_tree(message)

    def send(self, message: Message, tree: Any, duration: float) -> Any:
        proto = message_to_proto(message)
        proto.ClearField("content")
        self.left += proto.SerializeToString() + tree.SerializeToString()
        self.durations.append(duration)
        return {node.object_id for node in objects.iterate_object_tree(tree)}, tree.object_id

    def push(self, run_id: int, session: str, name: str, content: bytes) -> None:
        self.left += content
        self._came[name] = content
        if name == session:
            self.replies.append(inflate_object_from_contents(name, self._came))

    def get_run(self, run_id: int) -> Run:
        run = Run.create_empty(run_id)
        run.primary_task_type = TaskType.AGENT_APP
        return run

    @property
    def connection(self) -> tuple[Any, ...]:
        confirm = lambda run, message: self.confirmed.append(message)  # noqa: E731
        return 1, self.receive, self.send, self.get_run, None, self.pull, self.push, confirm


class Node:
    def __init__(self, connection: tuple[Any, ...]) -> None:
        self.connection = connection
        self.state = NodeStateFactory(ObjectStoreFactory()).state()

    def receive(self) -> Message:
        message, tree = self.connection[1]()
        parts = [node.object_id for node in objects.iterate_object_tree(tree)]
        contents = {part: self.connection[5](1, part) for part in parts}
        received: Any = inflate_object_from_contents(tree.object_id, contents)
        received.metadata.__dict__["_message_id"] = message.metadata.message_id
        return received

    def push(self, *replies: Message) -> None:
        for reply in replies:
            start_client_internal._insert_message(reply, self.state, self.state.object_store)
        parts = self.state, self.state.object_store, self.connection[2], self.connection[6]
        start_client_internal._push_messages(*parts)


Answer = Callable[[Message], Message | list[Message]]


def exchanged(message: Message, answer: Answer, rules: Policy | None = PLAIN) -> Link:
    link = Link(message)
    connection = link.connection
    node = Node(Border(Gate(rules), connection).connection() if rules else connection)
    replies = answer(node.receive())
    node.push(*(replies if isinstance(replies, list) else [replies]))
    return link


def attacking(name: str) -> Answer:
    def answer(message: Message) -> Message:
        arrays = {key: array.numpy() for key, array in message.content["arrays"].items()}
        return Message(ATTACKS[name](arrays), reply_to=message)

    return answer


def replying(content: RecordDict | Error) -> Answer:
    return lambda message: Message(content, reply_to=message)


SILENT = {"honest", "missing", "infinite", "nan"}
OUTSIDE = {"error", "task"}


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - OUTSIDE))
def test_nothing_leaves_but_what_the_policy_says(name: str) -> None:
    kind = name.partition("-")[0] if name.startswith(("evaluate", "query")) else "train"
    assert bool(leaks(exchanged(asked(kind), attacking(name), None).left)) == (name not in SILENT)
    link = exchanged(asked(kind), attacking(name))
    assert not leaks(link.left)
    assert link.durations == [0.0]
    (reply,) = link.replies
    assert reply.metadata.message_type == kind
    if reply.has_error():
        assert refusal(link) == REFUSAL
        assert name not in ("honest", "record-names")
        return
    assert name != "names"
    records = plain(reply)
    assert set(records) <= {"arrays", "metrics"}
    assert set(records.get("metrics", {})) <= {"num-examples"}
    assert kind == "train" or "arrays" not in records
    if "arrays" in records:
        assert norm(records["arrays"]) <= 0.5 * (1 + 1e-6)
        assert records["arrays"]["steps"] == MODEL["steps"]
    if name in ("honest", "record-names"):
        # An honest update leaves as it is.
        wanted = next(iter(ATTACKS[name](MODEL).array_records.values()))
        np.testing.assert_array_equal(records["arrays"]["w"], wanted["w"].numpy())


REFUSAL = Error(6, "refused by this site, whose log says why")


def refusal(link: Link) -> Error:
    """Return the one error that a link got; there must be nothing else but its metadata."""
    (reply,) = link.replies
    assert link.durations == [0.0]
    proto = message_to_proto(reply)
    proto.ClearField("metadata")
    assert proto == type(proto)(error=proto.error)
    assert objects.get_object_tree(reply).children == []
    return reply.error


REFUSED: dict[str, tuple[dict[str, Any], RecordDict | Error]] = {
    "words": ({}, Error(666, SECRET)),
    "no words": ({}, Error(2, None)),
    "a number": ({}, Error(2**60, "x")),
    "two models": ({"more": record(MODEL)}, trained(MODEL)),
    # Arrays leave in replies to training only.
    **{
        kind: ({"kind": kind}, trained(MODEL))
        for kind in ("system", "reconnect", "get_parameters", "evaluate", "query")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_as_one_error(name: str) -> None:
    request, content = REFUSED[name]
    link = exchanged(asked(**request), replying(content))
    assert refusal(link) == REFUSAL
    assert not leaks(link.left)
    assert exchanged(asked("train.again"), replying(trained(MODEL))).replies[0].has_content()


def twice(message: Message) -> list[Message]:
    more = trained(MODEL, more=ConfigRecord({"a": 1}))
    return [Message(trained(MODEL), reply_to=message), Message(more, reply_to=message)]


def stray(field: str, value: Any, message: Message) -> Message:
    reply = Message(trained(MODEL), reply_to=message)
    reply.metadata.__dict__[field] = value
    return reply


@pytest.mark.parametrize(
    ("answer", "sent", "leaves"),
    [
        (twice, 2, 1),
        (partial(stray, "_reply_to_message_id", "0" * 64), 1, 0),
        (partial(stray, "_run_id", 7), 1, 0),
    ],
)
def test_a_message_has_one_reply(answer: Answer, sent: int, leaves: int) -> None:
    assert len(exchanged(asked(), answer, None).durations) == sent
    link = exchanged(asked(), answer)
    assert (len(link.replies), bool(link.left)) == (leaves, leaves > 0)


def test_without_the_model_nothing_leaves(caplog: Any) -> None:
    link = Link(asked())
    link.pull = None
    node = Node(Border(Gate(PLAIN), link.connection).connection())
    message, _ = node.connection[1]()
    node.push(Message(trained(MODEL), reply_to=message))
    assert refusal(link) == REFUSAL
    assert "the model that this replies to has not been seen" in caplog.text


def test_beyond_max_replies_no_app_sees_a_message(caplog: Any) -> None:
    messages = [asked(run=run) for run in (1, 1, 1, 2)]
    link = Link(*messages)
    connection = Border(Gate(Policy(max_norm=0.5, max_replies_per_run=2)), link.connection)
    seen = [connection.receive() is not None for _ in messages]
    assert seen == [True, True, False, True]
    assert refusal(link) == REFUSAL
    assert link.confirmed == [messages[2].metadata.message_id]
    assert "max_replies_per_run = 2" in caplog.text


@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_the_real_mod_and_server_work_through_a_border_without_noise(noise: float) -> None:
    server = UpdateServer(AdaptiveBound(start_norm=2.0))
    client = ClientApp(mods=[UpdateClipMod()])

    @client.train()
    def train(message: Message, context: Context) -> Message:
        content = trained({**MODEL, "w": MODEL["w"] + np.float32(NUMBER)})
        return Message(content, reply_to=message)

    state = Context(1, 1, {}, RecordDict(), {})
    message = asked(fedclip=ConfigRecord(bound_to(server.open())))
    rules = Policy(max_norm=0.5, noise_multiplier=noise)
    (reply,) = exchanged(message, lambda received: client(received, state), rules).replies
    update = {name: array.numpy() for name, array in reply.content["arrays"].items()}
    assert update.keys() == {"w", "half"}
    said = reply_from(update, dict(reply.content["fedclip"]), "site")
    (fault,) = server.close([said], like=update).faults
    if noise:
        assert (said.votes, said.clipped) == (0, 0)
        assert "norm" in fault
    else:
        # The mod clips to 2, and says that it did; the site clips further.
        assert (said.votes, said.within, said.clipped, fault) == (1, 0, 1, "")
        assert np.linalg.norm(update["w"]) == pytest.approx(0.5, rel=1e-5)
    # A server that has asked for no update gets none: this would be the wrong model.
    voted = trained(update, fedclip=reply.content["fedclip"])
    assert exchanged(asked(), replying(voted)).replies[0].has_error()


def test_nothing_runs_as_an_agent() -> None:
    link = Link()
    assert link.get_run(1).primary_task_type == TaskType.AGENT_APP
    run = Border(Gate(PLAIN), link.connection).connection()[3](1)
    assert run.primary_task_type == TaskType.CLIENT_APP
