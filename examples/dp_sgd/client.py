"""A client: python client.py CONFIG NAME [--ledger FILE] [--declearn].

The ledger keeps over restarts what the records have been used for. It lies beside them.
--declearn starts declearn's own client, for comparison.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient
from declearn.utils import set_device_policy

from fedclip import PrivateFederatedClient

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("name")
parser.add_argument("--ledger")
parser.add_argument("--declearn", action="store_true")
args = parser.parse_args()
ledger = args.ledger or f"data/{args.name}/privacy_spent.json"


def records(part: str) -> InMemoryDataset:
    pixels, digits = (np.load(f"data/{args.name}/{part}_{what}.npy") for what in ("data", "target"))
    return InMemoryDataset(pixels, target=digits, expose_classes=True)


network = tomllib.loads(args.config.read_text())["network"]
settings: dict[str, Any] = {
    "netwk": {
        "protocol": network["protocol"],
        "server_uri": f"ws://{network['host']}:{network['port']}",
        "name": args.name,
    },
    "train_data": records("train"),
    # Losses are sent without noise: of these records, never of those that are protected.
    "valid_data": records("valid"),
    "verbose": False,
}
set_device_policy(gpu=False)
if args.declearn:
    FederatedClient(**settings).run()
    sys.exit()
# Whatever the server asks for, this client's records give away no more than this.
client = PrivateFederatedClient(max_budget=(8.0, 1e-5), ledger=ledger, **settings)
client.run()
if client.spent is not None:
    print("spent: epsilon {:.3f} at delta {:g}".format(*client.spent))
