# SPDX-License-Identifier: Apache-2.0
"""The data of the demo: scikit-learn's breast-cancer records, split over three hospitals.

569 records of 30 measurements of cell nuclei. Each hospital gets 152 records to train on and 37
or 38 to validate with. All scale their features with one table of means and standard
deviations, agreed beforehand (here: those of site-a). Site-c reports its perimeters in
millimetres where the others report centimetres, and nobody noticed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["FACTOR", "SITES", "write_data"]

SITES = ("site-a", "site-b", "site-c")

FACTOR = 10.0
"""How many of site-c's units of length make one of the agreed unit."""

SEED = 0


def write_data(folder: Path) -> None:
    """Write each site's records into a folder of its own, as declearn's quickrun expects them."""
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    records = np.asarray(source.data, dtype=np.float64)
    target = np.asarray(source.target, dtype=np.int64)
    perimeters = np.flatnonzero(["perimeter" in name for name in source.feature_names])
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(target))
    held_out = len(target) // 5
    valid = np.array_split(order[:held_out], len(SITES))
    train = np.array_split(order[held_out:], len(SITES))
    mean, std = records[train[0]].mean(axis=0), records[train[0]].std(axis=0)
    last = np.concatenate([train[-1], valid[-1]])
    records[np.ix_(last, perimeters)] *= FACTOR
    for site, train_rows, valid_rows in zip(SITES, train, valid, strict=True):
        path = folder / site
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "train_data.npy", (records[train_rows] - mean) / std)
        np.save(path / "train_target.npy", target[train_rows])
        np.save(path / "valid_data.npy", (records[valid_rows] - mean) / std)
        np.save(path / "valid_target.npy", target[valid_rows])
