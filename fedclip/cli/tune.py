# SPDX-License-Identifier: Apache-2.0
"""Tries settings over seeds, several runs at a time, against a configuration without clipping.

The settings are named, or those that `suggest` proposes by the norms of the first runs, which are
those without clipping. What failed or diverged gets no more seeds.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomlkit

from fedclip.cli.editing import rewritten, set_value, unclipped
from fedclip.cli.output import ToolError
from fedclip.cli.ranking import AS_IS, NONE, Ranking
from fedclip.cli.runner import Planned, planned_run, refuse
from fedclip.cli.suggest import advised
from fedclip.core.parameters import Config
from fedclip.core.toml import value_of
from fedclip.errors import nearest
from fedclip.report import read_report
from fedclip.report.advice import Advice
from fedclip.report.results import Result, result_of


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
        raise ToolError(f"{setting!r} must be KEY=VALUE,VALUE")
    try:
        found = tomllib.loads(f"x = [{values}]")["x"]
    except (ValueError, RecursionError):
        found = [value_of(word.strip()) for word in values.split(",")]
    return key.strip(), found


def combined(text: str, settings: Sequence[str]) -> dict[str, str]:
    """Return a configuration with each combination of the values, by a name for it.

    Raises
    ------
    ToolError
        If a key is not in the configuration, or two values are the same.
    """
    parsed, found = [parse(setting) for setting in settings], dict[str, str]()
    for values in itertools.product(*(values for _, values in parsed)):
        document: Config = tomlkit.parse(text)
        words = []
        for (key, _), value in zip(parsed, values, strict=True):
            set_value(document, key, value)
            plain = value if isinstance(value, str) else json.dumps(value)
            words.append(f"{key.rpartition('.')[2]}={plain}")
        # A folder can have this name.
        plain = re.sub(r'[][{}"]', "", ",".join(words))
        name = re.sub(r"[^\w.=,+-]+", "_", plain).strip("_.")[:120]
        if name in (*found, ""):
            raise ToolError(f"two settings have the same name, {name!r}: give each value once")
        found[name] = tomlkit.dumps(document)
    return found


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
        folder = self.out / name.replace(" ", "-")
        runs = [
            planned_run(tomlkit.parse(text), self.file, folder / f"seed-{seed}", self.rounds)
            for seed in range(1, self.seeds + 1)
        ]
        runs = [run._replace(label=name) for run in runs]
        refuse(self.file, runs[0], self.command)
        self.runs[name], self.texts[name] = runs, text

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

        Where their seeds do not differ, the other settings are run once. What has diverged, or
        failed, gets no more seeds.
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
            found = result_of(report, min(report.experiments)) if report else Result()
            self.results.setdefault(run.label, {})[str(run.seed)] = found
        known = self.results[NONE]["1"].sites
        if not any(known.values()):
            raise ValueError("no site has evaluated the model: there is nothing to rank by")
        for site in self.sites:
            if site not in known:
                hint = nearest(site, known) or f" (there are: {', '.join(sorted(known))})"
                raise ValueError(f"there is no site {site!r}{hint}")
        self.ranking = Ranking(self.results, NONE, self.sites)
