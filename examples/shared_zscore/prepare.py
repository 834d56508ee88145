"""Write scikit-learn's digits for three unlike sites, the way declearn's quickrun reads them.

``large`` has two thirds of the images, ``small`` has 150, and ``bright`` has 400 whose pixels are
five times as bright: its gradients are the largest, but one limit for each site would not show it.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

SITES = {"large": (1200, 1.0), "small": (150, 1.0), "bright": (400, 5.0)}

pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
start = 0
for site, (size, brightness) in SITES.items():
    rows, start = order[start : start + size], start + size
    folder = Path("data", site)
    folder.mkdir(parents=True, exist_ok=True)
    cut = size * 4 // 5
    for part, chosen in (("train", rows[:cut]), ("valid", rows[cut:])):
        np.save(folder / f"{part}_data.npy", brightness * pixels[chosen] / 16)
        np.save(folder / f"{part}_target.npy", digits[chosen])
