# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a simulated round, by number of clients: ``python -m benchmarks.simulate``.

Each client takes a step on 8 records, with a model of 1,000 values. Each number of clients has a
process with one thread; a second one would wait, and count three times as much. Time is wall-clock
and the processor's, for the rounds after the first, which makes the clients. Memory is the
process's largest, beyond what it has when the simulation is ready.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

SIZES = (100, 1000, 10_000)

MODELS = {
    "torch": """\
import torch
from declearn.model.torch import TorchModel

layers = torch.nn.Sequential(torch.nn.Linear(999, 1), torch.nn.Flatten(0))
model = TorchModel(layers, torch.nn.BCEWithLogitsLoss())
""",
    "sklearn": """\
from declearn.model.sklearn import SklearnSGDModel

model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
""",
}
"""Logistic regression of 999 features: with an intercept, 1,000 values."""

CONFIG = """\
[data]
data_folder = "data"

[model]

[optim]
aggregator = "clipped-averaging"

[optim.client_opt]
lrate = 0.1
modules = ["update-clip-client"]

[optim.server_opt]
lrate = 1.0
modules = ["update-clip-server"]

[run]
rounds = 1

[run.training]
batch_size = 8
n_steps = 1
shuffle = true

[simulate]
clients = {clients}
seed = 0
"""


def write(folder: Path, model: str, clients: int) -> None:
    """Write data, model and configuration."""
    rng = np.random.default_rng(0)
    site = folder / "data" / "site"
    site.mkdir(parents=True)
    for part, count in (("train", 200), ("valid", 100)):
        data = rng.normal(size=(count, 999)).astype(np.float32)
        np.save(site / f"{part}_data.npy", data)
        np.save(site / f"{part}_target.npy", (data[:, 0] > 0).astype(np.float32))
    (folder / "model.py").write_text(MODELS[model], encoding="utf-8")
    text = CONFIG.format(clients=clients).replace('"data"', repr(str(folder / "data")))
    (folder / "config.toml").write_text(text, encoding="utf-8")


def measure(model: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a round and of its processor, and the MB of the whole simulation."""
    from fedclip.engines.local.simulate import Simulation

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), model, clients)
        simulation = Simulation(Path(folder) / "config.toml")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        simulation.step()
        begun, started = time.process_time(), time.perf_counter()
        for _ in range(rounds):
            simulation.step()
        seconds = (time.perf_counter() - started) / rounds
        processor = (time.process_time() - begun) / rounds
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, processor, (peak - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=SIZES)
    parser.add_argument("--model", choices=MODELS, default="torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(*measure(options.model, options.only, options.rounds))
        return
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    table = Table(
        "clients", "s a round", "of the processor", "MB", title=f"1,000 values, {options.model}"
    )
    for clients in options.clients:
        own = ["--only", str(clients), "--model", options.model, "--rounds", str(options.rounds)]
        command = [sys.executable, "-m", "benchmarks.simulate", *own]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | threads
        )
        seconds, processor, size = map(float, done.stdout.split())
        table.add_row(f"{clients:,}", f"{seconds:.2g}", f"{processor:.2g}", f"{size:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
