# SPDX-License-Identifier: Apache-2.0
r"""What guesses about who took part say of epsilon: a lower bound, by an attack that was run.

Of m canaries, each took part or not by a fair coin. Whoever sees what was released guesses of r of
them, chosen by scores, and v guesses are right. If releases are (epsilon, delta)-private::

    P[right >= v] <= P[W >= v] + 2 m delta max over i of P[v - i <= W < v] / i
                                      W: binomial, r draws of 1 / (1 + exp(-epsilon))

An epsilon for which that is below 5 % is refuted with 95 % confidence; the largest of these is the
lower bound. It is above the true epsilon in one audit of twenty.

References
----------
Steinke, Nasr & Jagielski, 2023, "Privacy auditing with one (1) training run", arXiv:2305.08846,
theorem 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Guesses", "chance", "guessed", "lower_bound"]


class Guesses(NamedTuple):
    """What an attack has guessed: of so many canaries, for so many, so many of them right."""

    canaries: int
    guesses: int
    right: int

    def least(self, delta: float) -> float:
        """Return the lower bound on epsilon."""
        return lower_bound(*self, delta)


def guessed(there: Sequence[bool], scores: ArrayLike, share: float = 0.2) -> Guesses:
    """Guess that those with the highest scores were there, and those with the lowest were not.

    >>> guessed([True, True, False, False], [3.0, 0.1, 0.0, -2.0], share=0.5)
    Guesses(canaries=4, guesses=2, right=2)
    """
    known, order = np.asarray(there), np.argsort(np.asarray(scores))
    half = max(1, round(share * len(known) / 2))
    right = int(known[order[-half:]].sum() + (~known[order[:half]]).sum())
    return Guesses(len(known), 2 * half, right)


def lower_bound(canaries: int, guesses: int, right: int, delta: float) -> float:
    """Return the least epsilon with which so many right guesses are no surprise, at 5 %.

    >>> round(lower_bound(1000, 200, 200, 1e-5), 2), lower_bound(1000, 200, 100, 1e-5)
    (4.17, 0.0)
    """
    if chance(canaries, guesses, right, 0.0, delta) >= 0.05:
        return 0.0
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        unlikely = chance(canaries, guesses, right, middle, delta) < 0.05
        low, high = (middle, high) if unlikely else (low, middle)
    return low


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the chance of so many right guesses."""
    from scipy import stats

    q = 1 / (1 + math.exp(-epsilon))
    # P[right - i <= W < right] for i = 1, 2, …, with W binomial.
    near = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, q))
    most = max((near / np.arange(1, right + 1)).max(initial=0.0), 0.0)
    return float(stats.binom.sf(right - 1, guesses, q) + 2 * canaries * delta * most)
