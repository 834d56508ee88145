# SPDX-License-Identifier: Apache-2.0
"""A limit from the median and the standard deviation of all norms seen so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import Judgement, State
from fedclip.rules.history import History, choose
from fedclip.rules.quantiles import Given, Markers, Window
from fedclip.rules.sharing import Counted, Floats, Sketched, pooled

LEAST = 5
"""Number of norms of a group before which it is not judged."""


class AutoMarkersState(NamedTuple):
    """The markers of the median (`fedclip.rules.quantiles`), mean, variance, and count."""

    h0: Array
    h1: Array
    h2: Array
    h3: Array
    h4: Array
    n1: Array
    n2: Array
    n3: Array
    mean: Array
    variance: Array
    count: Array


class AutoWindowState(NamedTuple):
    """The last norms, for the median, and mean, variance and count of all norms."""

    window: Array
    mean: Array
    variance: Array
    count: Array


class AutoGivenState(NamedTuple):
    """A median from elsewhere, and mean, variance and count of all norms."""

    level: Array
    mean: Array
    variance: Array
    count: Array


@dataclass(frozen=True, kw_only=True)
class Auto(History):
    """Limits at a number of standard deviations above the median.

    ::

        threshold = median + std_factor * max(std, min_std * median)
        limit     = threshold, or x if that is larger    where x + eps <= threshold
                    threshold                            elsewhere
                    warmup_norm                          before `warmup` norms (5 at least), and
                                                         where the threshold is 0
        limit     = min(limit, max_norm)
        u         = min(x, threshold) | x | no update on a spike     (feedback)

    The standard deviation, n - 1 in the denominator, is of all u. Its floor lets a constant
    stream grow: with a limit at the very median, clipped norms would be constant for ever.

    In a federation (`merge`) mean, variance and count are those of all norms of all clients,
    and the median is that of their sketch.
    """

    counters: ClassVar[tuple[str, ...]] = ("moments", "sketch")

    median: Markers | Window | Given
    std_factor: float
    decay: float | None
    min_std: float

    def begin(self, groups: int, xp: Arithmetic) -> State:
        zeros = xp.asarray([0.0] * groups)
        fields = self.median.init(groups, xp)._asdict()
        cls = {Markers: AutoMarkersState, Window: AutoWindowState, Given: AutoGivenState}[
            type(self.median)
        ]
        return cls(**fields, mean=zeros, variance=zeros)

    def judge(self, norms: Array, state: State, xp: Arithmetic) -> Judgement:
        median = self.median.estimate(state, xp)
        few = xp.maximum(state.count - 1.0, 1.0)
        std = xp.sqrt(state.variance * (state.count / few))
        threshold = median + self.std_factor * xp.maximum(std, self.min_std * median)
        ready = (state.count >= max(self.warmup, LEAST)) & (threshold > 0)
        spike = ready & (norms + self.eps > threshold)
        limits = self.limits(
            norms,
            threshold,
            spike,
            ready,
            xp,
            target=threshold,
        )
        clipped = xp.where(spike, xp.minimum(norms, threshold), norms)
        seen = norms if self.feedback == "raw" else clipped
        return Judgement(limits, seen, ready, spike if self.feedback == "none" else None)

    @property
    def remembered(self) -> int | None:
        return self.median.size if isinstance(self.median, (Window, Given)) else None

    def levels(self, sketch: Sketched) -> tuple[float, ...]:
        return (sketch.quantile(0.5),)

    def shared(self) -> Auto:
        return replace(self, median=Given(0.5, self.remembered, least=self.median.least))

    def merge(self, state: AutoGivenState, counted: Counted) -> AutoGivenState:
        keep = 0.0 if self.decay is None else 1.0 - np.power(self.decay, counted.n)
        count, mean, variance = pooled(state.count, state.mean, state.variance, counted, keep)
        return AutoGivenState(counted.levels[0], mean, variance, count)

    def ceiling(self, state: AutoGivenState) -> Floats:
        few = np.maximum(state.count - 1.0, 1.0)
        std = np.sqrt(state.variance * (state.count / few))
        threshold = state.level + self.std_factor * np.maximum(std, self.min_std * state.level)
        ready = (state.count >= max(self.warmup, LEAST)) & (threshold > 0)
        return self.known(threshold, ready)

    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        count = state.count + 1.0
        delta = seen - state.mean
        # Welford's update, until the past has its final weight.
        weight = 1.0 / count if self.decay is None else xp.maximum(1.0 / count, 1 - self.decay)
        mean = state.mean + delta * weight
        variance = state.variance + (delta * (seen - mean) - state.variance) * weight
        after = self.median.observe(seen, state, xp)
        after = after._replace(mean=mean, variance=variance, count=count)
        # The square of a norm may be beyond the floats; nothing is learnt from such a norm.
        return choose(xp.isfinite(variance), after, state, xp)
