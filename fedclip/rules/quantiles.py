# SPDX-License-Identifier: Apache-2.0
"""Running quantiles of a stream of norms: of a window, by five markers, or by small steps.

=============  ==================================================================  ============
estimator      quantile                                                            state a group
=============  ==================================================================  ============
`Window`       exact, of the last so many norms                                    the window
`Markers`      P2: approximate, of all norms                                       8 numbers
`Stream`       approximate, follows norms that change                              2 numbers
`Given`        from the server of a federation                                     1 number
=============  ==================================================================  ============

Each estimator reads and replaces its own fields of a state, which may hold others. The rule
updates `count`, the number of norms seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedclip import parameters
from fedclip.arrays import Arithmetic, Array
from fedclip.rules import State

LARGEST = 65_536
"""Largest size of a window: a state can still hold it, and a step sorts it in a millisecond."""


def check_window(low: int, window: int) -> int:
    """Return the size of a window if it is in range."""
    result = parameters.integer(low, window=window)
    if result > LARGEST:
        raise ValueError(f"window must be at most {LARGEST:,}, got {result:,}")
    return result


class Quantile(Protocol):
    """A running quantile."""

    @property
    def quantile(self) -> float:
        """Which quantile, in (0, 1]."""

    @property
    def least(self) -> int:
        """Number of norms before which there is no estimate."""

    def init(self, groups: int, xp: Arithmetic) -> State:
        """Return the estimator's own fields, and `count`, before the first norm."""

    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        """Return the state after a norm, `count` left as it is."""

    def estimate(self, state: State, xp: Arithmetic) -> Array:
        """Return the quantile; any finite number while there is no estimate."""


class WindowState(NamedTuple):
    """The last norms, in a ring, and how many have been seen."""

    window: Array
    count: Array


@dataclass(frozen=True)
class Window:
    """Quantile of the last `size` norms, interpolated linearly between neighbours."""

    quantile: float
    size: int
    least: int = 1

    def init(self, groups: int, xp: Arithmetic) -> WindowState:
        # Keep the norms of a group side by side in memory, because sorting compares them: a step of
        # `percentile-norm-clip` over 300 groups takes 9 % less.
        window = np.zeros((groups, self.size)).T
        return WindowState(xp.asarray(window), xp.asarray([0.0] * groups))

    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        return state._replace(window=xp.put(state.window, state.count % self.size, seen))

    def estimate(self, state: State, xp: Arithmetic) -> Array:
        held = xp.maximum(xp.minimum(state.count, float(self.size)), 1.0)
        place = self.quantile * (held - 1.0)
        below = place - place % 1.0
        low, high = xp.ranked(state.window, held, below)
        return low + (place - below) * (high - low)


class MarkersState(NamedTuple):
    """Heights of the five markers, positions of the inner three, and the number of norms."""

    h0: Array
    h1: Array
    h2: Array
    h3: Array
    h4: Array
    n1: Array
    n2: Array
    n3: Array
    count: Array


@dataclass(frozen=True)
class Markers:
    """The P2 algorithm (Jain & Chlamtac, 1985, doi:10.1145/4372.4378).

    Five markers stand at the minimum, the quantiles p/2, p and (1+p)/2, and the maximum. Each
    norm changes the positions. If an inner marker is a whole place or more from where it should
    be, it moves by one place, and its height follows the parabola through it and its neighbours::

        h_i += s / (n_i+1 - n_i-1) * (  (n_i - n_i-1 + s) (h_i+1 - h_i) / (n_i+1 - n_i)
                                      + (n_i+1 - n_i - s) (h_i - h_i-1) / (n_i - n_i-1) )

    If that height is not between theirs, it follows the line to the neighbour on that side.
    """

    quantile: float
    least: int = 5

    def init(self, groups: int, xp: Arithmetic) -> MarkersState:
        o = xp.asarray([0.0] * groups)
        return MarkersState(o, o, o, o, o, n1=o + 2.0, n2=o + 3.0, n3=o + 4.0, count=o)

    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        heights = [state.h0, state.h1, state.h2, state.h3, state.h4]
        first = self._insert(seen, heights, state.count, xp)
        few = state.count < 5
        # Before five norms, any ordered heights will do: the result is not used.
        ordered = [xp.where(few, float(k), h) for k, h in enumerate(heights)]
        n = [1.0, state.n1, state.n2, state.n3, xp.maximum(state.count + 1.0, 6.0)]
        moved = self._move(seen, ordered, n, xp)
        h = [xp.where(few, f, m) for f, m in zip(first, moved, strict=True)]
        n1, n2, n3 = (xp.where(few, o, p) for o, p in zip(state[5:8], n[1:4], strict=True))
        return state._replace(h0=h[0], h1=h[1], h2=h[2], h3=h[3], h4=h[4], n1=n1, n2=n2, n3=n3)

    def estimate(self, state: State, xp: Arithmetic) -> Array:
        return state.h2

    @staticmethod
    def _insert(seen: Array, heights: list[Array], count: Array, xp: Arithmetic) -> list[Array]:
        """Return the first five norms in order, with 0 for those still missing."""
        result = []
        for k, height in enumerate(heights):
            held = xp.where(count > k, height, math.inf)
            result.append(xp.where(count >= k, xp.minimum(held, seen), 0.0 * height))
            seen = xp.maximum(held, seen)
        return result

    def _move(self, seen: Array, h: list[Array], n: list[Any], xp: Arithmetic) -> list[Array]:
        """Return the heights after a norm, and move the inner positions `n` in place."""
        p = self.quantile
        for i in (1, 2, 3):
            n[i] = n[i] + xp.where(seen < h[i], 1.0, 0.0)
        h[0], h[4] = xp.minimum(h[0], seen), xp.maximum(h[4], seen)
        for i, share in ((1, p / 2), (2, p), (3, (1 + p) / 2)):
            gap = 1.0 + share * (n[4] - 1.0) - n[i]
            left, right = n[i] - n[i - 1], n[i + 1] - n[i]
            up = (gap >= 1) & (right > 1)
            down = (gap <= -1) & (left > 1)
            s = xp.where(up, 1.0, xp.where(down, -1.0, 0.0))
            rise, fall = (h[i + 1] - h[i]) / right, (h[i] - h[i - 1]) / left
            curved = h[i] + s / (left + right) * ((left + s) * rise + (right - s) * fall)
            inside = (h[i - 1] < curved) & (curved < h[i + 1])
            straight = h[i] + xp.where(up, rise, -fall)
            h[i] = xp.where(up | down, xp.where(inside, curved, straight), h[i])
            n[i] = n[i] + s
        return h


class StreamState(NamedTuple):
    """The estimate, the mean distance of norms from it, and how many have been seen."""

    level: Array
    spread: Array
    count: Array


@dataclass(frozen=True)
class Stream:
    """A quantile that each norm moves a little, down or up.

    ::

        level  = first norm
        spread <- w spread + (1-w) abs(min(x, 10 level) - level)
        level  <- level + rate * spread * (p - [x < level]),  but not past x

    with ``w = decay``. At the start the steps are longer, so that a first norm far off is soon
    forgotten: ``1-w`` is at least ``1 / count``, and the rate at least ``4 / count``. A norm far
    above the level counts as ten times the level, so that one spike does not make the steps huge.
    """

    quantile: float
    rate: float
    decay: float
    least: int = 1

    def init(self, groups: int, xp: Arithmetic) -> StreamState:
        zeros = xp.asarray([0.0] * groups)
        return StreamState(zeros, zeros, zeros)

    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        level = state.level
        start = 1.0 / xp.maximum(state.count, 1.0)
        distance = abs(xp.minimum(seen, 10.0 * level) - level)
        gain = xp.maximum(start, 1 - self.decay)
        spread = state.spread + gain * (distance - state.spread)
        toward = self.quantile - xp.where(seen < level, 1.0, 0.0)
        moved = level + xp.maximum(4.0 * start, self.rate) * spread * toward
        moved = xp.minimum(xp.maximum(moved, xp.minimum(seen, level)), xp.maximum(seen, level))
        # A level of 0 gives steps of 0: start again from the norm.
        return state._replace(level=xp.where(level == 0, seen, moved), spread=spread)

    def estimate(self, state: State, xp: Arithmetic) -> Array:
        return state.level


class GivenState(NamedTuple):
    """The quantile, and the number of its norms."""

    level: Array
    count: Array


@dataclass(frozen=True)
class Given:
    """A quantile that a federation's server has computed from sketches."""

    quantile: float
    size: int | None
    least: int = 1

    def init(self, groups: int, xp: Arithmetic) -> GivenState:
        zeros = xp.asarray([0.0] * groups)
        return GivenState(zeros, zeros)

    def observe(self, seen: Array, state: State, xp: Arithmetic) -> State:
        return state

    def estimate(self, state: State, xp: Arithmetic) -> Array:
        return state.level
