# SPDX-License-Identifier: Apache-2.0
"""A client's part of update clipping, as a mod of Flower's `ClientApp`.

::

    take the bound out of the message
    reply  = what the app and the other mods reply
    update = the model received - the model in the reply
    send the clipped update instead of the model, and a vote
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import OTHER_TENSORS, alike
from fedclip.updates.protocol import SentBound, bound_from, reply_to
from fedclip.updates.store import client_of, settings_in

# The name of fedclip's own record in a message: the bound in one, the votes in the other.
RECORD = "fedclip"

Record = Mapping[str, Any]

OLDER_API = (
    "NumPyClient, client_fn and SecAgg+ are of Flower's older API: write a function with "
    "@app.train(), and leave secaggplus_mod out"
)
NO_BOUND = (
    "the message has no bound: put UpdateClipStrategy around the server's strategy, and "
    "UpdateClipMod once into the mods"
)


class UpdateClipMod:
    """Clips what a client sends after its training, to the bound of `UpdateClipStrategy`.

    It must be the first of the mods, and so the last to touch a reply: whatever another mod does to
    it later, such as Flower's `LocalDpMod`, is not clipped, and the server refuses it.

    Parameters
    ----------
    client : UpdateClient or None, default=None
        How updates are clipped. None: as ``[tool.flwr.app.config.update-clip]`` says.

    Notes
    -----
    Apps of Flower's older API (``client_fn``, `NumPyClient`) and SecAgg+, which is a part of it,
    get an error that says so: their messages hold other records.

    Only messages of training are touched. Tensors of whole numbers, which count something, do not
    leave the client; the server keeps its own.

    An update that cannot be clipped is not sent: without a bound, with several `ArrayRecord`, or
    with other tensors than those received, the reply is an error with the reason.

    A mod is a part of the app, which can remove it. A limit that no app can undo is the policy of
    a site, `fedclip site supernode`.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[UpdateClipMod()])
    """

    def __init__(self, client: UpdateClient | None = None) -> None:
        self.client = client

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Handle a message."""
        if not message.metadata.message_type.startswith("train"):
            return call_next(message, context)
        try:
            client = self.client or client_of(settings_in(context.run_config))
            sent, received = _taken(message)
        except (TypeError, ValueError) as exc:
            return _refused(message, exc)
        try:
            reply = call_next(message, context)
        except KeyError as exc:
            # Of its own records, which Flower looks for in this message.
            if not _is_older(exc):
                raise
            return _refused(message, OLDER_API)
        if not reply.has_error():
            try:
                _clip(client, reply, received, sent)
            except (TypeError, ValueError, RuntimeError) as exc:
                return _refused(message, exc)
        return reply


def _is_older(text: object) -> bool:
    return any(word in str(text) for word in ("fitins", "secagg"))


def _refused(message: Message, why: object) -> Message:
    reason = f"UpdateClipMod: {why}"
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)


def _taken(message: Message) -> tuple[SentBound, Record]:
    """Take the bound out of a message; return it, and the model."""
    if RECORD not in message.content:
        raise ValueError(OLDER_API if _is_older([*message.content]) else NO_BOUND)
    sent = bound_from(message.content[RECORD])
    # The app may empty the record.
    received = dict(one_record(message.content, "the message")[1])
    # Other messages may share the content: replace it.
    message.content = RecordDict({k: v for k, v in message.content.items() if k != RECORD})
    return sent, received


def _clip(client: UpdateClient, reply: Message, received: Record, sent: SentBound) -> None:
    """Put the clipped update and the vote into a reply."""
    name, trained = one_record(reply.content, "the reply")
    before = floats_of(received)
    after = {k: trained[k].numpy() for k in before if k in trained}
    if not alike(after, before) or received.keys() != trained.keys():
        raise ValueError(OTHER_TENSORS)
    with np.errstate(over="ignore", invalid="ignore"):
        update = {k: before[k] - after[k] for k in before}
    clipped = client.clip(update, sent)
    reply.content[name] = record_of(clipped.arrays)
    reply.content[RECORD] = MetricRecord(reply_to(clipped))


def one_record(content: RecordDict, who: str) -> tuple[str, Record]:
    """Return the one record of arrays, and its name; raise a ValueError if there are others."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise ValueError(f"{who} holds {len(records)} ArrayRecords: it must hold one, the model")
    return str(records[0][0]), records[0][1]


def floats_of(record: Record) -> dict[str, Any]:
    """Return the tensors that are clipped: those of real numbers. Whole numbers are counters.

    Raises
    ------
    TypeError
        If there are other tensors, such as complex ones.
    """
    for name, array in record.items():
        if np.dtype(array.dtype).kind not in "fiub":
            raise TypeError(f"the tensor {name!r} is of {array.dtype}: no real numbers")
    return {k: array.numpy() for k, array in record.items() if np.dtype(array.dtype).kind == "f"}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return a record of NumPy arrays."""
    return ArrayRecord({name: Array(np.asarray(x)) for name, x in arrays.items()})
