# SPDX-License-Identifier: Apache-2.0
"""How a module and the aggregator of one node know of each other.

declearn hands auxiliary variables to modules only, and the round update to the aggregator only.
It calls them in one go, synchronously::

    client:  module.process_aux_var -> steps -> aggregator.prepare_for_sharing
                                                             -> module.collect_aux_var
    server:  module.collect_aux_var ... module.process_aux_var -> aggregator.finalize_updates
                                                             -> module.run

so that a context variable set in one is seen by the next. Every asyncio task and every thread
has its own, hence every client, even when all of them share a process.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["CLIENT", "OPENED", "SERVER", "ClientRound", "ServerRound"]


@dataclass
class ClientRound:
    """One round of one client.

    Attributes
    ----------
    bound
        Largest norm of the update, as the server sent it.
    private
        Whether noise is added: then nothing is counted that noise does not cover.
    norm
        The smallest bound that would leave the update alone; None until it is known, or if
        there is no update to speak of.
    clipped
        Whether the update was above the bound.
    zeroed
        Whether the aggregator has replaced it by zeros.
    done
        Whether the aggregator has seen the update.
    """

    bound: float
    private: bool = False
    norm: float | None = None
    clipped: bool = False
    zeroed: bool = False
    done: bool = False


@dataclass
class ServerRound:
    """One round of the server.

    Attributes
    ----------
    bound
        Largest norm of an update, as it was sent to the clients.
    clients
        Number to divide the sum of the updates by, if it is fixed in advance.
    average
        What the aggregator made of the updates; None until it has.
    trouble
        Why the bound does not hold for this round, if so; empty otherwise.
    """

    bound: float
    clients: int | None = None
    average: Any = None
    trouble: str = ""


CLIENT: ContextVar[ClientRound | None] = ContextVar("fedclip_client_round", default=None)
"""From `process_aux_var` to `collect_aux_var` of the module."""
SERVER: ContextVar[ServerRound | None] = ContextVar("fedclip_server_round", default=None)
"""From `process_aux_var` to `run` of the module, which come one right after the other."""
OPENED: ContextVar[weakref.ref[Any] | None] = ContextVar("fedclip_opened", default=None)
"""The server's module that has sent a bound and not received votes."""
