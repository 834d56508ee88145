# SPDX-License-Identifier: Apache-2.0
"""The norms in one place where something can be clipped, by client and by round."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedclip.core.records import RoundRecord
from fedclip.report.rows import Row, grouped, pooled, site_of

BY_NORM = {
    *("no-op", "norm-clip", "normalize", "zscore-clip", "ema-clip", "auto-clip", "mad-clip"),
    *("percentile-norm-clip", "adaptive-clip", "growth-clip", "ema-norm-clip", "ema-normalize"),
}
"""Clippers by the norm of the gradient, which have norms to choose a limit by."""
UPDATES = ("update-norms", "update-clip-client")
"""What records the norms of updates; of a simulation, the first knows whose they are."""
FEW = {"step": 20, "update": 9}
"""Number of norms below which nothing is chosen by them; a client has one update in a round."""
ALONE = 10.0
"""A client whose largest norms are so many times the others' is an outlier, by these alone."""
_UNMEASURED = {
    "step": 'no clipper by norm ran on the clients: add "no-op" to their modules',
    "update": "the norms of updates were not measured",
}


@dataclass(frozen=True)
class Norms:
    """What is known of the norms in one place.

    Attributes
    ----------
    place
        "step" or "update".
    rows
        The rounds of the first clipper by norm on each node.
    order
        The order of the norms as a parameter, if it is another than 2.
    effort
        Of updates: the number of steps that each client took in each round, if that is known.
    """

    place: str
    rows: Sequence[Row]
    order: Mapping[str, object] = field(default_factory=dict)
    effort: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @cached_property
    def clients(self) -> dict[str, RoundRecord]:
        """All norms of each client, by its name within the federation."""
        return {name: pooled(records) for name, records in self.by_client().items()}

    @cached_property
    def whole(self) -> RoundRecord:
        """All norms of all clients."""
        return pooled(self.clients.values())

    def by_client(self) -> dict[str, list[RoundRecord]]:
        """Return the rounds of each client, in order."""
        found = grouped(self.rows, lambda row: site_of(row.node))
        return {name: [row.record for row in rows] for name, rows in found.items()}

    def by_round(self) -> dict[int, dict[str, RoundRecord]]:
        """Return the records of those with norms, by round, and in a round by client."""
        found: dict[int, dict[str, RoundRecord]] = {}
        for name, records in self.by_client().items():
            for record in (record for record in records if record.counts):
                found.setdefault(record.round, {})[name] = record
        return dict(sorted(found.items()))

    def ratios(self) -> dict[str, float]:
        """Return how many times the norms of the median client each one's are.

        In a round a client has the 95 % quantile of its norms, and its largest one. Where a model
        saturates, gradients are 0 but for a few: the largest one decides if its ratio is
        `ALONE` or more. Otherwise both have to be above 1, or below, and the ratio is the one
        nearer to 1. An update counts as it is and for each step that it took, likewise: many steps
        make a longer update, and few one that is long for a step. A ratio is the median over the
        rounds, or that of the first round if it is larger.
        """
        if self.place == "update":
            whole, each = (self._ratios(1.0, per_step=own) for own in (False, True))
            return {name: min(ratio, each.get(name, ratio)) for name, ratio in whole.items()}
        typical, largest = self._ratios(0.95), self._ratios(1.0)
        return {
            name: ratio if ratio >= ALONE else statistics.median((1.0, ratio, typical.get(name, 1)))
            for name, ratio in largest.items()
        }

    def _ratios(self, q: float, per_step: bool = False) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for round_, records in self.by_round().items():
            levels = {
                name: (record.norm_max if q == 1.0 else record.norm_quantile(q)) or 0.0
                for name, record in records.items()
            }
            if per_step:
                levels = {n: level / self.effort.get((n, round_), 1) for n, level in levels.items()}
            if middle := statistics.median_low(levels.values()):
                for name, level in levels.items():
                    found.setdefault(name, []).append(level / middle)
        return {name: max(ratios[0], statistics.median(ratios)) for name, ratios in found.items()}

    def middle(self, q: float, first: bool = False) -> float:
        """Return the median over the clients of each one's q-quantile; of two, the lower one.

        A few clients unlike the others do not move it, however many norms they have. In the first
        round all begin with the same weights: nobody has changed the others' norms yet.
        """
        records = next(iter(self.by_round().values())) if first else self.clients
        found = [record.norm_quantile(q) for record in records.values()]
        return statistics.median_low([norm for norm in found if norm is not None] or [0.0])

    def until(self, round_: int) -> Norms:
        """Return the norms of the rounds up to one, or all, if those are too few."""
        own = dataclasses.replace(self, rows=[r for r in self.rows if r.record.round <= round_])
        return self if own.lacking else own

    def usual(self, name: str) -> float:
        """Return the largest norm of a client in the median round."""
        return statistics.median(record.norm_max or 0.0 for record in self.by_client()[name])

    def above(self, limit: float) -> dict[str, float]:
        """Return the share of each client's norms that is above a limit."""
        return {name: _above(record, limit) for name, record in self.clients.items()}

    def above_the_median(self) -> dict[str, float]:
        """Return the share of each client's norms that is above the median of their round.

        It is for updates, of which a client has one in a round.
        """
        found: dict[str, list[float]] = {}
        for records in self.by_round().values():
            bound = statistics.median_low(norm for r in records.values() for norm in r.norms())
            for name, record in records.items():
                found.setdefault(name, []).append(_above(record, bound))
        return {name: sum(shares) / len(shares) for name, shares in found.items()}

    @property
    def lacking(self) -> str:
        """Why there are no norms to choose by, and what to do about it; "" if there are."""
        count = sum(self.whole.counts)
        if not self.rows:
            return _UNMEASURED[self.place]
        if count < (few := FEW[self.place]):
            return f"{count} norms are too few to choose a limit by: at least {few} are needed"
        if not self.middle(0.95):
            return "nearly all norms are 0: there is no scale to choose a limit by"
        return ""


def places_of(rows: Iterable[Row]) -> list[Norms]:
    """Return the norms of steps, and of updates, of the clients of one federation."""
    rows = [*rows]
    steps = _first(rows)
    updates = {name: [row for row in rows if row.name == name] for name in UPDATES}
    effort = {(site_of(row.node), row.record.round): row.record.steps or 1 for row in steps}
    chosen = updates[UPDATES[0]] or updates[UPDATES[1]]
    return [Norms("step", steps), Norms("update", chosen, effort=effort)]


def _first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first clipper by norm on each node."""
    found: dict[str, int] = {}
    for row in rows:
        if row.name in BY_NORM:
            found[row.node] = min(found.get(row.node, row.place), row.place)
    return [row for row in rows if found.get(row.node) == row.place and row.name in BY_NORM]


def _above(record: RoundRecord, limit: float) -> float:
    norms = record.norms()
    return sum(norm > limit for norm in norms) / max(1, len(norms))


def rounded(value: float) -> float:
    """Return a number > 0 with two digits, not below the value.

    Examples
    --------
    >>> rounded(1.234), rounded(0.0301), rounded(57.0)
    (1.3, 0.031, 57.0)
    """
    digits = 1 - math.floor(math.log10(value))
    near = round(value, digits)
    return near if near >= value else round(near + 10.0**-digits, digits)
