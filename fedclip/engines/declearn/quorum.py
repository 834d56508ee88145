# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a run, who has left it and why, and whether those that are left are enough.

::

    all are needed (min_replies is None)    whoever leaves ends the run
    min_replies = m                         a round goes on with m replies or more

Who leaves is gone for good, and nobody takes its place in the round: the sum is over the replies
that came, noise and its cost are those of the clients that were to reply.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

WHO = "{client}"
"""Where the names go in a sentence about clients."""


@contextmanager
def untold(logger: logging.Logger, what: str, *harmless: type[Exception]) -> Iterator[None]:
    """Log what is raised, and raise a text that says nothing of it: the server gets texts.

    Errors that are `harmless` say nothing of records, and pass.
    """
    try:
        yield
    except harmless:
        raise
    except Exception as exc:
        logger.error("%s failed: %r.", what, exc, exc_info=exc)
        raise RuntimeError(f"{what} failed on this client; its log says why") from None


def plain(text: object, most: int) -> str:
    r"""Return the start of what a client has written, as one line that moves no cursor.

    Examples
    --------
    >>> plain("full\n\x1b[2Jdisk", 60)
    'full [2Jdisk'
    """
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(printable.split())[:most]


def told(reasons: Mapping[str, str]) -> str:
    """Return what is said of each client, in at most five sentences, clients alike in one.

    Examples
    --------
    >>> told({"a": "{client} is gone", "b": "{client} is silent", "c": "{client} is gone"})
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
    >>> sorted(members.present), members.refusal(2, 3, members.gone)
    (['a', 'c'], '')
    >>> members.refusal(1, 3, members.gone)
    "1 of 3 clients have replied, and min_replies = 2: 'b' is gone"
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

    def refusal(self, replied: int, asked: int, missing: Mapping[str, str]) -> str:
        """Return why a round can not go on with so many replies; "" if it can, or needs all."""
        if self.min_replies is None or replied >= self.min_replies:
            return ""
        text = f"{replied} of {asked} clients have replied, and min_replies = {self.min_replies}"
        return f"{text}: {told(missing)}" if missing else text


def unfit(*, secagg: bool, fairness: bool, aggregator: str) -> list[str]:
    """Return why replies may not be missing in a run, in sentences."""
    reasons = {
        "secure aggregation, which decrypts the sum of all replies or nothing": secagg,
        "fairness, which needs the replies of all": fairness,
        "the aggregator 'sum', whose steps would get shorter": aggregator == "sum",
    }
    return [
        f"min_replies does not go with {what}: remove one of them"
        for what, found in reasons.items()
        if found
    ]


MEMBERS: ContextVar[Members | None] = ContextVar("fedclip_members", default=None)
"""The clients of the run that a server is in, for its sampler."""
