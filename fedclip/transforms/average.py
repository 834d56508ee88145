# SPDX-License-Identifier: Apache-2.0
r"""Limits at the norm of the moving average of the gradient itself.

::

    e     = e + (1 - decay) (g - e)                                for each tensor
    size  = norm of e, for each group
    size  = min(size, max(max_growth * size before, min_norm)),    e shrunk accordingly
    limit = size

The average sees every gradient before it is clipped, the current one included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import NUMPY, Array, HostView, Views
from fedclip.measures import Float64, Numbers, Order, degree, exact_norm
from fedclip.measures.l2 import CHUNK, decode
from fedclip.rules import CLEAR, NoState, State
from fedclip.rules.constant import Constant, Given
from fedclip.rules.elementwise import blend, step_size
from fedclip.scopes import Groups
from fedclip.states import Statistics
from fedclip.transforms.action import Action, replaced
from fedclip.transforms.base import Gradient, Outcome, Transform
from fedclip.transforms.norm import CLOSE, NormClipping
from fedclip.transforms.past import PAST, recall, recall_on_device, remember


class AverageState(NamedTuple):
    """Norm of the average, and the number of steps, of each group."""

    norm: Any
    count: Any


@dataclass(frozen=True)
class AverageClipping(Transform):
    """Clip to, or bring to (`rescale`), the norm of the moving average.

    The other fields are parameters of `ema-norm-clip`; `start`, its `init`, is None for the first
    gradient.
    """

    array_fields: ClassVar[tuple[str, ...]] = PAST

    decay: float
    ord: Order
    max_growth: float | None
    start: float | None
    min_norm: float | None
    debias: bool
    rescale: bool

    def init(self, groups: Groups) -> AverageState:
        return AverageState(np.zeros(len(groups)), np.zeros(len(groups)))

    def measure(self, gradient: Gradient) -> Numbers:
        """Return the norm of each group."""
        return self._clipping(()).measure(gradient)

    def _clipping(self, limits: tuple[float, ...]) -> NormClipping:
        return NormClipping(Constant(limits), self.ord, Action(rescale=self.rescale))

    # -- on the host --------------------------------------------------------------------------
    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient, given its norms, which are all finite."""
        groups, local = gradient.groups, gradient.dense()
        memories = recall(gradient, local)
        for view, memory in zip(local, memories, strict=True):
            self._learn(view, memory)
        first = np.atleast_1d(state.count) == 0
        sizes = self._restrained([m["past"] for m in memories], groups, state, first)
        if self.ord == 2:
            # The clipping step measures norms close to a limit in float64: do the same here.
            close = np.abs(np.atleast_1d(measured) - sizes) <= CLOSE * sizes
            for group in np.flatnonzero(close):
                sizes[group] = exact_norm([memories[i]["past"] for i in groups.members[group]])
        limits = sizes
        if not self.rescale and (self.start is None or self.debias):
            # The average of one gradient is that gradient: rounding its norm must not clip it.
            limits = np.where(first, np.maximum(sizes, CLEAR * np.atleast_1d(measured)), sizes)
        clipping = self._clipping(tuple(limits.tolist()))
        outcome = clipping.step(gradient, measured, NoState())
        return outcome._replace(state=AverageState(sizes, np.atleast_1d(state.count) + 1))

    def _learn(self, view: HostView, memory: dict[str, Any]) -> None:
        flat, past, count = view.reshape(-1), memory["past"].reshape(-1), float(memory["count"])
        memory["count"] = np.asarray(count + 1)
        weight = step_size(self.decay, self.debias, count)
        if count == 0:
            if self.start is None:
                weight = 1.0
            else:
                past[:] = self.start
        for begin in range(0, flat.size, CHUNK):
            piece = slice(begin, begin + CHUNK)
            values = decode(flat[piece])
            past[piece] = values if weight == 1.0 else blend(past[piece], values, weight)

    def _restrained(
        self, means: list[Any], groups: Groups, state: AverageState, first: Any
    ) -> Float64:
        """Return the norms of the averages; shrink, in place, averages that grow too fast."""
        sizes = np.array(self.measure(Gradient(means, groups, NUMPY, Views(means))), ndmin=1)
        if self.max_growth is None:
            return sizes
        # From 0 nothing could grow, so what follows it is a first gradient again.
        norms = np.atleast_1d(state.norm)
        before = np.where(first | (norms == 0), sizes, norms)
        allowed = np.maximum(before * self.max_growth, self.min_norm or 0.0)
        for group in np.flatnonzero(sizes > allowed):
            factor = float(allowed[group] / sizes[group]) ** (1.0 / degree(self.ord))
            for i in groups.members[group]:
                np.multiply(means[i], factor, out=means[i])
        return np.asarray(np.minimum(sizes, allowed))

    # -- on a device, or in compiled code -----------------------------------------------------
    def kept_on_device(self, gradient: Gradient) -> Statistics:
        return recall_on_device(gradient)

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient, in the framework's own operations."""
        groups, xp = gradient.groups, gradient.backend
        clipping = self._clipping(())
        norms = clipping.measure_on_device(gradient)
        fine = xp.isfinite(norms)
        finite = gradient.finite(norms)
        gradient.kept.update(recall_on_device(gradient))
        counts = [gradient.kept[name]["count"] for name in groups.names]
        means = self._learnt(gradient, counts)
        first = state.count == 0
        of_means = Gradient(means, groups, xp)
        sizes = xp.where(fine, clipping.measure_on_device(of_means), 0.0)
        if self.max_growth is not None:
            # From 0 nothing could grow, so what follows it is a first gradient again.
            before = xp.where(first | (state.norm == 0), sizes, state.norm)
            allowed = xp.maximum(before * self.max_growth, self.min_norm or 0.0)
            kept = xp.where(sizes > allowed, allowed / xp.where(sizes > 0, sizes, 1.0), 1.0)
            kept = xp.sqrt(kept) if degree(self.ord) == 2 else kept
            places = {i: (group, xp.dtype(means[i])) for i, group in enumerate(groups.owners)}
            means = replaced(
                means, places, lambda some, _, key: xp.multiply(some, xp.of_group(kept, key[0]))
            )
            sizes = xp.minimum(sizes, allowed)
        limits = sizes
        if not self.rescale and (self.start is None or self.debias):
            # As on the host: the average of one gradient is that gradient.
            limits = xp.where(first, xp.maximum(sizes, CLEAR * xp.where(fine, norms, 0.0)), sizes)
        given = replace(clipping, rule=Given(limits))
        outcome = given.clip_measured(gradient, norms, NoState(), on_nonfinite)
        trios = zip(groups.names, means, xp.each(lambda count: count + 1.0, counts), strict=True)
        after = {name: {"past": past, "count": count} for name, past, count in trios}
        remember(gradient, after, finite)
        new = AverageState(sizes, state.count + 1.0)
        return outcome._replace(state=AverageState(*xp.choose([finite] * len(state), new, state)))

    def _learnt(self, gradient: Gradient, counts: Sequence[Array]) -> Sequence[Array]:
        """Return the averages after the gradient, of which they have seen `counts` before."""
        names, xp = gradient.groups.names, gradient.backend
        pasts = [gradient.kept[name]["past"] for name in names]
        pairs = zip(gradient.arrays, pasts, strict=True)
        values = [xp.cast(xp.dense(array), xp.dtype(past)) for array, past in pairs]
        if self.start:
            pairs = zip(counts, pasts, strict=True)
            pasts = [xp.where(c == 0, 0.0 * past + self.start, past) for c, past in pairs]

        def weight(count: Array) -> Array:
            found = step_size(self.decay, self.debias, count) + 0.0 * count
            return found if self.start is not None else xp.where(count == 0, 1.0, found)

        return xp.blends(pasts, values, xp.each(weight, counts))
