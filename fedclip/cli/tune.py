# SPDX-License-Identifier: Apache-2.0
"""The command ``fedclip tune``: edit a configuration, and try settings of it over seeds.

The settings are named, or those that `suggest` proposes by the norms of the first runs, which are
those without clipping. Settings that failed or diverged get no more seeds.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tomlkit
import typer

from fedclip.cli.output import JsonFlag, commands, fail, progress, say, typed
from fedclip.cli.reporting import AS_IS, NONE, Ranking, show_ranking
from fedclip.cli.running import Planned, planned_run, run_all
from fedclip.cli.suggest import SERVERS, advised, modules_of, rewritten, save
from fedclip.core.parameters import Config
from fedclip.core.toml import value_of
from fedclip.errors import ToolError, nearest
from fedclip.report import read_report
from fedclip.report.findings import Lines, Proposal
from fedclip.report.norms import BY_NORM, UPDATES
from fedclip.report.results import Result, result_of

app = commands()

_CLIPPING = (BY_NORM - {"no-op"}).union(
    SERVERS, UPDATES, ("update-clip-server", "l2-clipping", "l2-global-clipping")
)
"""The modules that clip by norm, with their server modules."""


@app.command()
def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A quickrun file.")] = Path(),
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=V1,V2", help="As zscore-clip.z_max=1,2; else as suggested."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each setting.")] = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, not as in the file.")] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="Run nodes over websockets.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; else by cores.")] = None,
    sites: Annotated[str, typer.Option(metavar="A,B", help="Sites that count.")] = "",
    write: Annotated[bool, typer.Option("--write", help="Write the winner into CONFIG.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rank settings, or what `suggest` proposes, over several seeds.

    The ranking goes by the metric of each site, against no clipping. Several runs go on at a time.
    After an interruption the same command continues.
    """
    from fedclip.cli.check.configuration import find_config

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = jobs or cores or 1
    # Several runs share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // jobs)))
    chosen = [name.strip() for name in sites.split(",") if name.strip()]
    try:
        file = find_config(config)
        out = file.with_name(f"{file.stem}-tune{'-nodes' * nodes}")
        command = "quickrun" if nodes else "simulate"
        tuning = Tuning(file, out, seeds, rounds, command, settings or [], chosen)
        _tuned(tuning, jobs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        fail(f"{config} cannot be tuned: {exc}")
    show_ranking(tuning.ranking, "fedclip-tune/2", as_json)
    if "noise_multiplier" in tuning.text and not as_json:
        say("This choice uses the data, and the epsilon of a run does not cover it.")
    winner = tuning.ranking.winner
    fresh = winner not in ("", NONE, AS_IS)
    if write and fresh:
        save(file, winner, tuning.texts[winner])
    elif write:
        say(f"{typed(file)} was not changed", err=True)
    elif fresh and not as_json:
        words = [*tuning.settings, "--seeds", str(seeds)]
        words += ["--rounds", str(rounds)] * bool(rounds) + ["--nodes"] * nodes
        words += ["--sites", sites] * bool(sites)
        say(f"To write it:  fedclip tune {typed(file)} {shlex.join(words)} --write")


def _tuned(tuning: Tuning, jobs: int) -> None:
    """Run all settings, and print the progress."""
    show, before, total = progress("tune"), 0, tuning.left
    for number, wave in enumerate(tuning.waves()):
        todo = [run for run in wave if not run.done]

        def tell(done: int, text: str, before: int = before, total: int = total) -> None:
            show(before + done, total, text)

        failed = run_all(todo, tuning.command, jobs, tell)
        before += sum(run.rounds for run in todo)
        for why in failed.values():
            if not number:
                fail(why)
            say(why, err=True)
        tuning.judge(wave, failed)
        if not number:
            if not tuning.settings:
                tuning.take_advice()
            names = ", ".join(tuning.runs)
            say(f"{len(tuning.runs)} settings with {tuning.seeds} seeds each: {names}", err=True)
        total = before + tuning.left


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
        advice = "plan its limit with `fedclip privacy calibrate`"
        raise ValueError(f"DP-SGD records no norms, and each run would spend budget: {advice}")
    measures: Lines = {side: ("no-op", {}) for side in ("client_opt", "server_opt")}
    document: Config = tomlkit.parse(rewritten(text, Proposal("step.none", measures)))
    clipped = not _CLIPPING.isdisjoint(modules)
    for name, holder, place in list(modules_of(document))[::-1]:
        if name in _CLIPPING:
            del holder[place]
    optim = document["optim"]
    aggregator = optim.get("aggregator", "averaging")
    config = {"name": aggregator} if isinstance(aggregator, str) else aggregator
    if config.get("name") == "clipped-averaging":
        steps = config.get("weights") == "steps"
        optim["aggregator"] = {"name": "averaging", "steps_weighted": steps}
        clipped = True
    return str(tomlkit.dumps(document)), clipped


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

    def take_advice(self) -> None:
        """Add the settings that are advised by the first run, and say why."""
        report = read_report(self.runs[NONE][0].folder)
        advice = advised(report, min(report.experiments))
        say(*advice.findings, advice.answer, err=True)
        for proposal in advice.proposals:
            try:
                text = rewritten(self.text, proposal)
                # The file may have it already.
                if tomllib.loads(text) != tomllib.loads(self.text):
                    self._add(proposal.name, text)
            except (ToolError, ValueError) as exc:
                say(f"{proposal.name} is not tried: {exc}", err=True)

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
        for site in (site for site in self.sites if site not in known):
            hint = nearest(site, known) or f" (there are: {', '.join(sorted(known))})"
            raise ValueError(f"there is no site {site!r}{hint}")
        self.ranking = Ranking(self.results, NONE, self.sites)
