# SPDX-License-Identifier: Apache-2.0
"""The records of declearn's datasets by position, and clipped sums of their gradients.

Each record is one batch: what makes batches of records, such as padding to the longest, then lets
no record depend on another. Records of one shape are put together afterwards.

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
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.model.sklearn import SklearnSGDModel
from scipy.sparse import issparse

from fedclip.arrays import Array, Float64, HostView, narrowed
from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample import ClippedSum, base
from fedclip.dpsgd.persample.base import Arrays, Batch, Data, Failed, Positions, Stack
from fedclip.dpsgd.persons import Means
from fedclip.engines.declearn.context import AnyModel, AnyVector

# So many records are tried, before all count as impossible to read.
_TRIED = 16


class Records:
    """The records of a dataset, by position.

    Of `InMemoryDataset` and `TorchDataset` they are taken from the dataset itself, whenever they
    are drawn. Those of any other kind are read once, in the dataset's order, and kept in memory.

    Parameters
    ----------
    dataset
        A dataset of declearn.
    like
        A batch to whose dtypes the arrays of an `InMemoryDataset` are brought, record by record
        where that can fail: one text among numbers, or one label that is missing, would
        otherwise change the arrays of all records.

    Raises
    ------
    TypeError, ValueError
        If the dataset has no length, or no record.
    Exception
        The exception of the first records, if all of them fail; and whatever a dataset of
        another kind raises while it is read.
    """

    unit = "record"
    mean = 1.0
    """How many records each unit has, in the mean."""

    def __init__(self, dataset: Data, like: Data = None) -> None:
        self._rows: Callable[[Positions], Data]
        self._plain = False
        if isinstance(dataset, InMemoryDataset):
            arrays = dataset.feats, dataset.target, dataset.weights
            dtypes = [getattr(array, "dtype", None) for array in like or (None,) * 3]
            # Weights need not be in both, and are numbers.
            dtypes[2] = dtypes[2] or np.dtype(np.float64)
            pairs = [*zip(arrays, dtypes, strict=True)]
            self._size, self._plain = int(arrays[0].shape[0]), all(_plain(*pair) for pair in pairs)
            self._rows = lambda positions: tuple(_rows(*pair, positions) for pair in pairs)
        elif hasattr(dataset, "collate_to_batch"):
            source = dataset.dataset
            if not hasattr(source, "__len__"):
                name = type(source).__name__
                raise TypeError(f"{name} has no length: take a dataset with __len__")
            self._size = len(source)
            self._rows = lambda positions: dataset.collate_to_batch([source[positions[0]]])
        else:
            batches = [*dataset.generate_batches(batch_size=1, drop_remainder=False)]
            self._size = len(batches)
            self._rows = lambda positions: batches[positions[0]]
        if not len(self):
            raise ValueError("the training data holds no record")
        errors: list[BaseException] = []
        tried = range(min(len(self), _TRIED))
        if not any(self.take([i], lambda _, exc: errors.append(exc)) for i in tried):
            raise errors[0]

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Positions, failed: Failed | None = None) -> list[Batch]:
        """Return batches: one for each kind of record; none of those that raise.

        Of one kind are those of the same shapes, dtypes and structure. Those that cannot be put
        together, such as sparse ones, are separate batches.

        Parameters
        ----------
        positions
            Of the records, any number of them.
        failed
            Called for each record that raises; None: they raise here.
        """
        if self._plain and len(positions):
            return [_batch(self._rows(positions), positions)]
        alike: dict[object, list[tuple[int, Data]]] = {}

        def work(start: int, stop: int) -> None:
            record = self._rows([start])
            alike.setdefault(_likeness(record), []).append((start, record))

        for position in map(int, positions):
            base.retry_halving(work, position, position + 1, failed or raised)
        batches = []
        for members in alike.values():
            places, records = zip(*members, strict=True)
            try:
                batches.append(_batch(_mapped(_joined, *records), places))
            except Exception:
                batches += [_batch(record, [place]) for place, record in members]
        return batches


def first_records(dataset: Data) -> list[Data]:
    """Return up to three batches of one record each.

    Raises
    ------
    ValueError
        If there is no data set, or no record in it.
    """
    if dataset is None:
        raise ValueError("give valid_data: the model is tried and evaluated on its records")
    batches = [*islice(dataset.generate_batches(batch_size=1, drop_remainder=False), 3)]
    if not batches:
        raise ValueError("valid_data holds no record: a private client tries the model on some")
    return batches


def _batch(parts: Data, positions: Positions) -> Batch:
    batch = Batch(parts)
    batch.positions = positions
    return batch


def _likeness(record: Data) -> object:
    """Return what records must share to be put together; refuse a batch of several."""
    if isinstance(record, (list, tuple)):
        return (type(record), *map(_likeness, record))
    if record is None:
        return None
    if tuple(record.shape[:1]) != (1,):
        shape = tuple(record.shape)
        raise ValueError(f"one record has the shape {shape}: the first axis has to be the records")
    known = (str(getattr(record, name, "")) for name in ("dtype", "device", "layout"))
    return (type(record), tuple(record.shape), *known)


def _mapped(function: Callable[..., Data], first: Data, *others: Data) -> Data:
    """Apply a function to the arrays of batches, in the same place of each."""
    if first is None:
        return None
    if isinstance(first, (list, tuple)):
        kind = list if isinstance(first, list) else tuple
        return kind(_mapped(function, *column) for column in zip(first, *others, strict=True))
    return function(first, *others)


def _joined(*parts: Data) -> Data:
    first = parts[0]
    if not hasattr(first, "new_empty"):
        return np.concatenate(parts)
    # A tensor of torch, which need not be imported for it.
    joined = first.new_empty((len(parts), *first.shape[1:]))
    for i, part in enumerate(parts):
        joined[i] = part[0]
    return joined


def _plain(data: Data, dtype: object) -> bool:
    """Whether no row can fail to be brought to a dtype, whatever it holds."""
    if data is None:
        return True
    integer = isinstance(dtype, np.dtype) and dtype.kind in "iu"
    # Those of pandas' own are of another dtype once a value is missing.
    return all(
        isinstance(kind, np.dtype) and kind.kind in "biufc" and not (integer and kind.kind == "f")
        for kind in np.ravel(data.dtypes if hasattr(data, "iloc") else data.dtype)
    )


def _rows(data: Data, dtype: object, positions: Positions) -> Data:
    """Return rows, in a dtype of NumPy's that holds numbers, if it is one."""
    if data is None:
        return None
    rows = data.iloc[positions].to_numpy() if hasattr(data, "iloc") else data[positions]
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufc":
        return rows
    with np.errstate(all="ignore"):
        wide = rows if rows.dtype.kind in "biufc" else rows.astype(np.float64)
        cast = wide.astype(dtype, copy=False)
    if dtype.kind in "iu" and wide.dtype.kind == "f" and (cast != wide).any():
        raise ValueError(f"{rows.tolist()} where valid_data has {dtype}")
    return cast


# -- gradients --------------------------------------------------------------------------------
def _framework(model: AnyModel) -> tuple[str, Any]:
    """Return the framework of a model of declearn's, and the file for it, or None."""
    for cls in type(model).__mro__:
        kind = cls.__module__.removeprefix("declearn.model.").partition(".")[0]
        if kind in ("torch", "tensorflow"):
            return kind, import_module(f"fedclip.engines.declearn.persample_{kind}")
        if kind in ("haiku", "sklearn"):
            return kind, None
    text = f"fedclip has no gradients of single records for {type(model).__name__}"
    raise TypeError(f"{text}: take a TorchModel, TensorflowModel, HaikuModel or SklearnSGDModel")


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
    file = _framework(model)[1]
    if file is not None:
        file.check(model)
    elif isinstance(model, SklearnSGDModel) and model._model.get_params().get("class_weight"):
        raise ValueError("class_weight lets records depend on others: give sample weights instead")
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

    kind, file = _framework(model)
    if kind == "torch":
        file.try_out(model, records, gradient)
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
        # Some kinds of arrays cannot be cut, such as sparse ones.
        some = batch if stop - start == _size(batch) else part(batch, slice(start, stop))
        stacks = _stacks(model, some, micro_batch, each is not None or of_persons)
        if means is not None:
            stacks = means.of(stacks, batch.owners[start:stop], batch.shares[start:stop])
        total.add(stacks)

    def leave_out(batch: Data, record: int, exc: BaseException) -> None:
        (failed or raised)(int(getattr(batch, "positions", range(record + 1))[record]), exc)
        if means is not None:
            total.add(means.without(int(batch.owners[record])))

    for batch in batches:
        base.retry_halving(partial(add, batch), 0, _size(batch), partial(leave_out, batch))
    return total.result()


def raised(record: int, exc: BaseException) -> None:
    """Raise what a record has raised."""
    raise exc


def _size(batch: Data) -> int:
    """Return the number of records; those without inputs have no size, but positions."""
    if (positions := getattr(batch, "positions", None)) is not None:
        return len(positions)
    first = batch[0]
    while isinstance(first, (list, tuple)):
        first = first[0]
    return int(first.shape[0])


def part(data: Data, rows: slice) -> Data:
    """Return some of the records of a batch."""
    return _mapped(lambda x: x.iloc[rows] if hasattr(x, "iloc") else x[rows], data)


def _stacks(model: Any, batch: Data, micro_batch: int, whole: bool) -> Iterator[Stack]:
    """Yield the gradients of each micro-batch; `whole` says that they are asked for themselves."""
    kind, file = _framework(model)
    if kind == "sklearn":
        return _linear_stacks(model, batch, micro_batch)
    stacks = _haiku_stacks if kind == "haiku" else file.stacks
    return stacks(model, batch, micro_batch, whole)


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
_SLOPES: dict[str, Callable[[HostView, HostView, float], HostView]] = {
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
    together = base.at_once(micro_batch, coef.size)
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
        yield base.HostStack({n: steps[n].reshape(len(x), *shape) for n, shape in shaped.items()})


def _dense(data: Data, rows: slice) -> HostView:
    some = part(data, rows)
    return np.asarray(some.toarray() if issparse(some) else some, dtype=np.float64)


def _signs(model: SklearnSGDModel, targets: HostView) -> HostView:
    """Return targets as the loss has them, one column for each output."""
    column = targets.reshape(len(targets), 1)
    classes = getattr(model._model, "classes_", None)
    if classes is None:
        return column
    classes = classes[1:] if len(classes) == 2 else classes
    return np.where(column == np.asarray(classes, dtype=model._dtype), 1.0, -1.0)
