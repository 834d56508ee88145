# SPDX-License-Identifier: Apache-2.0
"""The connection between a module and the aggregator of one node.

declearn passes auxiliary variables only to modules, and the round update only to the aggregator.
It calls them synchronously, one after the other::

    client:  module.process_aux_var -> steps -> aggregator.prepare_for_sharing
                                                             -> module.collect_aux_var
    server:  module.collect_aux_var ... module.process_aux_var -> aggregator.finalize_updates
                                                             -> module.run

So a context variable that one of them sets is visible in the next. Every asyncio task and every
thread has its own context, and so has every client, even if all of them share a process.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass
class ClientRound:
    """One round of one client.

    Attributes
    ----------
    bound
        Largest norm of the update, as the server sent it.
    private
        Whether the server adds noise; then the client sends no counts that noise does not cover.
    norm
        The smallest bound that would leave the update alone; None until it is known, or if
        there is no valid update.
    clipped
        Whether the update was above the bound.
    zeroed
        Whether the aggregator has replaced the update by zeros.
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
        Largest norm of an update, as sent to the clients.
    clients
        Number by which to divide the sum of the updates, if it is fixed in advance.
    average
        The aggregator's average of the updates; None until then.
    exact
        The same in float64, by name, before it was rounded to the dtypes of the model.
    trouble
        Why the bound does not hold in this round; empty if it does.
    """

    bound: float
    clients: int | None = None
    average: Any = None
    exact: Any = None
    trouble: str = ""


CLIENT: ContextVar[ClientRound | None] = ContextVar("fedclip_client_round", default=None)
"""The client's round, from `process_aux_var` to `collect_aux_var` of the module."""
SERVER: ContextVar[ServerRound | None] = ContextVar("fedclip_server_round", default=None)
"""The server's round, from `process_aux_var` to `run` of the module, which follows directly."""
OPENED: ContextVar[weakref.ref[Any] | None] = ContextVar("fedclip_opened", default=None)
"""The server's module that has sent a bound and not yet received votes."""
