# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records, clipped and added up: the only part of DP-SGD that knows frameworks.

::

    for each micro-batch:
        g_i    = gradient of weight_i * loss_i, of each record by itself      (the framework)
        n_i    = norm of each group of its tensors, in float64
        g_i, n_i = 0, NaN  where any value is NaN or infinite
        sum   += factors(n_i) * g_i, in float64

Each record goes through the model in a batch of its own, so that none can depend on another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from fedclip.scopes import Groups

__all__ = ["Arrays", "check", "clipped_sum", "vector"]

Float64: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Arrays: TypeAlias = Mapping[str, "np.ndarray[Any, Any]"]
"""Arrays by the names of the model's trainable weights."""

_HOMES = {
    "declearn.model.torch": "fedclip.dpsgd.persample.torch",
    "declearn.model.sklearn": "fedclip.dpsgd.persample.sklearn",
    "declearn.model.haiku": "fedclip.dpsgd.persample.jax",
    "declearn.model.tensorflow": "fedclip.dpsgd.persample.tensorflow",
}


def _framework(model: Any) -> Any:
    for cls in type(model).__mro__:
        for origin, home in _HOMES.items():
            if f"{cls.__module__}.".startswith(f"{origin}."):
                return import_module(home)
    raise TypeError(
        f"fedclip has no gradients of single records for {type(model).__name__}: its models are "
        "declearn's TorchModel, TensorflowModel, HaikuModel and SklearnSGDModel"
    )


def check(model: Any) -> None:
    """Refuse a model of which a record can not be treated by itself.

    Raises
    ------
    TypeError, ValueError
        If the model is of no kind known here, or a layer, which is named, mixes records.
    """
    _framework(model).check(model)


def vector(model: Any, arrays: Arrays) -> Any:
    """Return float64 arrays as a declearn Vector of the model's own type, dtype and device."""
    return _framework(model).vector(model, arrays)


def clipped_sum(
    model: Any,
    batch: Any,
    factors: Callable[[Float64], Float64],
    *,
    groups: Groups | None = None,
    micro_batch: int = 32,
    each: Callable[[Arrays], Arrays] | None = None,
) -> tuple[dict[str, Float64], Float64]:
    """Return the sum of the clipped gradients of a batch, and the norms before.

    Parameters
    ----------
    model
        A declearn model, initialised.
    batch
        Inputs, targets and weights (or None), as declearn has them; None: there is no record.
    factors
        From finite norms (records, groups) to factors of the same shape.
    groups
        Which tensors share a norm; all, if None.
    micro_batch
        How many records' gradients are in memory at once.
    each
        What is done to each record's gradient before it is measured.

    Returns
    -------
    sums
        Float64 arrays by name; zeros if there is no record.
    norms
        Of shape (records, groups); NaN in the row of a record that counted as zero.
    """
    framework = _framework(model)
    weights = model.get_weights(trainable=True).coefs
    names = groups.names if groups is not None else tuple(weights)
    members = groups.members if groups is not None else (tuple(range(len(names))),)
    sums = {name: np.zeros(tuple(weights[name].shape)) for name in names}
    norms = [np.zeros((0, len(members)))]
    stacks: Iterator[Arrays] = framework.gradients(model, batch, micro_batch)
    for given in () if batch is None else stacks:
        stack = given if each is None else _one_by_one(given, each)
        norms.append(_add(sums, stack, names, members, factors))
    return sums, np.concatenate(norms)


def _one_by_one(stack: Arrays, each: Callable[[Arrays], Arrays]) -> Arrays:
    records = len(next(iter(stack.values())))
    done = []
    for i in range(records):
        record = {name: array[i] for name, array in stack.items()}
        # A record with NaN counts as zero, and no policy of what comes before is asked.
        sound = all(np.isfinite(array).all() for array in record.values())
        done.append(each(record) if sound else record)
    return {name: np.stack([one[name] for one in done]) for name in stack}


def _add(
    sums: dict[str, Float64],
    stack: Arrays,
    names: tuple[str, ...],
    members: tuple[tuple[int, ...], ...],
    factors: Callable[[Float64], Float64],
) -> Float64:
    with np.errstate(all="ignore"):
        squares = np.stack([_squares(stack[name]) for name in names], axis=1)
        norms = np.sqrt(np.stack([squares[:, list(m)].sum(axis=1) for m in members], axis=1))
    sound = np.isfinite(norms).all(axis=1)
    norms[~sound] = np.nan
    scales = factors(norms[sound])
    for group, positions in enumerate(members):
        for name in (names[i] for i in positions):
            rows = _rows(stack[name])
            rows = rows if sound.all() else rows[sound]
            # Products, and their sum, are those of float64: the norm was measured in it too.
            sums[name] += (scales[:, group] @ rows).reshape(sums[name].shape)
    return np.asarray(norms)


def _rows(array: np.ndarray[Any, Any]) -> Float64:
    size = math.prod(array.shape[1:])
    rows: Float64 = np.asarray(array.reshape(len(array), size), dtype=np.float64)
    return rows


def _squares(array: np.ndarray[Any, Any]) -> Float64:
    rows = _rows(array)
    return np.asarray(np.einsum("ij,ij->i", rows, rows))
