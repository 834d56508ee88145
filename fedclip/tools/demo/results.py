# SPDX-License-Identifier: Apache-2.0
"""What came out of the demo: a table, what it says in words, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median

import numpy as np

from fedclip.report import Report
from fedclip.report.rows import Row
from fedclip.tools.compare import Outcome, compared, interval
from fedclip.tools.demo.data import SITES
from fedclip.tools.output import typed

__all__ = ["outcomes", "plot", "pulls", "sentences"]

GAIN = "gain over fixed-bound"


def outcomes(reports: Mapping[str, Report]) -> list[Outcome]:
    """Return accuracy and loss of each way, and the accuracies above those of the fixed bound.

    All ways have the same splits, so that gains vary less from split to split than accuracies do.
    """
    fixed = _accuracies(reports["fixed-bound"])["server"]
    gains = {
        way: [a - b for a, b in zip(_accuracies(report)["server"], fixed, strict=True)]
        for way, report in reports.items()
    }
    return [
        outcome._replace(values={**outcome.values, GAIN: interval(gains[outcome.name])})
        for outcome in compared(reports.items(), ("accuracy", "loss"))
    ]


def _accuracies(report: Report) -> dict[str, list[float]]:
    """Return the last accuracy of the server, and of each site on its own records, by split."""
    found: dict[str, list[float]] = {}
    for curve in sorted(report.curves):
        if curve.metric == "accuracy":
            found.setdefault(curve.node.rpartition("/")[2], []).append(curve.last[1])
    return found


def pulls(report: Report) -> list[list[float]]:
    """Return by split and round how many times as hard as the median site the odd one pulls.

    A site pulls as hard as its update is long after it was clipped.
    """
    norms = np.array(
        [
            [[_pull(row) for row in _updates(report, run, site)] for site in SITES]
            for run in report.experiments
        ]
    )
    found: list[list[float]] = (norms[:, -1] / np.median(norms, axis=1)).tolist()
    return found


def _updates(report: Report, run: str, site: str) -> tuple[Row, ...]:
    return report.select(f"{run}/{site}", "update-clip-client")


def _pull(row: Row) -> float:
    norm, limit = row.record.norm_median, row.record.limit
    assert norm is not None
    assert limit is not None
    return min(norm, limit)


def sentences(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield what the table and the picture say, in words."""
    none, fixed, adaptive = (_accuracies(report) for report in reports.values())
    yield (
        f"Without clipping, {SITES[-1]}'s updates outweigh the others', and "
        f"{fmean(none['server']):.1%} of the records are told right. "
        f"With a fixed bound, {fmean(fixed['server']):.1%} are; "
        f"with one that follows the updates, {fmean(adaptive['server']):.1%}."
    )
    low = min(SITES, key=lambda site: fmean(adaptive[site]))
    yield (
        f"The lowest of the sites is then {low}: {fmean(adaptive[low]):.1%} of its records, "
        f"{fmean(fixed[low]):.1%} with the fixed bound, {fmean(none[low]):.1%} without clipping."
    )
    bounds = [pulls(reports[way]) for way in ("fixed-bound", "adaptive-bound")]
    third = len(bounds[0][0]) // 3 or 1
    late = [median(value for run in found for value in run[-third:]) for found in bounds]
    yield (
        f"In the last {third} rounds, {SITES[-1]} pulls the model {late[0]:.1f} times as hard as "
        f"the median site with the fixed bound, and {late[1]:.1f} times with the adaptive one."
    )


def plot(folder: Path, reports: Mapping[str, Report]) -> str:
    """Draw the accuracies of all trainings, and the updates and bounds of the first split."""
    file = folder / "demo.png"
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "No plot without matplotlib: pip install matplotlib"
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    axes[2].sharey(axes[1])
    styles = dict(zip(reports, ("C3", "C1", "C0"), strict=True))
    for way, report in reports.items():
        for curve in report.curves:
            if curve.metric == "accuracy" and curve.node in report.servers:
                label = way if curve.node.startswith("seed-0/") else None
                axes[0].plot(*zip(*curve.points, strict=True), styles[way], alpha=0.7, label=label)
    axes[0].set(title="the model: accuracy, one line for each split", ylabel="accuracy")
    axes[0].legend(frameon=False, loc="lower right")
    for ax, way in zip(axes[1:], ("fixed-bound", "adaptive-bound"), strict=True):
        for site, line in zip(SITES, ("-", "--", "-"), strict=True):
            records = [row.record for row in _updates(reports[way], "seed-0", site)]
            numbers = [record.round for record in records]
            colour = "C3" if site == SITES[-1] else "0.45"
            norms = [record.norm_median for record in records]
            ax.plot(numbers, norms, line, color=colour, label=f"update of {site}")
        bounds = [record.limit for record in records]
        ax.plot(numbers, bounds, color=styles[way], linewidth=3, label="bound")
        ax.set(title=f"{way}: norms of the updates", ylabel="norm", yscale="log")
    axes[2].legend(frameon=False, loc="best")
    for ax in axes:
        ax.set_xlabel("round")
        ax.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return f"Accuracy, updates and bounds: {typed(file)}"
