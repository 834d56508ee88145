"""Data and model of a client: softmax regression on scikit-learn's digits, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

Arrays = dict[str, np.ndarray[Any, Any]]
BATCH = 32


def initial() -> Arrays:
    return {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}


def load(part: int, parts: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the images and labels of one of so many clients; 360 others are kept for tests."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[360:]
    rows = order[part::parts]
    return images[rows] / 16.0, labels[rows]


def load_test() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    images, labels = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(images))[:360]
    return images[rows] / 16.0, labels[rows]


def scores(model: Mapping[str, Any], images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    logits = images @ model["weight"] + model["bias"]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def loss(model: Arrays, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    right = scores(model, images)[np.arange(len(labels)), labels]
    return float(-np.log(right + 1e-12).mean())


def accuracy(model: Arrays, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    return float((scores(model, images).argmax(axis=1) == labels).mean())


def train(
    model: Arrays,
    data: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    epochs: int,
    lrate: float,
    clip: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda gradients: gradients,
) -> Arrays:
    """Return the model after so many passes over the data; `clip` gets each step's gradients."""
    images, labels = data
    model = {name: array.copy() for name, array in model.items()}
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(labels), BATCH):
            rows = order[start : start + BATCH]
            wrong = (scores(model, images[rows]) - np.eye(10)[labels[rows]]) / len(rows)
            gradients = clip({"weight": images[rows].T @ wrong, "bias": wrong.sum(axis=0)})
            for name, gradient in gradients.items():
                model[name] -= lrate * gradient
    return model
