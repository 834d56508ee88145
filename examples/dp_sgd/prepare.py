"""Write scikit-learn's digits: three clients' folders, and what no client has, for the end."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
pixels = (pixels / 16).astype("float32")
order = np.random.default_rng(0).permutation(len(digits))
held, kept = np.split(order, [len(order) // 5])
np.savez("test.npz", pixels=pixels[held], digits=digits[held])
for i, rows in enumerate(np.array_split(kept, 3)):
    folder = Path("data", f"client_{i}")
    folder.mkdir(parents=True, exist_ok=True)
    cut = len(rows) * 9 // 10
    for part, chosen in (("train", rows[:cut]), ("valid", rows[cut:])):
        np.save(folder / f"{part}_data.npy", pixels[chosen])
        np.save(folder / f"{part}_target.npy", digits[chosen])
