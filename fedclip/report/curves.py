# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics by round, from the files that declearn's `Checkpointer` writes.

A node's ``metrics.csv`` has a row for each evaluation, and a server has ``metrics_CLIENT.csv`` for
each client besides. The rows have a time, and no round; the state files of the same time have.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedclip.report.rows import experiment_of


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
    def experiment(self) -> str:
        """The folder that holds the nodes of one federation."""
        return experiment_of(self.node)

    @property
    def last(self) -> tuple[int, float]:
        """Round and value of the last evaluation; NaN if it was not finite."""
        rounds = *self.points[-1:], *((round_, math.nan) for round_ in self.nonfinite[-1:])
        return max(rounds, key=lambda point: point[0])


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
        (found,) = json.loads(f"{{{line}}}").values()
        matrix = [[float(count) for count in row] for row in found["confusion"]]
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
