"""Write scikit-learn's digits as three clients' folders, the way declearn's quickrun reads them.

All should scale their pixels to [0, 1]. client_2 forgot to: its are 16 times larger.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CLIENTS = ("client_0", "client_1", "client_2")

pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
for client, rows in zip(CLIENTS, np.array_split(order, len(CLIENTS)), strict=True):
    folder = Path("data", client)
    folder.mkdir(parents=True, exist_ok=True)
    cut = len(rows) * 4 // 5
    for part, chosen in (("train", rows[:cut]), ("valid", rows[cut:])):
        scale = 1 if client == "client_2" else 16
        np.save(folder / f"{part}_data.npy", pixels[chosen] / scale)
        np.save(folder / f"{part}_target.npy", digits[chosen])
