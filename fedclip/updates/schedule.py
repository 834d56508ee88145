# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: a schedule that is fixed before the run.

::

    b      = ceil(clients / per_round)
    groups = every b-th of the clients, in the order of their names: from the first, the second...
    round t is the turn of group t mod b

Who is due depends on no data and on no reply, so that a client can be charged for its own turns
only: at most ``ceil(rounds / b)``. That holds as long as nobody takes the place of a client that
does not reply, and no reply counts in a later round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import uuid4

from fedclip.core import parameters


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
        return (
            f"{self.clients} clients have a turn every {self.separation} rounds, and noise is "
            f"accounted for separation={separation}: with expected_clients={per_round} that "
            f"takes more than {(separation - 1) * per_round} clients"
        )


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
