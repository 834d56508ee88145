# SPDX-License-Identifier: Apache-2.0
"""The messages of a round of update clipping: plain objects, and the same as flat tables.

::

    message     server -> client                     bound_to, bound_from
    vote        client -> server, next to the arrays reply_to, reply_from
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedclip.arrays import Array, Float64
from fedclip.core import parameters
from fedclip.core.plugins import VERSION
from fedclip.core.scopes import Scope, check_scope

Arrays = Mapping[str, Array]

EDGES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
"""Between the bins of votes, in octaves: log2(norm / bound). The first and the last are open."""
BINS = len(EDGES) + 1
WITHIN = EDGES.index(0.0) + 1
"""The number of bins that are within the bound."""

VOTES = ((0, 0), (1, 0), (1, 1))
"""What one client may say: it does not vote, its update was above the bound, it was within it."""
COUNTS = ((0, 0), (1, 0), (0, 1))
"""Whether one client has clipped its update, and whether it has replaced it by zeros."""


def is_one_of(known: Sequence[tuple[int, ...]], numbers: Sequence[object]) -> bool:
    """Whether a client's numbers are ints, and known ones; 1.0 and True do not count."""
    return all(type(n) is int for n in numbers) and tuple(numbers) in known


def one_hot(times: float, clipped: bool) -> tuple[int, ...]:
    """Return a client's vote: 1 for the bin of an update whose norm is `times` the bound.

    Whether the update was clipped decides at the bound, where rounding may differ.

    Examples
    --------
    >>> one_hot(1.5, clipped=True)
    (0, 0, 0, 0, 0, 0, 1, 0, 0, 0)
    """
    octaves = math.log2(times) if times > 0.0 else -math.inf
    place = sum(octaves > edge for edge in EDGES)
    place = max(place, WITHIN) if clipped else min(place, WITHIN - 1)
    return tuple(int(i == place) for i in range(BINS))


def is_vote(votes: object, within: object, bins: object) -> bool:
    """Whether one client may vote so: for one bin, which fits, or for none; () is no bins."""
    if not is_one_of(VOTES, (votes, within)) or not isinstance(bins, (tuple, list)):
        return False
    if len(bins) == 0:
        return True
    right = len(bins) == BINS and all(type(n) is int and n in (0, 1) for n in bins)
    return right and (sum(bins), sum(bins[:WITHIN])) == (votes, within)


def counts_of(votes: int, within: int, bins: Sequence[float]) -> Float64:
    """Return votes as one count for each bin.

    An older client does not say which: its vote counts as half for each of the two bins next to the
    bound on its side.

    Examples
    --------
    >>> counts_of(1, 0, ())
    array([0. , 0. , 0. , 0. , 0. , 0.5, 0.5, 0. , 0. , 0. ])
    """
    counts = np.zeros(BINS)
    if len(bins):
        counts += bins
    else:
        counts[WITHIN - 2 : WITHIN] = within / 2
        counts[WITHIN : WITHIN + 2] = (votes - within) / 2
    return counts


WITHOUT_BINS = (
    "a vote without bins, as an older fedclip sends it, is not counted with noise: install the "
    "server's version on that client"
)
"""Why a vote of an older client counts as an abstention."""


@dataclass(frozen=True)
class SentBound:
    """The server's message to each client at the start of a round.

    Attributes
    ----------
    bound
        Largest norm of the whole update.
    adaptive
        Whether the clients should vote.
    bins
        How many bins the server counts; 0 for an older server, which takes none.
    only_votes
        Whether the round only looks for the bound: then updates are shared as zeros.
    private
        Whether noise is added; then clients send no counts that noise does not cover.
    scope
        Which tensors share a norm.
    round
        Number of the round, from 1.
    stop
        Why training has to end, as a sentence; empty if it goes on.
    steps
        Whether the clients should say how many steps they took, as these are their weights.
    fedclip
        The version that the server runs.
    schedule
        The identity of the schedule in the ledger to which the round is charged; "" without noise.
    """

    bound: float
    adaptive: bool = True
    private: bool = False
    scope: Scope = "global"
    round: int = 1
    stop: str = ""
    steps: bool = False
    fedclip: str = VERSION
    schedule: str = ""
    only_votes: bool = False
    bins: int = BINS


@dataclass(frozen=True)
class Reply:
    """The reply of a client, or the secure sum of several replies.

    Attributes
    ----------
    arrays
        The clipped update; of an invalid reply, anything.
    votes, within
        1 if the client votes, and 1 if its update was within the bound.
    bins
        The vote, 1 for one of the `BINS`; or the counts of a secure sum. An older client sends
        none.
    clipped, zeroed
        1 if the update was clipped, or replaced by zeros; always 0 if the server adds noise.
    sender
        Who sent it, as the server's connection says.
    fault
        Why the reply is invalid, if that is known on arrival.
    clients
        Number of clients; several in a secure sum. As the sender, it is for the engine to say, and
        never what a client claims.
    steps
        Number of steps that the client says it took, if the server asks for it; or of all, in a
        secure sum.
    senders
        Whose updates are in a secure sum, as the server knows it, if not those of all clients.
    """

    arrays: Arrays
    votes: int = 0
    within: int = 0
    clipped: int = 0
    zeroed: int = 0
    sender: str = ""
    fault: str = ""
    clients: int = 1
    steps: int | None = None
    senders: Sequence[str] = ()
    bins: Sequence[int] = ()


@dataclass(frozen=True)
class RoundResult:
    """The result of a round.

    Attributes
    ----------
    average
        The average of the updates, with noise if there is any; zeros if it is withheld.
    withheld
        Whether the round has only counted votes, so that its average is not released.
    faults
        Why each reply counts as zeros; "" if it does not.
    record
        Round, bound and next bound, share within the bound, counts, and epsilon so far.
    """

    average: dict[str, Array]
    withheld: bool
    faults: list[str]
    record: dict[str, Any]


# -- messages as flat tables of numbers and texts, which any engine can send ---------------------
_COUNTS = ("votes", "within", "clipped", "zeroed")


def bound_to(sent: SentBound) -> dict[str, str | int | float | bool]:
    """Return a message to the clients as numbers and texts."""
    return {**asdict(sent), "scope": json.dumps(sent.scope)}


def bound_from(message: Mapping[str, object]) -> SentBound:
    """Return the message of a server.

    Raises
    ------
    ValueError
        If it is not a message of `bound_to`.
    """
    try:
        return SentBound(
            parameters.positive(bound=message.get("bound")),
            scope=check_scope(json.loads(_text(message, "scope")), limits=True),
            round=parameters.integer(1, round=message.get("round")),
            adaptive=parameters.boolean(adaptive=message.get("adaptive")),
            private=parameters.boolean(private=message.get("private")),
            stop=_text(message, "stop"),
            steps=parameters.boolean(steps=message.get("steps")),
            fedclip=_text(message, "fedclip"),
            schedule=_text(message, "schedule"),
            only_votes=parameters.boolean(only_votes=message.get("only_votes", False)),
            bins=parameters.integer(0, bins=message.get("bins", 0)),
        )
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"the server's message is not that of update clipping ({exc!s:.200}): both need the "
            "same version of fedclip"
        ) from None


def _text(message: Mapping[str, object], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a text, got {type(text).__name__}")
    return text


def reply_to(reply: Reply) -> dict[str, int]:
    """Return the numbers of a reply, without its arrays."""
    content = {name: getattr(reply, name) for name in _COUNTS}
    if any(reply.bins):
        content["bin"] = reply.bins.index(1)
    return content if reply.steps is None else content | {"steps": reply.steps}


def reply_from(arrays: Arrays, table: object, sender: str = "") -> Reply:
    """Return a client's reply; with a fault if the table is not one of `reply_to`.

    `close` then counts it as zeros, and its votes as an abstention. The sender is for the engine
    to say.

    Examples
    --------
    >>> reply_from({}, {"votes": 1, "within": 1, "clipped": 0, "zeroed": 0}, "a").fault
    ''
    >>> reply_from({}, {"votes": 10}, "b").fault
    'it says nothing that update clipping does: the client has no update clipping, or another one'
    """
    table = dict[str, Any](table) if isinstance(table, Mapping) else {}
    counts: dict[str, Any] = {name: table.get(name) for name in _COUNTS}
    place = table.get("bin", 0)
    if not all(type(count) is int for count in [*counts.values(), place]) or set(table) - {
        *counts,
        "steps",
        "bin",
    }:
        fault = "it says nothing that update clipping does: the client has no update clipping, "
        return Reply(arrays, sender=sender, fault=f"{fault}or another one")
    bins = tuple(int(i == place) for i in range(BINS)) if "bin" in table else ()
    return Reply(arrays, **counts, sender=sender, steps=table.get("steps"), bins=bins)
