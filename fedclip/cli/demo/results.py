# SPDX-License-Identifier: Apache-2.0
"""What came out of the demo: a table, what it says in words, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedclip.cli.demo.data import SITES
from fedclip.cli.output import typed
from fedclip.cli.ranking import Ranking
from fedclip.report import Report
from fedclip.report.results import result_of


def ranked(reports: Mapping[str, Report]) -> Ranking:
    """Return the ranking of the ways against the fixed bound, over the same splits.

    All sites count: what they validate with has the right unit.
    """
    results = {
        way: {run: result_of(report, run) for run in report.experiments}
        for way, report in reports.items()
    }
    return Ranking(results, "fixed-bound", SITES)


def pulls(report: Report) -> NDArray[np.float64]:
    """Return by split and round how many times as hard as the median site the odd one pulls.

    A site pulls as hard as its update is long after it was clipped.
    """
    runs = report.experiments
    norms = np.array([[_updates(report, run, site).min(axis=0) for site in SITES] for run in runs])
    return np.asarray(norms[:, -1] / np.median(norms, axis=1))


def _updates(report: Report, run: str, site: str) -> NDArray[np.float64]:
    """Return the norms of a site's updates, and their bounds, by round."""
    records = [row.record for row in report.select(f"{run}/{site}", "update-clip-client")]
    return np.array([[r.norm_median for r in records], [r.limit for r in records]], np.float64)


def sentences(reports: Mapping[str, Report], ranking: Ranking) -> Iterator[str]:
    """Yield what the table and the picture show."""
    found = (pulls(reports[way]) for way in ("fixed-bound", "adaptive-bound"))
    late = [np.median(some[:, some.shape[1] * 2 // 3 :]) for some in found]
    yield (
        f"Without clipping, {SITES[-1]}'s updates outweigh the others'. In the last third of the "
        f"rounds, it pulls the model {late[0]:.1f} times as hard as the median site with the fixed "
        f"bound, and {late[1]:.1f} times with the adaptive one."
    )
    low = ranking.worst([*reports][-1])
    none, fixed, adaptive = (ranking.mean(way, low)[0] for way in reports)
    yield (
        f"With the adaptive bound, the lowest site is {low}: accuracy {adaptive:.1%}, "
        f"with the fixed bound {fixed:.1%}, without clipping {none:.1%}."
    )


def plot(folder: Path, reports: Mapping[str, Report]) -> str:
    """Draw the accuracies of all trainings, and the updates and bounds of the first split."""
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
            norms, bounds = _updates(reports[way], "seed-0", site)
            numbers = range(1, len(norms) + 1)
            colour = "C3" if site == SITES[-1] else "0.45"
            ax.plot(numbers, norms, line, color=colour, label=f"update of {site}")
        ax.plot(numbers, bounds, color=styles[way], linewidth=3, label="bound")
        ax.set(title=f"{way}: norms of the updates", ylabel="norm", yscale="log")
    axes[2].legend(frameon=False, loc="best")
    for ax in axes:
        ax.set_xlabel("round")
        ax.grid(alpha=0.3)
    figure.savefig(folder / "demo.png", dpi=120)
    return f"Accuracy, updates and bounds: {typed(folder / 'demo.png')}"
