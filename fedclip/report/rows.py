# SPDX-License-Identifier: Apache-2.0
"""One row for each round of a clipper on a node, and how names and numbers are shown."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from fedclip.core.records import RoundRecord
from fedclip.errors import needing

if TYPE_CHECKING:
    from rich.table import Table

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

COLUMNS = (
    *("node", "module", "group", "round", "steps", "clipped", "clipped_share"),
    *("norm_min", "norm_p05", "norm_median", "norm_p95", "norm_max"),
    *("limit", "limit_min", "limit_max", "limited_by", "fixed", "learnt", "warmup", "nonfinite"),
)

SETTERS = {"fixed": "fixed", "learnt": "adaptive", "warmup": "warm-up", "": "-"}
"""What set a limit, as the column "by" has it."""


class ReportError(ValueError):
    """There is nothing to report on; the message says what was looked for and what to do."""


@dataclass(frozen=True)
class Row:
    """One round of one clipper on one node."""

    node: str
    position: int
    """Place of the clipper among the optimizer's modules of that name, from 0."""
    name: str
    """Registered name of the clipper."""
    record: RoundRecord
    adaptive: bool = False
    """Whether the clipper keeps statistics, from which a limit may follow."""
    index: int = 0
    """Place of the clipper among all modules of the optimizer, from 0."""
    limit: float | None = None
    """The smallest limit of all groups; set only in `Report.whole`."""

    @property
    def module(self) -> str:
        """Name of the clipper, numbered if there are two of a kind, as in ``norm-clip#2``."""
        return self.name if self.position == 0 else f"{self.name}#{self.position + 1}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Node, clipper and round."""
        return self.node, self.module, self.record.round

    def as_dict(self) -> dict[str, Any]:
        """Return the row by column name, as in the CSV file."""
        record = self.record
        computed: dict[str, Any] = {"node": self.node, "module": self.module}
        computed |= {f"norm_p{q:02}": record.norm_quantile(q / 100) for q in (5, 95)}
        return {c: computed[c] if c in computed else getattr(record, c) for c in COLUMNS}


class Curve(NamedTuple):
    """One metric of one node, round by round."""

    node: str
    metric: str
    """Name of the metric, as declearn writes it: "loss", "accuracy", ..."""
    points: tuple[tuple[int, float], ...]
    """Pairs of round and value; finite ones only."""
    nonfinite: tuple[int, ...] = ()
    """Rounds after which it was NaN or infinite."""

    @property
    def last(self) -> tuple[int, float]:
        """Round and value of the last evaluation; NaN if it was not finite."""
        rounds = *self.points[-1:], *((round_, math.nan) for round_ in self.nonfinite[-1:])
        return max(rounds, key=lambda point: point[0])


def experiment_of(node: str) -> str:
    """Return the folder that holds the nodes of a node's federation; "" if it is the report's."""
    return node.rpartition("/")[0]


def site_of(node: str) -> str:
    """Return the name of a node within its federation."""
    return node.rpartition("/")[2]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their keys, in the order in which these come first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def limits(rows: Iterable[Row]) -> list[float]:
    """Return the limits of those rows that have one."""
    return [row.limit for row in rows if row.limit is not None]


def pooled(records: Iterable[RoundRecord]) -> RoundRecord:
    """Return one record of all steps of some records; the limit is that of the last one."""
    result = RoundRecord(0)
    for record in records:
        result.add(record)
    return result


def cells(record: RoundRecord, limit: float | None) -> dict[str, str]:
    """Return what tables show of a record, by the head of the column."""
    return {
        "round": str(record.round) if record.round else "all",
        "steps": f"{record.steps:,}",
        "clipped": f"{record.clipped_share:.1%}" if record.steps else "-",
        "median\nnorm": number(record.norm_median),
        "95 %": number(record.norm_quantile(0.95)),
        "max\nnorm": number(record.norm_max),
        "limit": number(limit),
        "by": SETTERS[record.limited_by],
        "non-finite": str(record.nonfinite),
    }


def printable(text: str) -> str:
    r"""Return other people's text in a form that is safe to show: control characters escaped.

    Examples
    --------
    >>> print(printable("a\x1b[31mb\nc [red]"))
    a\x1b[31mb\nc [red]
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number(value: float | None) -> str:
    """Return a number with three digits, "-" for none."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.2e}"


def listed(names: Sequence[str]) -> str:
    """Return the first five names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def write_csv(columns: Iterable[str], rows: Iterable[Mapping[str, object]], file: TextIO) -> None:
    """Write rows as CSV; what else they hold is left out, and a missing number an empty cell.

    An apostrophe stands before text that a spreadsheet would take for a formula.
    """
    writer = csv.DictWriter(file, [*columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _inert(cell) for name, cell in row.items()})


def _inert(cell: object) -> object:
    formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{cell}" if formula else cell


def plain_table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return an empty table that, where it is narrow, folds names and keeps numbers whole."""
    # Imported here: a report needs no rich.
    with needing("a table", "rich: pip install 'fedclip[cli]'"):
        from rich import box
        from rich.table import Table
        from rich.text import Text

    heading = Text(printable(title))
    table = Table(title=heading, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for head in names:
        table.add_column(head, overflow="fold", min_width=4)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def table_of(title: str, rows: Sequence[Row], rounds: bool) -> Table:
    """Return the table; see `Report.table`."""
    runs = grouped(rows, lambda row: (row.node, row.module))
    if not rounds:
        rows = [replace(run[-1], record=pooled(r.record for r in run)) for run in runs.values()]
    heads = ["round"] * rounds + ["steps", "clipped", "median\nnorm", "max\nnorm", "limit", "by"]
    heads += ["non-finite"] * any(row.record.nonfinite for row in rows)
    modules = len(runs) > len({node for node, _ in runs})
    table = plain_table(title, ["node", *["clipper"] * modules], heads)
    from rich.text import Text

    previous = ""
    for row in rows:
        if previous and row.node != previous and rounds:
            table.add_section()
        names = [row.node if row.node != previous else "", *[row.module] * modules]
        shown = cells(row.record, row.limit)
        table.add_row(*map(Text, map(printable, names)), *(shown[head] for head in heads))
        previous = row.node
    return table
