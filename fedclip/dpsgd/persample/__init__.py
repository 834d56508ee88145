# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records, clipped and added up: the only part of DP-SGD that knows frameworks.

::

    for each micro-batch:
        g_i    = gradient of weight_i * loss_i, of each record by itself      (the framework)
        n_i    = norm of each group of its tensors, in float64
        g_i, n_i = 0, NaN  where any value is NaN or infinite
        sum   += factors(n_i) * g_i, in float64

Each record goes through the model in a batch of its own, so that none can depend on another.
Gradients and sums stay where the framework has them; norms and factors go through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np

from fedclip.dpsgd.persample.base import Arrays, Float64, HostStack, Stack
from fedclip.scopes import Groups

__all__ = ["Arrays", "add_up", "check", "clipped_sum", "vector"]

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
    framework = _framework(model)
    framework.check(model)
    if not framework.shapes(model):
        raise ValueError("none of the model's weights is trained: there is nothing to clip")


def vector(model: Any, arrays: Arrays) -> Any:
    """Return float64 arrays as a declearn Vector of the model's own type, dtype and device."""
    return _framework(model).vector(model, arrays)


def clipped_sum(
    model: Any,
    batches: Sequence[Any],
    factors: Callable[[Float64], Float64],
    *,
    groups: Groups | None = None,
    micro_batch: int = 128,
    each: Callable[[Arrays], Arrays] | None = None,
) -> tuple[dict[str, Float64], Float64]:
    """Return the sum of the clipped gradients of records, and the norms before.

    Parameters
    ----------
    model
        A declearn model, initialised.
    batches
        Inputs, targets and weights (or None), as declearn has them; several, where records differ
        in shape; none, if there is no record.
    factors
        From finite norms (records, groups) to factors of the same shape.
    groups
        Which tensors share a norm; all, if None.
    micro_batch
        How many records are in memory at once, at most; fewer, if their gradients are large.
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
    whole = each is not None
    found = (framework.stacks(model, batch, micro_batch, whole) for batch in batches)
    stacks = chain.from_iterable(found)
    return add_up(stacks, framework.shapes(model), factors, groups, each)


def add_up(
    stacks: Iterable[Stack],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Callable[[Float64], Float64],
    groups: Groups | None = None,
    each: Callable[[Arrays], Arrays] | None = None,
) -> tuple[dict[str, Float64], Float64]:
    """Return what `clipped_sum` does, of gradients that are there."""
    names = groups.names if groups is not None else tuple(shapes)
    members = groups.members if groups is not None else (tuple(range(len(names))),)
    totals: dict[str, Any] = {}
    norms = [np.zeros((0, len(members)))]
    for given in stacks:
        stack = given if each is None else _one_by_one(given.arrays(), each)
        norms.append(_add(totals, stack, names, members, factors))
    sums = {
        name: _host(totals[name]) if name in totals else np.zeros(shapes[name]) for name in names
    }
    return sums, np.concatenate(norms)


def _host(total: Any) -> Float64:
    # What is on another device does not become an array by itself.
    return np.asarray(total.cpu() if hasattr(total, "cpu") else total, dtype=np.float64)


def _one_by_one(arrays: Arrays, each: Callable[[Arrays], Arrays]) -> HostStack:
    done = []
    for i in range(len(next(iter(arrays.values())))):
        record = {name: array[i] for name, array in arrays.items()}
        # A record with NaN counts as zero, and no policy of what comes before is asked.
        sound = all(np.isfinite(array).all() for array in record.values())
        done.append(each(record) if sound else record)
    return HostStack({name: np.stack([one[name] for one in done]) for name in arrays})


def _add(
    totals: dict[str, Any],
    stack: Stack,
    names: tuple[str, ...],
    members: tuple[tuple[int, ...], ...],
    factors: Callable[[Float64], Float64],
) -> Float64:
    squares = stack.squares(names)
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.stack([squares[:, list(m)].sum(axis=1) for m in members], axis=1))
    sound = np.isfinite(norms).all(axis=1)
    norms[~sound] = np.nan
    scales = np.zeros_like(norms)
    scales[sound] = factors(norms[sound])
    columns = {names[i]: scales[:, group] for group, m in enumerate(members) for i in m}
    stack.add(totals, columns, sound)
    return np.asarray(norms)
