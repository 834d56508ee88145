"""Write the breast-cancer records that come with scikit-learn as the CSV files of three hospitals.

The last of them measures lengths in millimetres, where the others have centimetres.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

SITES = ("harbour", "north", "valley")
UNITS = {"radius": 10.0, "perimeter": 10.0, "area": 100.0}
"""What the last hospital's numbers are multiplied by, by a word in the name of the column."""


def write_tables(folder: Path) -> list[Path]:
    """Write a CSV file for each hospital."""
    source = load_breast_cancer(as_frame=True)
    table = source.data.assign(diagnosis=source.target.map({0: "malignant", 1: "benign"}))
    table.insert(0, "case", [f"case-{i:03}" for i in table.index])
    order = np.random.default_rng(0).permutation(len(table))
    files = [folder / f"{site}.csv" for site in SITES]
    for file, rows in zip(files, np.array_split(order, len(files)), strict=True):
        own = table.iloc[rows].copy()
        for word, factor in UNITS.items() if file == files[-1] else ():
            own[[column for column in own if word in column]] *= factor
        own.to_csv(file, index=False)
    return files


if __name__ == "__main__":
    write_tables(Path())
