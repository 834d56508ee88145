# SPDX-License-Identifier: Apache-2.0
"""The current round, as the parts of one node of declearn share it.

declearn passes auxiliary variables only to modules, and the round's update only to the aggregator.
Neither gets a reference to the other, and a process may hold many nodes. declearn calls them one
after the other, without waiting in between::

    client:  module.process_aux_var -> steps -> aggregator.prepare_for_sharing
                                                             -> module.collect_aux_var
    server:  module.collect_aux_var ... module.process_aux_var -> aggregator.finalize_updates
                                                             -> module.run

So one of them writes to a context variable, and the next one reads it. Every asyncio task and every
thread has its own context, and so has every client, even if all of them share a process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

from declearn.model.api import Model, Vector
from declearn.optimizer.modules import OptiModule

from fedclip.arrays import Float64
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import Outcome
from fedclip.updates.protocol import Arrays, Participation, Reply, SentBound

LOGGER = logging.getLogger("declearn.server.fedclip")
CLIENT_LOGGER = logging.getLogger("declearn.client.fedclip")
"""The logs of a server and of a client."""

AnyModel: TypeAlias = Model[Any]
AnyModule: TypeAlias = OptiModule[Any]
AnyVector: TypeAlias = Vector[Any]
Blank: TypeAlias = Callable[[], AnyVector] | None

UPDATES, SUM = "updates", "secure sum"
"""The keys of updates, and of a secure sum, next to the names of auxiliary variables."""


@dataclass
class ClientPart:
    """One round of a client; `outcome` and `reply` follow when the aggregator clips the update.

    Attributes
    ----------
    add_noise
        Returns an update with the noise that the client adds; None if it adds none.
    """

    sent: SentBound
    add_noise: Callable[[Arrays], Arrays] | None = None
    outcome: Outcome | None = None
    reply: Reply | None = None


@dataclass
class ServerPart:
    """One round of the server's module, which lasts no longer than the module.

    Attributes
    ----------
    module, sent
        The module, and what it has sent.
    counted
        Whether the votes have come, so that the average is next.
    average, exact
        The average of the updates; None until then. The same in float64, by name, if known.
    trouble
        Why the bound does not hold in this round; empty if it does.
    """

    module: ref[AdaptiveBound]
    sent: SentBound
    counted: bool = False
    average: AnyVector | None = None
    exact: Mapping[str, Float64] | None = None
    trouble: str = ""


class Senders(NamedTuple):
    """Who sent what, for each key in the order in which replies are added up.

    Attributes
    ----------
    reply
        One of the replies: when it is gone, the round is over.
    by_key
        The names of the clients.
    blank
        Returns an update of zeros, of the model's shapes.
    """

    reply: ref[object]
    by_key: Mapping[str, Sequence[str]]
    blank: Blank


@dataclass(frozen=True)
class RoundContext:
    """The current round of a node; a part that is not under way is None.

    Attributes
    ----------
    client
        The client's round, from `process_aux_var` to `collect_aux_var` of its module.
    server
        The server's round, from `collect_aux_var` to `run` of its module.
    sharing
        The model of which a client shares updates, and what encrypts them: None in cleartext.
    participation
        What the sampler has drawn for the round that begins; None without turns.
    members, expected, senders, evaluations
        The clients of the run; the messages that server modules expect; the senders of the replies;
        the evaluations that get noise.
    """

    client: ClientPart | None = None
    server: ServerPart | None = None
    sharing: tuple[AnyModel, object] | None = None
    participation: Participation | None = None
    members: Any = None
    expected: Mapping[str, Any] | None = None
    senders: Senders | None = None
    evaluations: Any = None


ROUND: ContextVar[RoundContext] = ContextVar("fedclip_round", default=RoundContext())  # noqa: B039
"""The only context variable of fedclip: the parts of one node read it, and replace it."""


def change(**parts: Any) -> None:
    """Replace parts of the round's context; the other parts stay.

    Examples
    --------
    >>> change(members={"a"})
    >>> ROUND.get().members
    {'a'}
    >>> change(members=None)
    """
    ROUND.set(replace(ROUND.get(), **parts))


def under_way(counted: bool) -> tuple[ServerPart, AdaptiveBound] | None:
    """Return the server's round and its module, before or after the votes are `counted`."""
    round_ = ROUND.get().server
    module = round_.module() if round_ and round_.counted == counted else None
    # A run that has ended may have left its round.
    return (round_, module) if round_ and module else None


# -- on the server: which messages to expect, and who sent which one ------------------------------
def expect(key: str, abstention: Any) -> None:
    """Note the type of an auxiliary variable, by what replaces one of another type."""
    change(expected={**(ROUND.get().expected or {}), key: abstention})


def expected() -> Mapping[str, Any]:
    """Return what is expected, and forget it: the next round notes it again."""
    messages = ROUND.get().expected
    change(expected=None)
    return messages or {}


def note(reply: object, senders: Mapping[str, Sequence[str]], blank: Blank = None) -> None:
    """Note who sent what, until the `reply`, one of the round, is gone; None forgets the notes.

    `blank` returns an update of zeros, of the model's shapes.
    """
    change(senders=None if reply is None else Senders(ref(reply), senders, blank))


def senders_of(key: str | None) -> Sequence[str]:
    """Return the known senders of the messages, or of those in a secure sum."""
    known = ROUND.get().senders
    return known.by_key.get(key or "", ()) if known and known.reply() is not None else ()


def names_of(key: str | None, total: int) -> list[str]:
    """Return who sent each of `total` messages, in the order of the sum; "" where not known."""
    senders = senders_of(key)
    return [*senders] if len(senders) == total else [""] * total


def blank() -> AnyVector | None:
    """Return an update of zeros, of the model's shapes; None if the shapes are not known."""
    known = ROUND.get().senders
    return known.blank() if known and known.blank and known.reply() is not None else None
