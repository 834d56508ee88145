# SPDX-License-Identifier: Apache-2.0
"""The clients of a run: which are present, and which have left and why.

::

    all are needed (min_replies is None)    whoever leaves ends the run
    min_replies = m                         a round goes on with m replies or more

A client that leaves is gone for good, and no other client replaces it in its round: the sum is over
the replies that came, noise and its cost are those of the clients that were asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from fedclip.errors import Problem

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
    # A sentence may end with what a client has written.
    sentences = [why.replace(WHO, ", ".join(map(repr, who)), 1) for why, who in alike.items()]
    more = [f"and {len(alike) - 5} more"] if len(alike) > 5 else []
    return "; ".join(sentences[:5] + more)


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
        if news := name in self.present:
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
        "secure aggregation": secagg,
        "fairness": fairness,
        "the aggregator 'sum'": aggregator == "sum",
    }
    text = "min_replies does not go with {}, which needs all replies: remove one of them"
    return [Problem(text.format(what)) for what, applies in reasons.items() if applies]
