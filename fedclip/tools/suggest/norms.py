# SPDX-License-Identifier: Apache-2.0
"""Read the norms of one federation, in each place where something can be clipped."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fedclip.parameters import Config
from fedclip.report import Report, Row
from fedclip.tools.suggest.place import Norms, name_of

__all__ = ["BY_NORM", "UPDATES", "read_norms"]

BY_NORM = {
    *("no-op", "norm-clip", "normalize", "zscore-clip", "ema-clip", "auto-clip", "mad-clip"),
    *("percentile-norm-clip", "adaptive-clip", "growth-clip", "ema-norm-clip", "ema-normalize"),
}
"""Clippers by the norm of the gradient, which have norms to choose a limit by."""
UPDATES = ("update-norms", "update-clip-client")
"""What records the norms of updates; of a simulation, the first knows whose they are."""


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, and of updates, of one federation of a report."""
    rows = [r for r in report.whole if r.experiment == experiment and r.node not in report.servers]
    steps = _first(rows)
    updates = {name: [row for row in rows if row.name == name] for name in UPDATES}
    effort = {(name_of(row), row.record.round): row.record.steps or 1 for row in steps}
    return [
        Norms("step", steps, _order(report, steps[0]) if steps else {}),
        Norms("update", updates[UPDATES[0]] or updates[UPDATES[1]], effort=effort),
    ]


def _first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first clipper by norm on each node."""
    found: dict[str, int] = {}
    for row in rows:
        if row.name in BY_NORM:
            found[row.node] = min(found.get(row.node, row.place), row.place)
    return [row for row in rows if found.get(row.node) == row.place and row.name in BY_NORM]


def _order(report: Report, row: Row) -> Config:
    """Return the order of the norm as a parameter, if the node's configuration has another than 2.

    Raises
    ------
    ValueError
        If the configuration can not be read: the norms may then be of any order.
    """
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
