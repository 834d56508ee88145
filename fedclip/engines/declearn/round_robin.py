# SPDX-License-Identifier: Apache-2.0
"""`round-robin`: clients that take turns, as declearn's client sampler."""

from __future__ import annotations

from typing import ClassVar

from declearn.client_sampler import ClientSampler
from declearn.messaging import TrainReply

from fedclip.core import parameters
from fedclip.engines.declearn.generics import AnyModel
from fedclip.updates.schedule import DUE, Schedule


class RoundRobin(ClientSampler):
    """Let groups of clients take turns, by a schedule that is fixed before the first round.

    ::

        b      = ceil(clients / per_round)
        groups = every b-th of the clients, in the order of their names
        round t is the turn of group t mod b

    With `update-clip-server`, ``separation`` at most b, each client is charged for its own turns
    only. Nobody is drawn in the place of a client that has left or does not reply.

    Parameters
    ----------
    per_round : int
        The largest number of clients in a round, at least 1: ``expected_clients``.

    Raises
    ------
    TypeError, ValueError
        If `per_round` is no such number.
    RuntimeError
        In a round, if the whole group has left; or if a client has replied whose turn it was not,
        as under another sampler that adds clients of its own.

    Notes
    -----
    A server that is started again begins with the first group; noise is accounted for that.
    The schedule is public: every client can know the others' turns.

    Examples
    --------
    >>> sampler = RoundRobin(per_round=2)
    >>> sampler.init_clients({"a", "b", "c", "d"})
    >>> [sorted(sampler.run()) for _ in range(3)]
    [['a', 'c'], ['b', 'd'], ['a', 'c']]
    """

    strategy: ClassVar[str] = "round-robin"

    def __init__(self, per_round: int) -> None:
        super().__init__()
        self.per_round = parameters.integer(1, per_round=per_round)
        self._schedule: Schedule | None = None
        self._round = 0
        self._due: frozenset[str] = frozenset()

    @property
    def secagg_compatible(self) -> bool:
        """Whether it works with secure aggregation: it does, without evaluations in between."""
        return True

    def init_clients(self, clients: set[str]) -> None:
        """Fix the schedule for these clients."""
        super().init_clients(clients)
        self._schedule, self._round = Schedule(self.clients, self.per_round), 0

    def sample(self, eligible_clients: set[str]) -> set[str]:
        """Return whose turn it is, without those that are not eligible.

        Never nobody: declearn would draw again, and in the end draw everybody.
        """
        if self._schedule is None:
            raise RuntimeError("round-robin has no clients: call init_clients() first")
        self._due = frozenset(self._schedule.due(self._round))
        DUE.set(self._schedule.at(self._round))
        self._round += 1
        if found := self._due & eligible_clients:
            return set(found)
        names = ", ".join(map(repr, sorted(self._due)[:5]))
        raise RuntimeError(
            f"all clients whose turn it is have left ({names}), and nobody may take their place: "
            "start again with those that are there"
        )

    def update(self, client_to_reply: dict[str, TrainReply], global_model: AnyModel) -> None:
        """Refuse a round in which others than those that were due have replied."""
        if others := sorted(client_to_reply.keys() - self._due):
            raise RuntimeError(
                f"{others[0]!r} has replied, whose turn it was not: round-robin can not be part "
                "of another sampler that draws clients"
            )
