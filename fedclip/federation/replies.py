# SPDX-License-Identifier: Apache-2.0
"""Who sent which reply of the present round, as far as somebody has noted it down."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

__all__ = ["UPDATES", "Sender", "faulty_senders", "note", "sender_of"]

UPDATES = "updates"
"""The key of what every reply has, beside the names of auxiliary variables."""


class Sender(NamedTuple):
    """A client, and whether what it sent said on arrival that it made no sense."""

    name: str
    faulty: bool


# With one of the replies: when that is gone, so is the round.
_ROUND: ContextVar[tuple[ref[Any], dict[str, list[Sender]]] | None] = ContextVar(
    "fedclip_senders", default=None
)


def note(reply: Any, senders: dict[str, list[Sender]]) -> None:
    """Note down, for each key, the senders in the order in which replies are added up.

    It is forgotten as soon as the `reply`, one of the round, is gone; without one, at once.
    """
    _ROUND.set(None if reply is None else (ref(reply), senders))


def _senders(key: str | None) -> list[Sender]:
    round_ = _ROUND.get()
    return [] if key is None or round_ is None or round_[0]() is None else round_[1].get(key, [])


def sender_of(key: str | None, position: int, total: int) -> str:
    """Return who sent one of `total` replies, as it was added up; "" if that is not known."""
    senders = _senders(key)
    return senders[position].name if len(senders) == total else ""


def faulty_senders(key: str) -> Sequence[str]:
    """Return whose messages said on arrival that they make no sense, as far as is known."""
    return [sender.name for sender in _senders(key) if sender.faulty]
