# SPDX-License-Identifier: Apache-2.0
r"""Records by the persons that they are of, so that a step draws persons, each with its records.

::

    Draw(persons):                    a Poisson sample, in which persons are independent
        for each person i of them:
            own = its records, or max_records of them, drawn at random without replacement
            g_i = mean of the gradients of own          (`Means`)

The means g_i are clipped: whatever all records of a person hold, and however many there are, they
move the sum of a step by at most the bound. A person with many records has no larger say than one
with few.
"""

from __future__ import annotations

import csv
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedclip.core import parameters
from fedclip.dpsgd.persample.base import Batch, Failed, Float64, HostStack, Positions, Stack
from fedclip.privacy.noise import Words, random_words

Ids: TypeAlias = str | Path | Sequence[object] | ArrayLike
"""Whose each record is, in their order; or a CSV file of one column, with a head."""


class Records(Protocol):
    """The records of a data set, by position, as each engine reads them."""

    def __len__(self) -> int:
        """Return how many there are."""

    def take(self, positions: Positions, failed: Failed | None = None) -> list[Batch]:
        """Return batches of records of one shape, without those that raise."""


# What stands for a value that is missing, in one table or another.
_NOBODY = {"", "nan", "nat", "none", "null", "<na>"}


class Persons:
    """The records of a data set, by person; it is asked as `Records` is.

    Parameters
    ----------
    records
        All of them.
    ids
        Whose each record is: texts or whole numbers, one for each record.
    max_records
        Of a person that is drawn, as many records are taken at most, >= 1; None: all.
    bits
        Where the choice of them comes from.

    Raises
    ------
    OSError
        If a file is not readable.
    TypeError, ValueError
        If there is not one id for each record, or some are missing.

    Examples
    --------
    >>> from declearn.dataset import InMemoryDataset
    >>> from fedclip.engines.declearn.persample import Records
    >>> visits = Records(InMemoryDataset(np.arange(8.0).reshape(4, 2), target=np.ones(4)))
    >>> persons = Persons(visits, ["ann", "bob", "ann", "ann"])
    >>> len(persons), persons.mean
    (2, 2.0)
    >>> (batch,) = persons.take([0])
    >>> batch.positions, batch.owners.tolist()
    ([0, 2, 3], [0, 0, 0])
    """

    unit = "person"

    def __init__(
        self, records: Records, ids: Ids, max_records: int | None = None, bits: Words = random_words
    ) -> None:
        self.max_records = parameters.optional(parameters.integer, 1, max_records=max_records)
        self._records, self._bits = records, bits
        self._of = numbered(ids, len(records))
        order = np.argsort(self._of, kind="stable")
        self._own = np.split(order, np.cumsum(np.bincount(self._of))[:-1])
        taken = [min(len(positions), self.max_records or len(positions)) for positions in self._own]
        self.mean = float(np.mean(taken))
        """How many records of a person are taken, in the mean of all."""

    def __len__(self) -> int:
        return len(self._own)

    def take(self, drawn: Positions, failed: Failed | None = None) -> list[Batch]:
        """Return the records of persons, each with its owner and its share in the owner's mean."""
        chosen = [self._some(self._own[person]) for person in drawn]
        shares = np.zeros(len(self))
        shares[[*drawn]] = [1.0 / len(positions) for positions in chosen]
        batches = self._records.take([*map(int, np.concatenate([[], *chosen]))], failed)
        for batch in batches:
            batch.owners = self._of[np.asarray(batch.positions, dtype=np.intp)]
            batch.shares = shares[batch.owners]
        return batches

    def _some(self, own: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return at most `max_records` of these, all choices alike."""
        if self.max_records is None or len(own) <= self.max_records:
            return own
        return own[np.argsort(self._bits(len(own)))[: self.max_records]]


def numbered(ids: Ids, records: int) -> NDArray[np.intp]:
    """Return for each record the number of its person, from 0."""
    values = _column(Path(ids)) if isinstance(ids, (str, Path)) else ids
    # As objects: NumPy would make texts of whatever stands among texts, NaN too.
    objects = np.asarray(values, dtype=object)
    if objects.shape != (records,):
        allowed = f"one id for each of the {records} records, in their order"
        raise ValueError(f"persons must be {allowed}, got shape {objects.shape}")
    # Of one person, whatever keyboard or table its id is from.
    texts = [unicodedata.normalize("NFC", str(value).strip()) for value in objects]
    named = [text.casefold() not in _NOBODY for text in texts]
    for value in objects[named]:
        if isinstance(value, bool) or not isinstance(value, (str, Integral)):
            raise TypeError(f"persons must be texts or whole numbers, got {type(value).__name__}")
    if missing := named.count(False):
        why = f"{missing} of {records} records have no id of a person"
        raise ValueError(f"{why}: leave them out, or give each of them an id")
    return np.unique(texts, return_inverse=True)[1]


def _column(file: Path) -> list[str]:
    """Return what stands below the head of a file of one column, as text: 007 is not 7."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = [*csv.reader(lines)][1:]
    if any(len(row) > 1 for row in rows):
        raise ValueError(f"{file} must have one column, the persons")
    return ["".join(row) for row in rows]


class Means:
    """The means of persons whose records come some at a time; few are kept at once.

    Parameters
    ----------
    batches
        All that will come, each with `owners` and `shares` of its records.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._left = Counter(int(owner) for batch in batches for owner in batch.owners)
        self._begun: dict[int, dict[str, Float64]] = {}

    def of(
        self, stacks: Iterable[Stack], owners: NDArray[np.intp], shares: Float64
    ) -> Iterator[HostStack]:
        """Yield the gradients of the persons of whom nothing is left to come.

        A record with NaN or infinity counts as zero. Nothing is kept if a stack raises.
        """
        remaining, begun, start = self._left.copy(), dict(self._begun), 0
        for stack in stacks:
            arrays = stack.arrays()
            flat = [array.reshape(len(array), -1) for array in arrays.values()]
            finite = np.all([np.isfinite(array).all(axis=1) for array in flat], axis=0)
            rows, start = slice(start, start + len(finite)), start + len(finite)
            complete = []
            for owner in map(int, np.unique(owners[rows])):
                chosen = owners[rows] == owner
                remaining[owner] -= int(chosen.sum())
                chosen &= finite
                weights, before = shares[rows][chosen], begun.pop(owner, {})
                gradient = {
                    n: np.tensordot(weights, array[chosen].astype(float), 1) + before.get(n, 0.0)
                    for n, array in arrays.items()
                }
                if remaining[owner]:
                    begun[owner] = gradient
                else:
                    complete.append(gradient)
            if complete:
                yield HostStack({n: np.stack([mean[n] for mean in complete]) for n in arrays})
        self._left, self._begun = remaining, begun

    def without(self, owner: int) -> Iterator[HostStack]:
        """Yield a person's gradient if all that was left of it is a record that raised."""
        self._left[owner] -= 1
        if not self._left[owner] and owner in self._begun:
            yield HostStack({n: value[None] for n, value in self._begun.pop(owner).items()})
