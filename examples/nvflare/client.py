# SPDX-License-Identifier: Apache-2.0
"""A client's script, as any of NVFlare's: it knows nothing of clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvflare.client as flare
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.client import FLModel, ParamsType
from sklearn.datasets import load_digits

BATCH = 32
LEARNING_RATE = 0.5
EPOCHS = 2

Array = np.ndarray[Any, Any]


def load(part: int, parts: int) -> tuple[Array, Array]:
    """Return the digits of one of so many sites, as rows that end with 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(images))[part::parts]
    return np.c_[images[rows] / 16.0, np.ones(len(rows))], labels[rows]


def odds(weights: Array, images: Array) -> Array:
    logits = images @ weights
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def train(weights: Array, images: Array, labels: Array) -> tuple[Array, int]:
    """Return softmax regression after some passes over the data, and the number of steps."""
    weights, steps = weights.copy(), 0
    rng = np.random.default_rng(0)
    for _ in range(EPOCHS):
        order = rng.permutation(len(labels))
        for start in range(0, len(labels), BATCH):
            rows = order[start : start + BATCH]
            wrong = odds(weights, images[rows]) - np.eye(10)[labels[rows]]
            weights -= LEARNING_RATE * images[rows].T @ wrong / len(rows)
            steps += 1
    return weights, steps


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().removeprefix("site-"))
    while flare.is_running():
        received = flare.receive()
        images, labels = load(site - 1, 5)
        before = received.params["numpy_key"]
        right = odds(before, images).argmax(axis=1) == labels
        weights, steps = train(before, images, labels)
        flare.send(
            FLModel(
                params={"numpy_key": weights},
                params_type=ParamsType.FULL,  # the recipe makes it a difference
                metrics={"accuracy": float(right.mean())},
                meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps},
            )
        )


if __name__ == "__main__":
    main()
