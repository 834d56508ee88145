# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: what came out at the end, with means and intervals over seeds.

A 95 % interval is Student's: ``mean ± t(0.975, n - 1) · s / √n`` for n runs with sample standard
deviation s. One run has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from fedclip.report import Report, number, pooled, printable
from fedclip.report.rows import grouped, site_of
from fedclip.report.table import plain_table

_ENDS = ("rounds", "clipped", "largest norm", "worst site")
_CAPTION = "The last round of each run; mean ± 95 % interval (Student's) where there are several."
_HIGHER = ("accuracy", "roc_auc", "f-score", "r2")


class Outcome(NamedTuple):
    """One setting: how many runs it has, and mean and half-width of the interval by measure."""

    name: str
    runs: int
    values: Mapping[str, tuple[float, float | None]]
    nonfinite: Mapping[str, int]
    """In how many runs the last value was NaN or infinite: the others alone have no fair mean."""
    worst: str = ""
    """The site with the worst mean, and that."""

    def as_dict(self) -> dict[str, object]:
        """Return plain values."""
        values = {key: {"mean": m, "half_width": h} for key, (m, h) in self.values.items()}
        return self._asdict() | {"values": values}


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and half of the 95 % interval; None for a single value.

    Examples
    --------
    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    >>> interval([1.0])
    (1.0, None)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    if len(set(values)) == 1:
        return mean, 0.0  # the mean may be off by its last digit
    # SciPy comes with scikit-learn, which declearn needs.
    from scipy.stats import sem, t

    return mean, float(t.ppf(0.975, len(values) - 1) * sem(values))


def compared(reports: Iterable[tuple[str, Report]], only: Collection[str] = ()) -> list[Outcome]:
    """Return the outcome of each setting, whose runs are the experiments of its report.

    If measures are named, `only` these are in it.
    """
    outcomes = []
    for name, report in reports:
        runs = [_run(report, experiment) for experiment in report.experiments]
        found: dict[str, list[float]] = {}
        for key, value in (item for run in runs for item in run.items()):
            if key in only or not only:
                found.setdefault(key, []).append(value)
        lost = {key: sum(map(math.isnan, values)) for key, values in found.items()}
        whole = {key: interval(values) for key, values in found.items() if not lost[key]}
        worst = "" if only else _worst(report)
        lost = {key: count for key, count in lost.items() if count}
        outcomes.append(Outcome(name, len(runs), whole, lost, worst))
    return outcomes


def by_site(report: Report, experiment: str) -> dict[str, dict[str, float]]:
    """Return the last loss and metrics of each site of a run, on its own validation data."""
    found: dict[str, dict[str, float]] = {}
    for curve in report.curves:
        if curve.experiment == experiment and curve.node not in report.servers:
            found.setdefault(site_of(curve.node), {})[curve.metric] = curve.last[1]
    return found


def judged_by(metrics: Collection[str]) -> tuple[str, bool]:
    """Return the metric that sites are judged by, and whether higher is better.

    Examples
    --------
    >>> judged_by(["loss", "precision", "accuracy"]), judged_by(["loss", "mse"])
    (('accuracy', True), ('loss', False))
    """
    names = [name for name in _HIGHER if name in metrics]
    return (names[0], True) if names else ("loss", False)


def _worst(report: Report) -> str:
    """Return the site with the worst mean over runs, in words; "" if there are not two."""
    curves = [curve for curve in report.curves if curve.node not in report.servers]
    metric, higher = judged_by({curve.metric for curve in curves})
    chosen = (curve for curve in curves if curve.metric == metric)
    sites = grouped(chosen, lambda curve: site_of(curve.node))
    means = {site: interval([curve.last[1] for curve in own]) for site, own in sites.items()}
    # Nothing is worse than what is no number.
    ranked = sorted(means, key=lambda s: (not math.isnan(m := means[s][0]), m if higher else -m))
    return f"{ranked[0]}: {metric} {shown(*means[ranked[0]])}" if ranked[1:] else ""


def shown(mean: float, half: float | None) -> str:
    """Return a mean and half of its interval, in words; no digit is finer than the interval.

    Examples
    --------
    >>> shown(0.955, 0.5812), shown(512.3, 124.0), shown(0.625, 0.0), shown(0.625, 1e-5)
    ('0.95 ± 0.58', '510 ± 120', '0.625 ± 0', '0.625 ± <0.0001')
    """
    if half is None or not math.isfinite(half):
        return number(mean)
    if half < 1e-4 and (half == 0 or abs(mean) > 1e-3):
        return f"{number(mean)} ± {'<0.0001' if half else 0}"
    half = float(f"{half:.2g}")
    return f"{number(round(mean, 1 - math.floor(math.log10(half))) + 0.0)} ± {number(half)}"


def _run(report: Report, experiment: str) -> dict[str, float]:
    """Return the last loss and metrics of a run, and what was clipped on its clients."""
    found = {}
    for curve in report.curves:
        if curve.node in report.servers and curve.experiment == experiment:
            found[curve.metric] = curve.last[1]
    own = [row for row in report.whole if row.experiment == experiment]
    # What measures updates clips none of them.
    rows = [row for row in own if row.node not in report.servers and row.name != "update-norms"]
    whole = pooled(row.record for row in rows)
    ends: dict[str, float] = {"rounds": max(row.record.round for row in own)} if own else {}
    if rows:
        ends["clipped"] = whole.clipped_share
    if whole.norm_max is not None:
        ends["largest norm"] = whole.norm_max
    loss_first = sorted(found.items(), key=lambda item: item[0] != "loss")
    return {**dict(loss_first), **ends}


def table_of(outcomes: Sequence[Outcome], name: str = "Comparison") -> dict[str, Any]:
    """Return the table of these settings as text: its name, caption, heads and rows."""
    keys = [key for outcome in outcomes for key in (*outcome.nonfinite, *outcome.values)]
    keys += ["worst site"] * any(outcome.worst for outcome in outcomes)
    keys = sorted(dict.fromkeys(keys), key=lambda key: (key in _ENDS, key != "loss"))
    rows = [[o.name, str(o.runs), *(_cell(o, key) for key in keys)] for o in outcomes]
    return {"name": name, "caption": _CAPTION, "heads": ["Setting", "Runs", *keys], "rows": rows}


def drawn(table: Mapping[str, Any]) -> Table:
    """Return a table for a terminal; the first column has names, and the last may have."""
    found = plain_table(table["name"], table["heads"][:1], table["heads"][1:])
    found.columns[-1].no_wrap, found.columns[-1].overflow = False, "fold"
    for row in table["rows"]:
        found.add_row(*map(Text, map(printable, row)))
    return found


def _cell(outcome: Outcome, key: str) -> str:
    if key == "worst site":
        return outcome.worst or "-"
    if key in outcome.nonfinite:
        return "NaN" if outcome.runs == 1 else f"NaN in {outcome.nonfinite[key]}"
    if key not in outcome.values:
        return "-"
    mean, half = outcome.values[key]
    if key == "rounds":
        return f"{mean:g}"
    if key == "clipped":
        return f"{mean:.1%}" + ("" if half is None else f" ± {half:.1%}")
    return shown(mean, half)
