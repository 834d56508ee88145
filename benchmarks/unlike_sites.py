"""Eight sites that are not alike, and a hostile one among them: the task behind the tables.

1,400 digits of scikit-learn (pixels / 16) are split over eight sites, of 0.6 % to 52 % of them.
Each site but the largest has a label mix of its own, drawn from Dirichlet(0.3); the other 397
digits are the test data. Softmax regression, 30 rounds of three full steps of 0.5 on each site.

::

    folder = write(path, seed)                     data of a split, and a model file
    text = config(folder, ROWS["capped"], SITES)   a quickrun file, without [network]
    site, factor = ATTACKS["largest × -10"]        that site's update is multiplied, then clipped
    seeds = range(SPLITS)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SHARES = (0.006, 0.02, 0.03, 0.05, 0.08, 0.12, 0.177, 0.517)
"""Share of the records that each site has, the smallest first."""

RECORDS = 1400
COUNTS = tuple(round(share * RECORDS) for share in SHARES)
SITES = tuple(f"site_{i}" for i in range(len(SHARES)))
SPLITS = 8
LABEL_MIX = 0.3
ROUNDS, STEPS, LRATE = 30, 3, 0.5
START_NORM = 1.27
"""The bound of the first round: the median of the first norms, which is 1.18 to 1.34 by split."""

ATTACKS: Mapping[str, tuple[str, float] | None] = {
    "no attack": None,
    "smallest × 1000": (SITES[0], 1000.0),
    "largest × -10": (SITES[-1], -10.0),
}
"""Who is hostile, and what it multiplies its update by; then it clips as the others do."""

TABLE = dict(zip(SITES, map(float, COUNTS), strict=True))
WIDE = {"name": "clipped-averaging", "max_norm": 1e6}
CLIPPED = {"name": "clipped-averaging"}
ROWS: Mapping[str, dict[str, Any]] = {
    "equal mean": WIDE,
    "weighted mean": {**WIDE, "weights": TABLE},
    "equal clip": CLIPPED,
    "weighted clip": {**CLIPPED, "weights": TABLE},
    "weighted clip, at most 25 %": {**CLIPPED, "weights": TABLE, "max_share": 0.25},
    "arc": {**WIDE, "combine": "arc", "n_hostile": 1},
    "trimmed": {**WIDE, "combine": "trimmed", "n_hostile": 1},
    "equal clip, trimmed": {**CLIPPED, "combine": "trimmed", "n_hostile": 1},
}
"""The aggregators; those without `max_norm` have a bound that follows the median of the norms.

ARC after such a bound would change nothing: half of the updates are as long as the bound then.
"""

MODEL = """\
import torch
from declearn.model.torch import TorchModel

layer = torch.nn.Linear(64, 10)
torch.nn.init.zeros_(layer.weight)
torch.nn.init.zeros_(layer.bias)
model = TorchModel(layer, torch.nn.CrossEntropyLoss())
"""

CONFIG = """\
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

[run.training]
batch_size = {records}
n_epoch = {steps}
drop_remainder = false

[run.evaluate]
batch_size = {records}

[experiment]
metrics = [["multi-classif", {{labels = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}}]]
checkpoint = {results}
"""


Records = tuple[np.ndarray, np.ndarray]
"""Data and labels."""


def split(seed: int, alike: bool = False) -> tuple[list[Records], Records]:
    """Return the records of each site, and the test data; `alike` sites have 175 of any label."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    data = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    test = data[RECORDS:], labels[RECORDS:]
    if alike:
        parts = np.array_split(np.arange(RECORDS), len(SITES))
        return [(data[rows], labels[rows]) for rows in parts], test
    left = [np.flatnonzero(labels[:RECORDS] == label).tolist() for label in range(10)]
    sites = []
    for count in COUNTS[:-1]:
        mix = rng.dirichlet([LABEL_MIX] * 10)
        rows: list[int] = []
        while len(rows) < count:
            # A label of which none are left is drawn no more.
            there = [bool(rest) for rest in left]
            chances = np.where(there, mix + 1e-12, 0.0)
            rows.append(left[rng.choice(10, p=chances / chances.sum())].pop())
        sites.append((data[rows], labels[rows]))
    rows = [row for rest in left for row in rest]
    return [*sites, (data[rows], labels[rows])], test


def write(folder: Path, seed: int, alike: bool = False) -> Path:
    """Write the data of a split, with a part of the test data for each site, and the model."""
    sites, (data, labels) = split(seed, alike)
    parts = np.array_split(np.arange(len(labels)), len(sites))
    for name, (own, targets), part in zip(SITES, sites, parts, strict=True):
        site = folder / "data" / name
        site.mkdir(parents=True, exist_ok=True)
        files = {"train_data": own, "train_target": targets}
        files |= {"valid_data": data[part], "valid_target": labels[part]}
        for file, array in files.items():
            np.save(site / f"{file}.npy", array)
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    return folder


def config(folder: Path, aggregator: Mapping[str, Any], results: str = "results") -> str:
    """Return a quickrun file without [network] and [run.register], for the data in a folder."""
    adaptive = "max_norm" not in aggregator
    server = [["update-clip-server", {"start_norm": START_NORM}]] if adaptive else []
    return CONFIG.format(
        data=json.dumps(str(folder / "data")),
        model=json.dumps(str(folder / "model.py")),
        results=json.dumps(str(folder / results)),
        aggregator=inline(aggregator),
        client=inline(["update-clip-client"] if adaptive else []),
        server=inline(server),
        lrate=LRATE,
        rounds=ROUNDS,
        records=RECORDS,
        steps=STEPS,
    )


def inline(value: Any) -> str:
    """Return a value as TOML of one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)
