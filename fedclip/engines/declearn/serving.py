# SPDX-License-Identifier: Apache-2.0
"""Makes a federated server robust: with checks of replies, and limited waiting."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from importlib.util import find_spec

from declearn.client_sampler import ClientSampler
from declearn.communication import NetworkServerConfig
from declearn.main.config import FLOptimConfig

from fedclip.core.parameters import Config
from fedclip.engines.declearn.round_robin import RoundRobin
from fedclip.engines.declearn.senders import NamedClients
from fedclip.engines.declearn.update_server import UpdateClipServer


def watchful(network: NetworkServerConfig) -> NetworkServerConfig:
    """Return a network of fedclip's own protocol in place of the plain ``websockets``."""
    if network.protocol.strip().lower() == "websockets" and find_spec("websockets"):
        network = copy(network)
        network.protocol = "fedclip-websockets"
    return network


def guarded(
    network: NetworkServerConfig,
    optim: FLOptimConfig,
    sampler: Mapping[str, object] | ClientSampler | None = None,
) -> Config:
    """Return a network and a sampler for `FederatedServer`, in place of the given ones.

    Parameters
    ----------
    network : NetworkServerConfig
        Where the server listens. The plain protocol ``websockets`` becomes fedclip's own, which
        ends with a message if a client is gone or does not answer; clients need no change.
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
    receives = [str(m.aux_name or m.name) for m in optim.server_opt.modules]
    if sampler is None:
        sampler = turns(optim)
    if not isinstance(sampler, NamedClients):
        sampler = NamedClients(sampler, receives=receives)
    return {"netwk": watchful(network), "client_sampler": sampler}


def turns(optim: FLOptimConfig) -> RoundRobin | None:
    """Return the sampler for the turns that noise is accounted for; None if there are none."""
    for module in optim.server_opt.modules:
        if isinstance(module, UpdateClipServer) and module.separation > 1:
            return RoundRobin(per_round=module.expected_clients or 1)
    return None
