# SPDX-License-Identifier: Apache-2.0
"""The data of the demo: scikit-learn's breast-cancer records, split over three hospitals.

569 records of 30 measurements of cell nuclei, three of which are areas. Each hospital gets 152
records to train on and 37 or 38 to validate with. All scale their features with one table of
means and standard deviations, agreed beforehand (here: those of site-a). At site-c, one record
in fifty was written down by another instrument, with its areas in a unit a million times
smaller (µm² for mm², say), and nobody noticed. Validation records are in the agreed unit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["FACTOR", "SHARE", "SITES", "write_data"]

SITES = ("site-a", "site-b", "site-c")

SHARE = 0.02
"""Share of site-c's training records with areas in the other unit."""

FACTOR = 1e6
"""How many of the other unit make one of the agreed unit."""

SEED = 0


def write_data(folder: Path) -> int:
    """Write each site's records as declearn's quickrun expects them.

    Parameters
    ----------
    folder
        Where to make one folder a site.

    Returns
    -------
    wrong
        How many records of site-c have their areas in the other unit.
    """
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    records = np.asarray(source.data, dtype=np.float64)
    target = np.asarray(source.target, dtype=np.int64)
    areas = np.flatnonzero(["area" in name for name in source.feature_names])
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(target))
    held_out = len(target) // 5
    valid = np.array_split(order[:held_out], len(SITES))
    train = np.array_split(order[held_out:], len(SITES))
    mean, std = records[train[0]].mean(axis=0), records[train[0]].std(axis=0)
    wrong = rng.choice(train[-1], size=round(SHARE * len(train[-1])), replace=False)
    written = records.copy()
    written[np.ix_(wrong, areas)] *= FACTOR
    for site, train_rows, valid_rows in zip(SITES, train, valid, strict=True):
        path = folder / site
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "train_data.npy", (written[train_rows] - mean) / std)
        np.save(path / "train_target.npy", target[train_rows])
        np.save(path / "valid_data.npy", (records[valid_rows] - mean) / std)
        np.save(path / "valid_target.npy", target[valid_rows])
    return len(wrong)
