# SPDX-License-Identifier: Apache-2.0
"""The server or a client of a small federation; the client may run another Python or fedclip.

::

    python mixed_node.py server PORT '{"noise_multiplier": 1.0, ...}'
    python mixed_node.py NAME PORT
"""

import json
import logging
import sys

import numpy as np
from declearn.communication import build_client, build_server
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.model.sklearn import SklearnSGDModel

import fedclip  # noqa: F401  (registers the plug-ins)


def serve(port: int, settings: dict[str, object]) -> None:
    """Run two rounds with two clients, and print the weights."""
    server = FederatedServer(
        model=SklearnSGDModel.from_parameters(kind="regressor"),
        netwk=build_server("fedclip-websockets", host="127.0.0.1", port=port, heartbeat=0.2),
        optim={
            "aggregator": "clipped-averaging",
            "client_opt": {"lrate": 0.01, "modules": [("zscore-clip", {}), "update-clip-client"]},
            "server_opt": {"lrate": 1.0, "modules": [("update-clip-server", settings)]},
        },
    )
    register = {"min_clients": 2, "max_clients": 2, "timeout": 60}
    server.run({"rounds": 2, "register": register, "training": {"batch_size": 10, "n_epoch": 1}})
    print(
        {
            name: np.asarray(array).tolist()
            for name, array in server.model.get_weights().coefs.items()
        }
    )


def take_part(name: str, port: int) -> None:
    """Train on random numbers."""
    rng = np.random.default_rng(len(name))
    data = InMemoryDataset(x := rng.normal(size=(40, 3)), x @ [1.0, 2.0, 3.0])
    network = build_client("websockets", f"ws://127.0.0.1:{port}", name)
    FederatedClient(network, data, data).run()


if __name__ == "__main__":
    who, where, *more = sys.argv[1:]
    # Not by declearn's functions, which 2.8 lacks.
    logging.basicConfig(level=logging.INFO)
    if who == "server":
        serve(int(where), json.loads(more[0]))
    else:
        take_part(who, int(where))
