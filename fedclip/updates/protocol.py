# SPDX-License-Identifier: Apache-2.0
"""The messages of a round of update clipping, also as flat tables; and whose turn it is.

::

    message     server -> client                     bound_to, bound_from
    vote        client -> server, next to the arrays reply_to, reply_from

A `Schedule` is fixed before the run::

    b      = ceil(clients / per_round)
    groups = every b-th of the clients, in the order of their names: from the first, the second...
    round t is the turn of group t mod b

Who is due depends on no data and on no reply, so that a client can be charged for its own turns
only: at most ``ceil(rounds / b)``. That holds as long as nobody takes the place of a client that
does not reply, and no reply counts in a later round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from fedclip.arrays import Array
from fedclip.core import parameters
from fedclip.core.plugins import VERSION
from fedclip.core.scopes import Scope, check_scope
from fedclip.updates.votes import BINS

Arrays = Mapping[str, Array]


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


def _text(**values: object) -> str:
    return "" if "" in values.values() else parameters.name(**values)


_FIELDS: Mapping[str, Callable[..., Any]] = {
    "bound": parameters.positive,
    "scope": lambda **values: check_scope(json.loads(_text(**values)), limits=True),
    "round": partial(parameters.integer, 1),
    "bins": partial(parameters.integer, 0),
    **dict.fromkeys(("adaptive", "private", "steps", "only_votes"), parameters.boolean),
    **dict.fromkeys(("stop", "fedclip", "schedule"), _text),
}


def bound_from(message: Mapping[str, object]) -> SentBound:
    """Return the message of a server.

    Raises
    ------
    ValueError
        If it is not a message of `bound_to`.
    """
    # An older server sends neither of these.
    content = {"only_votes": False, "bins": 0, **message}
    try:
        return SentBound(**{n: check(**{n: content.get(n)}) for n, check in _FIELDS.items()})
    except (TypeError, ValueError) as exc:
        text = f"the server's message is not that of update clipping ({exc!s:.200})"
        raise ValueError(f"{text}: both need the same version of fedclip") from None


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
    kinds = {*map(type, [*counts.values(), place])}
    if kinds != {int} or table.keys() - {*_COUNTS, "steps", "bin"}:
        fault = "it says nothing that update clipping does: the client has no update clipping, "
        return Reply(arrays, sender=sender, fault=f"{fault}or another one")
    bins = tuple([int(i == place) for i in range(BINS)]) if "bin" in table else ()
    return Reply(arrays, **counts, sender=sender, steps=table.get("steps"), bins=bins)


# -- turns --------------------------------------------------------------------------------------


class Participation(NamedTuple):
    """The place of a round in a schedule.

    Attributes
    ----------
    separation
        The number of rounds from one turn of a client to its next.
    clients
        How many clients take turns.
    schedule
        An identity that no other schedule has; "" for the only one that an object will serve.
    round
        The round of the schedule, from 0 on.
    """

    separation: int
    clients: int
    schedule: str = ""
    round: int = 0

    def follows(self, other: Participation) -> bool:
        """Whether this is the next round of the same schedule."""
        expected = other.round + bool(self.schedule)
        return (self.schedule, self.round) == (other.schedule, expected)

    @classmethod
    def of(cls, clients: int, per_round: int) -> Participation:
        """Return how far turns are apart with at most `per_round` of the clients in a round."""
        return cls(-(-clients // per_round), clients)

    def refusal(self, separation: int, per_round: int) -> str:
        """Return why these turns are closer than accounting has them; "" if they are not."""
        if self.separation >= separation:
            return ""
        text = f"{self.clients} clients have a turn every {self.separation} rounds, below"
        needed = f"with expected_clients={per_round}, that takes more than"
        least = f"{needed} {(separation - 1) * per_round} clients"
        return f"{text} separation={separation}: {least}"


class Schedule:
    """Groups of clients that take turns.

    Parameters
    ----------
    clients
        Their names, all different.
    per_round
        The largest number of clients in a round, at least 1.

    Attributes
    ----------
    turns : Participation
        How far a client's turns are from each other, and how many clients take them.
    identity : str
        A name that no other schedule has.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above, or there is no client.

    Examples
    --------
    >>> schedule = Schedule(["a", "b", "c", "d", "e"], per_round=2)
    >>> schedule.at(0).separation, [schedule.due(t) for t in range(4)]
    (3, [['a', 'd'], ['b', 'e'], ['c'], ['a', 'd']])
    """

    def __init__(self, clients: Iterable[str], per_round: int) -> None:
        self.clients: Sequence[str] = sorted(clients)
        per_round = parameters.integer(1, per_round=per_round)
        if not self.clients:
            raise ValueError("a schedule needs at least one client, got none")
        if len(set(self.clients)) < len(self.clients):
            raise ValueError("a schedule needs different names: a client would have two turns")
        self.turns = Participation.of(len(self.clients), per_round)
        self.identity = uuid4().hex

    def at(self, round_: int) -> Participation:
        """Return what `AdaptiveBound.open` has to know of a round, from 0 on."""
        return self.turns._replace(schedule=self.identity, round=round_)

    def due(self, round_: int) -> Sequence[str]:
        """Return who has a turn in a round, from 0 on."""
        separation = self.turns.separation
        return self.clients[round_ % separation :: separation]

    def present(self, round_: int, names: Container[str]) -> list[str]:
        """Return who of these names has a turn in a round, from 0 on.

        Raises
        ------
        RuntimeError
            If nobody has: all whose turn it is have left, and no client may replace them.
        """
        due = self.due(round_)
        if present := [name for name in due if name in names]:
            return present
        who = f"all clients whose turn it is have left ({', '.join(due[:5])})"
        raise RuntimeError(f"{who}, and no client may replace them: start again with the others")
