"""The client of a site: it trains with differential privacy, within a budget of the site's own.

    python client.py north                                                 for a try on one machine
    python client.py north --server wss://server.example.org:8765 --certificate ca.crt

Its name is that of the site's folder in data/, and no two clients have the same.
"""

import argparse
import logging
import tomllib
from pathlib import Path

import model  # noqa: F401 (declearn learns of the kind of model that the server sends)
from declearn.communication import NetworkClientConfig
from declearn.dataset import InMemoryDataset
from declearn.utils import set_device_policy, setup_client_loggers

from fedclip import PrivateFederatedClient

HERE = Path(__file__).resolve().parent
# Epsilon and delta: whatever the server asks for, what this client sends in all runs together says
# no more of a record or person. Delta is well below 1 / their number.
MAX_BUDGET = (3.0, 1e-6)


def main() -> None:
    """Take part in the training."""
    parser = argparse.ArgumentParser(description="Run the client of a site.")
    parser.add_argument("name", help="the site, as you named it for prepare.py")
    parser.add_argument("--server", default="ws://127.0.0.1:8765", help="address of the server")
    parser.add_argument("--certificate", help="of the authority that signed the server's")
    options = parser.parse_args()
    data, results = HERE / "data" / options.name, HERE / "results" / options.name
    if not data.is_dir():
        parser.error(f"{data} is missing: run prepare.py, with --site {options.name}")
    if options.server.startswith("wss:") != bool(options.certificate):
        parser.error("TLS needs both an address wss://… and --certificate")
    set_device_policy(gpu=False)
    setup_client_loggers(options.name, logging.INFO, str(results / "logs.txt"))
    unit = tomllib.loads((HERE / "columns.toml").read_text("utf-8"))["unit"]
    files = (data / f"{part}_persons.csv" for part in ("train", "valid"))
    persons = [file if unit == "person" else None for file in files]
    client = PrivateFederatedClient(
        netwk=NetworkClientConfig(
            "websockets", options.server, options.name, certificate=options.certificate
        ),
        train_data=InMemoryDataset(f"{data}/train_data.npy", target=f"{data}/train_target.npy"),
        valid_data=InMemoryDataset(f"{data}/valid_data.npy", target=f"{data}/valid_target.npy"),
        checkpoint=str(results),
        verbose=False,
        max_budget=MAX_BUDGET,
        # What was spent on these records, over all runs. Keep it with them.
        ledger=data / "privacy_spent.json",
        persons=persons[0],
        valid_persons=persons[1],
    )
    client.run()


if __name__ == "__main__":
    main()
