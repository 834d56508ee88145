# SPDX-License-Identifier: Apache-2.0
"""Which replies the server expects in the current round, and who sent which reply.

Server modules note which messages they expect. The sampler, which sees the replies by client, notes
who sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

if TYPE_CHECKING:
    from fedclip.engines.declearn.generics import AnyVector

UPDATES = "updates"
"""The key of the updates, next to the names of auxiliary variables."""


class Sender(NamedTuple):
    """A client whose message has arrived.

    Attributes
    ----------
    faulty
        Whether the message was found to be invalid.
    summed
        Whether only the sum of several messages is known, which is nobody's.
    """

    name: str
    faulty: bool = False
    summed: bool = False


class Expected(NamedTuple):
    """The message that a module of the server expects.

    Attributes
    ----------
    abstention
        Makes the replacement for a message of another kind.
    """

    kind: type[Any]
    abstention: Callable[[], Any]


_EXPECTED: ContextVar[Mapping[str, Expected]] = ContextVar(
    "fedclip_expected", default=MappingProxyType({})
)


class _Round(NamedTuple):
    # One of the replies: when it is gone, the round is over.
    reply: ref[object]
    senders: dict[str, list[Sender]]
    blank: Callable[[], AnyVector] | None


_ROUND: ContextVar[_Round | None] = ContextVar("fedclip_senders", default=None)


def expect(key: str, kind: type[Any], abstention: Callable[[], Any]) -> None:
    """Note which message is expected under the name of an auxiliary variable."""
    _EXPECTED.set({**_EXPECTED.get(), key: Expected(kind, abstention)})


def expected() -> Mapping[str, Expected]:
    """Return the expected messages, and forget them: the next round notes them again."""
    found = _EXPECTED.get()
    _EXPECTED.set({})
    return found


def note(
    reply: object, senders: dict[str, list[Sender]], blank: Callable[[], AnyVector] | None = None
) -> None:
    """Note, for each key, the senders in the order in which replies are added up.

    The note lasts until the `reply`, one of the round, is gone; without a reply, it goes at once.
    `blank` returns an update of zeros, of the model's shapes.
    """
    _ROUND.set(None if reply is None else _Round(ref(reply), senders, blank))


def _round() -> _Round | None:
    round_ = _ROUND.get()
    return None if round_ is None or round_.reply() is None else round_


def _senders(key: str | None) -> list[Sender]:
    round_ = _round()
    return [] if key is None or round_ is None else round_.senders.get(key, [])


def blank() -> AnyVector | None:
    """Return an update of zeros, of the model's shapes; None if the shapes are not known."""
    round_ = _round()
    return None if round_ is None or round_.blank is None else round_.blank()


def sender_of(key: str | None, position: int, total: int) -> str:
    """Return who sent one of `total` replies, by its position in the sum; "" if not known."""
    senders = _senders(key)
    known = len(senders) == total and not senders[position].summed
    return senders[position].name if known else ""


def senders_of(key: str) -> Sequence[str]:
    """Return the known senders of the replies, or of those in a secure sum."""
    return [sender.name for sender in _senders(key)]


def faulty_senders(key: str) -> Sequence[str]:
    """Return the known senders of messages that were found to be invalid on arrival."""
    return [sender.name for sender in _senders(key) if sender.faulty]
