# SPDX-License-Identifier: Apache-2.0
"""A site's policy around Flower's SuperNode: an app's reply leaves as the policy allows, or not.

::

    SuperLink  --message-->  Border  --message-->  SuperNode  -->  process of the app
    SuperLink  <--new one--  Border  <---reply---  SuperNode  <--  process of the app

In both of its isolation modes, a SuperNode talks to its SuperLink by the eight functions of one
connection, and `Border` replaces them. It keeps the model that comes with a message, holds back all
parts of the reply until the last one, and sends a new message. One error, always the same, replaces
a reply that must not leave.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import flwr
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.logger import console_handler
from flwr.supercore.servicer.runtime import runtime_handlers
from flwr.supercore.version import package_version
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode

from fedclip.engines.flower.clipping import RECORD, one_record, record_of
from fedclip.errors import shown
from fedclip.site.gate import REFUSED, Gate, Refused
from fedclip.site.policy import Policy

_LOGGER = logging.getLogger("fedclip.site")

# The versions of flwr between whose functions this file stands, and SHA-256 of all their files.
KNOWN = {
    "1.41.0": "c92a946057b8fee676c67bcb1f9e636539574d71050745282c4148a7bf12bb18",
    "1.42.0": "5a388aca5684c7cf99f26ef1c6929229b73439172d8bab993d93ba5d642533aa",
}

# How many messages may wait for a reply; flwr hands out one at a time.
WAITING = 16


class Border:
    """The messages between a SuperNode and its SuperLink, with a site's policy in between.

    ::

        message m               -> counted, and kept with the model in it
                                   beyond max_replies: the error at once, and no app sees it
        first reply to m        -> a new message: update and named numbers that the gate lets out
                                   or one error, always the same
        any other reply         -> nothing

    Parameters
    ----------
    gate
        The gate that lets updates and numbers out.
    connection
        The functions by which flwr talks to a SuperLink, in flwr's order.
    """

    def __init__(self, gate: Gate, connection: Sequence[Any]) -> None:
        self._gate = gate
        self._node_id, self._receive, self._send, self._get_run, self._get_fab = connection[:5]
        self._pull, self._push, self._confirm = connection[5:]
        self._asked: dict[str, tuple[Message, dict[str, bytes]]] = {}
        self._held: dict[str, tuple[set[str], dict[str, bytes], Callable[..., Message]]] = {}
        self._lock = threading.Lock()

    def connection(self) -> tuple[Any, ...]:
        """Return the functions that flwr is to use, in its order."""
        first = (self._node_id, self.receive, self.send, self.get_run, self._get_fab)
        return (*first, self.pull, self.push, self._confirm)

    def receive(self) -> tuple[Message, Any] | None:
        """Pull a message with all its objects, which stay here until the reply."""
        if (received := self._receive()) is None:
            return None
        message, tree = received
        metadata = message.metadata
        try:
            self._gate.admit(metadata.run_id)
        except Refused as exc:
            self._deliver(_refusal(message, exc))
            self._confirm(metadata.run_id, metadata.message_id)
            return None
        ids = [node.object_id for node in inflatable_object.iterate_object_tree(tree)]
        try:
            objects = inflatable_utils.pull_objects(ids, partial(self._pull, metadata.run_id))
        except Exception as exc:
            # flwr will ask for them again, and gets objects that were not seen here.
            _LOGGER.error("a message came without its model: %s", shown(exc))
            objects = {}
        self._asked[metadata.message_id] = message, objects
        while len(self._asked) > WAITING:
            del self._asked[next(iter(self._asked))]
        return message, tree

    def pull(self, run_id: int, object_id: str) -> bytes:
        """Return an object of a message; the stored ones need not be sent again."""
        for _, objects in self._asked.values():
            if object_id in objects:
                return objects[object_id]
        content: bytes = self._pull(run_id, object_id)
        return content

    def get_run(self, run_id: int) -> Any:
        """Return a run as that of a client app, never of an agent, whose models call the web."""
        return dataclasses.replace(self._get_run(run_id), primary_task_type=TaskType.CLIENT_APP)

    def send(self, reply: Message, tree: Any, _duration: float) -> tuple[set[str], str]:
        """Hold back a reply and ask for its objects, if there is a message that waits for it."""
        replied_to = reply.metadata.reply_to_message_id
        pending = self._asked.get(replied_to)
        if pending is None or pending[0].metadata.run_id != reply.metadata.run_id:
            _LOGGER.error("not sent: a reply to no message that waits for one")
            return set(), ""
        del self._asked[replied_to]
        ids = {node.object_id for node in inflatable_object.iterate_object_tree(tree)}
        self._held[replied_to] = ids, {}, partial(self._answer, *pending, tree.object_id)
        return ids, replied_to

    def push(self, _run_id: int, replied_to: str, object_id: str, content: bytes) -> None:
        """Hold back an object of a reply; with the last one, send what may leave of the reply."""
        with self._lock:
            ids, objects, answer = self._held[replied_to]
            objects[object_id] = content
            if objects.keys() != ids:
                return
            del self._held[replied_to]
        self._deliver(answer(objects))

    def _deliver(self, reply: Message) -> None:
        """Send a message that was made here."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        # The time that the app took stays here: an app can choose it.
        missing, session = self._send(reply, inflatable_object.get_object_tree(reply), 0.0)
        inflatable_utils.push_objects(
            inflatable_object.get_all_nested_objects(reply),
            partial(self._push, reply.metadata.run_id, session),
            object_ids_to_push=missing,
        )

    def _answer(
        self, asked: Message, seen: dict[str, bytes], reply_id: str, objects: dict[str, bytes]
    ) -> Message:
        """Return a message of what the gate lets out, or an error."""
        try:
            if not seen:
                raise Refused("the model that this replies to has not been seen at the border")
            inflated = inflatable_utils.inflate_object_from_contents
            message: Any = inflated(asked.metadata.message_id, seen)
            reply: Any = inflated(reply_id, objects)
            if reply.has_error():
                raise Refused(f"the app has failed: {shown(reply.error.reason)}")
            kind = asked.metadata.message_type
            return Message(passed(kind, message.content, reply.content, self._gate), reply_to=asked)
        except Exception as exc:  # its text may hold data
            return _refusal(asked, exc)


def _refusal(message: Message, why: Exception) -> Message:
    """Return the error that leaves instead of a reply; only the log has the reason."""
    _LOGGER.error("not sent: %s", shown(why))
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, REFUSED), reply_to=message)


def passed(kind: str, asked: RecordDict, reply: RecordDict, gate: Gate) -> RecordDict:
    """Return what a gate lets out of a reply, under the names in the server's message.

    ::

        arrays   "train": one ArrayRecord in the form of the model that came with the message
                          model + gate(difference), rounded towards the model
                          or gate(update), if `UpdateClipMod` was asked for one and says it is
                          arrays of whole numbers: those of the model
                 others:  refused
        numbers  those that the policy names, in the MetricRecord "metrics"; votes, in "fedclip"
        anything else is left out

    Parameters
    ----------
    kind
        The message's type, such as "train" or "evaluate.twice".
    asked, reply
        Contents of the message and of the app's reply.
    gate
        The site's.

    Raises
    ------
    Refused, ValueError
        If nothing may leave.
    """
    kind = kind.partition(".")[0]
    if kind not in ("train", "evaluate", "query"):
        raise Refused("messages to train, evaluate or query are answered here, and no others")
    records = dict(reply.metric_records)
    voted = records.pop(RECORD, None) if RECORD in asked.config_records else None
    out = RecordDict()
    if reply.array_records:
        if kind != "train":
            raise Refused("arrays leave in replies to train only")
        name, model = one_record(asked, "the message")
        before = {k: array.numpy() for k, array in model.items()}
        after = {k: array.numpy() for k, array in one_record(reply, "the reply")[1].items()}
        if voted is None:
            sent = gate.model(after, before)
        else:
            sent = gate.update(after, {k: x for k, x in before.items() if x.dtype.kind == "f"})
        out[name] = record_of(sent)
    named = {name: number for record in records.values() for name, number in record.items()}
    if numbers := gate.metrics(named):
        out["metrics"] = MetricRecord(numbers)
    if voted is not None:
        out[RECORD] = MetricRecord(gate.votes(voted))
    return out


def _guard(gate: Gate, connect: Callable[..., Any]) -> None:
    """Have flwr's functions in this process connect through a border."""

    @contextmanager
    def connection(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*args, **kwargs) as functions:
            yield Border(gate, functions).connection()

    start_client_internal.http_request_response = connection
    # An app must not have tasks of other kinds started, whose models and tools call the web.
    runtime_handlers.TASK_TYPES_ALLOWED_TO_CREATE_TASKS = frozenset()


def _check() -> None:
    """Raise a RuntimeError unless all files of flwr are those of a version that is known here."""
    root = Path(str(flwr.__file__)).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    if KNOWN.get(package_version) != digest.hexdigest():
        needed = f"a site's SuperNode needs flwr {' or '.join(KNOWN)} from PyPI"
        hint = f"run pip install --force-reinstall flwr=={[*KNOWN][-1]}"
        raise RuntimeError(f"{needed}, and {package_version} is installed, or changed: {hint}")


def run(policy: Path, words: Sequence[str]) -> None:
    """Run flwr's SuperNode with a site's policy around it; the process ends with it.

    Parameters
    ----------
    policy
        The policy's file.
    words
        The arguments of `flower-supernode`.

    Raises
    ------
    OSError, ValueError
        If the policy cannot be read, or its ledger cannot be used.
    RuntimeError
        If flwr is not a version that is known here.
    """
    gate = Gate(Policy.read(policy))
    _check()
    _guard(gate, fleet_http_connection.http_request_response)
    _LOGGER.addHandler(console_handler)
    _LOGGER.setLevel(logging.INFO)
    sys.argv = ["fedclip site supernode", *words]
    # flwr starts others of its programs by their names.
    scripts = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    os.environ["PATH"] = os.pathsep.join([*scripts, os.environ.get("PATH", os.defpath)])
    why = "the log says why"
    try:
        flower_supernode()
    except Exception as exc:
        why = str(exc)
    # It returns if flwr has failed; a thread of flwr would keep the process running.
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, f"The SuperNode has failed: {why}")
