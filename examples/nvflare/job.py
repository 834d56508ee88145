# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits on NVFlare's simulator, with a bound that follows the updates.

python examples/nvflare/job.py --clients 3 --rounds 10 --folder /tmp/digits

With --installed it is exported for sites that have the script at that path, and holds no code:

python examples/nvflare/job.py --folder /tmp/digits --installed /opt/digits/client.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from fedclip.engines.nvflare import add_update_clipping

HERE = Path(__file__).parent


def recipe(clients: int, rounds: int, script: str = str(HERE / "client.py")) -> NumpyFedAvgRecipe:
    return NumpyFedAvgRecipe(
        name="digits",
        model=np.zeros((65, 10)),
        min_clients=clients,
        num_rounds=rounds,
        # The file of this path travels in the job, if it is there; else the sites have it.
        train_script=script,
        params_transfer_type=TransferType.DIFF,
    )


def export(job: NumpyFedAvgRecipe, folder: Path) -> None:
    """Write the job without the widget that would send what a script logs past a site's policy."""
    job.export(str(folder))
    file = folder / "digits" / "app" / "config" / "config_fed_client.json"
    config = json.loads(file.read_text())
    parts = config["components"]
    config["components"] = [one for one in parts if "ConvertToFedEvent" not in one["path"]]
    file.write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, made anew")
    parser.add_argument("--installed", help="where the sites have the script, an absolute path")
    args = parser.parse_args()
    job = recipe(args.clients, args.rounds, *filter(None, [args.installed]))
    add_update_clipping(job, start_norm=0.5)
    if args.installed:
        export(job, args.folder)
        return
    job.run(SimEnv(num_clients=args.clients, workspace_root=str(args.folder.resolve())))
    server = args.folder / "digits" / "server" / "simulate_job"
    print(f"model: {server / 'models' / 'server.npy'}")
    print(f"records: fedclip report {server / 'fedclip'}")


if __name__ == "__main__":
    main()
