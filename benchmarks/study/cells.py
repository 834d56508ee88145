# SPDX-License-Identifier: Apache-2.0
"""Runs the cells that are not in the CSV files yet, and writes a line for each.

A cell is a mechanism at a factor, on data with a trouble, split by a seed. Scales are chosen on two
seeds that are used for nothing else. Lines name a run, which `runs.csv` describes.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import logging
import math
import multiprocessing
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
TUNING = (1000, 1001)
FIELDS = ("data", "mechanism", "factor", "seed", "score", "run")
PACKAGES = ("fedclip", "declearn", "numpy", "scikit-learn", "scipy")


class Mechanism(NamedTuple):
    """How to make it at a factor of its scale, whether it has one, and if 1 is a default."""

    made: Callable[..., Any]
    tuned: bool = True
    default: bool = False


class Cell(NamedTuple):
    trouble: str
    data: str
    mechanism: str
    factor: float
    seed: int


class Job(NamedTuple):
    """Cells that have a split in common."""

    trouble: str
    data: str
    seed: int
    wanted: tuple[tuple[str, float], ...]


class Field(NamedTuple):
    """Where mechanisms are compared: data and troubles, and how a job is run."""

    places: tuple[tuple[str, str], ...]
    """Pairs of a trouble and data."""
    mechanisms: Mapping[str, Mechanism]
    run: Callable[[Job], list[float]]


Scores = dict[Cell, float]


def read(folder: Path) -> Scores:
    """Return the score of each cell that has been run; NaN, of a lost model, is the worst: 0."""
    found = {}
    for file in sorted(folder.glob("*.csv")):
        if file.stem != "runs":
            with file.open(encoding="utf-8", newline="") as lines:
                for row in csv.DictReader(lines):
                    at = row["data"], row["mechanism"], float(row["factor"]), int(row["seed"])
                    found[Cell(file.stem.replace("-", " "), *at)] = float(row["score"])
    return found


def worst(score: float) -> float:
    """Return a score, or that of a model that tells nothing right for one that is lost."""
    return 0.0 if math.isnan(score) else score


def chosen(scores: Scores, trouble: str, data: str, mechanism: str) -> float | None:
    """Return the factor with the best mean on the tuning seeds; None if there is one not run yet.

    Of several that are as good, it is the one nearest to the default.
    """
    means = {}
    for factor in FACTORS:
        cells = [Cell(trouble, data, mechanism, factor, seed) for seed in TUNING]
        if any(cell not in scores for cell in cells):
            return None
        means[factor] = sum(worst(scores[cell]) for cell in cells)
    return max(FACTORS, key=lambda f: (round(means[f], 9), -abs(math.log(f)), -f))


def wanted(field: Field, scores: Scores, seeds: int) -> list[Cell]:
    """Return the cells to run next: those of the tuning, and those whose factor is known."""
    cells = []
    for trouble, data in field.places:
        for name, mechanism in field.mechanisms.items():
            factors = [1.0] * (mechanism.default or not mechanism.tuned)
            if mechanism.tuned:
                cells += [Cell(trouble, data, name, f, s) for f in FACTORS for s in TUNING]
                best = chosen(scores, trouble, data, name)
                factors += [] if best in (None, *factors) else [best]
            cells += [Cell(trouble, data, name, f, s) for f in factors for s in range(seeds)]
    return [cell for cell in cells if cell not in scores]


def jobs_of(cells: Iterable[Cell]) -> list[Job]:
    """Return cells by what they have in common."""
    found: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
    for cell in cells:
        at = cell.trouble, cell.data, cell.seed
        found.setdefault(at, []).append((cell.mechanism, cell.factor))
    return [Job(*at, tuple(mechanisms)) for at, mechanisms in found.items()]


def complete(fields: Sequence[Field], folder: Path, seeds: int, processes: int) -> None:
    """Run all cells that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    with multiprocessing.get_context("fork").Pool(processes, _quiet) as pool:
        while True:
            scores = read(folder)
            jobs = [
                (field.run, job)
                for field in fields
                for job in jobs_of(wanted(field, scores, seeds))
            ]
            if not jobs:
                return
            number = number or _note(folder)
            for job, found in track(pool.imap_unordered(_run, jobs), "cells", len(jobs)):
                _append(folder, job, found, number)


def _quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _run(task: tuple[Callable[[Job], list[float]], Job]) -> tuple[Job, list[float]]:
    run, job = task
    return job, run(job)


def _append(folder: Path, job: Job, scores: Sequence[float], number: int) -> None:
    file = folder / f"{job.trouble.replace(' ', '-')}.csv"
    fresh = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        if fresh:
            writer.writerow(FIELDS)
        for (mechanism, factor), score in zip(job.wanted, scores, strict=True):
            shown = f"{score:.5g}"
            writer.writerow((job.data, mechanism, f"{factor:g}", job.seed, shown, number))


def _note(folder: Path) -> int:
    """Write a line on this run, and return its number."""
    file = folder / "runs.csv"
    fresh = not file.exists()
    number = 1 if fresh else len(file.read_text(encoding="utf-8").splitlines())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    said = "; ".join([f"Python {platform.python_version()}", *versions])
    command = shlex.join(["python", "-m", "benchmarks.study", *sys.argv[1:]])
    with file.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        if fresh:
            writer.writerow(("run", "date", "command", "versions"))
        writer.writerow((number, datetime.date.today().isoformat(), command, said))
    return number
