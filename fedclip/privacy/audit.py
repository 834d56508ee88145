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

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedclip.privacy.accounting import Accountant, epsilon, epsilon_of, mu_of

_SIGNIFICANCE = 0.05
# Smaller deltas say nothing of events as probable as those that are counted here.
_DELTAS = np.geomspace(0.7, 1e-4, 16)
_LARGEST = 2.0**14
# Canaries, in one run or several: twice as many until the claim can be refuted.
FEWEST, _MOST = 1000, 32_000
# About how long all runs may take, and how many there may be; but 10 in any case.
_SECONDS, _RUNS, REHEARSALS = 180.0, 2000, 10
# Shares of the canaries to guess: as present, and as absent. A canary that DP-SGD
# never draws looks absent, so that guesses of presence can be surer.
_SHARES = [(x, x) for x in (0.025, 0.05, 0.1, 0.2, 0.4)] + [(0.05, 0.0), (0.2, 0.0)]

Host: TypeAlias = NDArray[Any]
# What a run has charged; which canaries took part; their scores; their scores in rehearsals with
# half the claimed noise, of shape (rehearsals, canaries); and which premise was broken, or "".
Played: TypeAlias = tuple[Accountant, Host, Host, Host, str]


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
        epsilons = [*map(epsilon_of, [factor * mu for mu in self._mus], _DELTAS.tolist())]
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
        while high < _LARGEST and self.refuted(guesses, high):
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


class Audit(NamedTuple):
    """The result of the attacks.

    Attributes
    ----------
    protects
        "client", "record" or "person".
    claimed, delta
        The epsilon of all that the run has charged, and its delta.
    least
        The lower bound on epsilon, which is too high in at most one audit of twenty.
    most
        The largest claim that this audit can refute, if the noise is half of what is claimed.
    guesses
        The guesses of who took part.
    broken
        Which premise of accounting the run has broken; "" if none.
    """

    protects: str
    claimed: float
    delta: float
    least: float
    most: float
    guesses: Guesses
    broken: str

    @property
    def fault(self) -> bool:
        """Whether the claim is refuted."""
        return self.least > self.claimed or bool(self.broken)

    @property
    def audited(self) -> bool:
        """Whether the claim is refuted, or would be if the noise were half of it."""
        return self.fault or self.most > self.claimed

    def in_words(self) -> Iterator[str]:
        """Yield the result, sentence by sentence."""
        canaries, guesses, right = self.guesses
        yield f"one run: {canaries:,} canaries, each a {self.protects} clipped to the bound"
        yield f"  who took part: {right:,} of {guesses:,} guesses are right"
        yield f"  epsilon is at least {self.least:.3g} (95 % confidence)"
        yield f"  claimed is {self.claimed:.4g} at delta {self.delta:g}"
        yield f"  with half the noise, this audit can refute at most {self.most:.3g}"
        verdict = "THE CLAIM IS REFUTED" if self.fault else "no fault was found"
        verdict = verdict if self.audited else "NOT AUDITED: the claim is above that"
        yield f"  {verdict}{': ' * bool(self.broken)}{self.broken}"
        yield "what this does not show: that epsilon is as small as claimed (docs/audit.md)"


def attack(unit: str, play: Callable[[], Played], seconds: float) -> Audit:
    """Play runs until the guesses could refute the claim, or enough were played.

    How many runs there are, and how many canaries are guessed, depends on rehearsals alone.
    """
    runs, goal, most = [play()], FEWEST, min(max(int(_SECONDS / seconds), 10), _RUNS)
    spent, delta, relation = runs[0][0].spent, runs[0][0].delta, runs[0][0].relation
    claim, claimed = Claim(lambda x: epsilon(spent, x, relation)), epsilon(spent, delta, relation)
    while True:
        present, scores, half = (np.concatenate([run[i] for run in runs], -1) for i in (1, 2, 3))
        last = len(runs) >= most or len(present) >= _MOST
        if last or len(present) >= goal:
            refutable, share = max((claim.factor(_unlucky(present, half, x)), x) for x in _SHARES)
            if last or refutable > 1.0 or not half.any():
                break
            goal *= 2
        runs.append(play())
    guesses, mu = guess(present, scores, *share), mu_of(max(claimed, 1e-9), delta)
    least, most_ = (epsilon_of(x * mu, delta) for x in (claim.factor(guesses), refutable))
    return Audit(unit, claimed, delta, least, most_, guesses, max(run[-1] for run in runs))


def _unlucky(present: Host, half: Host, share: tuple[float, float]) -> Guesses:
    """Return the guesses of a rehearsal with fewer right ones than in 999 of 1,000."""
    from scipy import stats

    outcomes = [guess(present, scores, *share) for scores in half]
    right, guesses = sum(outcome.right for outcome in outcomes), outcomes[0].guesses
    surely = stats.beta.ppf(1e-3, right, len(outcomes) * guesses - right + 1) if right else 0.0
    return outcomes[0]._replace(right=int(stats.binom.ppf(1e-3, guesses, surely)))


def likelier(seen: Host, length: float, noise: float, rate: float) -> Host:
    """Return the logarithm of how much likelier this is with a canary that is drawn at a rate."""
    without = math.log1p(-rate) if rate < 1.0 else -math.inf
    ratio = (seen - length / 2.0) * length / noise**2
    return np.asarray(np.logaddexp(without, math.log(rate) + ratio))


def unmixed(seen: Any, due: Any, c: tuple[float, ...], lengths: list[float]) -> tuple[Host, Host]:
    """Return what canaries add to each round and what was seen of them, with independent noise.

    This undoes the correlation of the noise. Rounds within a band after a round without a release
    are left out.
    """
    from scipy.signal import lfilter

    usable = np.convolve(np.array(lengths) == 0.0, np.ones(len(c)))[: len(seen)] == 0
    expected = lfilter(c, [1.0], np.transpose(np.transpose(due) * lengths), axis=0)
    return expected * usable[:, None], lfilter(c, [1.0], seen, axis=0)
