# SPDX-License-Identifier: Apache-2.0
"""declearn's quickrun, with a server that vets replies and does not wait for ever."""

from __future__ import annotations

import asyncio
import logging
import os

from declearn.communication import NetworkServerConfig
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import ExperimentConfig, ModelConfig
from declearn.quickrun import _run as declearns
from declearn.utils import set_device_policy, setup_server_loggers

from fedclip.federation.serving import guarded

__all__ = ["run_experiment"]


async def run_experiment(config: str) -> None:
    """Run server and clients of a quickrun file, as `declearn.quickrun.quickrun` does."""
    toml, folder = declearns.get_toml_folder(config)
    network = NetworkServerConfig.from_toml(toml, False, "network")
    experiment = ExperimentConfig.from_toml(toml, False, "experiment", True)
    clients = [
        declearns.run_client(
            folder, declearns.server_to_client_network(network), experiment, name, paths
        )
        for name, paths in declearns.locate_split_data(toml, folder).items()
    ]
    await asyncio.gather(_serve(toml, folder, network, experiment), *clients)


async def _serve(
    toml: str, folder: str, network: NetworkServerConfig, experiment: ExperimentConfig
) -> None:
    set_device_policy(gpu=False)
    optim = FLOptimConfig.from_toml(toml, False, "optim")
    model = declearns.get_model(folder, ModelConfig.from_toml(toml, False, "model", True))
    checkpoint = os.path.join(declearns.get_checkpoint(folder, experiment), "server")
    setup_server_loggers(level=logging.INFO, fpath=os.path.join(checkpoint, "logs.txt"))
    server = FederatedServer(
        model=model,
        optim=optim,
        metrics=experiment.metrics,
        secagg=None,
        checkpoint=checkpoint,
        **guarded(network, optim),
    )
    await server.async_run(FLRunConfig.from_toml(toml, False, "run"))
