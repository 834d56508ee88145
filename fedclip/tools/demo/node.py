# SPDX-License-Identifier: Apache-2.0
"""One process of the demo's federation: ``python -m fedclip.tools.demo.node server|SITE CONFIG``.

It reads the very file that ``fedclip quickrun`` would run in one process. Whoever starts a
node holds the other end of its standard input: when that closes, the node ends, so that no
process outlives the demo, however the demo ends.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

from declearn.communication import NetworkClientConfig, NetworkServerConfig
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import ExperimentConfig
from declearn.utils import setup_client_loggers, setup_server_loggers

import fedclip  # noqa: F401  (registers the clippers)
from fedclip.federation.serving import guarded
from fedclip.tools.demo.data import SITES

__all__ = ["serve", "take_part"]


def serve(file: Path, config: dict[str, Any]) -> None:
    """Run the server of the federation that `file` describes."""
    setup_server_loggers(level=20)
    path = str(file)
    experiment = ExperimentConfig.from_toml(path, False, "experiment")
    optim = FLOptimConfig.from_toml(path, False, "optim")
    server = FederatedServer(
        model=runpy.run_path(config["model"]["model_file"])["model"],
        optim=optim,
        metrics=experiment.metrics,
        checkpoint=os.path.join(str(experiment.checkpoint), "server"),
        **guarded(NetworkServerConfig.from_toml(path, False, "network"), optim),
    )
    server.run(FLRunConfig.from_toml(path, False, "run"))


def take_part(site: str, config: dict[str, Any]) -> None:
    """Run one client of the federation."""
    setup_client_loggers(site, level=20)
    folder = Path(config["data"]["data_folder"], site)
    network = config["network"]
    client = FederatedClient(
        netwk=NetworkClientConfig.from_params(
            protocol=network["protocol"],
            server_uri=f"ws://{network['host']}:{network['port']}",
            name=site,
        ),
        train_data=InMemoryDataset(
            str(folder / "train_data.npy"),
            target=str(folder / "train_target.npy"),
            expose_classes=True,
            seed=SITES.index(site),
        ),
        valid_data=InMemoryDataset(
            str(folder / "valid_data.npy"), target=str(folder / "valid_target.npy")
        ),
        checkpoint=os.path.join(config["experiment"]["checkpoint"], site),
        verbose=False,
    )
    client.run()


def end_with_parent() -> None:
    """End this process when its standard input closes."""
    # Not through sys.stdin: its lock, held here, would stop the interpreter from ending.
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Run the node that the command line names."""
    role, file = sys.argv[1], Path(sys.argv[2])
    threading.Thread(target=end_with_parent, daemon=True).start()
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    if role == "server":
        serve(file, config)
    else:
        take_part(role, config)


if __name__ == "__main__":
    main()
