# SPDX-License-Identifier: Apache-2.0
"""declearn's quickrun with fedclip registered, after a check that reports every mistake."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from declearn.quickrun import DataSourceConfig, parse_data_folder

from fedclip.tools.check import Check
from fedclip.tools.experiment import run_experiment
from fedclip.tools.ports import port_is_free

__all__ = ["QuickrunError", "run"]


class QuickrunError(RuntimeError):
    """A run can not start; the message says why."""


def run(check: Check) -> tuple[int, str, bool]:
    """Run what a checked file describes.

    Returns
    -------
    clients, results, finished
        How many clients took part, where the results are, and whether the run came to its end:
        not so if it was interrupted from the keyboard.
    """
    network = check.config["network"]
    host, port = network.get("host", "localhost"), network.get("port", 8765)
    if not port_is_free(host, port):
        raise QuickrunError(f"port {port} on {host} is in use; set another port in [network]")
    folder = check.path.resolve().parent
    data = DataSourceConfig.from_toml(str(check.path), False, "data")
    try:
        clients = parse_data_folder(data, str(folder))
    except (OSError, ValueError) as exc:
        raise QuickrunError(f"[data] {exc}") from None
    if not clients:
        raise QuickrunError("[data] the data folder holds no client's folder")
    model = check.config.get("model", {}).get("model_file") or folder / "model.py"
    if not os.path.isfile(model):
        raise QuickrunError(f"[model] there is no model file {str(model)!r}")

    started, finished = time.time(), True
    try:
        asyncio.run(run_experiment(str(check.path)))
    except KeyboardInterrupt:
        finished = False
    return len(clients), str(_results(check.config, folder, started)), finished


def _results(config: dict[str, Any], folder: Path, started: float) -> Any:
    """Return the folder of the results, which declearn names by the minute if nobody else does."""
    chosen = config.get("experiment", {}).get("checkpoint")
    results = [path for path in folder.glob("result_*") if path.stat().st_mtime >= started - 1]
    return chosen or max(results, key=lambda path: path.stat().st_mtime, default=folder)
