# SPDX-License-Identifier: Apache-2.0
r"""The bound of the next round, from how far the clients' norms are from this one's.

Each client votes for the bin of its update in octaves, ``log2(norm / bound)``. One count for each
bin is what the server needs::

    p   = nearest shares >= 0 to counts / m that add up to 1
    y   = where p reaches the quantile, interpolated within its bin
    R   = (quantile (1 - quantile) / m + bins (noise / m)^2 / 4) / density(y)^2
    P  += 0.15^2                       how far the norms may have moved since the last round
    if y^2 > 9 (P + R):  P = y^2 - R   a jump: trust this round more than those before
    K   = P / (P + R)
    log2(bound) += K y,                by at most 3 octaves
    P  *= 1 - K

That is a Kalman filter on the logarithm of the bound, with variance P (Kalman, 1960). The quantile
is that of Andrew et al., 2021, arXiv:1905.03871, whose clients send the sign of y only.

Privacy: a vote adds 1 to one count at most. Before the noise, `projected` moves counts that no m
clients can have sent to the nearest ones that they can have, which brings no two sums further
apart. Whatever follows the noise costs nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedclip.arrays import Float64

__all__ = ["BoundRule", "NextBound", "projected"]

EDGES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
"""Between the bins of votes, in octaves: log2(norm / bound). The first and the last are open."""
BINS = len(EDGES) + 1
WITHIN = EDGES.index(0.0) + 1
"""The number of bins that are within the bound."""

VOTES = ((0, 0), (1, 0), (1, 1))
"""What one client may say: it does not vote, its update was above the bound, it was within it."""
COUNTS = ((0, 0), (1, 0), (0, 1))
"""Whether one client has clipped its update, and whether it has replaced it by zeros."""


def is_one_of(known: Sequence[tuple[int, ...]], numbers: Sequence[object]) -> bool:
    """Whether a client's numbers are ints, and known ones; 1.0 and True do not count."""
    return {*map(type, numbers)} <= {int} and tuple(numbers) in known


def one_hot(times: float, clipped: bool) -> tuple[int, ...]:
    """Return a client's vote: 1 for the bin of an update whose norm is `times` the bound.

    Whether the update was clipped decides at the bound, where rounding may differ.

    Examples
    --------
    >>> one_hot(1.5, clipped=True)
    (0, 0, 0, 0, 0, 0, 1, 0, 0, 0)
    """
    octaves = math.log2(times) if times > 0.0 else -math.inf
    place = bisect_left(EDGES, octaves)
    place = max(place, WITHIN) if clipped else min(place, WITHIN - 1)
    return tuple([int(i == place) for i in range(BINS)])


def is_vote(votes: object, within: object, bins: object) -> bool:
    """Whether one client may vote so: for one bin, which fits, or for none; () is no bins."""
    if not is_one_of(VOTES, (votes, within)) or not isinstance(bins, (tuple, list)):
        return False
    if len(bins) == 0:
        return True
    right = len(bins) == BINS and {*map(type, bins)} == {int} and {*bins} <= {0, 1}
    return right and (sum(bins), sum(bins[:WITHIN])) == (votes, within)


def counts_of(*votes: tuple[int, int, Sequence[float] | None]) -> Float64:
    """Return votes, those within the bound, and bins, all added up, as one count for each bin.

    An older client does not say which: its vote counts as half for each of the two bins next to the
    bound on its side.

    Examples
    --------
    >>> counts_of((1, 0, ()))
    array([0. , 0. , 0. , 0. , 0. , 0.5, 0.5, 0. , 0. , 0. ])
    """
    counts = np.zeros(BINS)
    for number, within, bins in votes:
        if bins is not None and len(bins):
            counts += bins
        else:
            counts[WITHIN - 2 : WITHIN] += within / 2
            counts[WITHIN : WITHIN + 2] += (number - within) / 2
    return counts


WITHOUT_BINS = (
    "a vote without bins, as an older fedclip sends it, is not counted with noise: install the "
    "server's version"
)
"""Why a vote of an older client counts as an abstention."""


FIRST_VARIANCE = 9.0
"""Variance of log2 of the bound before the first vote."""

_DRIFT = 0.15**2
_JUMP = 9.0
# A density beyond these comes from too few votes, or from updates that are all alike.
_DENSITIES = 0.4, 2.0


def projected(counts: Float64, total: float, *, exactly: bool = False) -> Float64:
    """Return the nearest counts >= 0 that add up to at most `total`, or `exactly` to it.

    Examples
    --------
    >>> projected(np.array([3.0, -1.0, 1.0]), 2.0)
    array([2., 0., 0.])
    >>> projected(np.array([0.5, 0.0, 1.0]), 2.0)
    array([0.5, 0. , 1. ])
    """
    positive: Float64 = np.maximum(counts, 0.0)
    if not exactly and positive.sum() <= total:
        return positive
    # All lose the same, or are 0 (Held, Wolfe & Crowder, 1974).
    falling = np.sort(counts)[::-1]
    excess = (np.cumsum(falling) - total) / np.arange(1, counts.size + 1)
    return np.asarray(np.maximum(counts - excess[falling > excess][-1], 0.0))


class NextBound(NamedTuple):
    """The bound after a round.

    Attributes
    ----------
    variance
        That of its logarithm, in octaves squared.
    share
        Share of the updates within the bound of the round; None if nobody has voted.
    """

    bound: float
    variance: float
    share: float | None


@dataclass(frozen=True)
class BoundRule:
    """The rule by which a bound follows the votes, with parameters of `update-clip-server`.

    `lowest` and `highest` are its `min_norm` and `max_norm`.
    """

    quantile: float
    lowest: float
    highest: float

    def within(self, bound: float) -> float:
        """Return the nearest bound within the limits."""
        return min(max(bound, self.lowest), self.highest)

    def after(
        self,
        bound: float,
        variance: float,
        counts: Float64,
        clients: int | None = None,
        noise: float = 0.0,
    ) -> NextBound:
        """Return the bound after a round.

        Parameters
        ----------
        counts
            Of each bin, with noise of standard deviation `noise`.
        clients
            By how many to divide, if there is noise; None: by the number of votes.
        """
        votes = float(clients or counts.sum())
        variance += _DRIFT
        if votes == 0:
            return NextBound(bound, variance, None)
        shares = projected(counts / votes, 1.0, exactly=True)
        octaves, density = self._read(shares)
        of_votes = self.quantile * (1.0 - self.quantile) / votes
        of_noise = BINS * (noise / votes) ** 2 / 4.0
        error = (of_votes + of_noise) / density**2
        if octaves**2 > _JUMP * (variance + error):
            variance = octaves**2 - error
        gain = variance / (variance + error)
        following = self.within(bound * 2.0 ** (gain * octaves))
        return NextBound(following, (1.0 - gain) * variance, float(min(shares[:WITHIN].sum(), 1.0)))

    def _read(self, shares: Float64) -> tuple[float, float]:
        """Return how many octaves the quantile is above the bound, and the density there."""
        below = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
        # The last bin in which the quantile may be: those after it begin beyond it.
        place = int(np.searchsorted(below, self.quantile)) - 1
        if place in (0, BINS - 1):
            return EDGES[0 if place == 0 else -1], _DENSITIES[0]
        low, width = EDGES[place - 1], EDGES[place] - EDGES[place - 1]
        density = float(shares[place]) / width
        octaves = low + (self.quantile - float(below[place])) / density
        return octaves, min(max(density, _DENSITIES[0]), _DENSITIES[1])
