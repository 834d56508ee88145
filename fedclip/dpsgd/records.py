# SPDX-License-Identifier: Apache-2.0
"""Records of declearn's datasets by position, for a sampler that draws positions.

A record is a batch of its own: what makes batches of records, such as padding to the longest,
then lets no record depend on another. Records of one shape are put together afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from declearn.dataset import Dataset, InMemoryDataset

__all__ = ["Records"]


class Records:
    """The records of a dataset, by position.

    Of `InMemoryDataset` and `TorchDataset` they are taken from the dataset itself, whenever they
    are drawn. Those of any other kind are read once, in the dataset's order, and kept in memory.

    Parameters
    ----------
    dataset
        A dataset of declearn.

    Raises
    ------
    TypeError, ValueError
        If the dataset has no length, or no record.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._size: int
        self._take: Callable[[Any], list[Any]]
        if isinstance(dataset, InMemoryDataset):
            self._data = (dataset.feats, dataset.target, dataset.weights)
            self._size, self._take = dataset.feats.shape[0], self._from_memory
        else:
            self._alone = _alone(dataset)
            self._size, self._take = len(self._alone), self._together
        if not self._size:
            raise ValueError("the training data holds no record")

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Any) -> list[Any]:
        """Return batches of inputs, targets and weights: one for each shape that records have."""
        return self._take(positions) if len(positions) else []

    def _from_memory(self, positions: Any) -> list[Any]:
        return [tuple(_rows(part, positions) for part in self._data)]

    def _together(self, positions: Any) -> list[Any]:
        alike: dict[Any, list[Any]] = {}
        for position in positions:
            record = self._alone[int(position)]
            alike.setdefault(_shape(record), []).append(record)
        return [_joined(records) for records in alike.values()]


def _alone(dataset: Any) -> Any:
    """Return records by position, each a batch of its own."""
    if hasattr(dataset, "collate_to_batch"):
        return _TorchRecords(dataset)
    return [*dataset.generate_batches(batch_size=1, drop_remainder=False)]


class _TorchRecords:
    """The records of a torch dataset, each made a batch of its own."""

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset.dataset, "__len__"):
            raise TypeError(
                f"{type(dataset.dataset).__name__} has no length, and records are drawn by "
                "position: take a dataset with __len__ and __getitem__"
            )
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset.dataset)

    def __getitem__(self, position: int) -> Any:
        record = self._dataset.collate_to_batch([self._dataset.dataset[position]])
        for leaf in _leaves(record):
            if tuple(leaf.shape[:1]) != (1,):
                raise ValueError(
                    f"collate_fn made a tensor of shape {tuple(leaf.shape)} of one record: the "
                    "first axis has to be the records"
                )
        return record


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, (list, tuple)):
        return [leaf for one in data for leaf in _leaves(one)]
    return [] if data is None else [data]


def _shape(record: Any) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in _leaves(record))


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, (list, tuple)):
        kind = list if isinstance(first, list) else tuple
        return kind(_joined(one) for one in zip(*parts, strict=True))
    if not hasattr(first, "new_empty"):
        return np.concatenate(parts)
    # A tensor of torch, which need not be imported for it.
    whole = first.new_empty((len(parts), *first.shape[1:]))
    for i, part in enumerate(parts):
        whole[i] = part[0]
    return whole


def _rows(data: Any, positions: Any) -> Any:
    if data is None:
        return None
    if isinstance(data, list):
        return [_rows(one, positions) for one in data]
    if hasattr(data, "iloc"):
        return data.iloc[positions].to_numpy()
    return data[positions]
