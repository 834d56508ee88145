# SPDX-License-Identifier: Apache-2.0
"""Tries proposals over seeds, side by side, beside a configuration without any clipping.

The first runs are those without clipping, which measure: what is tried is advised by their norms.
From the second seed on, what is hopeless is given up. Runs are planned, and done, as in a sweep.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomlkit

from fedclip.errors import nearest
from fedclip.report import Report, read_report
from fedclip.report.advice import Advice, Proposal
from fedclip.tools.compare import by_site, judged_by
from fedclip.tools.editing import rewritten, unclipped
from fedclip.tools.output import ToolError
from fedclip.tools.standings import AS_IS, NONE, Standings
from fedclip.tools.suggest import advised
from fedclip.tools.sweep import Planned, placed, refuse


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
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = self.file.read_text(encoding="utf-8")
        bare, clipped = unclipped(self.text)
        self._add(NONE, bare)
        if clipped:
            self._add(AS_IS, self.text)
        refuse(self.file, [run for runs in self.runs.values() for run in runs[:1]], self.command)

    def _add(self, name: str, text: str) -> None:
        folder = self.out / name.replace(" ", "-")
        self.runs[name] = [
            placed(tomlkit.parse(text), self.file, folder / f"seed-{seed}", self.rounds)._replace(
                label=name
            )
            for seed in range(1, self.seeds + 1)
        ]

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
                there = nearest(site, sites) or f" (there are: {', '.join(sorted(sites))})"
                raise ValueError(f"there is no site {site!r}{there}")
        advice = advised(report, experiment)
        # Of two, either may be the odd one.
        odd = advice.odd if len(sites) > 2 else ()
        counted = [site for site in sites if site in chosen or (not chosen and site not in odd)]
        self.standings = Standings(
            *judged_by(next(iter(sites.values()))), sorted(sites), sorted(counted or sites)
        )
        self.standings.left_out = "" if chosen else ", with norms unlike those of the others"
        for proposal in advice.proposals:
            try:
                text = rewritten(self.text, proposal)
                # It may have been taken up before.
                if tomllib.loads(text) != tomllib.loads(self.text):
                    self._add(proposal.name, text)
                    refuse(self.file, self.runs[proposal.name][:1], self.command)
                    self.proposals[proposal.name] = proposal
            except (ToolError, ValueError) as exc:
                self.runs.pop(proposal.name, None)
                self.left_out[proposal.name] = str(exc)
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

    def judge(self, runs: Sequence[Planned], failures: Mapping[Planned, str]) -> dict[str, str]:
        """Take up what came out; return which settings are given up, and why."""
        standings, found = self.standings, {}
        for run in runs:
            values = standings.values.setdefault(run.label, {})
            if run in failures:
                values[run.seed] = {}
                found[run.label] = failures[run]
                continue
            _, _, sites = _read(run)
            if run.label == NONE:
                standings.losses.append({site: own.get("loss", 0.0) for site, own in sites.items()})
            values[run.seed] = {
                # A model that has diverged may still have an accuracy: it says the same of all.
                site: own.get(standings.metric, math.nan) + 0.0 * own.get("loss", 0.0)
                for site, own in sites.items()
            }
        standings.ended |= found
        return found | standings.give_up()


def _read(planned: Planned) -> tuple[Report, str, dict[str, dict[str, float]]]:
    """Return the report of a run, the name of its only experiment, and what each site measured."""
    report = read_report(planned.folder)
    experiment = min(report.experiments)
    return report, experiment, by_site(report, experiment)
