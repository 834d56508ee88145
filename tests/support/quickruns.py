# SPDX-License-Identifier: Apache-2.0
"""A quickrun file, its model and the data of its sites, as small as can be."""

import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """
[network]
protocol = "websockets"
host = "127.0.0.1"
port = {port}
heartbeat = 0.02
[data]
data_folder = {data}
[model]
model_file = {model}
[optim]
aggregator = {aggregator}
[optim.client_opt]
lrate = {lrate}
modules = {client}
[optim.server_opt]
lrate = 1.0
modules = {server}
[run]
rounds = {rounds}
[run.register]
min_clients = 3
max_clients = 3
timeout = 120
[run.training]
batch_size = {batch_size}
{training}
shuffle = true
[experiment]
metrics = [["binary-classif", {{thresh = 0.0}}]]
checkpoint = {out}
{more}
"""
USUAL = {
    "port": 1,
    "aggregator": '"clipped-averaging"',
    "lrate": 0.1,
    "client": '["update-clip-client"]',
    "server": '["update-clip-server"]',
    "rounds": 3,
    "batch_size": 8,
    "training": "n_steps = 2",
    "more": "",
}
MODEL = """
from declearn.model.sklearn import SklearnSGDModel
model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", dtype="float64")
"""
SITES = {"a": 40, "b": 24, "c": 56}


def write_sites(folder: Path, records: Any = SITES, *, valid: int = 20, features: int = 4) -> None:
    """Write so many records of each site, whose first feature's sign is the target; and a model."""
    rng = np.random.default_rng(0)
    for site, train in records.items():
        place = folder / "data" / site
        place.mkdir(parents=True)
        for part, count in (("train", train), ("valid", valid)):
            data = rng.normal(size=(count, features))
            np.save(place / f"{part}_data.npy", data)
            np.save(place / f"{part}_target.npy", (data[:, 0] > 0).astype(int))
    (folder / "model.py").write_text(MODEL)


def write_config(file: Path, out: str = "out", **changes: Any) -> Path:
    """Write a quickrun file beside its sites, with what is changed of what is usual; return it."""
    paths = {"data": file.parent / "data", "model": file.parent / "model.py"}
    named = {key: json.dumps(str(path)) for key, path in paths.items()}
    named["out"] = json.dumps(str(file.parent / out))
    file.write_text(CONFIG.format(**USUAL | changes | named))
    return file
