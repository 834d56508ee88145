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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.optimizer import Optimizer

import fedclip
from fedclip.cli.catalogue import is_ours
from fedclip.cli.check.data import (
    check_data,
    check_folder,
    check_model,
    known_files,
    protected,
    unnamed,
)
from fedclip.cli.check.engines import check_app, check_job
from fedclip.cli.check.findings import (
    Check,
    Section,
    Setting,
    as_count,
    brief,
    innermost,
    part_of,
    read_json,
    read_toml,
    registered,
    text_of,
)
from fedclip.cli.check.plugins import (
    check_aggregator,
    check_counterparts,
    check_optimizer,
    is_shared,
)
from fedclip.cli.check.privacy import exposures
from fedclip.cli.check.settings import SECTIONS, elsewhere, fits, section_problems
from fedclip.cli.check.updates import update_problems
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.engines.declearn import stages as places
from fedclip.engines.declearn.members import quorum_problems
from fedclip.errors import ToolError, nearest
from fedclip.privacy.guarantees import Plugin

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
        apps = [path / APP] if _is_app(path / APP) else []
        file = next(iter([*apps, *sorted(path.glob(f"*/config/{JOB}"))]), file)
    if not os.path.isfile(file):
        where = f"{path} holds no config.toml" if folder else f"{path} does not exist"
        raise ToolError(f"{where}; give a declearn configuration file, or its folder", code=2)
    return file


def _is_app(file: Path) -> bool:
    """Whether a file exists and belongs to an app of Flower; any project may have this name."""
    return os.path.isfile(file) and "[tool.flwr." in file.read_text("utf-8", errors="replace")


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
    read = read_json if check.path.name == JOB else read_toml
    config = read(check, check.path, "the file", text)
    if config is None:
        return check
    other = {APP: check_app, JOB: check_job}.get(check.path.name)
    if other is not None and not (quickrun or simulate):
        other(check, config)
        return check
    config = _with_files(check, config)
    check.config = config = _without_network(config) if simulate else config
    # A script may have [network] and [run] next to client_opt, but only quickrun has [data].
    several = "data" in config and not {"network", "run"}.isdisjoint(config)
    bare = "run" in config and "client_opt" not in config
    if quickrun or simulate or "optim" in config or several or bare:
        _check_quickrun(check, config)
        run = part_of(config, "run")
        every = part_of(run, "evaluate").get("frequency", 1)
        if run.get("early_stop") is not None and every != 1 and not simulate:
            text = "declearn needs a loss after each round, so it fails with frequency = "
            check.problem("[run.early_stop]", f"{text}{brief(every)}: remove one of them")
    elif "client_opt" in config:
        run, check.quickrun = part_of(config, "run"), False
        # A section of this name may be anything else.
        _check_optim(check, config, {} if any(section_problems("run", run)) else run)
    else:
        what = "has neither [optim], as in a quickrun file, nor client_opt, as in a file for"
        check.problem("the file", f"{what} FLOptimConfig{nearest('client_opt', config)}")
    return check


def _check_quickrun(check: Check, config: Config) -> None:
    for section in REQUIRED:
        if section not in config:
            hint = nearest(section, config.keys() - SECTIONS.keys())
            empty = " (declearn needs it, even empty)" if section == "data" else ""
            check.problem(f"[{section}]", f"this section is missing{empty}{hint}")
    for key in config:
        _check_section(check, config, key)
    secagg, run = part_of(config, "secagg"), part_of(config, "run")
    if "clipval" in secagg and _secagg(check) is None:
        text = f"clipval must be a number > 0, got {brief(secagg['clipval'])}"
        check.problem("[secagg]", text)
    if isinstance(config.get("optim"), dict):
        wrong = any(finding.where.startswith("[run") for finding in check.problems)
        _check_optim(check, config["optim"], {} if wrong else run)
    if "fairness" in part_of(config, "optim"):
        text = (
            "fairness needs a FairnessDataset, and [data] provides arrays: remove fairness, or run "
            "a script"
        )
        check.problem("[optim.fairness]", text)
    if isinstance(config.get("run"), dict) and "register" not in run:
        text = "this section is missing: set min_clients to the number of clients to wait for"
        check.problem("[run.register]", text)
    register = part_of(run, "register")
    if register.get("timeout") and not register.get("max_clients"):
        text = (
            f"registration always lasts {brief(register['timeout'])} s: set max_clients to end it "
            "earlier"
        )
        check.note("[run.register]", text)
    model = part_of(config, "model").get("model_file")
    if isinstance(model, str) and not os.path.isfile(model):
        check.problem("[model]", f"there is no model file {brief(model)}")
    else:
        check_model(check, part_of(config, "model"))
    folder = part_of(config, "experiment").get("checkpoint")
    if isinstance(folder, str):
        check_folder(check, str(check.path.parent / folder))
    wrong_sections = [f.where for f in check.problems]
    if isinstance(config.get("data"), dict) and "[data]" not in wrong_sections:
        check_data(check, config["data"], run)


def _with_files(check: Check, config: Config) -> Config:
    """Return a configuration with the contents of files named in [run], as in declearn."""
    run = dict(part_of(config, "run"))
    for field in dataclasses.fields(FLRunConfig):
        path = run.get(field.name)
        if isinstance(path, str) and os.path.isfile(path):
            loaded = read_toml(check, Path(path), f"[run.{field.name}]")
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


def _check_section(check: Check, config: Section, key: str) -> None:
    """Check one section of a quickrun file, without its optimizers."""
    where, home = f"[{key}]", elsewhere(key, "")
    if key not in SECTIONS and home:
        write = f"[{home}.{key}]" if isinstance(config[key], dict) else f"{key} in [{home}]"
        check.problem(where, f"this file is for quickrun: write {write}")
    elif key not in SECTIONS:
        _ignored(check, "the file", key, SECTIONS)
    elif not isinstance(config[key], dict):
        check.problem(where, f"must be a section, got {brief(config[key])}")
    elif key != "optim":
        problems = list(section_problems(key, config[key]))
        for problem in problems:
            check.problem(f"[{problem.where}]", problem.text)
        if not problems:
            _declearn(check, where, SECTIONS[key], config[key])


def _ignored(check: Check, where: str, key: str, known: Iterable[str]) -> None:
    """Report a section that declearn ignores; a problem if its name looks like a typo."""
    slip = difflib.get_close_matches(key, list(known), n=1, cutoff=0.8)
    text = f"declearn ignores {f'[{key}]' if where == 'the file' else 'this section'}"
    if slip:
        check.problem(where, f"{text}; did you mean {slip[0]!r}?")
    elif check.quickrun:  # a file for FLOptimConfig may have other sections
        check.note(where, text)


def _check_optim(check: Check, optim: Mapping[str, object], run: Section) -> None:
    known = [field.name for field in dataclasses.fields(FLOptimConfig)]
    before = len(check.problems)
    plugins: dict[str, list[Plugin]] = {}
    for key in known[:2]:
        where = f"[optim.{key}]"
        if key in optim:
            plugins[key] = check_optimizer(check, optim[key], key, where)
        elif key == "client_opt" and key not in check.config:
            check.problem(where, f"the clients' optimizer is missing{nearest(key, optim)}")
    built = len(check.problems) == before
    if check.quickrun and any(
        p.name == "sample-clip" and p.evaluation_share for p in plugins.get("client_opt", ())
    ):
        check.problem("[data]", *unnamed(known_files(check)))
    aggregator = check_aggregator(check, optim.get("aggregator"), "[optim.aggregator]")
    metrics = part_of(check.config, "experiment").get("metrics")
    setting = Setting(
        plugins,
        aggregator,
        run,
        part_of(check.config, "client_sampler"),
        _secagg(check),
        "fairness" in optim,
        _clients(check.config),
        protected(check) if check.quickrun else None,
        metrics if isinstance(metrics, list) else [],
        _population(check),
        check.quickrun,
        part_of(check.config, "network").get("protocol")
        in ("fedclip-websockets", *["websockets"] * check.quickrun),
        check.quickrun,
    )
    # If a plug-in could not be built, its counterpart can not be checked.
    if built:
        check_counterparts(check, plugins)
        if "aggregator" not in optim or aggregator is not None:
            _check_updates(check, setting)
    least = as_count(part_of(part_of(check.config, "network"), "kwargs").get("min_replies"))
    if least is not None:
        if not check.quickrun and part_of(check.config, "network").get("protocol") == "websockets":
            # In a quickrun file, fedclip's own protocol takes its place.
            text = "declearn's 'websockets' has no min_replies: use 'fedclip-websockets'"
            check.problem("[network]", f"protocol: {text}")
        _check_quorum(check, setting, least)
    for key in (key for key in optim if key not in known):
        home = elsewhere(key, "optim") if check.quickrun else None
        if check.quickrun and key in parameters.signature_of(Optimizer):
            home = "optim.client_opt] or [optim.server_opt"
        if home:
            check.problem(f"[optim.{key}]", f"write it in [{home}]")
        else:
            _ignored(check, f"[optim.{key}]", key, known)
    # Report declearn's own errors only if no problem found above explains them.
    if len(check.problems) == before:
        where = "[optim]" if check.quickrun else "the file"
        _declearn(check, where, FLOptimConfig, {k: v for k, v in optim.items() if k in known})
    # The guarantee of a pipeline is only known if all its parts could be built.
    if len(check.problems) == before:
        _check_bounds(check, part_of(optim, "client_opt"), setting)
    chosen = [*plugins.get("client_opt", []), aggregator]
    names = dict.fromkeys(plugin.name for plugin in chosen if is_ours(type(plugin)))
    if names:
        check.note(
            "[optim.client_opt]",
            f"clients need fedclip>={fedclip.__version__} for {', '.join(names)}: import fedclip "
            "in their script, or start it with `fedclip run`",
        )


def _check_quorum(check: Check, setting: Setting, least: int) -> None:
    """Check the settings for rounds that go on without some clients."""
    where, name = "[network.kwargs]", getattr(setting.aggregator, "name", "averaging")
    register = part_of(check.config, "run").get("register")
    low = register.get("min_clients", 1) if isinstance(register, dict) else register
    secure = setting.secagg is not None
    problems = quorum_problems(secagg=secure, fairness=setting.fairness, aggregator=name)
    check.problem(where, *map(str, problems))
    clients, registered = setting.clients, as_count(low)
    if clients is not None and least > clients:
        text = f"min_replies = {least}, but a round has at most {clients} clients: lower it"
        check.problem(where, text)
    elif registered is not None and least > registered:
        check.note(
            where,
            f"registration may end with {registered} clients, below min_replies = {least}: raise "
            "min_clients",
        )
    if name == "clipped-averaging":
        if few := setting.aggregator.combining.too_few(least):
            check.note(
                where,
                f"{few} with min_replies, and such a round changes nothing: raise min_replies",
            )
    else:
        check.note(
            where,
            f"with fewer replies each client moves the average further, and {name!r} sets no "
            "limit: use clipped-averaging",
        )


def _check_updates(check: Check, setting: Setting) -> None:
    """Find mistakes that break the bound of the round update."""
    for level, section, message in update_problems(setting):
        check.add(level, f"[optim.{section}]", message)
    shared = any(is_shared(p) for chosen in setting.plugins.values() for p in chosen)
    if (is_ours(type(setting.aggregator)) or shared) and not setting.vetted:
        check.note(
            "[client_sampler]",
            "replies are not checked, so one client can end the run: give FederatedServer "
            "client_sampler = {'strategy': 'named-clients'}",
        )


def _clients(config: Section) -> int | None:
    """Return the largest number of clients in a round; None if it is not known."""
    most = registered(part_of(config, "run"))
    return as_count(innermost(part_of(config, "client_sampler")).get("n_samples", most))


def _population(check: Check) -> int | None:
    """Return the number of all clients; None if it is not known."""
    simulated = part_of(check.config, "simulate").get("clients")
    if simulated is not None:
        return as_count(simulated)
    known = registered(part_of(check.config, "run")), len(known_files(check)) * check.quickrun
    return max(filter(None, known), default=None)


def _secagg(check: Check) -> Section | None:
    """Return the section about secure aggregation, if there is one and its range is a number."""
    section = check.config.get("secagg")
    clipval = part_of(check.config, "secagg").get("clipval", 1.0)
    return section if isinstance(section, dict) and fits(clipval, float) and clipval > 0 else None


def _check_bounds(check: Check, client: Section, setting: Setting) -> None:
    """Describe the stages of clipping and their guarantees; report what voids a guarantee."""
    plugins, run = setting.plugins, setting.run
    for key, chosen in plugins.items():
        for warning in places.warnings(chosen):
            check.note(f"[optim.{key}]", warning)
        for leak in places.before_noise(chosen):
            check.add("leak", f"[optim.{key}]", leak)
    for level, section, message in exposures(setting):
        outside = section.partition(".")[0] in ("run", "secagg", "client_sampler", "experiment")
        check.add(level, f"[{section}]" if outside else f"[optim.{section}]", message)
    check.places = places.in_words(
        plugins.get("client_opt", []),
        plugins.get("server_opt", []),
        setting.aggregator if is_ours(type(setting.aggregator)) else None,
        optim=client,
        steps=part_of(run, "training").get("n_steps"),
        privacy=part_of(run, "privacy"),
        unit="record" if setting.protected is None else setting.protected[1],
    )


def _declearn(check: Check, where: str, parser: Any, values: Section) -> None:
    """Have declearn parse a section, and report what it refuses or ignores."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parser.from_params(**values)
        except Exception as exc:  # declearn raises a RuntimeError, or whatever it met first
            check.problem(where, text_of(exc))
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            check.note(where, str(warning.message))
