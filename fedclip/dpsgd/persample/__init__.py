# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records, clipped and added up: the only part of DP-SGD that knows frameworks.

::

    for each micro-batch:
        g_i    = gradient of weight_i * loss_i, of each record alone          (the framework)
        n_i    = norm of each group of its tensors, in float64
        g_i, n_i = 0, NaN  where any value is NaN or infinite
        sum   += factors(n_i) * g_i, in float64

Each record goes through the model in a batch with no other record, so no record can depend on
another. Gradients and sums stay where the framework has them; norms and factors go through the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Self

import numpy as np

from fedclip.core.scopes import Groups, resolve
from fedclip.dpsgd.persample.base import Array, Arrays, Float64, HostStack, Stack


class ClippedSum:
    """The sum of clipped gradients, and the norms before.

    Parameters
    ----------
    shapes
        Of the tensors, by name.
    factors
        From finite norms (records, groups) to factors of the same shape.
    groups
        Which tensors share a norm; all, if None.
    each
        Applied to each gradient before it is measured.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        factors: Callable[[Float64], Float64],
        groups: Groups | None = None,
        each: Callable[[Arrays], Arrays] | None = None,
    ) -> None:
        self._shapes, self._factors, self._each = shapes, factors, each
        groups = resolve("global", None, tuple(shapes)) if groups is None else groups
        self._names, self._members = groups.names, groups.members
        self._totals: dict[str, Array] = {}
        self._norms = [np.zeros((0, len(self._members)))]

    def add(self, stacks: Iterable[Stack]) -> Self:
        """Add all these gradients; if one raises, add nothing."""
        totals, norms = dict(self._totals), []
        for stack in stacks:
            if self._each is not None:
                stack = _one_by_one(stack.arrays(), self._each)
            norms.append(self._add(totals, stack))
        self._totals = totals
        self._norms += norms
        return self

    def _add(self, totals: dict[str, Array], stack: Stack) -> Float64:
        squares = stack.squares(self._names)
        with np.errstate(all="ignore"):
            sums = [squares[:, list(m)].sum(axis=1) for m in self._members]
            norms = np.sqrt(np.stack(sums, axis=1))
        finite = np.isfinite(norms).all(axis=1)
        norms[~finite] = np.nan
        scales = np.zeros_like(norms)
        scales[finite] = self._factors(norms[finite])
        groups = enumerate(self._members)
        columns = {self._names[i]: scales[:, group] for group, m in groups for i in m}
        stack.add(totals, columns, finite)
        return np.asarray(norms)

    def result(self) -> tuple[dict[str, Float64], Float64]:
        """Return float64 sums by name, and the norms; NaN in the row of a record that is zero."""
        totals, shapes = self._totals, self._shapes
        sums = {n: _host(totals[n]) if n in totals else np.zeros(shapes[n]) for n in self._names}
        return sums, np.concatenate(self._norms)


def _host(total: Array) -> Float64:
    # NumPy does not copy from another device.
    return np.asarray(total.cpu() if hasattr(total, "cpu") else total, dtype=np.float64)


def _one_by_one(arrays: Arrays, each: Callable[[Arrays], Arrays]) -> HostStack:
    done = []
    for i in range(len(next(iter(arrays.values())))):
        record = {name: array[i] for name, array in arrays.items()}
        # A record with NaN counts as zero, whatever the modules before would make of it.
        finite = all(np.isfinite(array).all() for array in record.values())
        done.append(each(record) if finite else record)
    return HostStack({name: np.stack([gradient[name] for gradient in done]) for name in arrays})
