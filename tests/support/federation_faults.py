"""Faults of a client at a moment of a run, as a broken or hostile one may show them.

A fault is ``[message, what, first]``: from the `first` message of that type on, the client does
what is said instead of sending it; a list of what to do is for as many messages.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgpack
from declearn.communication.api.backend.actions import Send
from declearn.messaging import Error, EvaluationReply, InitReply, Message


def content(what: str, message: Any) -> bytes:
    """Return the bytes that are sent in the place of a message."""
    if what == "no message":
        return b"\x0cno such type"
    if what == "half a message":
        sent = message.serialize()
        return bytes(sent[: len(sent) // 2])
    if what == "another type":
        other = EvaluationReply(0.0, 1, 0.0, {}) if isinstance(message, InitReply) else InitReply()
        return bytes(other.serialize())
    if what == "an error":
        return Error("the disk of site B is full").serialize()
    if what == "text for a tensor":
        return bytes(header(message) + msgpack.packb(texts(msgpack.unpackb(payload(message)))))
    if what == "nested":
        return header(message) + b"\x91" * 5000 + b"\xc0"
    if what == "more fields":
        data = msgpack.unpackb(payload(message))
        return header(message) + bytes(msgpack.packb({**data, "surprise": 1}))
    if what in EVALUATIONS:
        setattr(message, *EVALUATIONS[what])
    return message.serialize()


def header(message: Message) -> bytes:
    key = message.typekey.encode()
    return bytes([len(key)]) + key


def payload(message: Message) -> bytes:
    return message.serialize()[len(header(message)) :]


def texts(value: Any) -> Any:
    """Return a message with an array of text in the place of each array."""
    if isinstance(value, dict):
        if "array" in str(value.get("__type__", "")).lower():
            return {**value, "dump": [b"abcd", "<U1", [1]]}
        return {key: texts(item) for key, item in value.items()}
    return [texts(item) for item in value] if isinstance(value, list) else value


EVALUATIONS: dict[str, Any] = {
    "loss text": ("loss", "x"),
    "loss NaN": ("loss", float("nan")),
    "no steps": ("n_steps", 0),
}


async def server_says(text: str) -> None:
    """Wait for the server's log, which is in the folder that processes share."""
    while text not in Path("server.txt").read_text(errors="replace"):
        await asyncio.sleep(0.02)


def show(network: Any, message_name: str, faults: str | list[str], first: int) -> None:
    """Show a fault at a client's end of a connection, from now on; or one after the other."""
    honest, send = network.send_message, network._send_message
    left = [*[""] * (first - 1), *([faults] * 1000 if isinstance(faults, str) else faults)]

    async def sending(message: Message) -> None:
        what = left.pop(0) if type(message).__name__ == message_name and left else ""
        if not what:
            await honest(message)
            return
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "killed while it sends":
            await network._socket.send(b"STREAM_START")
            await network._socket.recv()
            await network._socket.send(b"0" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "late":
            await server_says("no answer from")
            await honest(message)
            return
        if what == "twice":
            await honest(message)
            # The server has taken the first: it would not see two that come at once.
            await server_says(f"Initiating training round {first + 1}")
            await honest(message)
            return
        if what == "breaks the handler":
            # declearn divides this by its heartbeat.
            await send(msgpack.packb({"action": "recv", "timeout": "soon"}))
        await send(Send(content(what, message)).serialize())

    network.send_message = sending
