"""Write the breast-cancer records that come with scikit-learn as the CSV files of three hospitals.

site-c measures lengths in millimetres, where the others have centimetres.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer

source = load_breast_cancer(as_frame=True)
records = source.data.assign(diagnosis=source.target.map({0: "malignant", 1: "benign"}))
parts = np.array_split(np.random.default_rng(0).permutation(len(records)), 3)
for site, rows in zip(("site-a", "site-b", "site-c"), parts, strict=True):
    table = records.iloc[rows].copy()
    if site == "site-c":
        for word, factor in (("radius", 10.0), ("perimeter", 10.0), ("area", 100.0)):
            table[table.columns[table.columns.str.contains(word)]] *= factor
    table.to_csv(f"{site}.csv", index=False)
