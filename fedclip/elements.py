# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient that is clipped element by element.

::

    output = the array itself if every element lies in [low, high]
             else min(high, max(low, x)) for each element
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedclip.arrays import Array, Backend, HostView
from fedclip.clipping import Outcome
from fedclip.norms import Float64, Numbers, extremes
from fedclip.rules import NoState
from fedclip.scopes import Groups
from fedclip.states import Statistics

__all__ = ["ValueClipping"]


@dataclass(frozen=True)
class ValueClipping:
    """A box for each group: ``[low, high]``, in the order of the groups."""

    array_fields: ClassVar[tuple[str, ...]] = ()

    lows: tuple[float, ...]
    highs: tuple[float, ...]

    def init(self, groups: Groups) -> NoState:
        """Return the state, of which there is none."""
        return NoState()

    def measure(
        self,
        arrays: Sequence[Array],
        views: Sequence[HostView | None],
        groups: Groups,
        backend: Backend,
    ) -> Float64:
        """Return the smallest and the largest element of each array."""
        local = [backend.to_host(a) if v is None else v for a, v in zip(arrays, views, strict=True)]
        return np.array([extremes(v) if v.size else (0.0, 0.0) for v in local])

    def step(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        measured: Numbers,
        state: NoState,
        views: Sequence[HostView | None],
        kept: Statistics,
    ) -> Outcome:
        """Clip one gradient; for the record, a norm is the largest absolute element."""
        ranges = np.asarray(measured)
        outputs = list(arrays)
        largest = np.zeros(len(groups))
        clipped = np.zeros(len(groups), dtype=bool)
        for i, group in enumerate(groups.index):
            low, high = self.lows[group], self.highs[group]
            largest[group] = max(largest[group], -ranges[i, 0], ranges[i, 1])
            if ranges[i, 0] < low or ranges[i, 1] > high:
                outputs[i] = backend.clip(arrays[i], low, high)
                clipped[group] = True
        limits = np.maximum(np.negative(self.lows), self.highs)
        return Outcome(outputs if clipped.any() else None, state, largest, limits, clipped)
