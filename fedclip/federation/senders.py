# SPDX-License-Identifier: Apache-2.0
"""Who sent what, for the server's log.

declearn adds replies up before aggregators and modules see them. Its client sampler is the one
part of the server that is shown them by name, and right before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from declearn.client_sampler import (
    ClientSampler,
    DefaultClientSampler,
    instantiate_client_sampler,
)
from declearn.messaging import TrainReply
from declearn.model.api import Model

from fedclip.federation.replies import UPDATES, Sender, note

__all__ = ["NamedClients"]


class NamedClients(ClientSampler):
    """Sample clients as another sampler does, and let the server's log name who sent what.

    With it, the warning about a reply that `clipped-averaging`, `update-clip-server` or the
    counterpart of a shared clipper leaves out says whose it was. Under secure aggregation there
    is only a sum, and nobody to be named.

    Parameters
    ----------
    sampler : dict, ClientSampler or None, default=None
        What samples the clients of a round, as declearn's `client_sampler` is given it; None for
        all clients in every round.
    max_retries : int, default=5
        How often to sample again where no client was chosen.

    Raises
    ------
    TypeError
        If `sampler` is none of these.

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
    ) -> None:
        super().__init__(max_retries=max_retries)
        if sampler is None:
            sampler = DefaultClientSampler()
        elif isinstance(sampler, Mapping):
            sampler = instantiate_client_sampler(**sampler)
        if not isinstance(sampler, ClientSampler):
            raise TypeError(
                "sampler must be a ClientSampler, or a dict with its 'strategy' and parameters, "
                f"got {sampler!r}"
            )
        self.sampler = sampler

    @property
    def secagg_compatible(self) -> bool:
        """Whether the sampler that chooses is."""
        return bool(self.sampler.secagg_compatible)

    def init_clients(self, clients: set[str]) -> None:
        """Tell the sampler that chooses of the clients."""
        super().init_clients(clients)
        self.sampler.init_clients(clients)

    def sample(self, eligible_clients: set[str]) -> set[str]:
        """Return what the sampler that chooses returns."""
        return set(self.sampler.sample(eligible_clients))

    def update(self, client_to_reply: dict[str, TrainReply], global_model: Model[Any]) -> None:
        """Note down the order of the replies."""
        self.sampler.update(client_to_reply, global_model)
        replies = list(client_to_reply.values())
        # Of a secure sum declearn shows the same reply for every client.
        if not replies or len({id(reply) for reply in replies}) < len(replies):
            note(None, {})
            return
        senders: dict[str, list[Sender]] = {}
        for client, reply in client_to_reply.items():
            senders.setdefault(UPDATES, []).append(Sender(client, False))
            for key, message in reply.aux_var.items():
                # Votes say it; in their place, what does not say it makes no sense.
                wrong = bool(getattr(message, "n_faults", True))
                senders.setdefault(key, []).append(Sender(client, wrong))
        note(replies[0], senders)
