# SPDX-License-Identifier: Apache-2.0
"""Read the checkpoints of an experiment: records, loss and metrics; all files or the new ones.

A node's ``metrics.csv`` has a row for each evaluation, and a server has ``metrics_CLIENT.csv`` for
each client as well. These rows have a time and no round; the state files of the same time have the
round.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgpack
import numpy as np

from fedclip.core.records import SERVED, read_rounds
from fedclip.report.rows import Curve, ReportError, Row, experiment_of, grouped
from fedclip.report.text import Report


def read_curves(node: str, file: Path, last: int, at: Mapping[str, int]) -> Iterator[Curve]:
    """Yield the curves in one file of metrics; none of a damaged file.

    The node has reached round `last`, and round ``at[stamp]`` at the time of some evaluations.
    """
    try:
        with file.open(newline="", encoding="utf-8", errors="replace") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, ValueError, csv.Error):
        return
    rounds = rounds_of([str(row.get("timestamp")) for row in rows], last, at)
    for metric in [name for name in (rows[0] if rows else ()) if name not in ("timestamp", None)]:
        cells = zip(rounds, (row.get(metric) for row in rows), strict=True)
        values = [(round_, number) for round_, cell in cells for number in _numbers(cell)]
        points = tuple((round_, value) for round_, value in values if math.isfinite(value))
        bad = tuple(round_ for round_, value in values if not math.isfinite(value))
        if values:
            yield Curve(node, metric, points, bad)


def read_confusion(file: Path) -> list[list[float]] | None:
    """Return the last confusion matrix in a file of metrics; None if it has none."""
    try:
        # Each evaluation has a line; the last line is a bracket.
        line = file.read_text(encoding="utf-8").splitlines()[-2].rstrip(",")
        (entry,) = json.loads(f"{{{line}}}").values()
        matrix = [[float(count) for count in row] for row in entry["confusion"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return matrix if all(len(row) == len(matrix) for row in matrix) else None


def rounds_of(stamps: Sequence[str], last: int, at: Mapping[str, int]) -> list[int]:
    """Return the round of each evaluation, of which `last` is that of the last one.

    Where no state file says which round it was, evaluations are taken to be evenly spaced.

    Examples
    --------
    >>> rounds_of(["10:01", "10:02", "10:03"], 6, {})
    [2, 4, 6]
    >>> rounds_of(["10:01", "10:02", "10:03"], 7, {"10:01": 3, "10:02": 6, "10:03": 7})
    [3, 6, 7]
    """
    # Several evaluations within a second have one time, and one file: that of the last of them.
    known = {i: at[s] for i, s in enumerate(stamps) if s in at and s not in stamps[i + 1 : i + 2]}
    known = {-1: 0, **known} | ({len(stamps) - 1: max(last, len(stamps))} if stamps else {})
    between = np.interp(range(len(stamps)), [*known], [*known.values()])
    return [round(value) for value in between.tolist()]


def _numbers(cell: object) -> list[float]:
    """Return the number in a cell, if there is one; declearn leaves the cell of NaN empty."""
    try:
        return [float(str(cell) or "nan")]
    except ValueError:
        return []


STATES = "optimizer_state_*.mpk"
LEDGER = "privacy_spent.json"
"""The ledger of a client that trains by DP-SGD; see `fedclip.privacy.ledger`."""


def read_report(folder: str | Path) -> Report:
    """Read what the clippers recorded in an experiment's checkpoints.

    Parameters
    ----------
    folder
        The ``checkpoint`` folder of an experiment, of one of its nodes, or one that holds
        several experiments: any folder with declearn checkpoints somewhere below.

    Raises
    ------
    ReportError
        If there is no such folder, no checkpoint in it, or no clipper of fedclip in those.
    """
    return Reader(folder).read()


class Reader:
    """Reads a folder, and afterwards only the files that are new or have changed.

    Parameters
    ----------
    folder
        As for `read_report`.
    """

    def __init__(self, folder: str | Path) -> None:
        # `Path.is_dir` raises where a path is too long for the system.
        if not os.path.isdir(folder):
            what = "is no folder" if os.path.exists(folder) else "does not exist"
            raise ReportError(f"{folder} {what}; give the folder with the experiment's checkpoints")
        self.folder = Path(folder)
        self._nodes: dict[Path, _Node] = {}

    def read(self) -> Report:
        """Return the report as of now; raise a `ReportError` if there is nothing to report."""
        folder = self.folder
        state_files = [*folder.rglob(STATES), *folder.rglob(SERVED)]
        for path in sorted({file.parent for file in state_files}, key=str):
            label = path.relative_to(folder).as_posix() if path != folder else path.resolve().name
            self._nodes.setdefault(path, _Node(path, label)).update()
        nodes = self._nodes.values()
        rows = [row for node in nodes for row in node.rows.values()]
        skipped = tuple(sorted(path for node in nodes for path in node.skipped))
        private = tuple(sorted(node.label for node in nodes if node.private))
        if not rows and not private:
            raise ReportError(self._why_empty(len(skipped)))
        rows.sort(key=lambda row: (row.node, row.position, row.name, row.record.round))
        servers = frozenset(node.label for node in nodes if node.is_server)
        curves, confusions = _metrics(nodes)
        return Report(folder, tuple(rows), skipped, curves, servers, private, confusions)

    def _why_empty(self, skipped: int) -> str:
        files = sum(len(node.seen) for node in self._nodes.values())
        broken = f"cannot read {skipped} of {files} state files"
        if not files:
            return f"{self.folder} has no {STATES}: run fedclip simulate or quickrun first"
        if skipped == files:
            return f"{broken} in {self.folder}"
        others = sorted({name for node in self._nodes.values() for name in node.others})
        text = f"{self.folder} has no records (modules: {', '.join(others) or 'none'}): add 'no-op'"
        return f"{text}, which measures norms{f'; {broken}' * bool(skipped)}"


class _Node:
    """The rows of the clippers of one node, and the files that they come from."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        self.rows: dict[tuple[int, str, str, int], Row] = {}
        self.others: set[str] = set()
        self.skipped: set[Path] = set()
        self.seen: dict[Path, tuple[int, int]] = {}
        self.mark = (0, 0)  # round and steps that the newest file has reached
        self.newest = folder
        self.rounds_at: dict[str, int] = {}

    @property
    def is_server(self) -> bool:
        known = self.folder.name == "server" or (self.folder / SERVED).exists()
        return known or any(self.folder.glob("metrics_*.csv"))

    @property
    def private(self) -> bool:
        """Whether it trains by DP-SGD, also without the module that says how."""
        return "sample-clip" in self.others or (not self.rows and (self.folder / LEDGER).exists())

    def update(self) -> None:
        """Read the files that are new or have changed, in the order in which they were written."""
        for path in sorted([*self.folder.glob(STATES), *self.folder.glob(SERVED)]):
            try:
                stat = path.stat()
            except OSError:  # declearn has just removed it, to keep a few only
                continue
            if self.seen.get(path) != (mark := (stat.st_mtime_ns, stat.st_size)):
                self.seen[path] = mark
                self.skipped.discard(path)
                try:
                    self._take(path)
                except Exception:  # a file cut short or damaged may hold anything in any place
                    self.skipped.add(path)

    def _take(self, path: Path) -> None:
        """Take over the rounds of a file: those that are new, and the last one before them."""
        if not path.is_file():  # a pipe would be waited for
            raise OSError(f"{path} is no file")
        # Values that declearn wraps, such as the vectors of other modules, stay wrapped.
        content = path.read_bytes()
        modules = (json.loads if path.name == SERVED else msgpack.unpackb)(content)["modules"]
        reached = max((r for _, s in modules for r in _rounds(s)), default=0)
        mark = reached, max((sum(_rounds(s, "steps")) for _, s in modules), default=0)
        # Rounds and steps only go up within a run, but names, in local time, do not.
        lower = mark < self.mark
        rows = list(self._rows(modules, 0 if lower else self.mark[0]))
        if lower and not self._is_of_another_run(rows, path):
            rows = [row for row in rows if _key(row) not in self.rows]
        else:
            if lower:
                self.rows.clear()
                self.rounds_at.clear()
            self.mark, self.newest = mark, path
        # Without records, as on a server whose modules keep none, a file tells no round.
        if reached:
            self.rounds_at[path.stem.removeprefix("optimizer_state_")] = reached
        for row in rows:
            self.rows[_key(row)] = row

    def _is_of_another_run(self, rows: list[Row], path: Path) -> bool:
        """Whether a file with a lower round begins another run in this folder."""
        # A server's clippers have no rounds: all steps are in one record.
        known = [(row, self.rows.get(_key(row))) for row in rows if row.record.round]
        if known or not rows:
            return any(row != other for row, other in known if other is not None)
        return self.seen[path] > self.seen.get(self.newest, (0, 0))

    def _rows(self, modules: Iterable[tuple[object, object]], since: int) -> Iterator[Row]:
        """Yield the rows of a state file from a round on; note the modules without records.

        The place counts only modules of the same name, so that a clipper keeps its label when you
        put another kind of module in front of it.
        """
        seen: Counter[str] = Counter()
        for place, (name, state) in enumerate(modules):
            if not isinstance(name, str):
                raise TypeError(f"a module's name must be a string, got {name!r}")
            seen[name] += 1
            if not isinstance(state, dict) or "rounds" not in state:
                self.others.add(name)
                continue
            adaptive = any((state.get("groups") or {}).values())
            # The rounds before were complete when an earlier file was written.
            chosen = [row for row in state["rounds"] if not 0 <= row["round"] < since]
            for record in read_rounds({"rounds": chosen}):
                row = Row(self.label, seen[name] - 1, name, record, adaptive, place)
                row.as_dict()  # Computing the quantiles reveals damaged counts.
                yield row


def _key(row: Row) -> tuple[int, str, str, int]:
    return row.position, row.name, row.record.group, row.record.round


def _rounds(state: object, field: str = "round") -> list[int]:
    """Return the rounds, or their steps, in a clipper's state; none in that of another module."""
    return [row[field] for row in state.get("rounds", ())] if isinstance(state, dict) else []


def _metrics(nodes: Collection[_Node]) -> tuple[tuple[Curve, ...], dict[str, list[list[float]]]]:
    """Return curves and confusion matrices, also of clients that only a server knows."""
    curves: dict[tuple[str, str], Curve] = {}
    confusions: dict[str, list[list[float]]] = {}
    federations = grouped(nodes, lambda node: experiment_of(node.label))
    last = {above: max(node.mark[0] for node in some) for above, some in federations.items()}
    for node in sorted(nodes, key=lambda node: node.is_server):
        above, slash, _ = node.label.rpartition("/")
        for file in sorted(node.folder.glob("metrics*.csv")):
            client = file.name.removeprefix("metrics").removesuffix(".csv").removeprefix("_")
            label = f"{above}{slash}{client}" if client else node.label
            for curve in read_curves(label, file, node.mark[0] or last[above], node.rounds_at):
                curves.setdefault((label, curve.metric), curve)
            if matrix := read_confusion(file.with_suffix(".json")):
                confusions.setdefault(label, matrix)
    return tuple(curves[key] for key in sorted(curves)), confusions
