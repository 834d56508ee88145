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

FEW = 20
"""Number of norms below which a 95 % quantile says nothing."""
BY_NORM = {
    *("no-op", "norm-clip", "normalize", "zscore-clip", "ema-clip", "auto-clip", "mad-clip"),
    *("percentile-norm-clip", "adaptive-clip", "growth-clip", "ema-norm-clip", "ema-normalize"),
}
"""Clippers by the norm of the gradient, which have norms to choose a limit by."""
UPDATES = ("update-clip-client",)
"""What records the norms of updates."""
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
    """

    place: str
    rows: Sequence[Row]
    order: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def clients(self) -> dict[str, RoundRecord]:
        """All norms of each client, by its name within the federation; or those of the server."""
        found = grouped(self.rows, lambda row: row.node.rpartition("/")[2])
        return {name: pooled(row.record for row in rows) for name, rows in found.items()}

    @cached_property
    def whole(self) -> RoundRecord:
        """All norms of all clients."""
        return pooled(self.clients.values())

    def rounds(self) -> dict[int, dict[str, RoundRecord]]:
        """Return the records by round, and in a round by client."""
        found: dict[int, dict[str, RoundRecord]] = {}
        for row in self.rows:
            found.setdefault(row.record.round, {})[row.node.rpartition("/")[2]] = row.record
        return dict(sorted(found.items()))

    @property
    def lacking(self) -> str:
        """Why there are no norms to choose by, and what to do about it; "" if there are."""
        count = sum(self.whole.counts)
        if not self.rows:
            return _UNMEASURED[self.place]
        if count < FEW:
            return f"{count} norms are too few to choose a limit by: at least {FEW} are needed"
        if not self.median(0.5):
            return "half of the norms, or more, are 0: there is no scale to choose a limit by"
        return ""

    def median(self, q: float) -> float:
        """Return the median over the clients of each one's q-quantile; of two, the lower one.

        A few clients unlike the others do not move it, however many norms they have.
        """
        found = [record.norm_quantile(q) for record in self.clients.values()]
        return statistics.median_low([norm for norm in found if norm is not None] or [0.0])

    def limit(self) -> float:
        """Return the fixed limit: above about 95 % of the norms of the median client."""
        return rounded(self.median(0.95))


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, updates and the aggregate of one federation of a report."""
    rows = [row for row in report.whole if row.experiment == experiment]
    clients = [row for row in rows if row.node not in report.servers]
    server = [row for row in rows if row.node in report.servers]
    steps, averages = _first(clients), _first(server)
    return [
        Norms("step", steps, _order(report, steps)),
        Norms("update", [row for row in clients if row.name in UPDATES]),
        Norms("aggregate", averages, _order(report, averages)),
    ]


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
