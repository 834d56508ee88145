# SPDX-License-Identifier: Apache-2.0
"""The data of the demo: scikit-learn's breast-cancer records, split over three hospitals.

569 records of 30 measurements of cell nuclei. Each hospital gets 152 records to train on and 37
or 38 to validate with. All scale their features with one table of means and standard
deviations, agreed beforehand (here: those of site-a). What site-c trains on is in millimetres,
and so its areas in square millimetres, where the others use centimetres; nobody noticed. The
records to validate with were checked, and are right everywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SITES = ("site-a", "site-b", "site-c")

FACTOR = 10.0
"""How many of site-c's units of length make one of the agreed unit."""


def write_data(folder: Path, seed: int = 0) -> None:
    """Write each site's records into a folder of its own, as declearn's quickrun expects them.

    The seed decides which records each site has, and which it validates with.
    """
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    records = np.asarray(source.data, dtype=np.float64)
    target = np.asarray(source.target, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(target))
    held_out = len(target) // 5
    valid = np.array_split(order[:held_out], len(SITES))
    train = np.array_split(order[held_out:], len(SITES))
    mean, std = records[train[0]].mean(axis=0), records[train[0]].std(axis=0)
    for word, power in (("radius", 1), ("perimeter", 1), ("area", 2)):
        columns = np.flatnonzero([word in name for name in source.feature_names])
        records[np.ix_(train[-1], columns)] *= FACTOR**power
    for site, train_rows, valid_rows in zip(SITES, train, valid, strict=True):
        path = folder / site
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "train_data.npy", (records[train_rows] - mean) / std)
        np.save(path / "train_target.npy", target[train_rows])
        np.save(path / "valid_data.npy", (records[valid_rows] - mean) / std)
        np.save(path / "valid_target.npy", target[valid_rows])
