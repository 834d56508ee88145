# SPDX-License-Identifier: Apache-2.0
"""What a round of update clipping exchanges, as plain objects: any engine can send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedclip.arrays import Array
from fedclip.core.plugins import VERSION
from fedclip.core.scopes import Scope

Arrays = Mapping[str, Array]

VOTES = ((0, 0), (1, 0), (1, 1))
"""What one client may say: it does not vote, its update was above the bound, it was within it."""
COUNTS = ((0, 0), (1, 0), (0, 1))
"""Whether one client has clipped its update, and whether it has replaced it by zeros."""


def is_one_of(known: Sequence[tuple[int, ...]], numbers: Sequence[object]) -> bool:
    """Whether a client's numbers are ints, and known ones; 1.0 and True are none."""
    return all(type(n) is int for n in numbers) and tuple(numbers) in known


@dataclass(frozen=True)
class SentBound:
    """What the server sends to each client at the start of a round.

    Attributes
    ----------
    bound
        Largest norm of the whole update.
    adaptive
        Whether the clients should vote.
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


@dataclass(frozen=True)
class Reply:
    """What a client replies, or the secure sum of several replies.

    Attributes
    ----------
    arrays
        The clipped update; of an invalid reply, anything.
    votes, within
        1 if the client votes, and 1 if its update was within the bound.
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


@dataclass(frozen=True)
class Closed:
    """What a round has come to.

    Attributes
    ----------
    average
        The average of the updates, with noise if there is any; zeros if it is withheld.
    withheld
        Whether a search has found the bound too high for its noise, so that the average is not
        released.
    faults
        Why each reply counts as zeros; "" if it does not.
    record
        Round, bound and next bound, share within the bound, counts, and epsilon so far.
    """

    average: dict[str, Array]
    withheld: bool
    faults: list[str]
    record: dict[str, Any]
