# SPDX-License-Identifier: Apache-2.0
"""Edit a configuration, and try settings of it over seeds against no clipping.

The settings are named, or those that `suggest` proposes by the norms of the first runs, which are
those without clipping. Settings that failed or diverged get no more seeds.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from fedclip.cli.ranking import AS_IS, NONE, Ranking
from fedclip.cli.runner import Planned, planned_run, refuse
from fedclip.cli.suggest import advised
from fedclip.core.parameters import Config
from fedclip.core.toml import toml_item, value_of
from fedclip.errors import ToolError, nearest
from fedclip.report import read_report
from fedclip.report.findings import Advice, Lines, Proposal
from fedclip.report.norms import BY_NORM, UPDATES
from fedclip.report.results import Result, result_of

_SIDES = ("client_opt", "server_opt")
_DECLEARNS = {"l2-clipping", "l2-global-clipping"}
_MEASURES: Lines = {side: ("no-op", {}) for side in _SIDES}


def modules_of(document: Config, sides: Sequence[str] = _SIDES) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each module of the optimizers, and where it stands: in a list, and at."""
    optim = document.get("optim", document)
    for side in sides:
        section = optim.get(side)
        modules = section.get("modules", []) if isinstance(section, Mapping) else []
        for place, module in enumerate(modules):
            name = module if isinstance(module, str) else module[0] if module else ""
            yield str(name), modules, place


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
    if not places:
        known = [*document, *(name for name, _, _ in standing)]
        hint = nearest(way[0], known) if way else ""
        if way and way[0] in document.get("optim", {}):
            hint = f"; write optim.{key}"
        raise ToolError(f"there is no section and no module {'.'.join(way) or key!r}{hint}")
    # A clipper and its counterpart must agree, and so both get the value.
    for modules, i in places:
        old = modules[i]
        modules[i] = [way[0], {**({} if isinstance(old, str) else old[1]), last: value}]


def rewritten(text: str, proposal: Proposal) -> str:
    """Return a configuration with a proposal in it; comments and layout stay.

    A proposal takes the place of the first module of its kind: a clipper by norm, a counterpart on
    the server, or a part of update clipping. Without one, it comes first, so that it sees what
    comes in; but `update-clip-client` comes last.

    Raises
    ------
    ValueError
        If the text is no configuration, a section cannot be edited, or noise
        would go with the bound that it is for.
    """
    document: Config = tomlkit.parse(text)
    optim = document.get("optim", document)
    if not hasattr(optim, "keys") or "client_opt" not in optim:
        raise ValueError("it has no client_opt to add a clipper to")
    noised = (str(entries[i]) for _, entries, i in modules_of(document, ["server_opt"]))
    if "aggregator" in proposal.plugins and any("noise_multiplier" in text for text in noised):
        raise ValueError(
            f"its server adds noise, and {proposal.name} adds none. If the proposed bound may "
            "depend on the data, write it into update-clip-server as start_norm"
        )
    for section, (name, config) in proposal.plugins.items():
        if section == "aggregator":
            optim["aggregator"] = toml_item({"name": name, **config} if config else name)
        else:
            _insert(optim, section, name, config)
    if proposal.name.startswith("step.") and "server_opt" not in proposal.plugins:
        # The clipper that made room may have been a shared one.
        entries = (f for f in modules_of(document, ["server_opt"]) if _kind(f[0]) == "counterpart")
        for _, modules, place in [*entries][:1]:
            del modules[place]
    return str(tomlkit.dumps(document))


def _insert(optim: Config, section: str, name: str, config: Mapping[str, object]) -> None:
    modules = _list_of(optim, section)
    item = toml_item([name, config] if config else name)
    for old, _, place in modules_of(optim, [section]):
        if old == name or (_kind(old) and _kind(old) == _kind(name)):
            modules[place] = item
            return
    if name == "update-clip-client":
        modules.append(item)
    elif len(modules) == 1 and "\n" not in modules.as_string():
        # Inserted before a single item, tomlkit puts no space after the comma; appended, it does.
        modules.append(modules[0])
        modules[0] = item
    else:
        modules.insert(0, item)


def _kind(name: str) -> str:
    if name in BY_NORM:
        return "clipper"
    counterpart = name.removesuffix("-server") in BY_NORM and name.endswith("-server")
    return "counterpart" if counterpart else ""


def _list_of(optim: Config, section: str) -> Any:
    """Return the list of modules of one side; create it if it is missing."""
    table = optim.get(section, 1.0)
    if isinstance(table, str):
        raise ValueError(f"{section} is in another file, {table!r}: edit that file")
    if not isinstance(table, Mapping):
        rate, table = table, tomlkit.table()
        table["lrate"] = rate
        if section in optim:
            del optim[section]
        optim[section] = table
    modules = table.get("modules")
    if modules is None:
        modules = tomlkit.array()
        table["modules"] = modules
        modules = table["modules"]
    if not isinstance(modules, list):
        raise ValueError(f"modules of {section} must be a list, got {modules!r:.100}")
    return modules


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
    document: Config = tomlkit.parse(rewritten(text, Proposal("step.none", _MEASURES)))
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
    base = name.removesuffix("-server")
    clippers = BY_NORM | {"update-clip", *UPDATES}
    return name in _DECLEARNS or (base in clippers and name != "no-op")


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
    parsed, texts = [parse(setting) for setting in settings], dict[str, str]()
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
        if name in (*texts, ""):
            raise ToolError(f"two settings have the same name, {name!r}: give each value once")
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
