# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of scikit-learn's linear models, in closed form.

What one step of `partial_fit` at a learning rate of 1 takes away from the weights, in the order
in which scikit-learn works: shrink by the l2 share, step along the loss, truncate by the l1 share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from scipy.sparse import issparse

from fedclip.dpsgd.persample.base import Arrays, Data, Host, HostStack, at_once

__all__ = ["check", "stacks", "vector"]


def _hinge(threshold: float) -> Callable[[Host, Host, float], Host]:
    return lambda p, y, eps: np.where(p * y <= threshold, -y, 0.0)


def _modified_huber(p: Host, y: Host, eps: float) -> Host:
    z = p * y
    return np.where(z >= 1.0, 0.0, np.where(z >= -1.0, -2.0 * (1.0 - z) * y, -4.0 * y))


def _outside(p: Host, y: Host, eps: float) -> Host:
    """Return by how much a prediction is too high (above 0) or too low, but for the margin."""
    return np.asarray(np.sign(p - y) * np.maximum(np.abs(p - y) - eps, 0.0))


# Derivatives by the prediction p; of classifiers, y is -1 or 1.
_SLOPES: dict[str, Callable[[Host, Host, float], Host]] = {
    "hinge": _hinge(1.0),
    "perceptron": _hinge(0.0),
    "log_loss": lambda p, y, eps: -y / (1.0 + np.exp(p * y)),
    "modified_huber": _modified_huber,
    "squared_hinge": lambda p, y, eps: -2.0 * y * np.maximum(1.0 - p * y, 0.0),
    "squared_error": lambda p, y, eps: p - y,
    "huber": lambda p, y, eps: np.clip(p - y, -eps, eps),
    "epsilon_insensitive": lambda p, y, eps: np.sign(_outside(p, y, eps)),
    "squared_epsilon_insensitive": lambda p, y, eps: 2.0 * _outside(p, y, eps),
}
# Beyond which scikit-learn cuts slopes, and by what it multiplies intercepts of sparse data.
_STEEPEST, _SPARSE = 1e12, 0.01


def check(model: SklearnSGDModel) -> None:
    """Refuse what weighs records by how many of a class there are."""
    settings = model._model.get_params()
    if settings.get("class_weight") is not None:
        raise ValueError(
            "class_weight lets the gradient of a record depend on others, or on secret counts: "
            "give sample weights with the data instead"
        )


def vector(model: SklearnSGDModel, arrays: Arrays) -> NumpyVector:
    """Return float64 arrays as a vector of the weights' dtypes."""
    weights = model.get_weights(trainable=True).coefs
    return NumpyVector({k: np.asarray(a, dtype=weights[k].dtype) for k, a in arrays.items()})


def stacks(
    model: SklearnSGDModel, batch: Data, micro_batch: int, whole: bool
) -> Iterator[HostStack]:
    """Yield the gradients of each micro-batch, which are always whole."""
    inputs, targets, weights = model._unpack_batch(batch)
    skl = model._model
    slope, settings = _SLOPES[skl.loss], skl.get_params()
    penalty = settings["penalty"]
    l1_ratio = {"l2": 0.0, "l1": 1.0, "elasticnet": settings["l1_ratio"]}.get(penalty, 0.0)
    alpha = 0.0 if penalty in (None, "none") else settings["alpha"]
    coef = np.atleast_2d(np.asarray(skl.coef_, np.float64))
    intercept = np.atleast_1d(np.asarray(skl.intercept_, np.float64))
    decay = (_SPARSE if issparse(inputs) else 1.0) if settings["fit_intercept"] else 0.0
    together = at_once(micro_batch, coef.size)
    for start in range(0, inputs.shape[0], together):
        part = slice(start, start + together)
        x = _dense(inputs, part)
        y = _signs(model, _dense(targets, part))
        with np.errstate(all="ignore"):
            p = x @ coef.T + intercept
            slopes = np.clip(slope(p, y, settings.get("epsilon", 0.0)), -_STEEPEST, _STEEPEST)
            after = coef * max(0.0, 1.0 - (1.0 - l1_ratio) * alpha)
            after = after - slopes[:, :, None] * x[:, None, :]
            after = np.sign(after) * np.maximum(np.abs(after) - l1_ratio * alpha, 0.0)
            steps = coef - after
            free = slopes * decay
            if weights is not None:
                # As declearn does: the whole step is multiplied, with its penalty.
                w = _dense(weights, part)
                steps, free = steps * w[:, None, None], free * w[:, None]
        yield HostStack(
            {
                "intercept": free.reshape(len(x), *skl.intercept_.shape),
                "coef": steps.reshape(len(x), *skl.coef_.shape),
            }
        )


def _dense(data: Data, part: slice) -> Host:
    rows = data.iloc[part].to_numpy() if hasattr(data, "iloc") else data[part]
    return np.asarray(rows.toarray() if issparse(rows) else rows, dtype=np.float64)


def _signs(model: SklearnSGDModel, targets: Host) -> Host:
    """Return targets as the loss has them, one column for each output."""
    column = targets.reshape(len(targets), 1)
    classes = getattr(model._model, "classes_", None)
    if classes is None:
        return column
    if len(classes) == 2:
        classes = classes[1:]
    return np.where(column == np.asarray(classes, dtype=model._dtype), 1.0, -1.0)
