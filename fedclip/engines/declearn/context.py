# SPDX-License-Identifier: Apache-2.0
"""The connection, in declearn, between a module and the aggregator of one node.

declearn passes auxiliary variables only to modules, and the round update only to the aggregator;
neither gets a reference to the other, and a process may hold many nodes. It calls them one after
the other, without waiting in between::

    client:  module.process_aux_var -> steps -> aggregator.prepare_for_sharing
                                                             -> module.collect_aux_var
    server:  module.collect_aux_var ... module.process_aux_var -> aggregator.finalize_updates
                                                             -> module.run

So a context variable that one of them sets is visible in the next. Every asyncio task and every
thread has its own context, and so has every client, even if all of them share a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

from fedclip.arrays import Float64
from fedclip.updates.adaptive import AdaptiveBound
from fedclip.updates.client import Outcome
from fedclip.updates.client_noise import SiteNoise
from fedclip.updates.protocol import SentBound

if TYPE_CHECKING:
    from fedclip.engines.declearn.generics import AnyModel, AnyVector


@dataclass
class ClientRound:
    """One round of one client; the outcome is None until the aggregator has seen the update.

    Attributes
    ----------
    site
        The noise that the client adds, if it does.
    encrypter
        declearn's, which encrypts the reply; None in cleartext.
    step
        The distance of the integers in which the update is shared, if the client adds noise.
    """

    sent: SentBound
    site: SiteNoise | None = None
    encrypter: object = None
    step: float = 0.0
    outcome: Outcome | None = None


@dataclass
class ServerRound:
    """One round of the server's module, which lasts no longer than the module itself.

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


CLIENT: ContextVar[ClientRound | None] = ContextVar("fedclip_client_round", default=None)
"""The client's round, from `process_aux_var` to `collect_aux_var` of the module."""
SHARED: ContextVar[tuple[AnyModel, object] | None] = ContextVar("fedclip_shared", default=None)
"""The model of which a client shares updates, and what encrypts them, None in cleartext."""
SERVER: ContextVar[ServerRound | None] = ContextVar("fedclip_server_round", default=None)
"""The server's round, from `collect_aux_var` to `run` of the module."""


def under_way(counted: bool) -> tuple[ServerRound, AdaptiveBound] | None:
    """Return the server's round and its module, before or after the votes are `counted`."""
    round_ = SERVER.get()
    module = None if round_ is None else round_.module()
    # A run that has ended may have left its round.
    if round_ is None or module is None or round_.counted != counted:
        return None
    return round_, module
