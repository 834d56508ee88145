# SPDX-License-Identifier: Apache-2.0
"""Records of declearn's datasets by position, for a sampler that draws positions.

Each record is one batch: what makes batches of records, such as padding to the longest,
then lets no record depend on another. Records of one shape are put together afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from declearn.dataset import Dataset, InMemoryDataset

from fedclip.dpsgd.persample.base import Batch, Data, Failed, Positions, retry_halving
from fedclip.engines.declearn.persample import raised

__all__ = ["Records", "first_records"]

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

    def __init__(self, dataset: Dataset, like: Data = None) -> None:
        source: Data = dataset
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
            if not hasattr(source.dataset, "__len__"):
                name = type(source.dataset).__name__
                raise TypeError(f"{name} has no length: take a dataset with __len__")
            self._size = len(source.dataset)
            self._rows = lambda positions: source.collate_to_batch([source.dataset[positions[0]]])
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
            alike.setdefault(_kind(record), []).append((start, record))

        for position in map(int, positions):
            retry_halving(work, position, position + 1, failed or raised)
        batches = []
        for members in alike.values():
            places, records = zip(*members, strict=True)
            try:
                batches.append(_batch(_joined(records), places))
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


def _kind(record: Data) -> object:
    """Return what records must share to be put together; refuse a batch of several."""
    if isinstance(record, (list, tuple)):
        return (type(record), *map(_kind, record))
    if record is None:
        return None
    if tuple(record.shape[:1]) != (1,):
        raise ValueError(
            f"a batch of one record has an array of shape {tuple(record.shape)}: the first axis "
            "has to be the records"
        )
    known = (str(getattr(record, name, "")) for name in ("dtype", "device", "layout"))
    return (type(record), tuple(record.shape), *known)


def _joined(parts: Sequence[Data]) -> Data:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, (list, tuple)):
        kind = list if isinstance(first, list) else tuple
        return kind(_joined(column) for column in zip(*parts, strict=True))
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
