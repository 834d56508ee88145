# SPDX-License-Identifier: Apache-2.0
"""Tables of reports and rankings for a terminal; only this file needs rich."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedclip.report.rows import SETTERS, Limits, Row, grouped, number, pooled, printable


def plain_table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return an empty table that, where it is narrow, folds names and keeps numbers whole."""
    table = Table(
        title=Text(printable(title)),
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for head in names:
        table.add_column(head, overflow="fold", min_width=4)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def table_of(title: str, rows: Sequence[Row], limits: Limits, rounds: bool) -> Table:
    """Return the table; see `Report.table`."""
    if not rounds:
        rows = _together(rows)
        # The limit of all rounds is that of the last one.
        limits = {(node, module, 0): limit for (node, module, _), limit in limits.items()}
    pairs = {(row.node, row.module) for row in rows}
    modules = len(pairs) > len({node for node, _ in pairs})
    bad = any(row.record.nonfinite for row in rows)
    heads = ["round", "steps", "clipped", "median\nnorm", "max\nnorm", "limit", "by"]
    table = plain_table(
        title, ["node", *["clipper"] * modules], heads[not rounds :] + ["non-finite"] * bad
    )
    previous = ""
    for row in rows:
        if previous and row.node != previous and rounds:
            table.add_section()
        record = row.record
        names = [row.node if row.node != previous else "", *[row.module] * modules]
        cells = [str(record.round) if record.round else "all"] * rounds
        cells += [
            str(record.steps),
            f"{record.clipped_share:.0%}" if record.steps else "-",
            number(record.norm_median),
            number(record.norm_max),
            number(limits.get(row.key)),
            SETTERS[record.limited_by],
        ]
        cells += [str(record.nonfinite)] * bad
        table.add_row(*(Text(printable(name)) for name in names), *cells)
        previous = row.node
    return table


def _together(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each clipper of a node, with all rounds."""
    runs = grouped(rows, lambda row: (row.node, row.module))
    return [
        dataclasses.replace(run[0], record=pooled(r.record for r in run)) for run in runs.values()
    ]
