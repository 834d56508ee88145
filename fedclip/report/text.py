# SPDX-License-Identifier: Apache-2.0
"""A report: the rows and curves of an experiment, as a table, sentences, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fedclip.core.records import ALL
from fedclip.report.findings import Finding, findings_of
from fedclip.report.rows import COLUMNS, Curve, Row, experiment_of, printable, table_of, write_csv

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Report:
    """The rows of an experiment, sorted by node, clipper, group and round.

    Attributes
    ----------
    folder
        The folder that was read.
    rows
        The rows found; empty only where all is `private`.
    skipped
        State files that could not be read, normally because they are being written.
    curves
        Loss and metrics by round, sorted by node and metric.
    servers
        The nodes that are servers.
    private
        The clients that train by DP-SGD, of whose records nothing is recorded.
    confusions
        The last confusion matrix of each node: records by class, and by predicted class.
    """

    folder: Path
    rows: tuple[Row, ...]
    skipped: tuple[Path, ...] = ()
    curves: tuple[Curve, ...] = ()
    servers: frozenset[str] = frozenset()
    private: tuple[str, ...] = ()
    confusions: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes: their folders, relative to the report's."""
        return tuple(dict.fromkeys(row.node for row in self.rows))

    @cached_property
    def whole(self) -> tuple[Row, ...]:
        """The rows of whole gradients, not of a group, with the smallest limit of their groups."""
        limits: dict[object, float] = {}
        for row in self.rows:
            if row.record.limit is not None:
                limits[row.key] = min(limits.get(row.key, math.inf), row.record.limit)
        rows = (row for row in self.rows if row.record.group == ALL)
        return tuple(replace(row, limit=limits.get(row.key)) for row in rows)

    @property
    def experiments(self) -> tuple[str, ...]:
        """The folders that hold the nodes of one federation, relative to the report's."""
        nodes = [*(row.node for row in self.rows), *self.private]
        return tuple(dict.fromkeys(map(experiment_of, nodes)))

    def only(self, experiments: Collection[str]) -> Report:
        """Return the report of some of the experiments."""
        rows = tuple(row for row in self.rows if experiment_of(row.node) in experiments)
        curves = tuple(c for c in self.curves if experiment_of(c.node) in experiments)
        private = tuple(n for n in self.private if experiment_of(n) in experiments)
        nodes = {n: m for n, m in self.confusions.items() if experiment_of(n) in experiments}
        return replace(self, rows=rows, curves=curves, private=private, confusions=nodes)

    def select(self, node: str | None = None, module: str | None = None) -> tuple[Row, ...]:
        """Return the rows of one node, of one clipper, or of both."""
        rows = (row for row in self.rows if node in (None, row.node))
        return tuple(row for row in rows if module in (None, row.module, row.name))

    def table(self, rounds: bool = True) -> Table:
        """Return the report as a table for a terminal, without columns that carry no information.

        Parameters
        ----------
        rounds
            Show each round, not only all rounds together.
        """
        return table_of(f"Clipping in {self.folder.name or self.folder}", self.whole, rounds)

    def write_csv(self, file: TextIO) -> None:
        """Write every row and every column as CSV; see `rows.write_csv`."""
        write_csv(COLUMNS, (row.as_dict() for row in self.rows), file)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``fedclip report --json`` prints it."""
        return {
            "schema": "fedclip-report/1",
            "folder": str(self.folder),
            "nodes": [{"node": n, "server": n in self.servers} for n in self.nodes],
            "private": [*self.private],
            "rows": [row.as_dict() for row in self.rows],
            "curves": [curve._asdict() for curve in self.curves],
            "findings": [finding._asdict() for finding in self.findings()],
            "skipped": [str(path) for path in self.skipped],
        }

    def findings(self) -> list[Finding]:
        """Return the findings: diverged losses first, then some for each clipper."""
        return list(findings_of(self.whole, self.curves, self.servers, self.private))

    def in_words(self) -> list[str]:
        """Return the findings as sentences, with experiment and clipper if there are several."""
        findings = self.findings()
        clippers = {f.clipper for f in findings if f.clipper}
        many = len({f.experiment for f in findings}) > 1, len(clippers) > 1
        sentences = []
        for finding in findings:
            about = [n for n, m in zip(finding[1:3], many, strict=True) if m and n]
            prefix = f"{', '.join(about)}: " if about else ""
            sentences.append(printable(prefix + finding.text))
        return sentences
