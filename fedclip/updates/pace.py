# SPDX-License-Identifier: Apache-2.0
r"""How fast a bound moves: as ever while the votes turn, and faster while they stay on one side.

::

    off      = share - quantile                     in (0, 1) if too many are within the bound
    u        = off / (half of the way to 0 or to 1),  within [-1, 1]
    lead     = |evidence| if it is on the side of `off`, else 0
    rate     = learning_rate * 2^(6 * max(lead - 2 spread, 0)),       at most log 4
    log C   -= learning_rate * off + (rate - learning_rate) * u / 2
    evidence <- evidence + off,  then nearer to 0 by the slack
        but at most 1/6 beyond max(lead, 2 spread): a rate is at most twice the last one

The evidence is a cumulative sum of the votes (Page, 1954, "Continuous inspection schemes"). The
slack makes it forget what is not clear: it is a sixth of the way to 0 or to 1, or half of `spread`
if that is more, the standard deviation of a share that is as it should be.

At the target more than that is rare, and the steps are those of Andrew et al. Far from it the rate
doubles round after round, so that steps are in proportion to the way that was gone: a bound that
has passed its target returns by less, and does not swing. At the median no round moves it by more
than a factor of 2, or of ``exp(learning_rate / 2)`` if that is more.

A rate depends on earlier shares only. As these are what was released, noise included, it costs no
privacy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_FASTEST = math.log(4.0)
# Standard deviations that evidence has to exceed, and by how much more the rate doubles.
_SURE, _DOUBLES = 2.0, 1 / 6


class Paced(NamedTuple):
    """A step of the logarithm of a bound, and the evidence after it."""

    step: float
    evidence: float


def pull_of(share: float, quantile: float) -> float:
    """Return how far a share is off, in halves of the way to 0 or to 1, within [-1, 1]."""
    return min(max((share - quantile) / _halfway(share > quantile, quantile), -1.0), 1.0)


def spread(quantile: float, votes: int, noise: float) -> float:
    """Return the standard deviation of a share of so many votes at its quantile.

    `noise` is that of the sum of the votes.
    """
    return math.hypot(math.sqrt(quantile * (1.0 - quantile) / votes), noise / votes)


def paced(
    share: float, evidence: float, *, quantile: float, learning_rate: float, spread: float
) -> Paced:
    """Return the step after a round in which a `share` of the updates was within the bound."""
    off, sure = share - quantile, _SURE * spread
    doublings = math.log2(max(_FASTEST / learning_rate, 1.0))
    lead = abs(evidence) if evidence * off > 0 else 0.0
    rate = learning_rate * 2.0 ** min(max(lead - sure, 0.0) / _DOUBLES, doublings)
    step = -learning_rate * off - (rate - learning_rate) * pull_of(share, quantile) / 2
    total = evidence + off
    slack = max(_halfway(total > 0, quantile) / 3, spread / 2)
    before = abs(evidence) if evidence * total > 0 else 0.0
    most = sure + _DOUBLES * doublings
    left = min(max(abs(total) - slack, 0.0), max(before, sure) + _DOUBLES, most)
    return Paced(step, math.copysign(left, total))


def _halfway(above: bool, quantile: float) -> float:
    return (1.0 - quantile if above else quantile) / 2
