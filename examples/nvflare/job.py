# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits on NVFlare's simulator, with a bound that follows the updates.

python examples/nvflare/job.py --clients 3 --rounds 10 --folder /tmp/digits
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from fedclip.adapters.nvflare import add_update_clipping

HERE = Path(__file__).parent


def recipe(clients: int, rounds: int) -> NumpyFedAvgRecipe:
    return NumpyFedAvgRecipe(
        name="digits",
        model=np.zeros((65, 10)),
        min_clients=clients,
        num_rounds=rounds,
        train_script=str(HERE / "client.py"),
        params_transfer_type=TransferType.DIFF,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, made anew")
    args = parser.parse_args()
    job = recipe(args.clients, args.rounds)
    add_update_clipping(job, start_norm=0.5)
    job.run(SimEnv(num_clients=args.clients, workspace_root=str(args.folder.resolve())))
    server = args.folder / "digits" / "server" / "simulate_job"
    print(f"model: {server / 'models' / 'server.npy'}")
    print(f"records: fedclip report {server / 'fedclip'}")


if __name__ == "__main__":
    main()
