# SPDX-License-Identifier: Apache-2.0
"""Read the norms of one federation, in each place where something can be clipped."""

from __future__ import annotations

import dataclasses
import json

from fedclip.parameters import Config
from fedclip.report import Report, Row
from fedclip.report.place import Norms, places_of

__all__ = ["read_norms"]


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, and of updates, of one federation of a report."""
    steps, updates = places_of(
        r for r in report.whole if r.experiment == experiment and r.node not in report.servers
    )
    order = _order(report, steps.rows[0]) if steps.rows else {}
    return [dataclasses.replace(steps, order=order), updates]


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
