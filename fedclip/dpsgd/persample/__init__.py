# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records, clipped and added up: the only part of DP-SGD that knows frameworks.

::

    for each micro-batch:
        g_i    = gradient of weight_i * loss_i, of each record by itself      (the framework)
        n_i    = norm of each group of its tensors, in float64
        g_i, n_i = 0, NaN  where any value is NaN or infinite
        sum   += factors(n_i) * g_i, in float64

Each record goes through the model in a batch of its own, so that none can depend on another; a
model that carries something from one to the next is refused. A record that raises is left out.
Gradients and sums stay where the framework has them; norms and factors go through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedclip.core.scopes import Groups
from fedclip.dpsgd.persample.base import (
    Array,
    Arrays,
    Data,
    Failed,
    Float64,
    HostStack,
    Stack,
    Unfit,
    spare,
)
from fedclip.dpsgd.persample.means import Means

if TYPE_CHECKING:
    from fedclip.engines.declearn.generics import AnyModel, AnyVector

__all__ = ["Arrays", "Unfit", "add_up", "check", "clipped_sum", "part", "try_out", "vector"]

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


def check(model: AnyModel) -> None:
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
    Unfit
        If the gradient of a record depends on which came before it.
    Exception
        Whatever the model raises for one of the records.
    """

    def gradient(of: AnyModel, record: Data) -> Float64:
        sums, _ = clipped_sum(of, [record], np.ones_like, **settings)
        # As a step ends, so that it does not fail when the budget is spent.
        vector(of, {name: array + 0.0 for name, array in sums.items()})
        return np.concatenate([array.ravel() for array in sums.values()])

    _framework(model).try_out(model, records, gradient)


def vector(model: AnyModel, arrays: Arrays) -> AnyVector:
    """Return float64 arrays as a declearn Vector of the model's own type, dtype and device."""
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
        in shape; none, if there is no record. With `owners` and `shares` (`fedclip.dpsgd.persons`),
        what is clipped are persons, each the sum of its records times their shares.
    factors
        From finite norms (records, groups) to factors of the same shape.
    groups
        Which tensors share a norm; all, if None.
    micro_batch
        How many records are in memory at once, at most; fewer, if their gradients are large.
    each
        What is done to each gradient, of a record or a person, before it is measured.
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
    total = _Sum(framework.shapes(model), factors, groups, each)
    of_persons = any(getattr(batch, "owners", None) is not None for batch in batches)
    means = Means(batches) if of_persons else None
    whole = each is not None or of_persons
    for batch in batches:
        # A record of no inputs has no size.
        places = getattr(batch, "positions", None)
        places = range(_size(batch)) if places is None else places
        size = len(places)

        def work(start: int, stop: int, batch: Data = batch, size: int = size) -> None:
            some = batch if stop - start == size else part(batch, slice(start, stop))
            stacks = framework.stacks(model, some, micro_batch, whole)
            if means is not None:
                stacks = means.of(stacks, batch.owners[start:stop], batch.shares[start:stop])
            total.add(stacks)

        def told(
            record: int, exc: BaseException, batch: Data = batch, places: Any = places
        ) -> None:
            if failed is not None:
                failed(int(places[record]), exc)
            if means is not None:
                total.add(means.without(int(batch.owners[record])))

        if failed is None:
            work(0, size)
        else:
            spare(work, 0, size, told)
    return total.result()


def _size(batch: Data) -> int:
    first = batch[0]
    while isinstance(first, (list, tuple)):
        first = first[0]
    return int(first.shape[0])


def part(data: Data, some: slice) -> Data:
    """Return some of the records of a batch."""
    if data is None:
        return None
    if isinstance(data, (list, tuple)):
        return [part(one, some) for one in data]
    return data.iloc[some] if hasattr(data, "iloc") else data[some]


def add_up(
    stacks: Iterable[Stack],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Callable[[Float64], Float64],
    groups: Groups | None = None,
    each: Callable[[Arrays], Arrays] | None = None,
) -> tuple[dict[str, Float64], Float64]:
    """Return what `clipped_sum` does, of gradients that are there."""
    total = _Sum(shapes, factors, groups, each)
    total.add(stacks)
    return total.result()


class _Sum:
    """The sum of clipped gradients, and the norms before; of stacks that end well."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        factors: Callable[[Float64], Float64],
        groups: Groups | None,
        each: Callable[[Arrays], Arrays] | None,
    ) -> None:
        self._shapes, self._factors, self._each = shapes, factors, each
        self._names = groups.names if groups is not None else tuple(shapes)
        whole = (tuple(range(len(self._names))),)
        self._members = groups.members if groups is not None else whole
        self._totals: dict[str, Array] = {}
        self._norms = [np.zeros((0, len(self._members)))]

    def add(self, stacks: Iterable[Stack]) -> None:
        """Add all of these gradients, or none if one raises."""
        totals, norms = dict(self._totals), []
        for given in stacks:
            stack = given if self._each is None else _one_by_one(given.arrays(), self._each)
            norms.append(_add(totals, stack, self._names, self._members, self._factors))
        self._totals = totals
        self._norms += norms

    def result(self) -> tuple[dict[str, Float64], Float64]:
        found, shapes = self._totals, self._shapes
        sums = {n: _host(found[n]) if n in found else np.zeros(shapes[n]) for n in self._names}
        return sums, np.concatenate(self._norms)


def _host(total: Array) -> Float64:
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
    totals: dict[str, Array],
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
