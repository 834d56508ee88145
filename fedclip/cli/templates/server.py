"""The server, on a separate machine: it holds the model and no records.

    python server.py                                                       for a try on one machine
    python server.py --host 0.0.0.0 --certificate server.crt --key server.key

Start it first. It waits for as many clients as [run.register] in config.toml says.
"""

import argparse
import logging
from pathlib import Path

from declearn.communication import NetworkServerConfig
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import ExperimentConfig
from declearn.utils import set_device_policy, setup_server_loggers
from model import model

from fedclip import NamedClients

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Train with the clients that join."""
    parser = argparse.ArgumentParser(description="Run the server of this federation.")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--certificate", help="of this server, for TLS")
    parser.add_argument("--key", help="the private key of the certificate")
    options = parser.parse_args()
    local = options.host in ("127.0.0.1", "localhost")
    if bool(options.certificate) != bool(options.key) or not (local or options.certificate):
        parser.error("other machines need TLS: give --certificate and --key")
    set_device_policy(gpu=False)
    config, results = str(HERE / "config.toml"), HERE / "results" / "server"
    setup_server_loggers(level=logging.INFO, fpath=str(results / "logs.txt"))
    # This protocol names a client that is gone; NamedClients leaves out replies that are no update.
    network = NetworkServerConfig(
        protocol="fedclip-websockets",
        host=options.host,
        port=options.port,
        certificate=options.certificate,
        private_key=options.key,
    )
    server = FederatedServer(
        model,
        netwk=network,
        optim=FLOptimConfig.from_toml(config, False, "optim"),
        metrics=ExperimentConfig.from_toml(config, False, "experiment").metrics,
        checkpoint=str(results),
        client_sampler=NamedClients(),
    )
    server.run(FLRunConfig.from_toml(config, False, "run"))


if __name__ == "__main__":
    main()
