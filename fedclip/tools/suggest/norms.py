# SPDX-License-Identifier: Apache-2.0
"""The norms of one federation in each place where something can be clipped, by client."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedclip.parameters import Config
from fedclip.records import RoundRecord
from fedclip.report import Report, Row
from fedclip.report.rows import grouped, pooled

__all__ = ["BY_NORM", "FEW", "UPDATES", "Norms", "read_norms"]

FEW = {"step": 20, "update": 9, "aggregate": 20}
"""Number of norms below which nothing is chosen by them; a client has one update in a round."""
BY_NORM = {
    *("no-op", "norm-clip", "normalize", "zscore-clip", "ema-clip", "auto-clip", "mad-clip"),
    *("percentile-norm-clip", "adaptive-clip", "growth-clip", "ema-norm-clip", "ema-normalize"),
}
"""Clippers by the norm of the gradient, which have norms to choose a limit by."""
UPDATES = ("update-norms", "update-clip-client")
"""What records the norms of updates; of a simulation, the first knows whose they are."""
_UNMEASURED = {
    "step": 'no clipper by norm ran on the clients: add "no-op" to their modules',
    "update": "the norms of updates were not measured",
    "aggregate": 'no clipper by norm ran on the server: add "no-op" to its modules',
}


@dataclass(frozen=True)
class Norms:
    """What is known of the norms in one place.

    Attributes
    ----------
    place
        "step", "update" or "aggregate".
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
        """All norms of each client, by its name within the federation; or those of the server."""
        return {name: pooled(records) for name, records in self.by_client().items()}

    @cached_property
    def whole(self) -> RoundRecord:
        """All norms of all clients."""
        return pooled(self.clients.values())

    def by_client(self) -> dict[str, list[RoundRecord]]:
        """Return the rounds of each client, in order."""
        found = grouped(self.rows, _name)
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

        In a round a client has the 95 % quantile of its norms, an update for each step that it
        took. Its ratio is the median over the rounds, or that of the first if it is larger: where
        units are wrong, a model may saturate, and gradients be 0 from then on.
        """
        found: dict[str, list[float]] = {}
        for round_, records in self.by_round().items():
            levels = {
                name: (record.norm_quantile(0.95) or 0.0) / self.effort.get((name, round_), 1)
                for name, record in records.items()
            }
            if middle := statistics.median_low(levels.values()):
                for name, level in levels.items():
                    found.setdefault(name, []).append(level / middle)
        return {name: max(ratios[0], statistics.median(ratios)) for name, ratios in found.items()}

    def first(self, q: float) -> float:
        """Return the median over the clients of each one's q-quantile in the first round.

        There all begin with the same weights: nobody has changed the others' norms yet.
        """
        records = next(iter(self.by_round().values()))
        return statistics.median_low([r.norm_quantile(q) or 0.0 for r in records.values()])

    @property
    def lacking(self) -> str:
        """Why there are no norms to choose by, and what to do about it; "" if there are."""
        count = sum(self.whole.counts)
        if not self.rows:
            return _UNMEASURED[self.place]
        if count < (few := FEW[self.place]):
            return f"{count} norms are too few to choose a limit by: at least {few} are needed"
        if not self.median(0.5):
            return "half of the norms, or more, are 0: there is no scale to choose a limit by"
        return ""

    def median(self, q: float) -> float:
        """Return the median over the clients of each one's q-quantile; of two, the lower one.

        A few clients unlike the others do not move it, however many norms they have.
        """
        found = [record.norm_quantile(q) for record in self.clients.values()]
        return statistics.median_low([norm for norm in found if norm is not None] or [0.0])


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, updates and the aggregate of one federation of a report."""
    rows = [row for row in report.whole if row.experiment == experiment]
    clients = [row for row in rows if row.node not in report.servers]
    server = [row for row in rows if row.node in report.servers]
    steps, averages = _first(clients), _first(server)
    updates = {name: [row for row in clients if row.name == name] for name in UPDATES}
    effort = {(_name(row), row.record.round): row.record.steps or 1 for row in steps}
    return [
        Norms("step", steps, _order(report, steps)),
        Norms("update", updates[UPDATES[0]] or updates[UPDATES[1]], effort=effort),
        Norms("aggregate", averages, _order(report, averages)),
    ]


def _name(row: Row) -> str:
    """Return the name of a node within its federation."""
    return row.node.rpartition("/")[2]


def _first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first clipper by norm on each node."""
    found: dict[str, int] = {}
    for row in rows:
        if row.name in BY_NORM:
            found[row.node] = min(found.get(row.node, row.place), row.place)
    return [row for row in rows if found.get(row.node) == row.place and row.name in BY_NORM]


def _order(report: Report, rows: Sequence[Row]) -> Config:
    """Return the order of the norm as a parameter, if the node's configuration has another than 2.

    Raises
    ------
    ValueError
        If the configuration can not be read: the norms may then be of any order.
    """
    if not rows:
        return {}
    row = rows[0]
    folder = report.folder if row.node == report.folder.resolve().name else report.folder / row.node
    file = folder / "optimizer_config.json"
    if not file.exists():
        return {}
    try:
        name, config = json.loads(file.read_text(encoding="utf-8"))["modules"][row.place]
        order = config.get("ord", 2) if name == row.name else 2
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f"{file} can not be read, and says of which order norms are") from exc
    return {} if order == 2 else {"ord": order}


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
