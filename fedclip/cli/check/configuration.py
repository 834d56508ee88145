# SPDX-License-Identifier: Apache-2.0
"""Check a federation's TOML before it runs: each problem, with its place.

declearn parses a configuration on the server and sends it to the clients. A name that a client
does not know ends that client with a `KeyError`, and the server waits for ever. So:

1. the file is parsed as declearn does it,
2. its settings are compared with those that declearn has (`fedclip.cli.check.settings`),
3. every plug-in of ``client_opt`` and ``server_opt`` is looked up and built on its own, so that
   each mistake is found, not only the first (`fedclip.cli.check.plugins`),
4. declearn's own parsers have the last word on what is left,
5. what could be built is looked at as a whole: what voids a guarantee
   (`fedclip.cli.check.privacy`).

What belongs together on clients and server is known where it is made, which knows of no file:
`fedclip.cli.check.plugins` and `fedclip.cli.check.updates`.

The result is always a list of findings, never an error, whatever bytes the file holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.optimizer import Optimizer

import fedclip
from fedclip.cli.catalogue import is_ours
from fedclip.cli.check import claims, data, plugins, settings
from fedclip.cli.check.findings import CLIENT, Check, Finding, Section, note, problem, read, text_of
from fedclip.cli.check.privacy import exposures
from fedclip.cli.check.settings import SECTIONS, Setting, part_of
from fedclip.cli.check.updates import reply_findings, update_problems
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.engines.declearn.stages import in_words
from fedclip.errors import ToolError, nearest, shown

APP = "pyproject.toml"
"""The file with the settings of an app of Flower."""
JOB = "config_fed_server.json"
"""The file with the server's part of an exported job of NVFlare."""
REQUIRED = ("network", "data", "optim", "run")
"""The sections that declearn's quickrun requires."""


def find_config(path: str | Path) -> Path:
    """Return the file that `path` names, itself or by its folder; raise an error without one."""
    path = Path(path)
    folder = os.path.isdir(path)  # `Path.is_dir` raises where a path is too long for the system.
    file = path / "config.toml" if folder else path
    if folder and not os.path.isfile(file):
        app = path / APP  # any project may have a file of this name
        is_app = os.path.isfile(app) and "[tool.flwr." in app.read_text("utf-8", errors="replace")
        file = next(iter([*[app] * is_app, *sorted(path.glob(f"*/config/{JOB}"))]), file)
    if not os.path.isfile(file):
        where = f"{path} holds no config.toml" if folder else f"{path} does not exist"
        raise ToolError(f"{where}; give a declearn configuration file, or its folder", code=2)
    return file


def check_config(
    path: str | Path, *, quickrun: bool = False, simulate: bool = False, text: str | None = None
) -> Check:
    """Check a declearn configuration: a quickrun file, or one for `FLOptimConfig`.

    The file may also be Flower's, or NVFlare's.

    `path` is as for `find_config`. With `quickrun` it must be a quickrun file; otherwise its
    sections decide. With `simulate` it is one that is to run in one process. If there is no such
    file, raise a `ToolError`; all else is a finding. A `text` is checked in place of the file's.
    """
    check = Check(find_config(path))
    config = read(check, check.path, "the file", text)
    if config is None:
        return check
    other = {APP: claims.app_findings, JOB: claims.job_findings}.get(check.path.name)
    if other is not None and not (quickrun or simulate):
        check.add(*other(config))
        return check
    config = _with_files(check, config)
    check.config = config = _without_network(config) if simulate else config
    # A script may have [network] and [run] next to client_opt, but only quickrun has [data].
    several = "data" in config and not {"network", "run"}.isdisjoint(config)
    bare = "run" in config and "client_opt" not in config
    if quickrun or simulate or "optim" in config or several or bare:
        _check_quickrun(check, config, simulate)
    elif "client_opt" in config:
        run, check.quickrun = part_of(config, "run"), False
        # A section of this name may be anything else.
        _check_optim(check, config, {} if any(settings.section_problems("run", run)) else run, {})
    else:
        text = f"has neither [optim] nor client_opt{nearest('client_opt', config)}"
        check.add(problem("the file", text))
    return check


def _check_quickrun(check: Check, config: Config, simulate: bool) -> None:
    for key in config:
        check.add(*_section_findings(check, config, key))
    files, wrong = data.site_files(check)
    if isinstance(config.get("optim"), dict):
        bad = any(finding.where.startswith("[run") for finding in check.problems)
        _check_optim(check, config["optim"], {} if bad else part_of(config, "run"), files)
    check.add(*_across_sections(config, simulate))
    check.add(*data.path_findings(check.path.resolve().parent, config))
    if isinstance(config.get("data"), dict) and "[data]" not in [f.where for f in check.problems]:
        check.add(*wrong, *data.data_findings(files, part_of(config, "run")))


def _section_findings(check: Check, config: Section, key: str) -> Iterable[Finding]:
    """Return the findings for one section of a quickrun file, without its optimizers."""
    where, home = f"[{key}]", settings.elsewhere(key, "")
    if key not in SECTIONS:
        return _stray(check, where, key, home, SECTIONS)
    if not isinstance(config[key], dict):
        return [problem(where, f"must be a section, got {shown(config[key])}")]
    if key == "optim":
        return []
    problems = list(settings.section_problems(key, config[key]))
    return problems or _parsed(where, SECTIONS[key], config[key])


def _stray(
    check: Check, where: str, key: str, home: str | None, known: Iterable[str]
) -> Iterator[Finding]:
    """Yield where a section belongs that declearn ignores; a problem if its name is a typo."""
    slip = difflib.get_close_matches(key, list(known), n=1, cutoff=0.8)
    if home:
        yield problem(where, f"write it in [{home}]")
    elif slip:
        yield problem(where, f"declearn ignores this section; did you mean {slip[0]!r}?")
    elif check.quickrun:  # a file for FLOptimConfig may have other sections
        yield note(where, "declearn ignores this section")


def _across_sections(config: Section, simulate: bool) -> Iterator[Finding]:
    """Yield missing sections, and settings that do not go with those of another section."""
    for section in (section for section in REQUIRED if section not in config):
        hint = nearest(section, config.keys() - SECTIONS.keys())
        empty = " (declearn needs it, even empty)" if section == "data" else ""
        yield problem(f"[{section}]", f"this section is missing{empty}{hint}")
    yield from settings.range_problems(part_of(config, "secagg"))
    if "fairness" in part_of(config, "optim"):
        yield problem("[optim.fairness]", "fairness needs a FairnessDataset: remove it")
    run, register = part_of(config, "run"), part_of(config, "run", "register")
    if isinstance(config.get("run"), dict) and "register" not in run:
        yield problem("[run.register]", "this section is missing: set min_clients")
    if register.get("timeout") and not register.get("max_clients"):
        yield note("[run.register]", "registration lasts until its timeout: set max_clients")
    every = part_of(run, "evaluate").get("frequency", 1)
    if run.get("early_stop") is not None and every != 1 and not simulate:
        text = f"each round must be evaluated: remove frequency = {shown(every)}"
        yield problem("[run.early_stop]", text)


def _with_files(check: Check, config: Config) -> Config:
    """Return a configuration with the contents of files named in [run], as in declearn."""
    run = dict(part_of(config, "run"))
    for field in dataclasses.fields(FLRunConfig):
        path = run.get(field.name)
        if isinstance(path, str) and os.path.isfile(path):
            loaded = read(check, Path(path), f"[run.{field.name}]")
            if loaded is not None:
                run[field.name] = loaded.get(field.name, loaded)
    return {**config, "run": run} if run else config


def _without_network(config: Config) -> Config:
    """Return a configuration for one process, with the number of clients in [simulate]."""
    crowd = part_of(config, "simulate")
    network = {"protocol": "websockets", "host": "127.0.0.1", "port": 1}
    run = {**part_of(config, "run"), "register": {}}
    sampler = {"n_samples": crowd.get("sampled", crowd.get("clients"))}
    return {**config, "network": network, "run": run, "client_sampler": sampler}


def _check_optim(check: Check, optim: Config, run: Section, files: data.Files) -> None:
    known = [field.name for field in dataclasses.fields(FLOptimConfig)]
    before = len(check.problems)
    if "client_opt" not in optim:
        check.add(problem(CLIENT, f"this section is missing{nearest('client_opt', optim)}"))
    client, server = (
        plugins.check_optimizer(check, optim[key], key, f"[optim.{key}]") if key in optim else []
        for key in ("client_opt", "server_opt")
    )
    built = len(check.problems) == before
    aggregator = plugins.check_aggregator(check, optim.get("aggregator"), "[optim.aggregator]")
    config, protected = check.config, None
    if "privacy" in part_of(config, "run"):
        protected = data.protected(files)
        evaluated = any(p.name == "sample-clip" and p.evaluation_share for p in client)
        check.add(*data.person_findings(files, evaluated=evaluated))
    setting = Setting(
        config, optim, run, client, server, aggregator, len(files), protected, check.quickrun
    )
    # If a plug-in could not be built, its counterpart cannot be checked.
    if built:
        check.add(*plugins.counterpart_problems(setting))
    if built and ("aggregator" not in optim or aggregator is not None):
        check.add(*update_problems(setting))
    check.add(*reply_findings(setting))
    for key in (key for key in optim if key not in known):
        home = settings.elsewhere(key, "optim") if check.quickrun else None
        if check.quickrun and key in parameters.signature_of(Optimizer):
            home = "optim.client_opt] or [optim.server_opt"
        check.add(*_stray(check, f"[optim.{key}]", key, home, known))
    # Report declearn's own errors only if no problem found above explains them.
    if len(check.problems) == before:
        where = "[optim]" if check.quickrun else "the file"
        check.add(*_parsed(where, FLOptimConfig, {k: v for k, v in optim.items() if k in known}))
    # The guarantee of a pipeline is only known if all its parts could be built.
    if len(check.problems) == before:
        check.add(*exposures(setting))
        check.places = in_words(
            client,
            server,
            aggregator if is_ours(type(aggregator)) else None,
            optim=part_of(optim, "client_opt"),
            steps=part_of(run, "training").get("n_steps"),
            privacy=part_of(run, "privacy"),
            unit=protected[1] if protected else "record",
        )
    if names := dict.fromkeys(p.name for p in [*client, aggregator] if is_ours(type(p))):
        text = f"clients need fedclip>={fedclip.__version__} for {', '.join(names)}: import"
        check.add(note(CLIENT, f"{text} fedclip in their script, or start it with `fedclip run`"))


def _parsed(where: str, parser: Any, values: Section) -> Iterator[Finding]:
    """Have declearn parse a section, and yield what it refuses or ignores."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parser.from_params(**values)
        except Exception as exc:  # declearn raises a RuntimeError, or whatever it met first
            yield problem(where, text_of(exc))
    ignored = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    yield from (note(where, str(warning.message)) for warning in ignored)
