# SPDX-License-Identifier: Apache-2.0
"""Checks replies before declearn adds them up, and lets the server's log name their senders.

Only declearn's client sampler sees the replies of a round by client, right before aggregator and
modules get the sums. An invalid reply would end the run there, or take honest replies with it; the
sampler replaces it by an abstention.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from declearn.client_sampler import ClientSampler, DefaultClientSampler, instantiate_client_sampler
from declearn.messaging import TrainReply
from declearn.optimizer.modules import AuxVar

from fedclip.core import parameters
from fedclip.core.messages import FromServer
from fedclip.engines.declearn.generics import AnyModel, AnyVector
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipVotes, zeros_like
from fedclip.engines.declearn.quorum import MEMBERS
from fedclip.engines.declearn.replies import UPDATES, Expected, Sender, expected, note
from fedclip.statistics.messages import FedclipSharedCounts

_LOGGER = logging.getLogger("declearn.server.fedclip")


def note_senders(
    replies: Mapping[str, TrainReply], blank: Callable[[], AnyVector] | None = None
) -> None:
    """Note who sent which reply, in the order in which declearn adds them up; `blank`: `note`."""
    senders: dict[str, list[Sender]] = {}
    for client, reply in replies.items():
        senders.setdefault(UPDATES, []).append(Sender(client, False))
        variables = reply.aux_var
        for key, message in variables.items() if isinstance(variables, Mapping) else ():
            faulty = bool(getattr(message, "n_faults", False))
            senders.setdefault(key, []).append(Sender(client, faulty))
    note(next(iter(replies.values()), None), senders, blank)


class NamedClients(ClientSampler):
    """Sample clients as another sampler does; vet their replies, and name who sent what.

    ::

        for each reply, before replies are added up:
            an invalid message in the place of one of fedclip's: an abstention
            an invalid update, or one with other tensors than the model: zeros, counted as refused
            an auxiliary variable that no module receives: left out

    So no reply of one client can end the run or cost another client its reply, in any order of
    arrival. The warning about a reply that is left out names the client. Under secure aggregation
    the server sees only a sum, and can name nobody.

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
        If `sampler` or `receives` is none of these.

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

    def __init__(
        self,
        sampler: Mapping[str, Any] | ClientSampler | None = None,
        max_retries: int = ClientSampler.DEFAULT_MAX_RETRIES,
        receives: Sequence[str] | None = None,
    ) -> None:
        super().__init__(max_retries=max_retries)
        if sampler is None:
            sampler = DefaultClientSampler()
        elif isinstance(sampler, Mapping):
            sampler = instantiate_client_sampler(**sampler)
        if not isinstance(sampler, ClientSampler):
            raise TypeError(f"sampler must be a ClientSampler, or a dict of one, got {sampler!r}")
        if receives is not None and not isinstance(receives, (list, tuple)):
            raise TypeError(f"receives must be a list of names, got {receives!r}")
        self.sampler = sampler
        names = [parameters.name(receives=name) for name in receives or ()]
        self.receives = None if receives is None else names
        # Names sent in earlier rounds: from then on, each client must send them.
        self._known: set[str] = set()

    @property
    def secagg_compatible(self) -> bool:
        """Whether the wrapped sampler works with secure aggregation."""
        return bool(self.sampler.secagg_compatible)

    def init_clients(self, clients: set[str]) -> None:
        """Tell the wrapped sampler which clients there are."""
        super().init_clients(clients)
        self.sampler.init_clients(clients)

    def sample(self, eligible_clients: set[str]) -> set[str]:
        """Return the choice of the wrapped sampler, among clients that have not left the run."""
        members = MEMBERS.get()
        gone = set() if members is None else members.gone.keys()
        return set(self.sampler.sample(eligible_clients - gone))

    def update(self, client_to_reply: dict[str, TrainReply], global_model: AnyModel) -> None:
        """Vet the replies, and note their order."""
        replies = list(client_to_reply.values())
        awaited = expected()
        # For a secure sum, declearn passes the same reply for every client.
        if len({id(reply) for reply in replies}) < len(replies) or not replies:
            names = {UPDATES: [Sender(name, summed=True) for name in client_to_reply]}
            note(replies[0] if replies else None, names)
            self.sampler.update(client_to_reply, global_model)
            return
        self._vet_variables(client_to_reply, awaited)
        self._vet_updates(client_to_reply)
        weights = global_model.get_weights
        note_senders(client_to_reply, lambda: zeros_like(weights(trainable=True)))
        self.sampler.update(client_to_reply, global_model)

    def _vet_variables(
        self, replies: Mapping[str, TrainReply], awaited: Mapping[str, Expected]
    ) -> None:
        """Keep in each reply only what the server's modules can add up."""
        sent: dict[str, dict[str, AuxVar]] = {}
        for client, reply in replies.items():
            variables = reply.aux_var
            sent[client] = dict(variables) if isinstance(variables, Mapping) else {}
        votes = Counter(key for found in sent.values() for key in found)
        self._known |= awaited.keys() & votes.keys()
        for client, reply in replies.items():
            kept: dict[str, AuxVar] = {}
            for key, message in sent[client].items():
                if key in awaited:
                    kind, abstention = awaited[key]
                    kept[key] = message if type(message) is kind else abstention()
                elif self._receives(key, message, votes[key], len(replies)):
                    kept[key] = message
                else:
                    text = "named-clients: no module receives %.60r, which %r has sent; left out"
                    _LOGGER.warning(text, key, client)
            for key in awaited.keys() - kept.keys():
                # If no client sends it, something else is wrong, and the module reports it.
                if key in self._known:
                    kept[key] = awaited[key].abstention()
            reply.aux_var = kept

    def _receives(self, key: object, message: object, votes: int, clients: int) -> bool:
        if not isinstance(key, str) or not isinstance(message, AuxVar):
            return False
        if isinstance(message, (FromServer, UpdateClipVotes, FedclipSharedCounts)):
            return False
        return 2 * votes >= clients if self.receives is None else key in self.receives

    def _vet_updates(self, replies: Mapping[str, TrainReply]) -> None:
        """Replace what is no update, if fedclip's aggregator averages them; it vets the rest."""
        ours = sum(type(reply.updates) is ClippedUpdates for reply in replies.values())
        if ours and 2 * ours >= len(replies):
            self._known.add(UPDATES)
        if UPDATES not in self._known:
            return
        for reply in replies.values():
            if type(reply.updates) is not ClippedUpdates:
                reply.updates = ClippedUpdates.stranger(reply.updates)
