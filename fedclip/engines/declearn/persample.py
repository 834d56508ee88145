# SPDX-License-Identifier: Apache-2.0
"""The records of declearn's datasets by position, and clipped sums of their gradients.

Each record is one batch: what makes batches of records, such as padding to the longest, then lets
no record depend on another. Records of one shape are put together afterwards.

A record that raises is left out. A model that carries something from one record to the next is
refused when it is tried out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.model.sklearn import SklearnSGDModel

from fedclip.arrays import Array, Float64, narrowed
from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample import ClippedSum, base, linear_records
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
    if (shape := tuple(record.shape))[:1] != (1,):
        raise ValueError(f"one record has the shape {shape}: the first axis has to be the records")
    known = (str(getattr(record, name, "")) for name in ("dtype", "device", "layout"))
    return (type(record), shape, *known)


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
def _framework(model: AnyModel) -> str:
    """Return the framework of a model of declearn's; refuse one that is not known here."""
    for cls in type(model).__mro__:
        kind = cls.__module__.removeprefix("declearn.model.").partition(".")[0]
        if kind in _STACKS:
            return kind
    text = f"fedclip has no gradients of single records for {type(model).__name__}"
    raise TypeError(f"{text}: take a TorchModel, TensorflowModel, HaikuModel or SklearnSGDModel")


def shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained weights, by name."""
    weights = model.get_weights(trainable=True).coefs
    return {name: tuple(array.shape) for name, array in weights.items()}


def check(model: Any) -> None:
    """Refuse a model in which a record cannot be treated alone.

    Raises
    ------
    TypeError, ValueError
        If the model is of no kind known here, or a layer, which is named, mixes records.
    """
    kind = _framework(model)
    if kind == "torch":
        from fedclip.dpsgd.persample import torch_check

        torch_check.check(model._raw_model.module)
    elif kind == "tensorflow":
        from fedclip.dpsgd.persample import tensorflow_records

        tensorflow_records.check(model._model)
    elif isinstance(model, SklearnSGDModel) and model._model.get_params().get("class_weight"):
        raise ValueError("class_weight lets records depend on others: give sample weights instead")
    if not shapes(model):
        raise ValueError("the model has no trainable weights: there is nothing to clip")


def try_out(model: Any, records: Sequence[Data], **settings: Any) -> None:
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

    if _framework(model) == "torch":
        from fedclip.dpsgd.persample import torch_check, torch_records

        modules = [model._raw_model.module, model._loss_fn.module]
        for record in records:
            torch_records.check_tracked(*_torch_records(model, record))
        torch_check.try_out(model, modules, records, gradient)
    else:
        # Nothing but variables could outlive a record there.
        for record in records:
            gradient(model, record)


def vector(model: AnyModel, arrays: Arrays) -> AnyVector:
    """Return float64 arrays as a declearn Vector in the model's dtypes, on its device."""
    like: AnyVector = model.get_weights(trainable=True)
    # Arithmetic makes a number of an array without dimensions.
    return type(like)({n: narrowed(np.asarray(a), like.coefs[n]) for n, a in arrays.items()})


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
    stacks_of = _STACKS[_framework(model)]
    of_persons = any(getattr(batch, "owners", None) is not None for batch in batches)
    means = Means(batches) if of_persons else None

    def add(batch: Data, start: int, stop: int) -> None:
        # Some kinds of arrays cannot be cut, such as sparse ones.
        some = batch if stop - start == _size(batch) else part(batch, slice(start, stop))
        stacks = stacks_of(model, some, micro_batch, each is not None or of_persons)
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


# -- the frameworks: each yields the gradients of micro-batches, `whole` if they are asked for ----
# To compile, or to trace, takes long: once for a model.
_COMPILED: WeakKeyDictionary[AnyModel, Any] = WeakKeyDictionary()


def _named(batch: Data) -> dict[str, Data]:
    pairs = zip(("inputs", "target", "weight"), batch, strict=True)
    return {name: data for name, data in pairs if data is not None}


def _torch_records(model: Any, batch: Data) -> tuple[Any, Data, Data]:
    """Return the module, its loss for one record, and the records on its device."""
    from torch.utils._pytree import tree_map

    # Not those that declearn wraps them in, which send all arguments to the device once more.
    module, criterion = model._raw_model.module, model._loss_fn.module
    device = model._raw_model.device
    module.train()

    def loss(run: Callable[[Data], Data], record: Data) -> Data:
        output = run(tuple(x.unsqueeze(0) for x in record["inputs"]))
        target = record["target"].unsqueeze(0) if "target" in record else None
        value = criterion(output, target).mean()
        return value * record["weight"].to(value.dtype) if "weight" in record else value

    return module, loss, tree_map(lambda x: x.to(device), _named(model._unpack_batch(batch)))


def _torch_stacks(model: Any, batch: Data, micro_batch: int, whole: bool) -> Iterator[Stack]:
    from fedclip.dpsgd.persample.torch_records import record_stacks

    return record_stacks(*_torch_records(model, batch), micro_batch, whole, "module.")


def _keras_stacks(model: Any, batch: Data, micro_batch: int, whole: bool) -> Iterator[Stack]:
    from fedclip.dpsgd.persample.tensorflow_records import RecordGradients

    if model not in _COMPILED:
        variables = [*model._get_weight_variables(trainable=True)]
        _COMPILED[model] = RecordGradients(model._model, variables, model._device)
    yield from _COMPILED[model].stacks(_named(batch), micro_batch)


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
    yield from _COMPILED[model].stacks(names, trained, fixed, records, micro_batch, whole)


def _haiku_loss(model: Any, trained: Data, fixed: Data, record: Data) -> Array:
    import jax

    key, data = record
    batch = jax.tree_util.tree_map(lambda array: array[None], data)
    return model._forward(trained, fixed, key, batch)


def _linear_stacks(model: Any, batch: Data, micro_batch: int, whole: bool) -> Iterator[Stack]:
    records = model._unpack_batch(batch)
    return linear_records.record_stacks(model._model, records, micro_batch, model._dtype)


_STACKS = {
    "torch": _torch_stacks,
    "tensorflow": _keras_stacks,
    "haiku": _haiku_stacks,
    "sklearn": _linear_stacks,
}
