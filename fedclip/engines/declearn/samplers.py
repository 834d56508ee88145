# SPDX-License-Identifier: Apache-2.0
"""declearn's client samplers: one checks replies and names their senders, one is a fixed schedule.

Only declearn's client sampler sees the replies of a round by client, right before aggregator and
modules get the sums. An invalid reply would end the run there, or take honest replies with it; the
sampler replaces it by an abstention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from importlib.util import find_spec
from typing import Any, ClassVar, TypeAlias

from declearn.client_sampler import ClientSampler, DefaultClientSampler, instantiate_client_sampler
from declearn.communication import NetworkServerConfig
from declearn.main.config import FLOptimConfig
from declearn.messaging import TrainReply
from declearn.optimizer.modules import AuxVar

from fedclip.core import parameters
from fedclip.core.messages import FromServer
from fedclip.core.parameters import Config
from fedclip.engines.declearn import context
from fedclip.engines.declearn.context import LOGGER, UPDATES, AnyModel, Blank
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipVotes, zeros_like
from fedclip.engines.declearn.update_modules import UpdateClipServer
from fedclip.statistics.counts import FedclipSharedCounts
from fedclip.updates.protocol import Schedule

Sampler: TypeAlias = Mapping[str, Any] | ClientSampler | None


def note_senders(replies: Mapping[str, TrainReply], blank: Blank = None) -> None:
    """Note who sent which reply, in the order in which declearn adds them up."""
    senders = {UPDATES: [*replies]}
    for client, reply in replies.items():
        for key in _variables(reply):
            senders.setdefault(key, []).append(client)
    context.note(next(iter(replies.values()), None), senders, blank)


def _variables(reply: TrainReply) -> dict[str, AuxVar]:
    """Return a client's auxiliary variables; none, if it has sent something else."""
    return dict(reply.aux_var) if isinstance(reply.aux_var, Mapping) else {}


class NamedClients(ClientSampler):
    """Sample clients as another sampler does; vet their replies, and name who sent what.

    ::

        for each reply, before replies are added up:
            an invalid message instead of one of fedclip's: an abstention
            an invalid update, or one with other tensors than the model: zeros, counted as refused
            an auxiliary variable that no module receives: left out

    So no reply of one client can end the run or cost another client its reply, in any order of
    arrival. The warning about a reply that is left out names the client. Under secure aggregation
    the server sees only a sum, and cannot name a client.

    Parameters
    ----------
    sampler : dict, ClientSampler or None, default=None
        The sampler of the clients, in the forms that declearn's `client_sampler` takes; None for
        all clients in every round.
    max_retries : int, default=5
        How often to sample again if no client was chosen.
    receives : list of str or None, default=None
        Names of the auxiliary variables that the server's modules receive. None: those of
        fedclip's modules, and those that at least half of the clients send.

    Raises
    ------
    TypeError
        If `sampler` or `receives` is of another type.

    Examples
    --------
    >>> from declearn.client_sampler import instantiate_client_sampler
    >>> inner = {"strategy": "uniform", "n_samples": 2}
    >>> sampler = instantiate_client_sampler("named-clients", sampler=inner)
    >>> sampler.init_clients({"a", "b", "c"})
    >>> len(sampler.run())
    2
    """

    strategy: ClassVar[str] = "named-clients"
    secagg_compatible: bool = True
    """Whether the wrapped sampler works with secure aggregation."""

    def __init__(
        self,
        sampler: Sampler = None,
        max_retries: int = ClientSampler.DEFAULT_MAX_RETRIES,
        receives: Sequence[str] | None = None,
    ) -> None:
        super().__init__(max_retries=max_retries)
        if isinstance(sampler, Mapping):
            sampler = instantiate_client_sampler(**sampler)
        self.sampler = DefaultClientSampler() if sampler is None else sampler
        if not isinstance(self.sampler, ClientSampler):
            raise TypeError(f"sampler must be a ClientSampler, or a dict of one, got {sampler!r}")
        if receives is not None and not isinstance(receives, (list, tuple)):
            raise TypeError(f"receives must be a list of names, got {receives!r}")
        self.receives = receives and [parameters.name(receives=name) for name in receives]
        self.secagg_compatible = bool(self.sampler.secagg_compatible)
        # Names sent in earlier rounds: from then on, each client must send them.
        self._known: set[str] = set()

    def init_clients(self, clients: set[str]) -> None:
        """Pass the names of the clients to the wrapped sampler."""
        super().init_clients(clients)
        self.sampler.init_clients(clients)

    def sample(self, eligible_clients: set[str]) -> set[str]:
        """Return the choice of the wrapped sampler, among clients that have not left the run."""
        members = context.ROUND.get().members
        lost = set() if members is None else members.gone.keys()
        return set(self.sampler.sample(eligible_clients - lost))

    def update(self, client_to_reply: dict[str, TrainReply], global_model: AnyModel) -> None:
        """Vet the replies, and note their order."""
        replies = [*client_to_reply.values()]
        awaited = context.expected()
        # For a secure sum, declearn passes the same reply for every client.
        if len({*map(id, replies)}) < len(replies):
            context.note(replies[0], {context.SUM: [*client_to_reply]})
        else:
            self._vet_variables(client_to_reply, awaited)
            self._vet_updates(replies)
            weights = global_model.get_weights
            note_senders(client_to_reply, lambda: zeros_like(weights(trainable=True)))
        self.sampler.update(client_to_reply, global_model)

    def _vet_variables(
        self, replies: Mapping[str, TrainReply], awaited: Mapping[str, AuxVar]
    ) -> None:
        """Keep in each reply only what the server's modules can add up."""
        votes = Counter(key for reply in replies.values() for key in _variables(reply))
        self._known |= awaited.keys() & votes.keys()
        for client, reply in replies.items():
            sent, valid = _variables(reply), dict[str, AuxVar]()
            # If no client sends one, something else is wrong, and the module reports it.
            for key in awaited.keys() & self._known:
                fits = type(sent.get(key)) is type(awaited[key])
                valid[key] = sent[key] if fits else awaited[key]
            for key in sent.keys() - valid.keys():
                if self._receives(key, sent[key], 2 * votes[key] >= len(replies)):
                    valid[key] = sent[key]
                else:
                    text = "named-clients: no module receives %.60r, which %r has sent; left out"
                    LOGGER.warning(text, key, client)
            reply.aux_var = valid

    def _receives(self, key: object, message: object, from_half: bool) -> bool:
        fits = isinstance(key, str) and isinstance(message, AuxVar)
        if not fits or isinstance(message, (FromServer, UpdateClipVotes, FedclipSharedCounts)):
            return False
        return from_half if self.receives is None else key in self.receives

    def _vet_updates(self, replies: Sequence[TrainReply]) -> None:
        """Replace invalid updates, if fedclip's aggregator averages them; it vets the others."""
        strangers = [r for r in replies if type(r.updates) is not ClippedUpdates]
        if replies and 2 * len(strangers) <= len(replies):
            self._known.add(UPDATES)
        for reply in strangers if UPDATES in self._known else ():
            reply.updates = ClippedUpdates.stranger(reply.updates)


class RoundRobin(ClientSampler):
    """Choose one group of clients after another, by a schedule fixed before the first round.

    ::

        b      = ceil(clients / per_round)
        groups = every b-th of the clients, in the order of their names
        round t is the turn of group t mod b

    With `update-clip-server`, ``separation`` at most b, each client is charged for the rounds of
    its group only. A client that has left or does not reply is not replaced.

    Parameters
    ----------
    per_round : int
        The largest number of clients in a round, at least 1: ``expected_clients``.

    Raises
    ------
    TypeError, ValueError
        If `per_round` is not as above.
    RuntimeError
        In a round, if the whole group has left; or if a client of another group has replied, as
        under a sampler that adds clients.

    Notes
    -----
    A server that is started again begins with the first group; the accounting of noise knows that.
    The schedule is public: every client can compute it.

    Examples
    --------
    >>> sampler = RoundRobin(per_round=2)
    >>> sampler.init_clients({"a", "b", "c", "d"})
    >>> [sorted(sampler.run()) for _ in range(3)]
    [['a', 'c'], ['b', 'd'], ['a', 'c']]
    """

    strategy: ClassVar[str] = "round-robin"
    secagg_compatible: bool = True
    """It works with secure aggregation, without evaluations in between."""

    def __init__(self, per_round: int) -> None:
        super().__init__()
        self.per_round = parameters.integer(1, per_round=per_round)
        self._schedule: Schedule
        self._round = 0

    def init_clients(self, clients: set[str]) -> None:
        """Fix the schedule for these clients."""
        super().init_clients(clients)
        self._schedule, self._round = Schedule(self.clients, self.per_round), 0

    def sample(self, eligible_clients: set[str]) -> set[str]:
        """Return the eligible clients of the group whose turn it is.

        It raises if there are none: declearn would draw again, and in the end draw all clients.
        """
        context.change(participation=self._schedule.at(self._round))
        self._round += 1
        return set(self._schedule.present(self._round - 1, eligible_clients))

    def update(self, client_to_reply: dict[str, TrainReply], global_model: AnyModel) -> None:
        """Refuse a round in which clients of another group have replied."""
        if others := sorted(client_to_reply.keys() - self._schedule.due(self._round - 1)):
            text = f"{others[0]!r} has replied, whose turn it was not"
            raise RuntimeError(f"{text}: no sampler around round-robin may draw other clients")


def watchful(network: NetworkServerConfig) -> NetworkServerConfig:
    """Return the network with the protocol ``fedclip-websockets`` instead of ``websockets``."""
    if network.protocol.strip().lower() == "websockets" and find_spec("websockets"):
        network = copy(network)
        network.protocol = "fedclip-websockets"
    return network


def guarded(network: NetworkServerConfig, optim: FLOptimConfig, sampler: Sampler = None) -> Config:
    """Return the arguments of `FederatedServer` for its network and sampler.

    Parameters
    ----------
    network : NetworkServerConfig
        Where the server listens. The protocol ``websockets`` becomes ``fedclip-websockets``, which
        ends with a message if a client has left or does not answer; clients need no change.
    optim : FLOptimConfig
        The optimizers; the server's modules determine the auxiliary variables it receives.
    sampler : dict, ClientSampler or None, default=None
        The sampler of the clients; `NamedClients` wraps it, to vet replies. None: all of them, or
        by turns if `update-clip-server` has a ``separation``.

    Examples
    --------
    >>> network = NetworkServerConfig("websockets", "127.0.0.1", 8765)
    >>> optim = FLOptimConfig.from_params(client_opt=0.1, aggregator="clipped-averaging")
    >>> settings = guarded(network, optim)
    >>> settings["netwk"].protocol, settings["client_sampler"].strategy
    ('fedclip-websockets', 'named-clients')
    """
    if not isinstance(sampler, NamedClients):
        receives = [str(m.aux_name or m.name) for m in optim.server_opt.modules]
        bounds = [m for m in optim.server_opt.modules if isinstance(m, UpdateClipServer)]
        if sampler is None and (turns := [m for m in bounds if m.separation > 1]):
            sampler = RoundRobin(per_round=turns[0].expected_clients or 1)
        sampler = NamedClients(sampler, receives=receives)
    return {"netwk": watchful(network), "client_sampler": sampler}
