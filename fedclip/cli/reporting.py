# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip report | compare``: show a run, and rank runs by the metric of each site.

Runs of one seed draw the same, so settings are compared seed by seed. An interval is Student's, of
95 %: ``mean ± t(0.975, n - 1) · s / √n`` for n values with sample standard deviation s. One value
has none. Outliers, whose norms are far above those of other clients, are shown but not counted.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedclip.cli.output import CsvFile, JsonFlag, Results, commands, fail, read, say, write
from fedclip.cli.privacy import NothingSpent, in_words, read_spent
from fedclip.cli.running import MARK
from fedclip.cli.suggest import advised
from fedclip.report import Report, number, page_of, printable
from fedclip.report.findings import Advice
from fedclip.report.results import Result, judged_by, results_of
from fedclip.report.rows import listed, plain_table, site_of

app = commands()

ByRound = Annotated[bool | None, typer.Option("--rounds/--summary", help="By round, or node.")]

NONE = "no clipping"
AS_IS = "as configured"
_SHOWN = 12
"""The number of nodes that fit on one screen."""


@app.command()
def report(
    folder: Results = None,
    csv: CsvFile = None,
    as_json: JsonFlag = False,
    rounds: ByRound = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page as well.")] = None,
) -> None:
    """Show what the clippers did in a run, by node and round."""
    if as_json and csv is not None:
        fail("give either --json or --csv", code=2)
    # What would keep the page from being written is found before what takes long.
    for package in ("jinja2", "vl_convert") if html is not None else ():
        if not find_spec(package):
            fail(f"--html needs {package}: pip install jinja2 vl-convert-python")
    result = read(folder)
    if as_json:
        print(json.dumps(result.as_dict()))
    elif csv is not None:
        result.write_csv(table := io.StringIO())
        write(csv, table.getvalue())
    else:
        show(result, rounds)
    if html is not None:
        write(html, page_of(result, _spent(result.folder), _advice(result)))


def show(report: Report, rounds: bool | None) -> None:
    """Print the answer, what was measured, and the table.

    None of `rounds` shows a line for each node: of many nodes, the outliers and some others.
    """
    results = results_of(report)
    if advice := _advice(report):
        say(advice.answer)
    for run, result in results.items():
        ends = [curve.last[0] for curve in report.only([run]).curves]
        if ends and (text := result.in_words()):
            # Without records, nothing says in which round an evaluation was.
            last = f"round {max(ends)}" if report.rows else "the last evaluation"
            say(f"{run}: " * (len(results) > 1) + f"After {last}: {text}.")
    say(*report.in_words())
    nodes = [*dict.fromkeys(row.node for row in report.whole)]
    if rounds is None and len(nodes) > _SHOWN:
        odd = {name for result in results.values() for name in result.outliers}
        shown = sorted(nodes, key=lambda node: site_of(node) not in odd)[:_SHOWN]
        say(f"{_SHOWN} of {len(nodes)} nodes are shown; --summary shows all.")
        rows = tuple(row for row in report.rows if row.node in shown)
        report = dataclasses.replace(report, rows=rows)
    if report.rows:
        console().print(report.table(bool(rounds)))
    for lines in _spent(report.folder).values() if report.private else ():
        say(*lines)


def console() -> Console:
    """Return a console for other people's text; a pipe or a file, which has no width, is wide."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)


def _advice(report: Report) -> Advice | None:
    """Return what is advised after the run of one federation."""
    if len(report.experiments) != 1:
        return None
    try:
        return advised(report, *report.experiments)
    except (TypeError, ValueError) as exc:
        # A damaged file may hold anything.
        say(f"fedclip: no advice: {exc}", err=True)
        return None


def _spent(folder: Path) -> dict[str, list[str]]:
    """Return what each ledger, and each server with noise, has spent, in lines of text."""
    try:
        # Without the lines of a ledger, which tell how many records a client has.
        return {s.where: [*in_words({**s.cost(), "entries": ()})] for s in read_spent(folder)}
    except NothingSpent:
        return {}
    except ValueError as exc:
        return {"": [f"the spent budget is unknown: {exc}"]}


# -- a ranking ------------------------------------------------------------------------------------
@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    as_json: JsonFlag = False,
) -> None:
    """Rank finished runs by the metric of each site.

    The first folder is what the others are compared with.

    Each folder is a setting; the runs below it are its seeds. The folder that `tune` writes stands
    for all its settings.
    """
    named: dict[str, Path] = {}
    for folder in folders:
        inner = sorted({mark.parent.parent for mark in folder.glob(f"*/*/{MARK}")}, key=str)
        for path in inner or [folder]:
            name = path.resolve().name
            named[str(path) if name in named else name] = path
    resolved = {path.resolve() for path in named.values()}
    results: dict[str, dict[str, Result]] = {}
    for name, path in named.items():
        runs = results_of(read(path, excluded=resolved))
        results[name] = {run.partition("/")[0]: result for run, result in runs.items()}
    show_ranking(Ranking(results, next(iter(results))), "fedclip-compare/2", as_json)


def show_ranking(ranking: Ranking, schema: str, as_json: bool) -> None:
    """Print a ranking."""
    if as_json:
        print(json.dumps({"schema": schema, **ranking.as_dict()}))
        return
    for table, caption in ranking.tables():
        console().print(table)
        say(caption)
        typer.echo()
    say(ranking.answer())


def interval(values: Iterable[float]) -> tuple[float, float | None]:
    """Return mean and half of the 95 % interval; None for a single value.

    Examples
    --------
    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    >>> interval([1.0])
    (1.0, None)
    """
    # Beyond twelve digits there is nothing but errors of rounding, which are no spread.
    values = [round(value, 12) for value in values] or [math.nan]
    mean = statistics.fmean(values)
    if len(set(values)) == 1:
        # The mean may be off by its last digit.
        return mean, 0.0 if len(values) > 1 else None
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
        self._sign, self._worse = (1, "lowest") if self.higher else (-1, "highest")
        odd = [site for run in runs for site in run.outliers]
        healthy = [site for site in self.sites if 2 * odd.count(site) < len(runs)]
        self.counted = self.counted or healthy or self.sites
        self.outliers = [site for site in self.sites if site not in self.counted]

    def means(self, name: str, *sites: str) -> dict[str, float]:
        """Return the mean over some sites, by default those that count, of each seed.

        It is NaN if the loss is: a diverged model may still have an accuracy.
        """
        means = {}
        for seed, run in self.results[name].items():
            metrics = [run.sites.get(site, {}) for site in sites or self.counted]
            values = (m.get(self.metric, math.nan) + 0.0 * m.get("loss", 0.0) for m in metrics)
            means[seed] = statistics.fmean(values)
        return means

    def mean(self, name: str, *sites: str) -> tuple[float, float | None]:
        """Return mean and half of the interval over seeds."""
        return interval(self.means(name, *sites).values())

    def gain(self, name: str, over: str, *sites: str) -> tuple[float, float | None]:
        """Return the mean difference between two settings over the seeds of both, and half."""
        means, other = self.means(name, *sites), self.means(over, *sites)
        return interval(means[seed] - other[seed] for seed in means if seed in other)

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
        keys = {n: (bool(self.lost(n)), -self._sign * self.mean(n)[0]) for n in self.results}
        return sorted(keys, key=keys.__getitem__)

    @property
    def alike(self) -> bool:
        """Whether all seeds of the reference gave equal results, so nothing was drawn."""
        first, *others = (run.sites for run in self.results[self.reference].values())
        return bool(others) and all(sites == first for sites in others)

    @property
    def _others(self) -> list[str]:
        """The settings without the reference that did not diverge, best first."""
        return [n for n in self.order() if n != self.reference and not self.lost(n)]

    @property
    def winner(self) -> str:
        """The best of those that beat the reference by more than the interval; or ""."""
        over, diverged = self.reference, bool(self.lost(self.reference))
        won = [name for name in self._others if diverged or self.clearly(name, over)]
        return won[0] if won and not self.alike else ""

    def answer(self) -> str:
        """Return the decision, in sentences."""
        first, over, others = self.winner, self.reference, self._others
        seeds = len(self.results[over])
        runs = f"{seeds} seeds" if seeds > 1 else "one seed"
        of = f"(mean {self.metric} of {listed(self.counted)}, over {runs})"
        if self.alike:
            text = f"No winner: the first seeds of {over} gave equal results, so batches are not"
            advice = "To draw batches at random, set shuffle = true in [run.training]."
            return f"{text} random. {advice}"
        if first and self.lost(over):
            value = f"{shown(*self.mean(first))} {of}"
            return f"With {over}, the model diverged; {first} is the best of the others: {value}."
        if first:
            text = f"{first} is better than {over} by more than its interval: "
            text += f"{self.against(first)} {of}. The {self._worse} site with it is "
            text += f"{self._worst(first)}; with {over} {self._worst(over)}."
            hurt = [s for s in self.counted if self.clearly(over, first, s, alike=True)]
            return text + f" But {listed(hurt)} does worse by more than the interval." * bool(hurt)
        if even := [n for n in others if self.clearly(n, over, alike=True)]:
            same = f"{even[0]} differs from {over} by the same amount with all seeds"
            more = "use more seeds, or more validation records"
            return f"No winner: {same}, {self.against(even[0])} {of}: {more}."
        text = f"No setting is better than {over} by more than its interval {of}."
        text += "".join(f" The nearest is {n}: {self.against(n)}." for n in others[:1])
        return text + " One run has no interval: repeat with `fedclip tune`." * (seeds < 2)

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

    def classes(self, name: str) -> tuple[float | None, float | None]:
        """Return majority share and balanced accuracy of a setting over seeds, if known."""
        pairs = [run.classes(self.counted) for run in self.results[name].values()]
        known = [pair for pair in pairs if pair]
        if not known or len(known) < len(pairs):
            return None, None
        shares, recalls = zip(*known, strict=True)
        return statistics.fmean(shares), statistics.fmean(recalls)

    def tables(self) -> list[tuple[Table, str]]:
        """Return the ranking, and the sites with the best of the others, each with its caption."""
        order, over = self.order(), self.reference
        note = f"Mean {self.metric} over seeds on the validation data of {listed(self.counted)} "
        note += f"± 95 % interval (Student's); differences to {over}, paired by seed."
        note += f" Not counted, as outliers: {listed(self.outliers)}." * bool(self.outliers)
        majority, _ = self.classes(over)
        if self.metric == "accuracy" and majority is not None:
            recalls = {name: self.classes(name)[1] for name in order}
            note += f" The majority class alone gives {number(majority)}; balanced accuracy: "
            note += ", ".join(f"{n} {number(x)}" for n, x in recalls.items() if x is not None) + "."
        heads = ["Setting", f"Mean {self.metric}", "Difference", "Clipped", f"{self._worse} site"]
        best = [n for n in (self.winner, *order) if n not in ("", over)][:1]
        sites = [
            [site + " (not counted)" * (site in self.outliers)]
            + [number(self.mean(name, site)[0]) for name in (over, *best)]
            + [self.against((over, *best)[-1], site)]
            for site in self.sites
        ]
        return [
            (_table("Ranking", heads, map(self._row, order)), note),
            (_table("Sites", ["Site", over, *best, "Difference"], sites), f"The {self.metric}."),
        ]

    def as_dict(self) -> dict[str, object]:
        """Return plain values, with None instead of NaN and infinity."""

        def plain(name: str, *sites: str) -> dict[str, float | None]:
            numbers = (*self.mean(name, *sites), *self.gain(name, self.reference, *sites))
            names = ("mean", "half_width", "difference", "difference_half_width")
            return {key: _finite(x) for key, x in zip(names, numbers, strict=True)}

        settings = [
            {"name": name, "seeds": [*self.results[name]]}
            | {"diverged": self.lost(name), "clipped": _finite(self._clipped(name)), **plain(name)}
            | dict(zip(("majority_share", "balanced_accuracy"), self.classes(name), strict=True))
            | {"sites": {site: plain(name, site) for site in self.sites}}
            for name in self.order()
        ]
        names = ("metric", "higher", "reference", "sites", "counted", "winner")
        facts = {key: getattr(self, key) for key in names}
        return facts | {"answer": self.answer(), "settings": settings}


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = plain_table(title, heads[:1], heads[1:])
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    for row in rows:
        table.add_row(*map(Text, map(printable, row)))
    return table


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
