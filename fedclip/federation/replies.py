# SPDX-License-Identifier: Apache-2.0
"""What clients are to reply with in the present round, and who sent which reply.

Server modules note down what they expect; the sampler, which is shown the replies, who sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

__all__ = [
    "UPDATES",
    "Expected",
    "Sender",
    "blank",
    "expect",
    "expected",
    "faulty_senders",
    "note",
    "sender_of",
]

UPDATES = "updates"
"""The key of what every reply has, beside the names of auxiliary variables."""


class Sender(NamedTuple):
    """A client, and whether what it sent said on arrival that it made no sense."""

    name: str
    faulty: bool


class Expected(NamedTuple):
    """What a module of the server is to be sent."""

    kind: type
    abstention: Callable[[], Any]
    """What stands for a reply that is of another kind."""


_EXPECTED: ContextVar[Mapping[str, Expected]] = ContextVar(
    "fedclip_expected", default=MappingProxyType({})
)


class _Round(NamedTuple):
    # One of the replies: when that is gone, so is the round.
    reply: ref[Any]
    senders: dict[str, list[Sender]]
    blank: Callable[[], Any] | None


_ROUND: ContextVar[_Round | None] = ContextVar("fedclip_senders", default=None)


def expect(key: str, kind: type, abstention: Callable[[], Any]) -> None:
    """Note down what is expected under the name of an auxiliary variable."""
    _EXPECTED.set({**_EXPECTED.get(), key: Expected(kind, abstention)})


def expected() -> Mapping[str, Expected]:
    """Return what has been noted down, and forget it: the next round says it anew."""
    found = _EXPECTED.get()
    _EXPECTED.set({})
    return found


def note(
    reply: Any, senders: dict[str, list[Sender]], blank: Callable[[], Any] | None = None
) -> None:
    """Note down, for each key, the senders in the order in which replies are added up.

    It is forgotten as soon as the `reply`, one of the round, is gone; without one, at once.
    `blank` returns an update of zeros, of the model's shapes.
    """
    _ROUND.set(None if reply is None else _Round(ref(reply), senders, blank))


def _round() -> _Round | None:
    round_ = _ROUND.get()
    return None if round_ is None or round_.reply() is None else round_


def _senders(key: str | None) -> list[Sender]:
    round_ = _round()
    return [] if key is None or round_ is None else round_.senders.get(key, [])


def blank() -> Any:
    """Return an update of zeros, of the model's shapes; None where nobody knows them."""
    round_ = _round()
    return None if round_ is None or round_.blank is None else round_.blank()


def sender_of(key: str | None, position: int, total: int) -> str:
    """Return who sent one of `total` replies, as it was added up; "" if that is not known."""
    senders = _senders(key)
    return senders[position].name if len(senders) == total else ""


def faulty_senders(key: str) -> Sequence[str]:
    """Return whose messages said on arrival that they make no sense, as far as is known."""
    return [sender.name for sender in _senders(key) if sender.faulty]
