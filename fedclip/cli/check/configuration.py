# SPDX-License-Identifier: Apache-2.0
"""Checks a federation's TOML before it runs: what would go wrong, and where.

declearn parses a configuration on the server and sends it to the clients; a name that a client
does not know ends that client with a `KeyError` and leaves the server waiting for ever. So:

1. the file is parsed as declearn does it,
2. its settings are compared with those that declearn has (`fedclip.cli.check.settings`),
3. every plug-in of ``client_opt`` and ``server_opt`` is looked up and built on its own, so that
   each mistake is found, not only the first (`fedclip.cli.check.plugins`),
4. declearn's own parsers have the last word on what is left,
5. what could be built is looked at as a whole: what voids a guarantee
   (`fedclip.cli.check.privacy`).

What belongs together on clients and server is known where it is made, which knows of no file:
`fedclip.cli.check.statistics` and `fedclip.cli.check.updates`.

The result is always a list of findings, never an error, whatever bytes the file holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from declearn.dataset.utils import load_data_array
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.optimizer import Optimizer
from declearn.quickrun import DataSourceConfig, parse_data_folder

import fedclip
from fedclip.cli.catalogue import is_ours
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
from fedclip.cli.check.plugins import check_aggregator, check_counterparts, check_optimizer
from fedclip.cli.check.privacy import exposures
from fedclip.cli.check.settings import SECTIONS, elsewhere, fits, section_faults
from fedclip.cli.check.statistics import is_shared
from fedclip.cli.check.updates import Known, update_problems
from fedclip.cli.output import ToolError
from fedclip.cli.persons import asked_for, units, unnamed
from fedclip.cli.trained import trained
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.engines.declearn import stages as places
from fedclip.engines.declearn.quorum import unfit
from fedclip.engines.declearn.senders import NamedClients
from fedclip.errors import nearest
from fedclip.privacy.guarantees import Plugin
from fedclip.updates.claims import Claim, voids_of
from fedclip.updates.tables import server_of, settings_in

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
    """Whether a file is there, and is that of an app of Flower: any project has one of its name."""
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
    other = {APP: _check_app, JOB: _check_job}.get(check.path.name)
    if other is not None and not (quickrun or simulate):
        other(check, config)
        return check
    config = _with_files(check, config)
    check.config = config = _without_network(config) if simulate else config
    # A script may have [network] and [run] next to client_opt, but only quickrun has [data].
    whole = "data" in config and not {"network", "run"}.isdisjoint(config)
    alone = "run" in config and "client_opt" not in config
    if quickrun or simulate or "optim" in config or whole or alone:
        _check_quickrun(check, config)
        run = part_of(config, "run")
        every = part_of(run, "evaluate").get("frequency", 1)
        if run.get("early_stop") is not None and every != 1 and not simulate:
            text = "declearn looks for a loss after each round, and with frequency = "
            check.problem("[run.early_stop]", f"{text}{brief(every)} fails: leave one of them out")
    elif "client_opt" in config:
        run, check.quickrun = part_of(config, "run"), False
        # A section of this name may be anything else.
        _check_optim(check, config, {} if any(section_faults("run", run)) else run)
    else:
        what = "holds neither [optim], as a quickrun file does, nor client_opt, as a file for"
        check.problem("the file", f"{what} FLOptimConfig does{nearest('client_opt', config)}")
    return check


def _check_app(check: Check, config: Section) -> None:
    """Check the settings of an app of Flower, as its run configuration gets them."""
    app: Section = config
    for key in ("tool", "flwr", "app", "config"):
        app = part_of(app, key)
    given = part_of(app, "update-clip")
    where = "[tool.flwr.app.config.update-clip]"
    if not given:
        hint = nearest("update-clip", app)
        check.problem(where, f"this section is missing: Flower would clip nothing{hint}")
    for key in [key for key, value in given.items() if isinstance(value, list)]:
        check.problem(where, f"{key}: Flower takes no lists: write one pattern, or a table")
    if check.problems:
        return
    try:
        settings = settings_in(dict(_flat(app)))
    except ValueError as exc:
        check.problem(where, text_of(exc))
        return
    evaluates = app.get("fraction-evaluate") != 0
    claim = Claim(
        "flower",
        None,
        rounds=as_count(app.get("num-server-rounds")),
        evaluates=evaluates,
        keeps_best=False,
    )
    sections = {"evaluate": "[tool.flwr.app.config]"}
    _check_settings(check, settings, claim, where, sections)


def _check_job(check: Check, config: Section) -> None:
    """Check the settings of a job of NVFlare, as a recipe has exported it."""
    workflows = [part_of(one, "args") for one in _sections(config, "workflows")]
    named = [(one, str(part_of(one, "aggregator").get("path"))) for one in workflows]
    ours = [one for one, path in named if path.startswith("fedclip.")]
    if len(ours) != 1:
        text = "fedclip clips nothing in this job: give its recipe add_update_clipping(recipe)"
        check.problem("[workflows]", text)
        return
    selects = any(
        "ModelSelector" in str(one.get("path")) for one in _sections(config, "components")
    )
    rounds = as_count(ours[0].get("num_rounds"))
    claim = Claim("nvflare", None, rounds=rounds, evaluates=selects, keeps_best=selects)
    settings = part_of(part_of(part_of(ours[0], "aggregator"), "args"), "settings")
    where = "[workflows.aggregator]"
    _check_settings(check, settings, claim, where, {"evaluate": "[components]"})


def _check_settings(
    check: Check,
    settings: Section,
    claim: Claim,
    where: str,
    sections: Mapping[str, str],
) -> None:
    """Check a flat table of settings, and what voids the guarantee of its noise."""
    try:
        bound = server_of(settings).bound
    except (TypeError, ValueError) as exc:
        check.problem(where, text_of(exc))
        return
    if bound.budget is None:
        return
    for severity, part, text in voids_of(claim._replace(bound=bound)):
        check.add(severity, sections.get(part, where), text)
    if claim.rounds:
        left = min(claim.rounds, bound.rounds_left())
        cost = bound.budget.cost(left)
        check.note(
            where, f"epsilon is {cost:.4g} after {left} rounds, of {claim.rounds} that are planned"
        )


def _flat(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield settings and their names as Flower hands them to an app."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _check_quickrun(check: Check, config: Config) -> None:
    for section in REQUIRED:
        if section not in config:
            hint = nearest(section, config.keys() - SECTIONS.keys())
            empty = " (it may be empty, but declearn looks for it)" if section == "data" else ""
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
            "fairness needs a FairnessDataset, and [data] gives arrays: remove it, or run a script"
        )
        check.problem("[optim.fairness]", text)
    if isinstance(config.get("run"), dict) and "register" not in run:
        text = "this section is missing: write in min_clients how many clients to wait for"
        check.problem("[run.register]", text)
    register = part_of(run, "register")
    if register.get("timeout") and not register.get("max_clients"):
        text = f"registration lasts {brief(register['timeout'])} s, as there is no max_clients"
        check.note("[run.register]", text)
    model = part_of(config, "model").get("model_file")
    if isinstance(model, str) and not os.path.isfile(model):
        check.problem("[model]", f"there is no model file {brief(model)}")
    else:
        _check_model(check, part_of(config, "model"))
    folder = part_of(config, "experiment").get("checkpoint")
    if isinstance(folder, str):
        _check_folder(check, str(check.path.parent / folder))
    told = [f.where for f in check.problems]
    if isinstance(config.get("data"), dict) and "[data]" not in told:
        _check_data(check, config["data"], run)


def _check_model(check: Check, model: Section) -> None:
    """Say what the model trains, if it holds more, and what becomes of running statistics."""
    file = Path(model.get("model_file") or check.path.resolve().parent / "model.py")
    if not file.is_file():
        return
    try:
        found = trained(file, model.get("model_name") or "model")
    except Exception:  # the file may need what is on another machine, or shapes from the data
        return
    if found.shared < found.values:
        check.note("[model]", str(found))
    if found.wrong:
        check.note("[model]", found.wrong)
    if found.lacking:
        check.problem("[model]", found.lacking)


def _with_files(check: Check, config: Config) -> Config:
    """Return a configuration with what files named in [run] hold, as declearn reads them."""
    run = dict(part_of(config, "run"))
    for field in dataclasses.fields(FLRunConfig):
        path = run.get(field.name)
        if isinstance(path, str) and os.path.isfile(path):
            loaded = read_toml(check, Path(path), f"[run.{field.name}]")
            if loaded is not None:
                run[field.name] = loaded.get(field.name, loaded)
    return {**config, "run": run} if run else config


def _without_network(config: Config) -> Config:
    """Return a configuration as it is in one process, with as many clients as it says."""
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
        faults = list(section_faults(key, config[key]))
        for section, message in faults:
            check.problem(f"[{section}]", message)
        if not faults:
            _declearn(check, where, SECTIONS[key], config[key])


def _ignored(check: Check, where: str, key: str, known: Iterable[str]) -> None:
    """Report a section that declearn ignores; a problem if its name looks like a typo."""
    slip = difflib.get_close_matches(key, list(known), n=1, cutoff=0.8)
    text = f"declearn ignores {f'[{key}]' if where == 'the file' else 'this section'}"
    if slip:
        check.problem(where, f"{text}; did you mean {slip[0]!r}?")
    elif check.quickrun:  # a file for FLOptimConfig may have other sections
        check.note(where, text)


def _sections(config: Section, name: str) -> list[Config]:
    """Return the sections in a list of a file; none if there is no list."""
    value = config.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _check_folder(check: Check, folder: str) -> None:
    """Find a checkpoint folder that no system can make."""
    try:
        os.lstat(os.path.join(folder, "server"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as exc:
        text = f"can not write to the folder {brief(folder)}: {getattr(exc, 'strerror', exc)}"
        check.problem("[experiment]", f"checkpoint: {text}")


def _check_data(check: Check, data: Section, run: Section) -> None:
    """Look for the clients' files, if they exist already, and check their number."""
    try:
        # Parse again, to count the clients only: errors here are reported elsewhere.
        files = _files(check, data)
    except (OSError, ValueError, RuntimeError) as exc:
        check.problem("[data]", text_of(exc))
        return
    if files is None:
        return
    if "privacy" in run:
        for level, text in asked_for(files):
            check.add(level, "[data]", text)
    _check_batches(check, files, run)
    count = len(files)
    register = run.get("register")
    low = high = register
    if isinstance(register, dict):
        low, high = register.get("min_clients", 1), register.get("max_clients")
    if isinstance(low, int) and count < low:
        check.problem("[data]", f"{low} clients are waited for, and the data folder holds {count}")
    elif isinstance(high, int) and count > high:
        check.problem("[data]", f"{high} clients are admitted, and the data folder holds {count}")


def _check_batches(check: Check, files: Mapping[str, Mapping[str, str]], run: Section) -> None:
    """Find sites that get no batch, as they have fewer records than one has."""
    # DP-SGD draws batches by itself.
    parts = () if "privacy" in run else (("training", "train", True), ("evaluate", "valid", False))
    for section, of, default in parts:
        effort = part_of(run, section)
        size = effort.get("batch_size", 128)
        if not effort.get("drop_remainder", default) or not isinstance(size, int):
            continue
        for site, own in files.items():
            try:
                count = len(load_data_array(own[f"{of}_target"]))
            except Exception:  # whatever a file makes declearn raise, which is reported elsewhere
                continue
            if count < size:
                check.problem(
                    f"[run.{section}]",
                    f"{site} gets no batch: it has {count} records in {of}_target, and batch_size "
                    f"= {size}; write drop_remainder = false, or batch_size = {count}",
                )


def _files(check: Check, data: Section) -> dict[str, dict[str, str]] | None:
    """Return the files of each client; None if the data is on another machine, or comes later."""
    folder = check.path.resolve().parent
    if data.get("data_folder") is None and not any(folder.glob("data*")):
        return None
    return parse_data_folder(DataSourceConfig.from_params(**data), str(folder))


def _known_files(check: Check) -> dict[str, dict[str, str]]:
    """Return the files of each client, as far as they can be found."""
    try:
        return _files(check, part_of(check.config, "data")) or {}
    except Exception:  # whatever declearn raises, which is reported elsewhere
        return {}


def _protected(check: Check) -> tuple[int, str] | None:
    """Return how many records, or persons, the smallest client has; None if it is not known."""
    if "privacy" not in part_of(check.config, "run"):
        return None
    try:
        return min(map(units, _known_files(check).values()))
    except Exception:  # whatever a file makes declearn raise, which is reported elsewhere
        return None


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
    whole = len(check.problems) == before
    if check.quickrun and any(
        p.name == "sample-clip" and p.evaluation_share for p in plugins.get("client_opt", ())
    ):
        check.problem("[data]", *unnamed(_known_files(check)))
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
        _protected(check) if check.quickrun else None,
        metrics if isinstance(metrics, list) else [],
        _population(check),
        check.quickrun,
        part_of(check.config, "network").get("protocol")
        in ("fedclip-websockets", *["websockets"] * check.quickrun),
    )
    # If a plug-in could not be built, its counterpart can not be checked.
    if whole:
        check_counterparts(check, plugins)
        if "aggregator" not in optim or aggregator is not None:
            _check_updates(check, optim, setting)
    least = as_count(part_of(part_of(check.config, "network"), "kwargs").get("min_replies"))
    if least is not None:
        if not check.quickrun and part_of(check.config, "network").get("protocol") == "websockets":
            # In a quickrun file, fedclip's own protocol takes its place.
            text = "declearn's own websockets takes no min_replies: write 'fedclip-websockets'"
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
            f"clients need fedclip>={fedclip.__version__} for {', '.join(names)}, and `import "
            "fedclip` in their script, or `fedclip run` to start it",
        )


def _check_quorum(check: Check, setting: Setting, least: int) -> None:
    """Find out whether a round may go on without some of its clients."""
    where, name = "[network.kwargs]", getattr(setting.aggregator, "name", "averaging")
    register = part_of(check.config, "run").get("register")
    low = register.get("min_clients", 1) if isinstance(register, dict) else register
    secure = setting.secagg is not None
    check.problem(where, *unfit(secagg=secure, fairness=setting.fairness, aggregator=name))
    clients, registered = setting.clients, as_count(low)
    if clients is not None and least > clients:
        text = f"min_replies = {least}, and a round has at most {clients} clients: lower it"
        check.problem(where, text)
    elif registered is not None and least > registered:
        check.note(
            where,
            f"registration may end with {registered} clients, fewer than min_replies = {least}: "
            "raise min_clients",
        )
    if name == "clipped-averaging":
        if few := setting.aggregator.combining.too_few(least):
            check.note(where, f"{few} with min_replies: such a round counts as zeros; raise it")
    else:
        check.note(
            where,
            f"fewer clients each move the average further, and {name!r} sets no limit to that: "
            "clipped-averaging does",
        )


def _check_updates(check: Check, optim: Section, setting: Setting) -> None:
    """Find mistakes that break the bound of the round update."""
    ours = is_ours(type(setting.aggregator))
    # `fedclip quickrun` and the demo take both by themselves.
    vetted = check.quickrun or setting.sampler.get("strategy") == NamedClients.strategy
    found = update_problems(
        setting.plugins,
        setting.aggregator if ours else getattr(setting.aggregator, "name", None),
        optim,
        Known(
            as_count(part_of(check.config, "run").get("rounds")),
            setting.clients,
            setting.secagg,
            check.quickrun,
            named=check.quickrun or setting.watched or (vetted and setting.secagg is None),
        ),
    )
    for level, section, message in found:
        check.add(level, f"[optim.{section}]", message)
    shared = any(is_shared(p) for chosen in setting.plugins.values() for p in chosen)
    if (ours or shared) and not vetted:
        check.note(
            "[client_sampler]",
            "replies are not vetted, so that one client can end the run: give FederatedServer "
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
    known = registered(part_of(check.config, "run")), len(_known_files(check)) * check.quickrun
    return max(filter(None, known), default=None)


def _secagg(check: Check) -> Section | None:
    """Return the section about secure aggregation, if there is one and its range is a number."""
    section = check.config.get("secagg")
    clipval = part_of(check.config, "secagg").get("clipval", 1.0)
    return section if isinstance(section, dict) and fits(clipval, float) and clipval > 0 else None


def _check_bounds(check: Check, client: Section, setting: Setting) -> None:
    """Describe what is clipped where, and what that guarantees; report what voids a guarantee."""
    plugins, run = setting.plugins, setting.run
    for key, chosen in plugins.items():
        for warning in places.warnings(chosen):
            check.note(f"[optim.{key}]", warning)
        for leak in places.before_noise(chosen):
            check.add("leak", f"[optim.{key}]", leak)
    for level, section, message in exposures(setting):
        own = section.partition(".")[0] in ("run", "secagg", "client_sampler", "experiment")
        check.add(level, f"[{section}]" if own else f"[optim.{section}]", message)
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
