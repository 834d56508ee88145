# SPDX-License-Identifier: Apache-2.0
"""Tries proposals over seeds, side by side, beside a configuration without any clipping.

The first runs are those without clipping, which measure: what is tried is advised by their norms.
From the second seed on, what is hopeless is given up. Runs are planned, and done, as in a sweep.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import tomlkit

from fedclip.errors import nearest
from fedclip.parameters import Config
from fedclip.records import RoundRecord
from fedclip.report import Report, pooled, read_report
from fedclip.report.advice import Advice, Proposal
from fedclip.report.rows import BY_NORM, UPDATES
from fedclip.report.words import unlike
from fedclip.tools import suggest, sweep
from fedclip.tools.compare import by_site, judged_by
from fedclip.tools.standings import AS_IS, NONE, Standings
from fedclip.tools.sweep import Planned, SweepError, modules_of, placed, refuse

__all__ = ["Tuning", "noised", "unclipped"]

_DECLEARNS = {"l2-clipping", "l2-global-clipping"}
_MEASURES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "client_opt": ("no-op", {}),
    "server_opt": ("no-op", {}),
}


def unclipped(text: str) -> tuple[str, bool]:
    """Return a configuration whose clippers by norm only measure, and whether it had any.

    Raises
    ------
    ValueError
        If it can not be changed, or trains by DP-SGD.
    """
    before: Config = tomlkit.parse(text)
    modules = [name for name, _, _ in modules_of(before)]
    if "sample-clip" in modules or "privacy" in before.get("run", {}):
        raise ValueError(
            "DP-SGD keeps no norms to choose a limit by, and each run would spend budget; its "
            "limit is planned with `fedclip privacy calibrate`"
        )
    document: Config = tomlkit.parse(suggest.rewritten(text, Proposal("step.none", _MEASURES)))
    clipped = any(_clips(name) for name in modules)
    for name, found, place in list(modules_of(document))[::-1]:
        if _clips(name):
            del found[place]
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
    base = name.removesuffix("-server")
    ours = BY_NORM | {"update-clip", *UPDATES}
    return name in _DECLEARNS or (base in ours and name != "no-op")


def noised(text: str) -> bool:
    """Whether a configuration has noise, and so a privacy budget."""
    tables = (found[place] for _, found, place in modules_of(tomlkit.parse(text)))
    return any(not isinstance(t, str) and t[1].get("noise_multiplier") for t in tables if t[1:])


@dataclass
class Tuning:
    """The settings that are tried, their runs, and how they stand.

    Parameters
    ----------
    file, out
        A quickrun file, and the folder for the runs.
    seeds, rounds
        Runs of each setting, and rounds in place of the file's.
    command
        "simulate" or "quickrun".
    jobs
        How many runs go on side by side.
    """

    file: Path
    out: Path
    seeds: int
    rounds: int | None
    command: str
    jobs: int
    runs: dict[str, list[Planned]] = field(default_factory=dict)
    proposals: dict[str, Proposal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = self.file.read_text(encoding="utf-8")
        bare, clipped = unclipped(self.text)
        self._add(NONE, bare)
        if clipped:
            self._add(AS_IS, self.text)
        refuse([run for runs in self.runs.values() for run in runs[:1]], self.command)

    def _add(self, name: str, text: str) -> None:
        folder = self.out / name.replace(" ", "-")
        self.runs[name] = [
            placed(tomlkit.parse(text), self.file, folder / f"seed-{seed}", self.rounds)
            for seed in range(1, self.seeds + 1)
        ]

    @property
    def first(self) -> list[Planned]:
        """The runs to begin with: without clipping, as many as go side by side."""
        return self.runs[NONE][: self.jobs]

    def advised(self, chosen: Sequence[str] = ()) -> Advice:
        """Take up what is advised by the norms of the first run; `chosen` sites are counted.

        Raises
        ------
        ValueError
            If sites have no metrics, or a chosen one is none of them.
        """
        report, experiment, sites = _read(self.runs[NONE][0])
        if not sites:
            raise ValueError("no site has evaluated the model: there is nothing to rank by")
        for site in chosen:
            if site not in sites:
                raise ValueError(f"there is no site {site!r}{nearest(site, sites)}")
        odd = _odd(report)
        counted = [site for site in sites if site in chosen or (not chosen and site not in odd)]
        self.standings = Standings(*judged_by(sites), sorted(sites), sorted(counted or sites))
        self.standings.left_out = "" if chosen else ", with norms unlike those of the others"
        advice: Advice = suggest.advised(report, experiment)
        for proposal in advice.proposals:
            text = suggest.rewritten(self.text, proposal)
            # It may have been taken up before.
            if tomllib.loads(text) != tomllib.loads(self.text):
                self._add(proposal.name, text)
                self.proposals[proposal.name] = proposal
        refuse([self.runs[name][0] for name in self.proposals], self.command)
        return advice

    def waves(self) -> Iterator[list[Planned]]:
        """Yield the runs of the first two seeds, then of one seed each."""
        for start, end in ((0, 2), *((n, n + 1) for n in range(2, self.seeds))):
            names = [name for name in self.runs if name not in self.standings.ended]
            yield [self.runs[name][seed] for seed in range(start, end) for name in names]

    @property
    def left(self) -> list[Planned]:
        """The runs that are still to be made."""
        kept = (runs for name, runs in self.runs.items() if name not in self.standings.ended)
        return [run for runs in kept for run in runs if not run.done]

    def seconds(self) -> float:
        """Return how long what is left takes, if nothing is given up."""
        each = statistics.fmean(run.seconds for run in self.runs[NONE] if run.done)
        return each * math.ceil(len(self.left) / self.jobs)

    def run(self, runs: Sequence[Planned], tell: Callable[[int, str], None]) -> dict[Planned, str]:
        """Run those that are not done side by side; tell of their rounds.

        Returns
        -------
        failures
            What those said that failed.
        """
        todo, stop = [run for run in runs if not run.done], Event()
        done = dict.fromkeys(todo, 0)

        def one(planned: Planned) -> str:
            def told(rounds: int, text: str) -> None:
                if stop.is_set():
                    raise SweepError("interrupted")
                done[planned] = rounds
                tell(sum(done.values()), f"{planned.label}, seed {planned.seed}: {text}")

            try:
                sweep.run(planned, told, self.command)
            except SweepError as exc:
                return str(exc)
            return ""

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                said = list(pool.map(one, todo))
            except KeyboardInterrupt:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return {run: text for run, text in zip(todo, said, strict=True) if text}

    def judge(self, runs: Sequence[Planned], failures: Mapping[Planned, str]) -> dict[str, str]:
        """Take up what came out; return which settings are given up, and why."""
        names = {run.folder.parent: name for name, all_ in self.runs.items() for run in all_}
        standings, found = self.standings, {}
        for run in runs:
            name = names[run.folder.parent]
            values = standings.values.setdefault(name, {})
            if run in failures:
                values[run.seed] = {}
                found[name] = failures[run]
                continue
            _, _, sites = _read(run)
            values[run.seed] = {
                # A model that has diverged may still have an accuracy: it says the same of all.
                site: own.get(standings.metric, math.nan) + 0.0 * own.get("loss", 0.0)
                for site, own in sites.items()
            }
        standings.ended |= found
        return found | standings.give_up()

    def reports(self) -> list[tuple[str, Path, Report]]:
        """Return name, folder and report of each setting, the best first."""
        found = []
        for name in self.standings.ranking():
            folder = self.out / name.replace(" ", "-")
            seeds = {run.folder.name for run in self.runs[name] if run.done}
            if seeds:
                report = read_report(folder)
                kept = [e for e in report.experiments if e.partition("/")[0] in seeds]
                found.append((name, folder, report.only(kept)))
        return found


def _read(planned: Planned) -> tuple[Report, str, dict[str, dict[str, float]]]:
    """Return the report of a run, the name of its only experiment, and what each site measured."""
    report = read_report(planned.folder)
    experiment = min(report.experiments)
    return report, experiment, by_site(report, experiment)


def _odd(report: Report) -> set[str]:
    """Return the clients whose steps are unlike those of the others."""
    records: dict[str, list[RoundRecord]] = {}
    for row in report.whole:
        if row.name == "no-op" and row.node not in report.servers:
            records.setdefault(row.node.rpartition("/")[2], []).append(row.record)
    # Most steps of a classifier that fits its data are about 0, whatever the units are.
    levels = {node: pooled(found).norm_quantile(0.9) for node, found in records.items()}
    return set(unlike({node: level for node, level in levels.items() if level}))
