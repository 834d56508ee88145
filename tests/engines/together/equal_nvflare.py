# SPDX-License-Identifier: Apache-2.0
"""The one task on NVFlare's simulator: python equal_nvflare.py FOLDER ROUNDS SETTINGS."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from equal_task import first, flat
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from fedclip.engines.nvflare import add_update_clipping


def main(folder: Path, rounds: int, settings: dict[str, object], clients: int = 3) -> None:
    job = NumpyFedAvgRecipe(
        name="equal",
        model=flat(first()),
        min_clients=clients,
        num_rounds=rounds,
        train_script=str(Path(__file__).with_name("equal_task.py")),
        params_transfer_type=TransferType.DIFF,
    )
    add_update_clipping(job, folder=str(folder), **settings)
    job.run(SimEnv(num_clients=clients, workspace_root=str(folder / "work")))
    (model,) = folder.glob("work/**/models/server.npy")
    shutil.copy(model, folder / "model.npy")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
