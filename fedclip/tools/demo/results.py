# SPDX-License-Identifier: Apache-2.0
"""What came out of the demo: a table, what it says in words, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fedclip.report import Report
from fedclip.report.rows import grouped, site_of
from fedclip.tools.compare import Outcome, compared, interval
from fedclip.tools.demo.data import SITES
from fedclip.tools.output import typed

GAIN = "gain over fixed-bound"


def outcomes(reports: Mapping[str, Report]) -> list[Outcome]:
    """Return accuracy and loss of each way, and the accuracies above those of the fixed bound.

    All ways have the same splits, so that gains vary less from split to split than accuracies do.
    """
    found = {way: _accuracies(report)["server"] for way, report in reports.items()}
    gains = {way: np.subtract(some, found["fixed-bound"]).tolist() for way, some in found.items()}
    return [
        outcome._replace(values={**outcome.values, GAIN: interval(gains[outcome.name])})
        for outcome in compared(reports.items(), ("accuracy", "loss"))
    ]


def _accuracies(report: Report) -> dict[str, list[float]]:
    """Return the last accuracy of the server, and of each site on its own records, by split."""
    curves = (curve for curve in sorted(report.curves) if curve.metric == "accuracy")
    return {
        site: [curve.last[1] for curve in own]
        for site, own in grouped(curves, lambda curve: site_of(curve.node)).items()
    }


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


def sentences(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield what the table and the picture say, in words."""
    found = (pulls(reports[way]) for way in ("fixed-bound", "adaptive-bound"))
    late = [np.median(some[:, some.shape[1] * 2 // 3 :]) for some in found]
    yield (
        f"Without clipping, {SITES[-1]}'s updates outweigh the others'. In the last third of the "
        f"rounds, it pulls the model {late[0]:.1f} times as hard as the median site with the fixed "
        f"bound, and {late[1]:.1f} times with the adaptive one."
    )
    sites = [_accuracies(report) for report in reports.values()]
    low = min(SITES, key=lambda site: fmean(sites[-1][site]))
    none, fixed, adaptive = (fmean(site[low]) for site in sites)
    yield (
        f"The lowest of the sites with the adaptive bound is {low}: {adaptive:.1%} of its records "
        f"are told right, {fixed:.1%} with the fixed bound, {none:.1%} without clipping."
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
