# SPDX-License-Identifier: Apache-2.0
r"""The bound of the next round, from the share of the updates that were within this one's.

::

    b     = sum(within - votes / 2) / m + 1/2          share of the updates within C
    C    <- C * exp(-learning_rate * (b - quantile))   Andrew et al., 2021, arXiv:1905.03871

With few votes or noise on them, `share_within` clamps the centred sum to ``± m / 2`` before the
noise is added: one client moves it by at most 1/2, whoever replies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BoundRule", "next_bound", "share_within"]


def next_bound(bound: float, share: float, quantile: float, learning_rate: float) -> float:
    """Return the bound after a round in which a `share` of the updates was within it.

    The share is of those that were *not* clipped: more of them than `quantile`, and the bound
    comes down.
    """
    return bound * math.exp(-learning_rate * (min(max(share, 0.0), 1.0) - quantile))


def share_within(votes: int, within: int, clients: int | None, noise: float) -> float | None:
    """Return the share of updates within the bound, in [0, 1]; None if nothing follows.

    Parameters
    ----------
    votes, within
        How many clients have voted, and how many of them to be within the bound.
    clients
        How many are expected; the sum of votes is divided by it. None: by those that voted.
    noise
        What is added to the sum.
    """
    if clients is None:
        return within / votes if votes else None
    centred = min(max(within - votes / 2, -clients / 2), clients / 2)
    return min(max((centred + noise) / clients + 0.5, 0.0), 1.0)


@dataclass(frozen=True)
class BoundRule:
    """How a bound follows the votes.

    Attributes
    ----------
    quantile
        Share of the updates that the bound should leave alone.
    learning_rate
        How fast the bound moves.
    lowest, highest
        Bounds on the bound.
    """

    quantile: float
    learning_rate: float
    lowest: float
    highest: float

    def within(self, bound: float) -> float:
        """Return the nearest bound that may be."""
        return min(max(bound, self.lowest), self.highest)

    def after(self, bound: float, share: float) -> float:
        """Return the bound after a round."""
        return self.within(next_bound(bound, share, self.quantile, self.learning_rate))
