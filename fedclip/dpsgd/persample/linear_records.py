# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of scikit-learn's linear models, in closed form.

They are what one step of `partial_fit` at a learning rate of 1 takes away from the weights. Its
order is that of scikit-learn: shrink by the l2 share, step along the loss, truncate by the l1
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from scipy.sparse import issparse

from fedclip.dpsgd.persample.base import Data, Float64, HostStack, at_once

# Derivatives by the prediction p; of classifiers, y is -1 or 1.
_SLOPES: dict[str, Callable[[Float64, Float64, float], Float64]] = {
    "hinge": lambda p, y, eps: np.where(p * y <= 1.0, -y, 0.0),
    "perceptron": lambda p, y, eps: np.where(p * y <= 0.0, -y, 0.0),
    "log_loss": lambda p, y, eps: -y / (1.0 + np.exp(p * y)),
    "modified_huber": lambda p, y, eps: -2.0 * y * np.clip(1.0 - p * y, 0.0, 2.0),
    "squared_hinge": lambda p, y, eps: -2.0 * y * np.maximum(1.0 - p * y, 0.0),
    "squared_error": lambda p, y, eps: p - y,
    "huber": lambda p, y, eps: np.clip(p - y, -eps, eps),
    "epsilon_insensitive": lambda p, y, eps: np.sign(p - y) * (np.abs(p - y) > eps),
    "squared_epsilon_insensitive": lambda p, y, eps: 2.0 * (p - y - np.clip(p - y, -eps, eps)),
}
# Beyond which scikit-learn cuts slopes, and by what it multiplies intercepts of sparse data.
_STEEPEST, _SPARSE = 1e12, 0.01


def record_stacks(
    model: Any, records: tuple[Data, Data, Data], micro_batch: int, dtype: DTypeLike
) -> Iterator[HostStack]:
    """Yield the gradients of each micro-batch.

    Parameters
    ----------
    model
        An `SGDClassifier` or `SGDRegressor` that has weights.
    records
        Inputs, targets and weights (None: all are 1), whose first axis is the records.
    micro_batch
        How many records are taken together, at most; fewer, if their gradients are large.
    dtype
        Of the targets, in which they are compared with the classes.
    """
    inputs, targets, weights = records
    slope, settings = _SLOPES[model.loss], model.get_params()
    penalty = settings["penalty"]
    l1_ratio = {"l2": 0.0, "l1": 1.0, "elasticnet": settings["l1_ratio"]}.get(penalty, 0.0)
    alpha = 0.0 if penalty in (None, "none") else settings["alpha"]
    coef = np.atleast_2d(np.asarray(model.coef_, np.float64))
    decay = (_SPARSE if issparse(inputs) else 1.0) if settings["fit_intercept"] else 0.0
    # Of a regressor, none.
    classes = np.asarray(getattr(model, "classes_", []), dtype)
    classes = classes[1:] if len(classes) == 2 else classes
    together = at_once(micro_batch, coef.size)
    for start in range(0, inputs.shape[0], together):
        rows = slice(start, start + together)
        x = _dense(inputs, rows)
        y = _dense(targets, rows).reshape(len(x), 1)
        y = np.where(y == classes, 1.0, -1.0) if len(classes) else y
        with np.errstate(all="ignore"):
            p = x @ coef.T + np.asarray(model.intercept_, np.float64)
            slopes = np.clip(slope(p, y, settings.get("epsilon", 0.0)), -_STEEPEST, _STEEPEST)
            after = coef * max(0.0, 1.0 - (1.0 - l1_ratio) * alpha)
            after = after - slopes[:, :, None] * x[:, None, :]
            after = np.sign(after) * np.maximum(np.abs(after) - l1_ratio * alpha, 0.0)
            # As declearn does: the whole step is multiplied, with its penalty.
            w = np.ones(len(x)) if weights is None else _dense(weights, rows)
            steps = {"intercept": slopes * decay * w[:, None]}
            steps["coef"] = (coef - after) * w[:, None, None]
        shaped = {"intercept": model.intercept_.shape, "coef": model.coef_.shape}
        yield HostStack({n: steps[n].reshape(len(x), *shape) for n, shape in shaped.items()})


def _dense(data: Data, rows: slice) -> Float64:
    some = data.iloc[rows] if hasattr(data, "iloc") else data[rows]
    return np.asarray(some.toarray() if issparse(some) else some, dtype=np.float64)
