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

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedclip.arrays import Array, Arrays
from fedclip.core.measures import SQUARED, Order, measure
from fedclip.core.scopes import Groups
from fedclip.rules import CLEAR, NoState, State
from fedclip.rules.constant import Given
from fedclip.rules.elementwise import blend, step_size
from fedclip.transforms.action import Action
from fedclip.transforms.base import Gradient, Outcome, by_tensor
from fedclip.transforms.norm import NormClipping
from fedclip.transforms.past import Remembering, remember


class AverageState(NamedTuple):
    """Norm of the average, and the number of steps, of each group."""

    norm: Array
    count: Array


@dataclass(frozen=True)
class AverageClipping(Remembering):
    """Clip to, or bring to (`rescale`), the norm of the moving average.

    The other fields are parameters of `ema-norm-clip`; `start`, its `init`, is None for the first
    gradient.
    """

    by_norms = True

    decay: float
    ord: Order
    max_growth: float | None
    start: float | None
    min_norm: float | None
    debias: bool
    rescale: bool

    def init(self, groups: Groups) -> AverageState:
        return AverageState(np.zeros(len(groups)), np.zeros(len(groups)))

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient to the norm of the average, which it is part of."""
        groups, xp = gradient.groups, gradient.xp
        norms = gradient.finite_norms(measure(gradient.arrays, groups, self.ord, xp))
        pasts, counts = self.begun(gradient)
        means = self._learnt(gradient, pasts, counts)
        sizes, first = measure(means, groups, self.ord, xp), state.count == 0
        # Of a step that is not finite nothing may be left.
        sizes = xp.where(xp.isfinite(sizes), sizes, 0.0)
        if self.max_growth is not None:
            # From 0 nothing could grow, so what follows it is a first gradient again.
            before = xp.where(first | (state.norm == 0), sizes, state.norm)
            allowed = xp.maximum(before * self.max_growth, self.min_norm or 0.0)
            factors = xp.where(sizes > allowed, allowed / xp.where(sizes > 0, sizes, 1.0), 1.0)
            factors = xp.sqrt(factors) if self.ord in SQUARED else factors
            means = xp.scale(means, by_tensor(factors, groups, xp))
            sizes = xp.minimum(sizes, allowed)
        if self.ord == 2:
            # Norms close to a limit are measured again: then the limit is, too.
            sizes = xp.recompute_near_limit(sizes, norms, means, groups.members)
        limits = sizes
        if not self.rescale and (self.start is None or self.debias):
            # The average of one gradient is that gradient: rounding its norm must not clip it.
            limits = xp.where(first, xp.maximum(sizes, CLEAR * norms), sizes)
        clipping = NormClipping(Given(limits), self.ord, Action(rescale=self.rescale))
        outcome = clipping.judged(gradient, norms, NoState())
        remember(gradient, means, counts)
        return outcome._replace(state=AverageState(sizes, state.count + 1.0))

    def _learnt(self, gradient: Gradient, pasts: Arrays, counts: Array) -> Arrays:
        """Return the averages after the gradient, of which they have seen `counts` before."""
        xp, start = gradient.xp, self.start
        first = xp.where(counts == 0, 1.0, 0.0 * counts)
        weights = step_size(self.decay, self.debias, counts)
        if start is None:
            weights = xp.where(counts == 0, 1.0, weights)

        def learn(values: Array, past: Array, weight: Array, begin: Array) -> tuple[Array, Array]:
            return values, blend(past + begin, values, weight)

        columns = [gradient.arrays, pasts, weights, first * (start or 0.0)]
        means: Arrays = xp.mapped(learn, columns)[1]
        return means
