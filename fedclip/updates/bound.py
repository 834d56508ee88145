# SPDX-License-Identifier: Apache-2.0
r"""The bound of the next round, from the share of the updates that were within this one's.

::

    b     = sum(within - votes / 2) / m + 1/2          share of the updates within C
    C    <- C * exp(-learning_rate * (b - quantile))   Andrew et al., 2021, arXiv:1905.03871
            and faster, up to a factor of 2, while the votes stay on one side: `pace.py`

With noise on the votes, the centred sum is clamped to ``± m / 2`` before the noise is added: one
client moves it by at most 1/2, however many reply.

A search finds the bound with the same votes if nothing is known about the norms::

    u     = (b - quantile) / (half of the way to 0 or to 1), within [-1, 1]
    C    <- C * exp(-u * step)
    step <- log 4      while u is -1, or is 1, round after round: nearly none, or nearly all
            step / 2   otherwise, until it is below log(4) / 16: found
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedclip.errors import StateError
from fedclip.updates.pace import paced, pull_of

FIRST = 0.1
"""First bound of a search."""

_STEP = math.log(4.0)
_FOUND = _STEP / 16


def share_within(votes: int, within: int, clients: int | None, noise: float) -> float | None:
    """Return the share of updates within the bound, in [0, 1]; None if nobody has voted.

    Of the `votes`, so many were `within` the bound. Their sum, with `noise`, is divided by the
    expected number of `clients`; if that is None, by the number of votes.
    """
    if clients is None:
        return within / votes if votes else None
    centred = min(max(within - votes / 2, -clients / 2), clients / 2)
    return min(max((centred + noise) / clients + 0.5, 0.0), 1.0)


class Search(NamedTuple):
    """State of a search.

    Attributes
    ----------
    direction
        Direction of the last full step: 1 up, -1 down; 0 before the first one.
    turned
        Whether both nearly all and nearly none have been within the bound.
    """

    step: float = _STEP
    direction: int = 0
    turned: bool = False

    @classmethod
    def of(cls, state: object) -> Search | None:
        """Return the search of a state; None if there is none."""
        match state:
            case None:
                return None
            case [float() as step, int() as direction, bool() as turned] if (
                0 < step <= _STEP and direction in (-1, 0, 1)
            ):
                return cls(step, direction, turned)
        raise StateError(f"'search' must be None or [step, direction, turned], got {state!r:.100}")


class Moved(NamedTuple):
    """The bound after a round.

    Attributes
    ----------
    search
        State of the search, if it is not over.
    too_high
        Whether, during a search, nearly all updates were within the bound.
    evidence
        How clearly the votes have been on one side, above 0 if too many were within the bound.
    """

    bound: float
    search: Search | None
    too_high: bool = False
    evidence: float = 0.0


@dataclass(frozen=True)
class BoundRule:
    """The rule by which a bound follows the votes, with parameters of `update-clip-server`.

    `lowest` and `highest` are its `min_norm` and `max_norm`.
    """

    quantile: float
    learning_rate: float
    lowest: float
    highest: float

    def within(self, bound: float) -> float:
        """Return the nearest bound within the limits."""
        return min(max(bound, self.lowest), self.highest)

    def after(
        self,
        bound: float,
        share: float,
        search: Search | None = None,
        evidence: float = 0.0,
        spread: float = 0.0,
    ) -> Moved:
        """Return the bound after a round.

        `spread` is the standard deviation of a share that is as it should be.
        """
        if search is None:
            rule = {"quantile": self.quantile, "learning_rate": self.learning_rate}
            step, evidence = paced(share, evidence, **rule, spread=spread)
            return Moved(self.within(bound * math.exp(step)), None, evidence=evidence)
        pull = pull_of(share, self.quantile)
        step, direction, turned = search
        if abs(pull) == 1.0:
            turned = turned or direction == pull
            direction = -int(pull)
        step = step / 2 if turned or abs(pull) < 1.0 else _STEP
        moved = self.within(bound * math.exp(-pull * step))
        # A search also ends at one of the limits of the bound.
        over = step <= _FOUND or (moved == bound and abs(pull) == 1.0)
        left = None if over else Search(step, direction, turned)
        return Moved(moved, left, too_high=pull == 1.0)
