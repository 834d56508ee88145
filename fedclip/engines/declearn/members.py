# SPDX-License-Identifier: Apache-2.0
"""The clients of a run: which are present, which have left and why, and who sent which reply.

::

    all are needed (min_replies is None)    whoever leaves ends the run
    min_replies = m                         a round goes on with m replies or more

A client that leaves is gone for good, and no other client replaces it in its round: the sum is over
the replies that came, noise and its cost are those of the clients that were asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from fedclip.engines.declearn.context import ROUND, change
from fedclip.errors import Problem

if TYPE_CHECKING:
    from fedclip.engines.declearn.generics import AnyVector

WHO = "{client}"
"""Where the names go in a sentence about clients."""


@contextmanager
def untold(logger: logging.Logger, what: str, *harmless: type[Exception]) -> Iterator[None]:
    """Log what is raised, and raise a text without it, as the server gets the text.

    Errors that are `harmless` reveal no records, and pass.
    """
    try:
        yield
    except harmless:
        raise
    except Exception as exc:
        logger.error("%s failed: %r.", what, exc, exc_info=exc)
        raise RuntimeError(f"{what} failed on this client; its log says why") from None


def one_line(text: object, most: int) -> str:
    r"""Return the start of what a client has written, as one line that moves no cursor.

    Examples
    --------
    >>> one_line("full\n\x1b[2Jdisk", 60)
    'full [2Jdisk'
    """
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(printable.split())[:most]


def summary(reasons: Mapping[str, str]) -> str:
    """Join the sentences about clients, five at most; clients with equal sentences share one.

    Examples
    --------
    >>> summary({"a": "{client} is gone", "b": "{client} is silent", "c": "{client} is gone"})
    "'a', 'c' is gone; 'b' is silent"
    """
    alike: dict[str, list[str]] = {}
    for name, why in sorted(reasons.items()):
        alike.setdefault(why, []).append(name)
    sentences = [
        # A sentence may end with what a client has written.
        why.replace(WHO, ", ".join(map(repr, names)), 1)
        for why, names in list(alike.items())[:5]
    ]
    more = len(alike) - len(sentences)
    return "; ".join(sentences) + (f"; and {more} more" if more else "")


class Members:
    """The clients of a run.

    Parameters
    ----------
    names
        The clients that have registered.
    min_replies
        The least number of replies with which a round goes on; None if all are needed.

    Examples
    --------
    >>> members = Members({"a", "b", "c"}, min_replies=2)
    >>> members.leave("b", "{client} is gone")
    True
    >>> members.check_quorum(2, 3, members.gone)
    >>> sorted(members.present)
    ['a', 'c']
    """

    def __init__(self, names: Iterable[str] = (), min_replies: int | None = None) -> None:
        self.names, self.min_replies = frozenset(names), min_replies
        self.gone: dict[str, str] = {}

    @property
    def present(self) -> set[str]:
        """The clients that have not left."""
        return set(self.names - self.gone.keys())

    def leave(self, name: str, why: str) -> bool:
        """Note that a client is gone, for good, in a sentence; return whether that is news."""
        news = name in self.present
        if news:
            self.gone[name] = why
        return news

    def check_quorum(self, replied: int, asked: int, missing: Mapping[str, str]) -> None:
        """Raise a RuntimeError if a round has fewer replies than `min_replies`."""
        if self.min_replies is None or replied >= self.min_replies:
            return
        text = f"{replied} of {asked} clients have replied, and min_replies = {self.min_replies}"
        reasons = f": {summary(missing)}" if missing else ""
        raise RuntimeError(f"{text}{reasons}; the run cannot go on")


def quorum_problems(*, secagg: bool, fairness: bool, aggregator: str) -> list[Problem]:
    """Return why replies must not be missing in a run."""
    reasons = {
        "secure aggregation, which decrypts the sum of all replies or nothing": secagg,
        "fairness, which needs the replies of all": fairness,
        "the aggregator 'sum', whose steps would get shorter": aggregator == "sum",
    }
    return [
        Problem(f"min_replies does not go with {what}: remove one of them")
        for what, applies in reasons.items()
        if applies
    ]


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


class _Round(NamedTuple):
    # One of the replies: when it is gone, the round is over.
    reply: ref[object]
    senders: dict[str, list[Sender]]
    blank: Callable[[], AnyVector] | None


def expect(key: str, kind: type[Any], abstention: Callable[[], Any]) -> None:
    """Note which message is expected under the name of an auxiliary variable."""
    change(expected={**(ROUND.get().expected or {}), key: Expected(kind, abstention)})


def expected() -> Mapping[str, Expected]:
    """Return the expected messages, and forget them: the next round notes them again."""
    messages = ROUND.get().expected
    change(expected=None)
    return messages or {}


def note(
    reply: object, senders: dict[str, list[Sender]], blank: Callable[[], AnyVector] | None = None
) -> None:
    """Note, for each key, the senders in the order in which replies are added up.

    The note lasts until the `reply`, one of the round, is gone; without a reply, it goes at once.
    `blank` returns an update of zeros, of the model's shapes.
    """
    change(senders=None if reply is None else _Round(ref(reply), senders, blank))


def _round() -> _Round | None:
    round_ = ROUND.get().senders
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
