"""Thirty clients and a server in one process, over real websockets on this machine.

    python run.py                        # adaptive bound, in cleartext
    python run.py --secagg masking       # the same; the server sees sums only
    python run.py --secagg joye-libert   # the same; some ten seconds a round
    python run.py --optim private.toml   # with central noise, and a privacy budget
    python run.py --optim sites.toml --secagg masking   # with noise that the clients add

Each client holds some of scikit-learn's digits, and all learn to tell even ones from odd ones.
Three clients' were scanned at a hundred times the brightness: their updates are far out of range.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedServer
from declearn.main.config import FLRunConfig
from declearn.model.sklearn import SklearnSGDModel
from declearn.secagg.utils import IdentityKeys
from declearn.utils import setup_server_loggers
from sklearn.datasets import load_digits

from fedclip import PersonalFederatedClient
from fedclip.engines.declearn.secagg import plan

BRIGHT = 3


def make_client(
    i: int, port: int, rows: np.ndarray[Any, Any], secagg: Any
) -> PersonalFederatedClient:
    pixels, digits = load_digits(return_X_y=True)
    data = pixels[rows] / 16 * (100.0 if i < BRIGHT else 1.0)
    return PersonalFederatedClient(
        netwk={
            "protocol": "websockets",
            "server_uri": f"ws://127.0.0.1:{port}",
            "name": f"client_{i}",
        },
        train_data=InMemoryDataset(data, target=digits[rows] % 2, expose_classes=True),
        secagg=secagg,
        verbose=False,
    )


async def federate(optim: str, clients: int, rounds: int, secagg: str | None) -> FederatedServer:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    client_secagg: list[Any] = [None] * clients
    server_secagg: dict[str, Any] | None = None
    if secagg:
        keys = [Ed25519PrivateKey.generate() for _ in range(clients)]
        trusted: list[Ed25519PublicKey | str] = [key.public_key() for key in keys]
        client_secagg = [
            {"secagg_type": secagg, "id_keys": IdentityKeys(key, trusted)} for key in keys
        ]
        # The losses of evaluation rounds go through the same range as the updates do. With more
        # bits, the sums of clients that add noise would not be exact.
        settings = plan(1e4, clients, 65, kind=secagg, bitsize=48)
        print(settings)
        server_secagg = {
            "secagg_type": secagg,
            "bitsize": settings.bitsize,
            "clipval": settings.clipval,
        }
    server = FederatedServer(
        model=SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty=None),
        netwk={"protocol": "websockets", "host": "127.0.0.1", "port": port, "heartbeat": 0.02},
        optim=optim,
        secagg=server_secagg,
    )
    config = FLRunConfig.from_params(
        rounds=rounds,
        register={"min_clients": clients, "max_clients": clients, "timeout": 60},
        training={"batch_size": 20, "n_epoch": 1},
        evaluate={"batch_size": 100, "frequency": max(1, rounds // 3)},
    )
    order = np.random.default_rng(0).permutation(1797)
    parts = np.array_split(order, clients)
    nodes = [make_client(i, port, parts[i], client_secagg[i]) for i in range(clients)]

    async def later(node: PersonalFederatedClient) -> None:
        await asyncio.sleep(0.5)
        await node.async_run()

    await asyncio.gather(server.async_run(config), *(later(node) for node in nodes))
    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optim", default="optim.toml")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--secagg", choices=("masking", "joye-libert"))
    args = parser.parse_args()
    # The server says each round what it clipped; the thirty clients need not say it, too.
    logging.getLogger().setLevel(logging.WARNING)
    setup_server_loggers(level=logging.WARNING)
    logging.getLogger("declearn.server.fedclip").setLevel(logging.INFO)
    logging.getLogger("declearn.client.fedclip").setLevel(logging.ERROR)
    server = asyncio.run(federate(args.optim, args.clients, args.rounds, args.secagg))
    (bound,) = (module for module in server.optim.modules if module.name == "update-clip-server")
    print(f"bound after {args.rounds} rounds: {bound.get_state()['bound']:.3g}")


if __name__ == "__main__":
    main()
