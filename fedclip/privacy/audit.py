# SPDX-License-Identifier: Apache-2.0
r"""What guesses of who took part prove: a lower bound on epsilon from one run.

Each of m canaries takes part by a fair coin. An attacker sees all releases and guesses the coins
of g canaries, of which c guesses are right. A claim is a curve of pairs (epsilon, delta). From
these follows, for each event whose probability with a canary is y, its least probability without::

    least(y) = max over all pairs of (y - delta) exp(-epsilon), 1 - delta - (1 - y) exp(epsilon)

If c or more right guesses had a probability of 5 %, then right and wrong guesses, each over m, had
expectations of at least r and h, from the highest numbers of right guesses down::

    r, h = 0.05 c / m, 0.05 (g - c) / m
    for i = c - 1, ..., 0:
        h' = max(h, least(r));  r = r + (h' - h) i / (g - i);  h = h'

Their sum is at most g / m. If r + h exceeds that, the claim is refuted with 95 % confidence.

References
----------
Mahloujifar, Melis & Chaudhuri, 2024, "Auditing f-differential privacy in one run",
arXiv:2410.22235, algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedclip.privacy.accounting import epsilon_of, mu_of

_SIGNIFICANCE = 0.05
# Smaller deltas say nothing of events as probable as those that are counted here.
_DELTAS = np.geomspace(0.7, 1e-4, 16)
_MOST = 2.0**14


class Guesses(NamedTuple):
    """The result of an attack."""

    canaries: int
    guesses: int
    right: int


def guess(there: ArrayLike, scores: ArrayLike, present: float, absent: float) -> Guesses:
    """Guess that the canaries of the highest scores were there, and those of the lowest not.

    Parameters
    ----------
    there
        For each canary, whether it took part.
    scores
        For each canary; high if it seems to have taken part.
    present, absent
        The shares of the canaries to guess as present, above 0, and as absent; at most 1 together.
        Fix them before you see the scores.

    Examples
    --------
    >>> guess([True, True, False, False], [3.0, 0.1, 0.0, -2.0], present=0.25, absent=0.25)
    Guesses(canaries=4, guesses=2, right=2)
    """
    coins, order = np.asarray(there, dtype=bool), np.argsort(np.asarray(scores))
    high, low = max(1, round(present * len(coins))), round(absent * len(coins))
    right = int(coins[order[-high:]].sum() + (~coins[order[:low]]).sum())
    return Guesses(len(coins), high + low, right)


class Claim:
    """A claim of privacy, and claims of the same form with more or less noise.

    Parameters
    ----------
    epsilon
        The claimed epsilon for a delta in (0, 1).

    Examples
    --------
    >>> claim = Claim(lambda delta: epsilon_of(1.0, delta))
    >>> claim.refuted(Guesses(1000, 200, 200)), claim.refuted(Guesses(1000, 200, 150))
    (True, False)
    """

    def __init__(self, epsilon: Callable[[float], float]) -> None:
        self._mus = [mu_of(max(epsilon(float(d)), 1e-9), float(d)) for d in _DELTAS]

    def refuted(self, guesses: Guesses, factor: float = 1.0) -> bool:
        """Return whether this number of right guesses refutes a claim of `factor` times the mu."""
        canaries, guessed, correct = guesses
        mus = [factor * mu for mu in self._mus]
        epsilons = [*map(epsilon_of, mus, _DELTAS.tolist())]
        ratio = np.exp(-np.minimum(epsilons, 700.0))
        right = _SIGNIFICANCE * correct / canaries
        wrong = _SIGNIFICANCE * (guessed - correct) / canaries
        for i in range(correct - 1, -1, -1):
            least = np.maximum((right - _DELTAS) * ratio, 1.0 - _DELTAS - (1.0 - right) / ratio)
            more = max(float(least.max()) - wrong, 0.0)
            right, wrong = right + more * i / (guessed - i), wrong + more
            if more == 0.0 or right + wrong > guessed / canaries:
                break
        return right + wrong > guessed / canaries

    def factor(self, guesses: Guesses) -> float:
        """Return the largest factor on the claim's mu that is refuted, or 0."""
        low, high = 0.0, 1.0
        while high < _MOST and self.refuted(guesses, high):
            low, high = high, 2.0 * high
        while high - low > 1e-3 * high and high > 1e-3:
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.refuted(guesses, middle) else (low, middle)
        return low


def lower_bound(guesses: Guesses, delta: float) -> float:
    """Return the epsilon that guesses prove of a Gaussian mechanism, with 95 % confidence.

    >>> round(lower_bound(Guesses(1000, 200, 190), 1e-5), 1)
    3.9
    >>> lower_bound(Guesses(1000, 200, 100), 1e-5)
    0.0
    """
    return epsilon_of(Claim(lambda d: epsilon_of(1.0, d)).factor(guesses), delta)
