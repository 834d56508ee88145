# SPDX-License-Identifier: Apache-2.0
"""Ranks settings by the metric of each site, over seeds, against one of them.

Runs of one seed draw the same, so settings are compared seed by seed. An interval is Student's, of
95 %: ``mean ± t(0.975, n - 1) · s / √n`` for n values with sample standard deviation s. One value
has none. Outliers, whose norms are far above those of other clients, are shown but not counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from fedclip.report import number, printable
from fedclip.report.results import Result, judged_by
from fedclip.report.rows import plain_table

NONE = "no clipping"
AS_IS = "as configured"
_CLASSES = ("majority_share", "balanced_accuracy")


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


def shown(mean: float, half: float | None) -> str:
    """Return a mean and half of its interval as text; no digit is finer than the interval.

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


@dataclass
class Ranking:
    """The results of each setting so far.

    Attributes
    ----------
    results
        By setting and seed.
    reference
        The setting that the others are compared with.
    counted
        The sites that the ranking counts; by default all but those that are outliers in at least
        half of the runs.
    """

    results: dict[str, dict[str, Result]]
    reference: str
    counted: Sequence[str] = ()

    def __post_init__(self) -> None:
        runs = [run for seeds in self.results.values() for run in seeds.values() if run.sites]
        self.sites = sorted(set.intersection(*(set(run.sites) for run in runs)))
        metrics = (set(run.sites[site]) for run in runs for site in self.sites)
        self.metric, self.higher = judged_by(set.intersection(*metrics))
        odd = [site for run in runs for site in run.outliers]
        healthy = [site for site in self.sites if 2 * odd.count(site) < len(runs)]
        self.counted = self.counted or healthy or self.sites
        self.outliers = [site for site in self.sites if site not in self.counted]

    def means(self, name: str, *sites: str) -> dict[str, float]:
        """Return the mean over some sites, by default those that count, of each seed.

        It is NaN if the loss is: a diverged model may still have an accuracy.
        """

        def value(own: Mapping[str, float]) -> float:
            return own.get(self.metric, math.nan) + 0.0 * own.get("loss", 0.0)

        return {
            seed: statistics.fmean(value(run.sites.get(s, {})) for s in sites or self.counted)
            for seed, run in self.results[name].items()
        }

    def mean(self, name: str, *sites: str) -> tuple[float, float | None]:
        """Return mean and half of the interval over seeds."""
        return _interval(self.means(name, *sites).values())

    def gain(self, name: str, over: str, *sites: str) -> tuple[float, float | None]:
        """Return the mean difference between two settings over the seeds of both, and half."""
        means, other = self.means(name, *sites), self.means(over, *sites)
        return _interval(means[seed] - other[seed] for seed in means if seed in other)

    def clearly(self, name: str, over: str, *sites: str, alike: bool = False) -> bool:
        """Whether it is better by more than the interval, and not by the same with each seed.

        Few records often give the same by chance; `alike` allows it.
        """
        mean, half = self.gain(name, over, *sites)
        return half is not None and self._sign * mean > half and (half > 0 or alike)

    def lost(self, name: str) -> list[str]:
        """Return the seeds with which a site that counts has no number."""
        return [seed for seed, mean in self.means(name).items() if math.isnan(mean)]

    def worst(self, name: str) -> str:
        """Return the site that counts with the worst mean; nothing is worse than NaN."""
        means = {site: self.mean(name, site)[0] for site in self.counted}
        return min(means, key=lambda site: (not math.isnan(means[site]), self._sign * means[site]))

    def order(self) -> list[str]:
        """Return the settings, best first; those that failed or diverged come last."""

        def place(name: str) -> tuple[bool, float]:
            return bool(self.lost(name)), -self._sign * self.mean(name)[0]

        return sorted(self.results, key=place)

    @property
    def _sign(self) -> int:
        return 1 if self.higher else -1

    @property
    def alike(self) -> bool:
        """Whether all seeds of the reference gave equal results, so nothing was drawn."""
        first, *others = (run.sites for run in self.results[self.reference].values())
        return bool(others) and all(sites == first for sites in others)

    @property
    def winner(self) -> str:
        """The best of those that beat the reference by more than the interval; or ""."""
        over, diverged = self.reference, bool(self.lost(self.reference))
        fit = [name for name in self.order() if name != over and not self.lost(name)]
        won = [name for name in fit if diverged or self.clearly(name, over)]
        return won[0] if won and not self.alike else ""

    def answer(self) -> str:
        """Return the decision, in sentences."""
        first, over, seeds = self.winner, self.reference, len(self.results[self.reference])
        others = [name for name in self.order() if name != over and not self.lost(name)]
        runs = f"{seeds} seeds" if seeds > 1 else "one seed"
        of = f"(mean {self.metric} of {_listed(self.counted)}, over {runs})"
        if self.alike:
            ahead = [n for n in others if self._sign * self.gain(n, over)[0] > 0][:1]
            text = f"No winner: the first seeds of {over} gave equal results, so batches are not "
            text += "random, and one run of each setting has no interval. "
            text += "".join(f"{n} is ahead by {self.against(n)} {of}. " for n in ahead)
            return text + "To draw batches at random, set shuffle = true in [run.training]."
        if first and self.lost(over):
            value = shown(*self.mean(first))
            return (
                f"With {over}, the model diverged; {first} is the best of the others: {value} {of}."
            )
        if first:
            text = f"{first} is better than {over} by more than its interval: "
            text += f"{self.against(first)} {of}. The {self._worse} site with it is "
            text += f"{self._worst(first)}; with {over} {self._worst(over)}."
            text += "".join(f" Outlier {s}: {self.against(first, s)}." for s in self.outliers[:5])
            hurt = [s for s in self.counted if self.clearly(over, first, s, alike=True)]
            return text + f" But {_listed(hurt)} does worse by more than the interval." * bool(hurt)
        even = [n for n in others if self.clearly(n, over, alike=True)]
        if even:
            return (
                f"No winner: {even[0]} differs from {over} by the same amount with all seeds, "
                f"{self.against(even[0])} {of}: use more seeds, or more validation records."
            )
        text = f"Nothing is better than {over} by more than its interval {of}."
        text += "".join(f" The nearest is {n}: {self.against(n)}." for n in others[:1])
        return text + " One run has no interval: repeat with `fedclip tune`." * (seeds < 2)

    @property
    def _worse(self) -> str:
        return "lowest" if self.higher else "highest"

    def against(self, name: str, *sites: str) -> str:
        """Return the difference to the reference as text."""
        mean, half = self.gain(name, self.reference, *sites)
        if name == self.reference or math.isnan(mean):
            return "-"
        text = shown(mean, half)
        return text if text.startswith("-") else f"+{text}"

    def _worst(self, name: str) -> str:
        return f"{(site := self.worst(name))}, {shown(*self.mean(name, site))}"

    def _row(self, name: str) -> list[str]:
        lost, clipped = len(self.lost(name)), self._clipped(name)
        mean = f"NaN in {lost}" if lost and self.results[name] else shown(*self.mean(name))
        share = "-" if math.isnan(clipped) else f"{clipped:.0%}"
        return [name, mean, self.against(name), share, self._worst(name)]

    def _clipped(self, name: str) -> float:
        return statistics.fmean(run.clipped for run in self.results[name].values())

    def classes(self, name: str) -> tuple[float, float] | None:
        """Return majority share and balanced accuracy of a setting over seeds, if known."""
        pairs = [run.classes(self.counted) for run in self.results[name].values()]
        known = [pair for pair in pairs if pair]
        shares, recalls = zip(*known, strict=True) if known else ((), ())
        full = known and len(known) == len(pairs)
        return (statistics.fmean(shares), statistics.fmean(recalls)) if full else None

    def tables(self) -> list[dict[str, Any]]:
        """Return the ranking, and the sites with the best of the others, as text."""
        note = f"Mean {self.metric} over seeds on the validation data of {_listed(self.counted)} "
        note += f"± 95 % interval (Student's); differences to {self.reference}, paired by seed."
        note += f" Not counted, as outliers: {_listed(self.outliers)}." * bool(self.outliers)
        known = {name: self.classes(name) for name in self.order()}
        if self.metric == "accuracy" and (both := known[self.reference]):
            note += f" The majority class alone gives {number(both[0])}; balanced accuracy: "
            note += ", ".join(f"{n} {number(pair[1])}" for n, pair in known.items() if pair) + "."
        best = [n for n in (self.winner, *self.order()) if n not in ("", self.reference)][:1]
        pair = [self.reference, *best]
        sites = [
            [site + " (not counted)" * (site in self.outliers)]
            + [number(self.mean(name, site)[0]) for name in pair]
            + [self.against(pair[-1], site)]
            for site in self.sites
        ]
        heads = ["Setting", f"Mean {self.metric}", "Difference", "Clipped", f"{self._worse} site"]
        tables = (
            ("Ranking", note, heads, [self._row(name) for name in self.order()]),
            ("Sites", f"The {self.metric} of each.", ["Site", *pair, "Difference"], sites),
        )
        return [dict(zip(("name", "caption", "heads", "rows"), t, strict=True)) for t in tables]

    def as_dict(self) -> dict[str, object]:
        """Return plain values, with None instead of NaN and infinity."""

        def plain(name: str, *sites: str) -> dict[str, float | None]:
            numbers = (*self.mean(name, *sites), *self.gain(name, self.reference, *sites))
            names = ("mean", "half_width", "difference", "difference_half_width")
            return {key: _finite(x) for key, x in zip(names, numbers, strict=True)}

        settings = [
            {"name": name, "seeds": [*self.results[name]]}
            | {"diverged": self.lost(name), "clipped": _finite(self._clipped(name)), **plain(name)}
            | dict(zip(_CLASSES, self.classes(name) or (None, None), strict=True))
            | {"sites": {site: plain(name, site) for site in self.sites}}
            for name in self.order()
        ]
        names = ("metric", "higher", "reference", "sites", "counted", "winner")
        facts = {key: getattr(self, key) for key in names}
        return facts | {"answer": self.answer(), "settings": settings}


def drawn(table: Mapping[str, Any]) -> Table:
    """Return a table for a terminal."""
    result = plain_table(table["name"], table["heads"][:1], table["heads"][1:])
    result.columns[-1].no_wrap, result.columns[-1].overflow = False, "fold"
    for row in table["rows"]:
        result.add_row(*map(Text, map(printable, row)))
    return result


def _interval(values: Iterable[float]) -> tuple[float, float | None]:
    # Beyond twelve digits there is nothing but errors of rounding, which are no spread.
    return interval([round(value, 12) for value in values] or [math.nan])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _listed(names: Sequence[str]) -> str:
    if len(names) > 8:
        return f"{len(names)} sites"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
