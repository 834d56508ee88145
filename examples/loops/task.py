"""What the loops share: data, model, batches and clipper.

Softmax regression on scikit-learn's handwritten digits, in float64, so that the loops can be
compared to many digits. One image in a hundred has its pixels in another unit.
"""

import numpy as np
from sklearn.datasets import load_digits

from fedclip import ZScoreClip

EPOCHS, BATCH, LRATE = 2, 64, 0.5


def data():
    """Return images, labels; the odd ones are 100 times too bright."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16.0
    images[::100] *= 100.0
    order = np.random.default_rng(0).permutation(len(images))
    return images[order], labels[order]


def batches():
    """Return the images and labels of each step."""
    images, labels = data()
    whole = len(images) - len(images) % BATCH
    for _ in range(EPOCHS):
        for start in range(0, whole, BATCH):
            yield images[start : start + BATCH], labels[start : start + BATCH]


def clipper():
    """Return the clipper, which is the same in all loops."""
    return ZScoreClip(z_max=2.5, warmup=10, warmup_norm=5.0, max_norm=None)


def report(name, accuracy, limits, clipped):
    """Print what a loop came to."""
    print(
        f"{name}: accuracy {accuracy:.1%} after {len(limits)} steps, {clipped} of them clipped; "
        f"the last limit is {limits[-1]:.6f}"
    )
