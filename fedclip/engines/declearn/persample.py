# SPDX-License-Identifier: Apache-2.0
"""Clipped sums of the gradients of single records, for declearn's models of all frameworks.

A record that raises is left out. A model that carries something from one record to the next is
refused when it is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample import ClippedSum
from fedclip.dpsgd.persample.base import Arrays, Data, Failed, Float64, retry_halving
from fedclip.dpsgd.persons import Means
from fedclip.engines.declearn.generics import AnyModel, AnyVector

__all__ = ["check", "clipped_sum", "part", "shapes", "try_out", "vector"]

_HOMES = {
    "declearn.model.torch": "fedclip.engines.declearn.persample_torch",
    "declearn.model.sklearn": "fedclip.engines.declearn.persample_sklearn",
    "declearn.model.haiku": "fedclip.engines.declearn.persample_jax",
    "declearn.model.tensorflow": "fedclip.engines.declearn.persample_tensorflow",
}


def _framework(model: AnyModel) -> ModuleType:
    for cls in type(model).__mro__:
        for origin, home in _HOMES.items():
            if f"{cls.__module__}.".startswith(f"{origin}."):
                return import_module(home)
    raise TypeError(
        f"fedclip has no gradients of single records for {type(model).__name__}: its models are "
        "declearn's TorchModel, TensorflowModel, HaikuModel and SklearnSGDModel"
    )


def shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights, by name."""
    framework = _framework(model)
    if hasattr(framework, "shapes"):
        named: dict[str, tuple[int, ...]] = framework.shapes(model)
        return named
    weights = model.get_weights(trainable=True).coefs
    return {name: tuple(array.shape) for name, array in weights.items()}


def check(model: AnyModel) -> None:
    """Refuse a model in which a record cannot be treated alone.

    Raises
    ------
    TypeError, ValueError
        If the model is of no kind known here, or a layer, which is named, mixes records.
    """
    _framework(model).check(model)
    if not shapes(model):
        raise ValueError("the model has no trainable weights: there is nothing to clip")


def try_out(model: AnyModel, records: Sequence[Data], **settings: Any) -> None:
    """Take the gradients of records that nobody protects.

    Parameters
    ----------
    model
        A declearn model, initialised.
    records
        Batches of one record each.
    **settings
        As `clipped_sum` has them.

    Raises
    ------
    UnsupportedModelError
        If the gradient of a record depends on which came before it.
    Exception
        Whatever the model raises for one of the records.
    """

    def gradient(model: AnyModel, record: Data) -> Float64:
        sums, _ = clipped_sum(model, [record], np.ones_like, **settings)
        # As a step ends, so that this fails now and not when the budget is spent.
        vector(model, {name: array + 0.0 for name, array in sums.items()})
        return np.concatenate([array.ravel() for array in sums.values()])

    framework = _framework(model)
    if hasattr(framework, "try_out"):
        framework.try_out(model, records, gradient)
        return
    # Nothing but variables could outlive a record there.
    for record in records:
        gradient(model, record)


def vector(model: AnyModel, arrays: Arrays) -> AnyVector:
    """Return float64 arrays as a declearn Vector in the model's dtypes, on its device."""
    made: AnyVector = _framework(model).vector(model, arrays)
    return made


def clipped_sum(
    model: AnyModel,
    batches: Sequence[Data],
    factors: Callable[[Float64], Float64],
    *,
    groups: Groups | None = None,
    micro_batch: int = 128,
    each: Callable[[Arrays], Arrays] | None = None,
    failed: Failed | None = None,
) -> tuple[dict[str, Float64], Float64]:
    """Return the sum of the clipped gradients of records, and the norms before.

    Parameters
    ----------
    model
        A declearn model, initialised.
    batches
        Inputs, targets and weights (or None), as declearn has them; several, where records differ
        in shape; an empty list, if there is no record. With `owners` and `shares`
        (`fedclip.dpsgd.persons`), persons are clipped, each the sum of its records times their
        shares.
    factors
        From finite norms (records, groups) to factors of the same shape.
    groups
        Which tensors share a norm; all, if None.
    micro_batch
        How many records are in memory at once, at most; fewer, if their gradients are large.
    each
        Applied to each gradient, of a record or a person, before it is measured.
    failed
        Called for each record that raises, with its position in the data, where a batch knows
        them, or else in the batch; the record counts as zero. None: it raises here.

    Returns
    -------
    sums
        Float64 arrays by name; zeros if there is no record.
    norms
        Of shape (records, groups); NaN in the row of a record that counted as zero, and no row
        for one that raised.
    """
    framework = _framework(model)
    total = ClippedSum(shapes(model), factors, groups, each)
    of_persons = any(getattr(batch, "owners", None) is not None for batch in batches)
    means = Means(batches) if of_persons else None
    materialise = each is not None or of_persons
    for batch in batches:
        # A record without inputs has no size.
        positions = getattr(batch, "positions", None)
        positions = range(_size(batch)) if positions is None else positions
        size = len(positions)

        def work(start: int, stop: int, batch: Data = batch, size: int = size) -> None:
            some = batch if stop - start == size else part(batch, slice(start, stop))
            stacks = framework.stacks(model, some, micro_batch, materialise)
            if means is not None:
                stacks = means.of(stacks, batch.owners[start:stop], batch.shares[start:stop])
            total.add(stacks)

        def leave_out(
            record: int, exc: BaseException, batch: Data = batch, positions: Any = positions
        ) -> None:
            if failed is not None:
                failed(int(positions[record]), exc)
            if means is not None:
                total.add(means.without(int(batch.owners[record])))

        if failed is None:
            work(0, size)
        else:
            retry_halving(work, 0, size, leave_out)
    return total.result()


def _size(batch: Data) -> int:
    first = batch[0]
    while isinstance(first, (list, tuple)):
        first = first[0]
    return int(first.shape[0])


def part(data: Data, rows: slice) -> Data:
    """Return some of the records of a batch."""
    if data is None:
        return None
    if isinstance(data, (list, tuple)):
        return [part(array, rows) for array in data]
    return data.iloc[rows] if hasattr(data, "iloc") else data[rows]
