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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgpack

from fedclip.core.records import SERVED, read_rounds
from fedclip.report.rows import Curve, ReportError, Row, experiment_of
from fedclip.report.text import Report


def read_curves(node: str, file: Path, last: int, at: Mapping[str, int]) -> list[Curve]:
    """Return the curves in one file of metrics; none of a damaged file.

    The node has reached round `last`, and round ``at[stamp]`` at the time of some evaluations.
    """
    try:
        with file.open(newline="", encoding="utf-8", errors="replace") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, ValueError, csv.Error):
        return []
    rounds = rounds_of([str(row.get("timestamp")) for row in rows], last, at)
    curves = []
    for metric in rows[0] if rows else ():
        if metric in ("timestamp", None):
            continue
        values = [
            (round_, value)
            for round_, row in zip(rounds, rows, strict=True)
            if (value := _float(row.get(metric))) is not None
        ]
        points = tuple((round_, value) for round_, value in values if math.isfinite(value))
        bad = tuple(round_ for round_, value in values if not math.isfinite(value))
        if values:
            curves.append(Curve(node, metric, points, bad))
    return curves


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
    if stamps:
        known[len(stamps) - 1] = max(last, len(stamps))
    result: list[int] = []
    before, start = -1, 0
    for place, round_ in sorted(known.items()):
        each = (round_ - start) / (place - before)
        result += [start + round(each * (i - before)) for i in range(before + 1, place + 1)]
        before, start = place, round_
    return result


def _float(text: object) -> float | None:
    try:
        # declearn leaves the cell of NaN empty.
        return float(str(text) or "nan")
    except ValueError:
        return None


STATES = "optimizer_state_*.mpk"
LEDGER = "privacy_spent.json"
"""The ledger of a client that trains by DP-SGD; see `fedclip.privacy.ledger`."""
_STAMP = slice(len("optimizer_state_"), -len(".mpk"))


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
        if not nodes:
            raise ReportError(
                f"{folder} has no {STATES}: run fedclip simulate or quickrun first. declearn "
                "writes these files if a checkpoint folder is set: checkpoint = … in [experiment], "
                "or checkpoint=… for FederatedClient and FederatedServer"
            )
        rows = [row for node in nodes for row in node.rows.values()]
        skipped = [path for node in nodes for path in node.skipped]
        private = tuple(sorted(node.label for node in nodes if node.private))
        if not rows and not private:
            files = sum(len(node.seen) for node in nodes)
            if len(skipped) == files:
                raise ReportError(f"cannot read any of the {files} state files in {folder}")
            names = ", ".join(sorted({n for node in nodes for n in node.others})) or "none"
            broken = f"; cannot read {len(skipped)} of {files} state files"
            raise ReportError(
                f"{folder} has no records: no clipper of fedclip has taken a step (modules: "
                f"{names}). Add the module 'no-op', which measures norms and changes nothing"
                f"{broken if skipped else ''}"
            )
        rows.sort(key=lambda row: (row.node, row.position, row.name, row.record.round))
        servers = frozenset(node.label for node in nodes if node.is_server)
        confusions: dict[str, list[list[float]]] = {}
        for label, file, _ in self._metrics():
            if matrix := read_confusion(file.with_suffix(".json")):
                confusions.setdefault(label, matrix)
        skipped_, curves = tuple(skipped), self._curves()
        return Report(folder, tuple(rows), skipped_, curves, servers, private, confusions)

    def _curves(self) -> tuple[Curve, ...]:
        """Return the curves of all nodes, and of clients that only their server knows."""
        curves: dict[tuple[str, str], Curve] = {}
        last: Counter[str] = Counter()
        for node in self._nodes.values():
            above = experiment_of(node.label)
            last[above] = max(last[above], node.last)
        for label, file, node in self._metrics():
            reached = node.last or last[experiment_of(node.label)]
            for curve in read_curves(label, file, reached, node.rounds_at):
                curves.setdefault((curve.node, curve.metric), curve)
        return tuple(curves[key] for key in sorted(curves))

    def _metrics(self) -> Iterator[tuple[str, Path, _Node]]:
        """Yield the files of metrics, each with whose they are, and the node that wrote them."""
        for node in sorted(self._nodes.values(), key=lambda node: node.is_server):
            above, slash, _ = node.label.rpartition("/")
            for file in sorted(node.folder.glob("metrics*.csv")):
                client = file.name.removeprefix("metrics").removesuffix(".csv").removeprefix("_")
                yield f"{above}{slash}{client}" if client else node.label, file, node


class _Node:
    """The rows of the clippers of one node, and the files that they come from."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        self.rows: dict[tuple[int, str, str, int], Row] = {}
        self.others: set[str] = set()
        self.skipped: list[Path] = []
        self.seen: dict[Path, tuple[int, int]] = {}
        self.last = 0
        self.mark = (0, 0)
        self.newest = folder
        self.rounds_at: dict[str, int] = {}

    @property
    def is_server(self) -> bool:
        if self.folder.name == "server" or (self.folder / SERVED).exists():
            return True
        return any(self.folder.glob("metrics_*.csv"))

    @property
    def private(self) -> bool:
        """Whether it trains by DP-SGD, also without the module that says how."""
        ledger = not self.rows and (self.folder / LEDGER).exists()
        return ledger or "sample-clip" in self.others

    def update(self) -> None:
        """Read the files that are new or have changed, in the order in which they were written."""
        fresh = []
        for path in sorted([*self.folder.glob(STATES), *self.folder.glob(SERVED)]):
            try:
                stat = path.stat()
            except OSError:  # declearn has just removed it, to keep a few only
                continue
            mark = (stat.st_mtime_ns, stat.st_size)
            if self.seen.get(path) != mark:
                self.seen[path] = mark
                fresh.append(path)
        self.skipped = [path for path in self.skipped if path not in fresh]
        for path in fresh:
            try:
                self._take(path)
            except Exception:  # a file cut short or damaged may hold anything in any place
                self.skipped.append(path)

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
        rows = list(_rows(modules, self.label, self.others, 0 if lower else self.last))
        if lower and not self._is_of_another_run(rows, path):
            rows = [row for row in rows if _key(row) not in self.rows]
        else:
            if lower:
                self.rows.clear()
                self.rounds_at.clear()
            self.last, self.mark, self.newest = reached, mark, path
        # Without records, as on a server whose modules keep none, a file tells no round.
        if reached:
            self.rounds_at[path.name[_STAMP]] = reached
        for row in rows:
            self.rows[_key(row)] = row

    def _is_of_another_run(self, rows: list[Row], path: Path) -> bool:
        """Whether a file with a lower round begins another run in this folder."""
        # A server's clippers have no rounds: all steps are in one record.
        known = [(row, self.rows.get(_key(row))) for row in rows if row.record.round]
        if known or not rows:
            return any(row != other for row, other in known if other is not None)
        return self.seen[path] > self.seen.get(self.newest, (0, 0))


def _key(row: Row) -> tuple[int, str, str, int]:
    return row.position, row.name, row.record.group, row.record.round


def _rounds(state: object, field: str = "round") -> list[int]:
    """Return the rounds, or their steps, in a clipper's state; none in that of another module."""
    return [row[field] for row in state.get("rounds", ())] if isinstance(state, dict) else []


def _rows(
    modules: Iterable[tuple[object, object]], node: str, others: set[str], since: int
) -> Iterator[Row]:
    """Yield the rows of a state file from a round on; add the names of modules without records.

    The place counts only modules of the same name, so that a clipper keeps its label when you
    put another kind of module in front of it.
    """
    seen: Counter[str] = Counter()
    for place, (name, state) in enumerate(modules):
        if not isinstance(name, str):
            raise TypeError(f"a module's name must be a string, got {name!r}")
        position = seen[name]
        seen[name] += 1
        if not isinstance(state, dict) or "rounds" not in state:
            others.add(name)
            continue
        adaptive = any((state.get("groups") or {}).values())
        # The rounds before were complete when an earlier file was written.
        chosen = [row for row in state["rounds"] if not 0 <= row["round"] < since]
        for record in read_rounds({"rounds": chosen}):
            row = Row(node, position, name, record, adaptive, place)
            row.as_dict()  # Computing the quantiles reveals damaged counts.
            yield row
