# SPDX-License-Identifier: Apache-2.0
"""Look at a federation's TOML before it runs, and say what would go wrong and where.

declearn parses a configuration on the server and sends it to the clients; a name that a client
does not know ends that client with a `KeyError` and leaves the server waiting for ever. So:

1. the file is parsed as declearn does it,
2. every plug-in of ``client_opt`` and ``server_opt`` is looked up and built on its own, so that
   each mistake is found, not only the first,
3. declearn's own parsers have the last word on what is left.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from declearn.communication import NetworkServerConfig
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.optimizer import Optimizer, list_optim_modules, list_optim_regularizers
from declearn.utils import access_types_mapping

import fedclip
from fedclip import parameters
from fedclip.errors import nearest
from fedclip.federation.statistics.check import is_shared, shared_problems
from fedclip.federation.update.check import update_problems
from fedclip.privacy import places
from fedclip.tools.catalogue import is_ours
from fedclip.tools.exposure import exposures

__all__ = ["Check", "Finding", "check_config", "find_config"]

Level = Literal["ok", "note", "problem"]

QUICKRUN_SECTIONS = ("network", "data", "optim", "run")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that the check has to say, and about which part of the file."""

    level: Level
    where: str
    message: str


@dataclasses.dataclass
class Check:
    """What was found in one file.

    Attributes
    ----------
    path
        The file.
    config
        Its parsed contents; empty if it is not TOML.
    findings
        In the order of the file.
    places
        What is clipped where, and what that guarantees: a line for each place.
    """

    path: Path
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way of a run."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        """The findings that would stop a run."""
        return [finding for finding in self.findings if finding.level == "problem"]

    def add(self, level: Level, where: str, message: str) -> None:
        """Add a finding, its message on one line."""
        self.findings.append(Finding(level, where, " ".join(message.split())))


def find_config(path: str | Path) -> Path:
    """Return the configuration file that `path` names: a file, or a folder with config.toml.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    path = Path(path)
    folder = os.path.isdir(path)  # `Path.is_dir` raises where a path is too long for the system.
    file = path / "config.toml" if folder else path
    if not os.path.isfile(file):
        where = f"{path} holds no config.toml" if folder else f"{path} does not exist"
        raise FileNotFoundError(f"{where}; give a declearn configuration file, or its folder")
    return file


def check_config(path: str | Path) -> Check:
    """Check a declearn configuration: a quickrun file, or one for `FLOptimConfig`.

    Parameters
    ----------
    path
        The TOML file, or a folder that holds it as ``config.toml``.

    Raises
    ------
    FileNotFoundError
        If there is no such file. Every other trouble is a finding.
    """
    check = Check(find_config(path))
    config = _load(check, check.path, "the file")
    if config is None:
        return check
    check.config = config
    if "client_opt" in config and "optim" not in config:
        _check_optim(check, config, {}, prefix="")
    elif not {"optim", "run"} & set(config):
        hint = nearest("client_opt", config)
        check.add(
            "problem",
            "the file",
            "holds neither [optim], as a quickrun file does, nor client_opt, as a file for "
            f"FLOptimConfig does{hint}",
        )
    else:
        _check_quickrun(check, config)
    return check


def _load(check: Check, path: Path, where: str) -> dict[str, Any] | None:
    """Parse a TOML file as declearn does, where nan means None; report what is wrong with it."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file, parse_float=lambda s: None if s == "nan" else float(s))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        check.add("problem", where, f"{path.name} is not valid TOML: {exc}")
    except OSError as exc:
        check.add("problem", where, f"{path} can not be read: {exc.strerror}")
    return None


def _check_quickrun(check: Check, config: dict[str, Any]) -> None:
    for section in QUICKRUN_SECTIONS:
        if section not in config:
            hint = nearest(section, set(config) - set(QUICKRUN_SECTIONS))
            empty = " (it may be empty, but declearn looks for it)" if section == "data" else ""
            check.add("problem", f"[{section}]", f"this section is missing{empty}{hint}")
        elif not isinstance(config[section], dict):
            check.add("problem", f"[{section}]", f"must be a section, got {config[section]!r}")
    optim, run = (_section(config, name) for name in ("optim", "run"))
    if optim is not None:
        _check_optim(check, optim, run or {}, prefix="optim.")
    if run is not None:
        _declearn(check, "[run]", FLRunConfig, run)
        _check_run(check, run)
    network = _section(config, "network")
    if network is not None:
        _declearn(check, "[network]", NetworkServerConfig, network)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = config.get(name)
    return value if isinstance(value, dict) else None


def _check_run(check: Check, run: Mapping[str, Any]) -> None:
    register = run.get("register")
    if isinstance(register, dict) and register.get("timeout") and not register.get("max_clients"):
        check.add(
            "note",
            "[run.register]",
            f"without max_clients, registration lasts the whole timeout ({register['timeout']} s), "
            "even when everybody has joined",
        )


def _check_optim(check: Check, optim: dict[str, Any], run: Mapping[str, Any], prefix: str) -> None:
    known = [field.name for field in dataclasses.fields(FLOptimConfig)]
    before = len(check.problems)
    plugins: dict[str, list[Any]] = {}
    for key in known[:2]:
        where = f"[{prefix}{key}]"
        if key not in optim:
            if key == "client_opt":
                hint = nearest(key, optim)
                check.add("problem", where, f"the clients' optimizer is missing{hint}")
            continue
        plugins[key] = _check_optimizer(check, optim[key], key, where)
    _check_counterparts(check, plugins, prefix)
    aggregator = _check_aggregator(check, optim.get("aggregator"), f"[{prefix}aggregator]")
    _check_updates(check, optim, plugins, prefix)
    # What declearn checks beyond that is worth a line only if nothing explains it already.
    if len(check.problems) == before:
        _declearn(
            check,
            f"[{prefix.rstrip('.')}]" if prefix else "the file",
            FLOptimConfig,
            {key: value for key, value in optim.items() if key in known},
        )
    # A pipeline of which a part is missing guarantees something else.
    if len(check.problems) == before:
        _check_bounds(check, optim, run, plugins, aggregator, prefix)
    for key in optim:
        hint = "" if key in known else nearest(key, known)
        # A file for FLOptimConfig may hold sections for others; one nearly right is a slip.
        if hint or (prefix and key not in known):
            check.add("note", f"[{prefix}{key}]", f"declearn ignores this section{hint}")
    ours = [p.name for p in plugins.get("client_opt", []) if is_ours(type(p))]
    ours += [aggregator.name] if aggregator is not None and is_ours(aggregator) else []
    if ours:
        check.add(
            "note",
            f"[{prefix}client_opt]",
            f"clients need fedclip>={fedclip.__version__} for {', '.join(dict.fromkeys(ours))}: "
            f"pip install 'fedclip>={fedclip.__version__}' on each, and `import fedclip` in the "
            "client's script, or start it with `fedclip run`",
        )


def _check_optimizer(check: Check, value: Any, key: str, where: str) -> list[Any]:
    """Check one optimizer in any of the forms it may take; return the plug-ins it holds."""
    if isinstance(value, bool) or value is None:
        check.add("problem", where, f"must be a learning rate or a section, got {value!r}")
        return []
    if isinstance(value, int):
        check.add("problem", where, f"{value} is an int, declearn wants a float: write {value}.0")
        return []
    if isinstance(value, float):
        check.add("ok", where, f"plain SGD, learning rate {value}")
        return []
    if isinstance(value, str):
        # Relative to the working directory, not to the file: so does declearn.
        path = Path(value)
        if not path.is_file():
            check.add("problem", where, f"there is no file {value!r} in {Path.cwd().name}/")
            return []
        loaded = _load(check, path, where)
        if loaded is None:
            return []
        try:
            FLOptimConfig.from_params(**{"client_opt": 0.1, key: value})
        except RuntimeError as exc:
            if "Unsupported inputs" in str(exc):
                text = f"this declearn takes no path here: write the section of {value!r} itself"
                check.add("problem", where, text)
        value = loaded.get(key, loaded)
        where = f"{path} {where}"
    if not isinstance(value, dict):
        check.add("problem", where, f"must be a learning rate or a section, got {value!r}")
        return []
    for name in value:
        allowed = parameters.signature_of(Optimizer)
        if name not in allowed:
            check.add(
                "problem",
                where,
                f"unknown field {name!r}{nearest(name, allowed)} (allowed: {', '.join(allowed)})",
            )
    if "lrate" not in value:
        check.add("problem", where, "lrate is missing")
    for name in ("lrate", "w_decay"):
        rate = value.get(name)
        if isinstance(rate, int) and not isinstance(rate, bool):
            check.add("problem", where, f"{name} = {rate} must be a float: write {rate}.0")
    plugins = []
    for field, registry, other in (
        ("regularizers", list_optim_regularizers(), list_optim_modules()),
        ("modules", list_optim_modules(), list_optim_regularizers()),
    ):
        specs = value.get(field) or []
        if not isinstance(specs, list):
            check.add("problem", where, f"{field} must be a list, got {specs!r}: write [{specs!r}]")
            continue
        for spec in specs:
            plugin = _check_plugin(check, spec, field, registry, other, where)
            if plugin is not None:
                plugins.append(plugin)
    if not (value.get("modules") or value.get("regularizers")):
        check.add("ok", where, "no module")
    return plugins


def _check_plugin(
    check: Check,
    spec: Any,
    field: str,
    registry: Mapping[str, type],
    other: Mapping[str, type],
    where: str,
) -> Any:
    """Look up and build one plug-in; return it, or None if it can not be built."""
    config: dict[str, Any] = {}
    match spec:
        case str() as name:
            pass
        case [str() as name, dict() as config]:
            pass
        case _:
            check.add(
                "problem",
                where,
                f"{spec!r} in {field} must be a name, or [name, {{parameter = value}}]",
            )
            return None
    if name not in registry:
        if name in other:
            right = "modules" if field == "regularizers" else "regularizers"
            check.add("problem", where, f"{name!r} is not one of the {field}: put it in {right}")
        else:
            hint = nearest(name, registry) or "; `fedclip list` shows the names"
            check.add("problem", where, f"unknown {field.removesuffix('s')} {name!r}{hint}")
        return None
    cls: Any = registry[name]
    allowed = parameters.signature_of(cls)
    if not any(p.kind is p.VAR_KEYWORD for p in allowed.values()):
        unknown = [key for key in config if key not in allowed]
        for key in unknown:
            takes = f" (it takes: {', '.join(allowed)})" if allowed else " (it takes none)"
            hint = nearest(key, allowed)
            check.add("problem", where, f"{name}: unknown parameter {key!r}{hint}{takes}")
        if unknown:
            return None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin = cls.from_config(dict(config))
    except Exception as exc:  # anything at all that a plug-in's constructor may raise
        check.add("problem", where, f"{name}: {_text(exc)}")
        return None
    shown = ", ".join(f"{key} = {value!r}" for key, value in config.items())
    check.add("ok", where, f"{name} {{{shown}}}" if shown else name)
    for warning in caught:
        check.add("note", where, f"{name}: {warning.message}")
    return plugin


def _check_aggregator(check: Check, value: Any, where: str) -> Any:
    """Check the aggregator's name; return its class, or None where there is nothing to say."""
    name = value.get("name") if isinstance(value, dict) else value
    if name is None:
        return None
    registry = access_types_mapping("Aggregator")
    if name not in registry:
        check.add("problem", where, f"unknown aggregator {name!r}{nearest(str(name), registry)}")
        return None
    if isinstance(value, dict) and is_ours(registry[name]):
        try:
            registry[name].from_config(value)
        except (TypeError, ValueError) as exc:
            check.add("problem", where, f"{name}: {_text(exc)}")
            return None
    check.add("ok", where, str(name))
    return registry[name]


def _check_updates(
    check: Check, optim: Mapping[str, Any], plugins: Mapping[str, list[Any]], prefix: str
) -> None:
    """Find what keeps the bound of the round update from holding."""
    value = optim.get("aggregator")
    aggregator: Any = value.get("name") if isinstance(value, dict) else value
    cls = access_types_mapping("Aggregator").get(str(aggregator))
    if cls is not None and is_ours(cls):
        try:
            aggregator = cls.from_config(value if isinstance(value, dict) else {"name": value})
        except (TypeError, ValueError):
            return  # `_check_aggregator` has said so
    server = optim.get("server_opt")
    run = check.config.get("run")
    found = update_problems(
        plugins,
        aggregator,
        rounds=run.get("rounds") if isinstance(run, dict) else None,
        clients=_clients_a_round(check.config),
        fairness="fairness" in optim,
        regularizers=isinstance(server, dict) and bool(server.get("regularizers")),
        secagg=_section(check.config, "secagg"),
    )
    for level, section, message in found:
        check.add("note" if level == "note" else "problem", f"[{prefix}{section}]", message)


def _clients_a_round(config: Mapping[str, Any]) -> Any:
    """Return how many clients may take part in a round; None if the file does not say."""
    run, sampler = _section(config, "run") or {}, _section(config, "client_sampler") or {}
    register = _section(run, "register") or {}
    most = register.get("max_clients", register.get("min_clients"))
    return sampler.get("n_samples", most)


def _check_bounds(
    check: Check,
    optim: Mapping[str, Any],
    run: Mapping[str, Any],
    plugins: Mapping[str, list[Any]],
    aggregator: Any,
    prefix: str,
) -> None:
    """Say what is clipped where and what that guarantees, and what stands in the way of it."""
    for key, chosen in plugins.items():
        for warning in places.warnings(chosen):
            check.add("note", f"[{prefix}{key}]", warning)
    client, shared = optim.get("client_opt"), optim.get("aggregator")
    options = client if isinstance(client, dict) else {}
    config = shared if isinstance(shared, dict) else {"name": shared}
    clipping = aggregator.from_config(config) if aggregator and is_ours(aggregator) else None
    secagg = _section(check.config, "secagg")
    for level, section, message in exposures(plugins, run, aggregator=clipping, secagg=secagg):
        own = section.partition(".")[0] in ("run", "secagg")
        check.add(level, f"[{section}]" if own else f"[{prefix}{section}]", message)
    training = _section(run, "training") or {}
    check.places = places.in_words(
        plugins.get("client_opt", []),
        plugins.get("server_opt", []),
        clipping,
        lrate=options.get("lrate"),
        w_decay=options.get("w_decay", 0.0),
        steps=training.get("n_steps"),
        privacy=_section(run, "privacy"),
    )


def _check_counterparts(check: Check, plugins: Mapping[str, Iterable[Any]], prefix: str) -> None:
    """Find modules that exchange variables with a module which the other side lacks.

    declearn's server does not survive a variable without a receiver: it hangs.
    """
    for side, problem in shared_problems(plugins):
        check.add("problem", f"[{prefix}{side}]", problem)
    names = {
        side: {plugin.aux_name for plugin in plugins.get(side, ()) if _exchanges(plugin)}
        for side in ("client_opt", "server_opt")
    }
    for side, other in (("client_opt", "server_opt"), ("server_opt", "client_opt")):
        for aux in sorted(names[side] - names[other]):
            mine = next(p for p in plugins[side] if getattr(p, "aux_name", None) == aux)
            candidates = [
                name
                for name, cls in list_optim_modules().items()
                if getattr(cls, "aux_name", None) == aux and not isinstance(mine, cls)
            ]
            what = f" ({', '.join(map(repr, candidates))})" if candidates else ""
            check.add(
                "problem",
                f"[{prefix}{side}]",
                f"{mine.name} exchanges {aux!r} with a counterpart{what}, and {other} has none: "
                "the run would hang",
            )


def _exchanges(plugin: Any) -> bool:
    """Whether a module sends variables to the other side; having a name for them is not enough."""
    # Shared clippers stay silent until they are spoken to, and have been looked at already.
    if not getattr(plugin, "aux_name", None) or is_shared(plugin):
        return False
    if plugin.auxvar_cls is not None:
        return True
    try:
        return plugin.collect_aux_var() is not None
    except Exception:  # scaffold-client, for one, can not say before its first step
        return True


def _declearn(check: Check, where: str, parser: Any, values: Mapping[str, Any]) -> None:
    """Have declearn parse a section, and report what it refuses or ignores."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parser.from_params(**values)
        except Exception as exc:  # declearn raises a RuntimeError, or whatever it met first
            check.add("problem", where, _text(exc))
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            check.add("note", where, str(warning.message))


def _text(exc: BaseException) -> str:
    """Return an exception's message; a KeyError would quote its own."""
    text = str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc)
    return text or type(exc).__name__
