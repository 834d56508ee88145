# SPDX-License-Identifier: Apache-2.0
"""The end of a run, site by site: the healthy sites, the outliers, and what accuracy is worth.

An outlier is a client whose norms are far above those of the median client. Numbers for a whole run
are means over the healthy sites, each on its validation data. Class counts come from confusion
matrices, which declearn's classification metrics write.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedclip.report.norms import norms_by_stage, outliers_of, unusual_norms
from fedclip.report.rows import listed, number, pooled, site_of
from fedclip.report.text import Report

_HIGHER = ("accuracy", "roc_auc", "f-score", "r2")
# A site does far worse than the others from this factor of the loss, or half of the accuracy, on.
_WORSE = 4.0


class Result(NamedTuple):
    """The end of one run; without sites for a run that failed."""

    sites: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    """The last loss and metrics of each site, on its own validation data."""
    outliers: Sequence[str] = ()
    clipped: float = math.nan
    """Share of the clients' steps or updates that were clipped."""
    confusions: Mapping[str, Sequence[Sequence[float]]] = MappingProxyType({})
    """Records of each site by class and predicted class, if they are known."""

    @property
    def healthy(self) -> list[str]:
        """The sites that are not outliers; all, if there is no other."""
        return [site for site in self.sites if site not in self.outliers] or [*self.sites]

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the healthy sites; NaN if one has no number."""
        return statistics.fmean(self.sites[s].get(metric, math.nan) for s in self.healthy)

    def classes(self, sites: Collection[str] = ()) -> tuple[float, float] | None:
        """Return the majority share and the balanced accuracy of some sites, if they are known.

        The first is the best accuracy of a constant prediction, in the mean over the sites. The
        second is the mean over classes of the share of their records that is predicted right.
        """
        chosen = sites or self.healthy
        matrices = [np.asarray(self.confusions[s]) for s in chosen if s in self.confusions]
        alike = len(matrices) == len(chosen) and len({matrix.shape for matrix in matrices}) == 1
        counts = [matrix.sum(axis=1) for matrix in matrices]
        if not alike or not all(count.sum() for count in counts):
            return None
        total = np.sum(matrices, axis=0)
        present = total.sum(axis=1) > 0
        recall = np.diag(total)[present] / total.sum(axis=1)[present]
        shares = np.mean([count / count.sum() for count in counts], axis=0)
        return float(shares.max()), float(recall.mean())

    def single(self) -> list[str]:
        """Return the sites that validate on one class only."""
        counts = {s: np.count_nonzero(np.sum(m, axis=1)) for s, m in self.confusions.items()}
        return [site for site, count in counts.items() if count == 1]

    def worse(self) -> dict[str, str]:
        """Return the sites that do far worse than the median one, and by how much as text."""
        texts: dict[str, str] = {}
        for metric, higher in (("loss", False), judged_by(self._metrics())):
            values = {site: metrics.get(metric, math.nan) for site, metrics in self.sites.items()}
            middle = statistics.median(values.values()) if values else math.nan
            for site, value in values.items() if len(values) > 2 and middle > 0 else ():
                if value <= middle / 2 if higher else value >= _WORSE * middle:
                    texts[site] = f"{metric} {number(value)}, median client {number(middle)}"
        return texts

    def findings(self) -> list[str]:
        """Return sentences on sites of one class, and on those that do far worse than others.

        Where norms show an outlier, it explains the metrics.
        """
        single, worse = self.single(), {} if self.outliers else self.worse()
        texts = [f"The validation data of {listed(single)} has only one class."] * bool(single)
        return texts + [f"{s}: {text}: check its labels and data." for s, text in worse.items()]

    def _metrics(self) -> set[str]:
        return set.intersection(*map(set, self.sites.values())) if self.sites else set()

    def in_words(self) -> str:
        """Return the metric and loss of the healthy sites, and those of the outliers, as text."""
        shared = self._metrics()
        if not shared:
            return ""
        metric, _ = judged_by(shared)
        names = [name for name in dict.fromkeys((metric, "loss")) if name in shared]
        text = ", ".join(f"{name} {number(self.mean(name))}" for name in names)
        if metric == "accuracy" and (known := self.classes()):
            text += f" (majority class {number(known[0])}, balanced {number(known[1])})"
        if len(self.healthy) < len(self.sites):
            text += f" (mean of {listed(self.healthy)})"
        for site in (site for site in self.outliers if site in self.sites):
            values = ", ".join(f"{name} {number(self.sites[site][name])}" for name in names)
            text += f"; outlier {site}: {values}"
        return text


def result_of(report: Report, experiment: str) -> Result:
    """Return the end of one run of a report; without sites' metrics, those of the server."""
    part, sites = report.only([experiment]), dict[str, dict[str, float]]()
    for curve in part.curves:
        sites.setdefault(site_of(curve.node), {})[curve.metric] = curve.last[1]
    servers = {site_of(node) for node in report.servers}
    clients = {site: metrics for site, metrics in sites.items() if site not in servers}
    rows = [row for row in part.whole if row.node not in report.servers]
    # What measures updates clips none of them.
    total = pooled(row.record for row in rows if row.name != "update-norms")
    shown = clients or sites or {"server": {}}
    matrices = {site_of(n): m for n, m in part.confusions.items() if site_of(n) in shown}
    clipped = total.clipped_share if total.steps else math.nan
    return Result(shown, outliers_of(unusual_norms(norms_by_stage(rows))), clipped, matrices)


def results_of(report: Report) -> dict[str, Result]:
    """Return the end of each run of a report."""
    return {run: result_of(report, run) for run in report.experiments}


def best_round(losses: Sequence[Mapping[str, float]], healthy: Collection[str]) -> int:
    """Return the place of the lowest mean loss over the healthy sites, of one entry a round."""
    means = [statistics.fmean(loss.get(site, math.nan) for site in healthy) for loss in losses]
    return min(range(len(means)), key=lambda i: (math.isnan(means[i]), means[i], i))


def judged_by(metrics: Collection[str]) -> tuple[str, bool]:
    """Return the metric that sites are judged by, and whether higher is better.

    Examples
    --------
    >>> judged_by(["loss", "precision", "accuracy"]), judged_by(["loss", "mse"])
    (('accuracy', True), ('loss', False))
    """
    names = [name for name in _HIGHER if name in metrics]
    return (names[0], True) if names else ("loss", False)
