# SPDX-License-Identifier: Apache-2.0
"""Records of declearn's datasets by position, for a sampler that draws positions."""

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
    """

    def __init__(self, dataset: Dataset) -> None:
        self._take: Callable[[Any], Any]
        torch: Any = dataset
        self._torch = torch
        if isinstance(dataset, InMemoryDataset):
            self._data = (dataset.feats, dataset.target, dataset.weights)
            self._size, self._take = len(_rows(dataset.feats)), self._from_memory
        elif getattr(dataset, "collate_to_batch", None):
            self._size, self._take = len(torch.dataset), self._from_torch
        else:
            batches = list(dataset.generate_batches(batch_size=256, drop_remainder=False))
            self._data = tuple(_joined(parts) for parts in zip(*batches, strict=True))
            first = self._data[0]
            self._size = len(first[0] if isinstance(first, list) else first)
            self._take = self._from_memory
        if not self._size:
            raise ValueError("the training data holds no record")

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Any) -> Any:
        """Return inputs, targets and weights of these records; None if there is no position."""
        return self._take(positions) if len(positions) else None

    def _from_memory(self, positions: Any) -> Any:
        return tuple(_taken(part, positions) for part in self._data)

    def _from_torch(self, positions: Any) -> Any:
        dataset = self._torch
        return dataset.collate_to_batch([dataset.dataset[int(i)] for i in positions])


def _rows(data: Any) -> range:
    return range(data.shape[0])


def _joined(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], (list, tuple)):
        return [np.concatenate([np.asarray(a) for a in one]) for one in zip(*parts, strict=True)]
    return np.concatenate([np.asarray(part) for part in parts])


def _taken(data: Any, positions: Any) -> Any:
    if data is None:
        return None
    if isinstance(data, list):
        return [_taken(one, positions) for one in data]
    if hasattr(data, "iloc"):
        return data.iloc[positions].to_numpy()
    return data[positions]
