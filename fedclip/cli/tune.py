# SPDX-License-Identifier: Apache-2.0
"""Try settings of a configuration over seeds, and rank them by the metric of each site.

The settings are named, or those that `suggest` proposes by the norms of the first runs, which are
those without clipping. Settings that failed or diverged get no more seeds.

Runs of one seed draw the same, so settings are compared seed by seed. An interval is Student's, of
95 %: ``mean ± t(0.975, n - 1) · s / √n`` for n values with sample standard deviation s. One value
has none. Outliers, whose norms are far above those of other clients, are shown but not counted.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from rich.table import Table
from rich.text import Text

from fedclip.cli.output import fail
from fedclip.cli.running import Planned, planned_run
from fedclip.cli.suggest import advised, modules_of, rewritten
from fedclip.core.parameters import Config
from fedclip.core.toml import value_of
from fedclip.errors import ToolError, nearest
from fedclip.report import number, printable, read_report
from fedclip.report.findings import Advice, Lines, Proposal
from fedclip.report.norms import BY_NORM, UPDATES
from fedclip.report.results import Result, judged_by, result_of
from fedclip.report.rows import listed
from fedclip.report.table import plain_table

NONE = "no clipping"
AS_IS = "as configured"


# -- the ranking of settings ----------------------------------------------------------------------
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
            return (
                f"No winner: the first seeds of {over} gave equal results, so batches are not "
                "random. To draw batches at random, set shuffle = true in [run.training]."
            )
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
        text = f"Nothing is better than {over} by more than its interval {of}."
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
            (_table("Sites", ["Site", over, *best, "Difference"], sites), f"The {self.metric} of each."),
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


# -- settings of a configuration ------------------------------------------------------------------
def unclipped(text: str) -> tuple[str, bool]:
    """Return a configuration whose clippers by norm only measure, and whether it had any.

    Raises
    ------
    ValueError
        If it cannot be changed, or trains by DP-SGD.
    """
    before: Config = tomlkit.parse(text)
    modules = [name for name, _, _ in modules_of(before)]
    if "sample-clip" in modules or "privacy" in before.get("run", {}):
        raise ValueError(
            "DP-SGD records no norms, and each run would spend budget: plan its limit with "
            "`fedclip privacy calibrate`"
        )
    measures: Lines = {side: ("no-op", {}) for side in ("client_opt", "server_opt")}
    document: Config = tomlkit.parse(rewritten(text, Proposal("step.none", measures)))
    clipped = any(_clips(name) for name in modules)
    for name, holder, place in list(modules_of(document))[::-1]:
        if _clips(name):
            del holder[place]
    optim = document["optim"]
    aggregator = optim.get("aggregator", "averaging")
    config = {"name": aggregator} if isinstance(aggregator, str) else aggregator
    if config.get("name") == "clipped-averaging":
        steps = config.get("weights") == "steps"
        optim["aggregator"] = {"name": "averaging", "steps_weighted": steps}
        clipped = True
    return str(tomlkit.dumps(document)), clipped


def _clips(name: str) -> bool:
    """Whether a module clips by norm, or is the counterpart of one that does."""
    clippers = BY_NORM - {"no-op"} | {"update-clip", *UPDATES}
    declearns = ("l2-clipping", "l2-global-clipping")
    return name in declearns or name.removesuffix("-server") in clippers


def set_value(document: Config, key: str, value: object) -> None:
    """Set a value by the way through the sections, or by the name of a module and a parameter."""
    *way, last = key.split(".")
    table: object = document
    for name in way:
        table = table.get(name) if isinstance(table, Mapping) else None
    if isinstance(table, MutableMapping) and way:
        table[last] = value
        return
    standing = [*modules_of(document)]
    places = [(modules, i) for name, modules, i in standing if [name] == way]
    # A clipper and its counterpart must agree, and so both get the value.
    for modules, i in places:
        old = modules[i]
        modules[i] = [way[0], {**({} if isinstance(old, str) else old[1]), last: value}]
    if not places:
        first = (way or [key])[0]
        hint = nearest(first, [*document, *(name for name, _, _ in standing)])
        hint = f"; write optim.{key}" if first in document.get("optim", {}) else hint
        fail(f"there is no section and no module {'.'.join(way) or key!r}{hint}")


def parse(setting: str) -> tuple[str, list[object]]:
    """Return key and values of ``key=v1,v2``; values are TOML, or else words.

    Examples
    --------
    >>> parse("zscore-clip.z_max=1.5,2")
    ('zscore-clip.z_max', [1.5, 2])
    >>> parse('optim.client_opt.modules=["no-op"],["auto-clip"]')
    ('optim.client_opt.modules', [['no-op'], ['auto-clip']])
    >>> parse("zscore-clip.action=max,mean")
    ('zscore-clip.action', ['max', 'mean'])
    """
    key, equals, values = setting.partition("=")
    if not equals or not key.strip() or not values.strip():
        fail(f"{setting!r} must be KEY=VALUE,VALUE")
    try:
        parsed = tomllib.loads(f"x = [{values}]")["x"]
    except (ValueError, RecursionError):
        parsed = [value_of(word.strip()) for word in values.split(",")]
    return key.strip(), parsed


def combined(text: str, settings: Sequence[str]) -> dict[str, str]:
    """Return a configuration with each combination of the values, by a name for it.

    Raises
    ------
    ToolError
        If a key is not in the configuration, or two values are the same.
    """
    keys, values = zip(*map(parse, settings), strict=True)
    texts: dict[str, str] = {}
    for chosen in itertools.product(*values):
        document: Config = tomlkit.parse(text)
        words = []
        for key, value in zip(keys, chosen, strict=True):
            set_value(document, key, value)
            plain = value if isinstance(value, str) else json.dumps(value)
            words.append(f"{key.rpartition('.')[2]}={plain}")
        # A folder can have this name.
        plain = re.sub(r'[][{}"]', "", ",".join(words))
        name = re.sub(r"[^\w.=,+-]+", "_", plain).strip("_.")[:120]
        if name in (*texts, ""):
            fail(f"two settings have the same name, {name!r}: give each value once")
        texts[name] = tomlkit.dumps(document)
    return texts


@dataclass
class Tuning:
    """The settings that are tried, their runs, and their ranking.

    Parameters
    ----------
    file, out
        A quickrun file, and the folder for the runs.
    seeds, rounds
        Runs of each setting, and rounds in place of the file's.
    command
        "simulate" or "quickrun".
    settings
        Keys and values to try, as ``KEY=V1,V2``; without any, what `suggest` proposes.
    sites
        The sites that count; without any, all but the outliers.
    """

    file: Path
    out: Path
    seeds: int
    rounds: int | None
    command: str
    settings: Sequence[str] = ()
    sites: Sequence[str] = ()
    runs: dict[str, list[Planned]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """The configuration of each setting."""
    results: dict[str, dict[str, Result]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = self.file.read_text(encoding="utf-8")
        bare, clipped = unclipped(self.text)
        self._add(NONE, bare)
        for name, text in combined(self.text, self.settings).items() if self.settings else ():
            self._add(name, text)
        if clipped and not self.settings:
            self._add(AS_IS, self.text)

    def _add(self, name: str, text: str) -> None:
        from fedclip.cli.check.configuration import check_config

        folder = self.out / name.replace(" ", "-")
        runs = [
            planned_run(tomlkit.parse(text), self.file, folder / f"seed-{seed}", self.rounds)
            for seed in range(1, self.seeds + 1)
        ]
        if not runs[0].done:
            checked = check_config(self.file, text=runs[0].text, **{self.command: True})
            for problem in checked.problems[:1]:
                fail(f"{name} would not run: {problem.where} {problem.message}")
        self.runs[name] = [run._replace(label=name) for run in runs]
        self.texts[name] = text

    def advised(self) -> tuple[Advice, dict[str, str]]:
        """Take up what is advised by the first run; return the advice, and what cannot be tried."""
        report, left_out = read_report(self.runs[NONE][0].folder), dict[str, str]()
        advice = advised(report, min(report.experiments))
        for proposal in advice.proposals:
            try:
                text = rewritten(self.text, proposal)
                # The file may have it already.
                if tomllib.loads(text) != tomllib.loads(self.text):
                    self._add(proposal.name, text)
            except (ToolError, ValueError) as exc:
                left_out[proposal.name] = str(exc)
        return advice, left_out

    def waves(self) -> Iterator[list[Planned]]:
        """Yield runs to be made and judged: those without clipping first, then seed by seed.

        If the seeds give equal results, the other settings are run once. Settings that diverged or
        failed get no more seeds.
        """
        yield self.runs[NONE][:2]
        seeds = 1 if self.ranking.alike else self.seeds
        first = [name for name in self.runs if name != NONE]
        yield [self.runs[name][seed] for seed in range(min(2, seeds)) for name in first]
        for seed in range(2, seeds):
            yield [self.runs[name][seed] for name in self._going]

    @property
    def left(self) -> int:
        """How many rounds are still to be run, at most."""
        return sum(run.rounds for name in self._going for run in self.runs[name] if not run.done)

    @property
    def _going(self) -> list[str]:
        tried = [name for name in self.results if name != NONE]
        return [n for n in self.runs if n not in tried or not self.ranking.lost(n)]

    def judge(self, runs: Sequence[Planned], failures: Collection[Planned]) -> None:
        """Rank the results so far.

        Raises
        ------
        ValueError
            If no site has evaluated the model, or one of `sites` does not exist.
        """
        for run in runs:
            report = None if run in failures else read_report(run.folder)
            result = result_of(report, min(report.experiments)) if report else Result()
            self.results.setdefault(run.label, {})[str(run.seed)] = result
        known = self.results[NONE]["1"].sites
        if not any(known.values()):
            raise ValueError("no site has evaluated the model: there is nothing to rank by")
        for site in self.sites:
            if site not in known:
                hint = nearest(site, known) or f" (there are: {', '.join(sorted(known))})"
                raise ValueError(f"there is no site {site!r}{hint}")
        self.ranking = Ranking(self.results, NONE, self.sites)
