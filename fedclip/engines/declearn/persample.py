# SPDX-License-Identifier: Apache-2.0
"""Clipped sums of the gradients of single records, for declearn's models of all frameworks.

A record that raises is left out. A model that carries something from one record to the next is
refused when it is tried out.

Linear models of scikit-learn have their gradients in closed form: what one step of `partial_fit` at
a learning rate of 1 takes away from the weights. Its order is that of scikit-learn: shrink by the
l2 share, step along the loss, truncate by the l1 share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
from declearn.model.sklearn import SklearnSGDModel
from scipy.sparse import issparse

from fedclip.arrays import narrowed
from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample import ClippedSum
from fedclip.dpsgd.persample.base import (
    Array,
    Arrays,
    Data,
    Failed,
    Float64,
    Host,
    HostStack,
    Stack,
    at_once,
    retry_halving,
)
from fedclip.dpsgd.persample.means import Means
from fedclip.engines.declearn.generics import AnyModel, AnyVector

__all__ = ["check", "clipped_sum", "part", "raised", "shapes", "try_out", "vector"]

_FILES = {
    "torch": "fedclip.engines.declearn.persample_torch",
    "tensorflow": "fedclip.engines.declearn.persample_tensorflow",
}


def _kind(model: AnyModel) -> str:
    """Return the framework of a model of declearn's."""
    for cls in type(model).__mro__:
        kind = cls.__module__.removeprefix("declearn.model.").partition(".")[0]
        if kind in ("haiku", "sklearn", *_FILES):
            return kind
    raise TypeError(
        f"fedclip has no gradients of single records for {type(model).__name__}: its models are "
        "declearn's TorchModel, TensorflowModel, HaikuModel and SklearnSGDModel"
    )


def shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights, by name."""
    weights = model.get_weights(trainable=True).coefs
    return {name: tuple(array.shape) for name, array in weights.items()}


def check(model: AnyModel) -> None:
    """Refuse a model in which a record cannot be treated alone.

    Raises
    ------
    TypeError, ValueError
        If the model is of no kind known here, or a layer, which is named, mixes records.
    """
    kind = _kind(model)
    if kind in _FILES:
        import_module(_FILES[kind]).check(model)
    elif isinstance(model, SklearnSGDModel) and model._model.get_params().get("class_weight"):
        raise ValueError(
            "class_weight lets the gradient of a record depend on others, or on secret counts: "
            "give sample weights with the data instead"
        )
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

    if _kind(model) == "torch":
        import_module(_FILES["torch"]).try_out(model, records, gradient)
        return
    # Nothing but variables could outlive a record there.
    for record in records:
        gradient(model, record)


def vector(model: AnyModel, arrays: Arrays) -> AnyVector:
    """Return float64 arrays as a declearn Vector in the model's dtypes, on its device."""
    weights: AnyVector = model.get_weights(trainable=True)
    coefs = weights.coefs
    # Arithmetic makes a number of an array without dimensions.
    return type(weights)({n: narrowed(np.asarray(a), coefs[n]) for n, a in arrays.items()})


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
    total = ClippedSum(shapes(model), factors, groups, each)
    of_persons = any(getattr(batch, "owners", None) is not None for batch in batches)
    means = Means(batches) if of_persons else None

    def add(batch: Data, start: int, stop: int) -> None:
        some = part(batch, slice(start, stop))
        stacks = _stacks(model, some, micro_batch, each is not None or of_persons)
        if means is not None:
            stacks = means.of(stacks, batch.owners[start:stop], batch.shares[start:stop])
        total.add(stacks)

    def leave_out(batch: Data, record: int, exc: BaseException) -> None:
        (failed or raised)(int(getattr(batch, "positions", range(record + 1))[record]), exc)
        if means is not None:
            total.add(means.without(int(batch.owners[record])))

    for batch in batches:
        retry_halving(partial(add, batch), 0, _size(batch), partial(leave_out, batch))
    return total.result()


def raised(record: int, exc: BaseException) -> None:
    """Raise what a record has raised."""
    raise exc


def _size(batch: Data) -> int:
    """Return the number of records; those without inputs have no size, but positions."""
    first = getattr(batch, "positions", None)
    if first is not None:
        return len(first)
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


def _stacks(model: AnyModel, batch: Data, micro_batch: int, whole: bool) -> Iterator[Stack]:
    """Yield the gradients of each micro-batch; `whole` says that they are asked for themselves."""
    kind = _kind(model)
    if isinstance(model, SklearnSGDModel):
        return _linear_stacks(model, batch, micro_batch)
    if kind == "haiku":
        return _haiku_stacks(model, batch, micro_batch, whole)
    stacks: Iterator[Stack] = import_module(_FILES[kind]).stacks(model, batch, micro_batch, whole)
    return stacks


# -- Haiku ------------------------------------------------------------------------------------
# To compile takes long: once for a model.
_COMPILED: WeakKeyDictionary[AnyModel, Any] = WeakKeyDictionary()


def _haiku_stacks(model: Any, batch: Data, micro_batch: int, whole: bool) -> Iterator[Stack]:
    import haiku as hk

    from fedclip.dpsgd.persample.jax_records import RecordGradients

    inputs, targets, weights = model._unpack_batch(batch)
    trained, fixed = hk.data_structures.partition(
        lambda layer, name, _: f"{layer}:{name}" in model._trainable, model._params
    )
    if model not in _COMPILED:
        # Weak, since the table keeps what is made of it.
        _COMPILED[model] = RecordGradients(partial(_haiku_loss, proxy(model)))
    # The model's own keys follow a seed, which the server may know, and the order of records.
    words = np.frombuffer(os.urandom(8 * len(inputs[0])), np.uint32)
    records = words.reshape(-1, 2), (inputs, targets, weights)
    names = [f"{layer}:{name}" for layer in sorted(trained) for name in sorted(trained[layer])]
    gradients: RecordGradients = _COMPILED[model]
    yield from gradients.stacks(names, trained, fixed, records, micro_batch, whole)


def _haiku_loss(model: Any, trained: Data, fixed: Data, record: Data) -> Array:
    import jax

    key, data = record
    batch = jax.tree_util.tree_map(lambda array: array[None], data)
    return model._forward(trained, fixed, key, batch)


# -- scikit-learn -----------------------------------------------------------------------------
# Derivatives by the prediction p; of classifiers, y is -1 or 1.
_SLOPES: dict[str, Callable[[Host, Host, float], Host]] = {
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


def _linear_stacks(model: SklearnSGDModel, batch: Data, micro_batch: int) -> Iterator[Stack]:
    inputs, targets, weights = model._unpack_batch(batch)
    skl = model._model
    slope, settings = _SLOPES[skl.loss], skl.get_params()
    penalty = settings["penalty"]
    l1_ratio = {"l2": 0.0, "l1": 1.0, "elasticnet": settings["l1_ratio"]}.get(penalty, 0.0)
    alpha = 0.0 if penalty in (None, "none") else settings["alpha"]
    coef = np.atleast_2d(np.asarray(skl.coef_, np.float64))
    decay = (_SPARSE if issparse(inputs) else 1.0) if settings["fit_intercept"] else 0.0
    together = at_once(micro_batch, coef.size)
    for start in range(0, inputs.shape[0], together):
        rows = slice(start, start + together)
        x, y = _dense(inputs, rows), _signs(model, _dense(targets, rows))
        with np.errstate(all="ignore"):
            p = x @ coef.T + np.asarray(skl.intercept_, np.float64)
            slopes = np.clip(slope(p, y, settings.get("epsilon", 0.0)), -_STEEPEST, _STEEPEST)
            after = coef * max(0.0, 1.0 - (1.0 - l1_ratio) * alpha)
            after = after - slopes[:, :, None] * x[:, None, :]
            after = np.sign(after) * np.maximum(np.abs(after) - l1_ratio * alpha, 0.0)
            # As declearn does: the whole step is multiplied, with its penalty.
            w = np.ones(len(x)) if weights is None else _dense(weights, rows)
            steps = {"intercept": slopes * decay * w[:, None]}
            steps["coef"] = (coef - after) * w[:, None, None]
        shaped = {"intercept": skl.intercept_.shape, "coef": skl.coef_.shape}
        yield HostStack({n: steps[n].reshape(len(x), *shape) for n, shape in shaped.items()})


def _dense(data: Data, rows: slice) -> Host:
    some = data.iloc[rows].to_numpy() if hasattr(data, "iloc") else data[rows]
    return np.asarray(some.toarray() if issparse(some) else some, dtype=np.float64)


def _signs(model: SklearnSGDModel, targets: Host) -> Host:
    """Return targets as the loss has them, one column for each output."""
    column = targets.reshape(len(targets), 1)
    classes = getattr(model._model, "classes_", None)
    if classes is None:
        return column
    classes = classes[1:] if len(classes) == 2 else classes
    return np.where(column == np.asarray(classes, dtype=model._dtype), 1.0, -1.0)
