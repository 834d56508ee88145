# SPDX-License-Identifier: Apache-2.0
"""Check optimizers and aggregators: look up and build each plug-in of a configuration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from declearn.aggregator import Aggregator, list_aggregators
from declearn.optimizer import Optimizer, list_optim_modules, list_optim_regularizers
from declearn.utils import access_types_mapping

from fedclip.cli.catalogue import is_ours
from fedclip.cli.check.findings import Check, Plugins, Section, brief, text_of
from fedclip.cli.check.settings import argument_problems, fits
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.core.toml import toml_value
from fedclip.engines.declearn.statistics_server import SharedServer
from fedclip.errors import Problem, nearest
from fedclip.privacy.guarantees import Plugin

CLIENT, SERVER = "client_opt", "server_opt"


def is_shared(plugin: object) -> bool:
    """Whether a plug-in is a clipper with ``shared = true``, or the counterpart of one."""
    return isinstance(plugin, SharedServer) or getattr(plugin, "_sharing", None) is not None


def shared_problems(plugins: Mapping[str, Iterable[Plugin]]) -> Iterator[Problem]:
    """Yield each problem, with its section, ``client_opt`` or ``server_opt``.

    Parameters
    ----------
    plugins
        The modules of ``client_opt`` and ``server_opt``.
    """
    both = [p for p in plugins.get(CLIENT, ()) if is_shared(p)]
    clients = [p for p in both if not isinstance(p, SharedServer)]
    # A shared clipper in the server's optimizer is an ordinary clipper, not a counterpart.
    servers = [p for p in plugins.get(SERVER, ()) if isinstance(p, SharedServer)]
    clippers = {p.aux_name: p for p in clients}
    counterparts = {p.aux_name: p for p in servers}
    for plugin in both:
        if isinstance(plugin, SharedServer):
            yield Problem(f"{plugin.name} belongs in {SERVER}", CLIENT)
    sides: tuple[tuple[str, list[Plugin]], ...] = ((CLIENT, clients), (SERVER, [*servers]))
    for side, chosen in sides:
        names = [str(p.aux_name) for p in chosen]
        for twice in sorted({name for name in names if names.count(name) > 1}):
            text = (
                f"{names.count(twice)} modules exchange {twice!r}, and only the last would receive "
                "messages"
            )
            yield Problem(f"{text}; give each pair a different shared_name", side)
    for name, clipper in clippers.items():
        other = counterparts.get(name)
        if other is None:
            lacks = f"{SERVER} lacks {clipper.name + '-server'!r}{_named(clipper)}"
            text = f"{clipper.name} has shared = true, and {lacks}"
            yield Problem(f"{text}: each client would clip by its own statistics", CLIENT)
        elif not isinstance(clipper, other.clipper):
            yield Problem(f"{name!r} is {clipper.name}'s, and {other.name}'s in {SERVER}", CLIENT)
        else:
            for key, expected in other.settings.items():
                if (actual := getattr(clipper, key)) != expected:
                    text = f"{clipper.name} has {key} = {actual!r}, its counterpart in {SERVER}"
                    yield Problem(f"{text} {expected!r}: write the same in both", CLIENT)
    for name, counterpart in counterparts.items():
        if name not in clippers:
            where = f"shared = true{_named(counterpart)} in {CLIENT}"
            text = f"{counterpart.name} needs {counterpart.clipper.name!r} with {where}"
            yield Problem(f"{text}: the run would end in its first round", SERVER)


def _named(plugin: Plugin) -> str:
    return f" with shared_name = {plugin.shared_name!r}" if plugin.shared_name else ""


Registries: TypeAlias = Mapping[str, Mapping[str, type[Plugin]]]


def check_optimizer(check: Check, value: object, key: str, where: str) -> list[Plugin]:
    """Check one optimizer in any of the forms it may take; return the plug-ins it holds."""
    if isinstance(value, str):
        text = f"declearn accepts no path here: write the contents of {brief(value)} in this file"
        check.problem(where, text)
        return []
    if fits(value, float):
        if not _check_rate(check, where, key, value):
            check.add("ok", where, f"plain SGD, learning rate {value}")
        return []
    if not isinstance(value, dict):
        check.problem(where, f"must be a learning rate or a section, got {brief(value)}")
        return []
    allowed = parameters.signature_of(Optimizer)
    known = f" (allowed: {', '.join(allowed)})"
    unknown = [name for name in value if name not in allowed]
    check.problem(
        where, *(f"unknown field {brief(n)}{nearest(n, allowed)}{known}" for n in unknown)
    )
    if "lrate" not in value:
        check.problem(where, "lrate is missing")
    for name in ("lrate", "w_decay"):
        if name in value:
            _check_rate(check, where, name, value[name])
    registries: Registries = {
        "regularizers": list_optim_regularizers(),
        "modules": list_optim_modules(),
    }
    plugins = []
    for field in registries:
        specs = value.get(field, [])
        if isinstance(specs, list):
            plugins += [_check_plugin(check, spec, field, registries, where) for spec in specs]
        else:
            what = f": write [{brief(specs)}]" if specs else ""
            check.problem(where, f"{field} must be a list, got {brief(specs)}{what}")
    if not (value.get("modules") or value.get("regularizers")):
        check.add("ok", where, "no module")
    return [plugin for plugin in plugins if plugin is not None]


def _check_rate(check: Check, where: str, name: str, value: object) -> bool:
    """Check a learning rate or a decay, a number or a schedule; return whether it is wrong."""
    schedules = access_types_mapping("Scheduler")
    match value:
        case [str() as kind, dict() as config] if kind in schedules:
            return _build(check, where, f"{name}: {kind}", schedules[kind], config) is None
        case [str() as kind, dict()]:
            text = f": unknown schedule {brief(kind)}{nearest(kind, schedules)}"
        case list():
            text = f": must be a number, or [schedule, {{parameter = value}}], got {brief(value)}"
        case _ if not fits(value, float):
            text = f" must be a number, got {brief(value)}"
        case float() if not math.isfinite(value):
            text = f" must be a finite number, got {value!r}"
        case int() | float() if value < 0 or (value == 0 and name != "w_decay"):
            text = f" must be {'>=' if name == 'w_decay' else '>'} 0, got {brief(value)}"
        case int():
            text = f" = {brief(value)} must be a float: write {brief(value)}.0"
        case _:
            return False
    return check.problem(where, name + text)


def _build(
    check: Check, where: str, label: str, cls: type[Plugin], config: Section, ok: str = ""
) -> Plugin:
    """Build a plug-in; report what is wrong with its parameters, and what it warns of."""
    allowed = parameters.signature_of(cls)
    faults = []
    if not any(p.kind is p.VAR_KEYWORD for p in allowed.values()):
        takes = f" (it takes: {', '.join(allowed)})" if allowed else " (it takes none)"
        unknown = [key for key in config if key not in allowed]
        faults = [f"unknown parameter {brief(k)}{nearest(k, allowed)}{takes}" for k in unknown]
    if not is_ours(cls):
        faults += argument_problems(cls, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Only an aggregator's `from_config` wants its name too.
            make = (lambda c: cls(**c)) if issubclass(cls, Aggregator) else cls.from_config
            plugin = None if faults else make(dict(config))
        except Exception as exc:  # anything at all that a plug-in's constructor may raise
            faults.append(text_of(exc))
    if check.problem(where, *(f"{label}: {text}" for text in faults)):
        return None
    if ok:
        check.add("ok", where, ok)
    for warning in caught:
        check.note(where, f"{label}: {warning.message}")
    return plugin


def _check_plugin(
    check: Check, spec: object, field: str, registries: Registries, where: str
) -> Plugin:
    """Look up and build one plug-in; return it, or None if it cannot be built."""
    match spec:
        case str() as name:
            config: Config = {}
        case [str() as name, dict() as config]:
            pass
        case _:
            form = "must be a name, or [name, {parameter = value}]"
            check.problem(where, f"{brief(spec)} in {field} {form}")
            return None
    if name in registries[field]:
        shown = ", ".join(f"{key} = {brief(value, toml_value)}" for key, value in config.items())
        ok = f"{name} {{{shown}}}" if shown else name
        return _build(check, where, name, registries[field][name], config, ok)
    right = next((other for other, registry in registries.items() if name in registry), None)
    if right:
        check.problem(where, f"{name!r} is not one of the {field}: put it in {right}")
    else:
        hint = nearest(name, registries[field]) or "; `fedclip list` shows the names"
        check.problem(where, f"unknown {field.removesuffix('s')} {brief(name)}{hint}")
    return None


def check_aggregator(check: Check, value: object, where: str) -> Plugin:
    """Check the aggregator; return it, or None if it is missing or cannot be built."""
    if value is None:
        return None
    config = dict(value) if isinstance(value, dict) else {"name": value}
    name = config.pop("name", None)
    registry = list_aggregators()
    if isinstance(name, str) and name in registry:
        return _build(check, where, name, registry[name], config, ok=name)
    hint = nearest(name, registry) if isinstance(name, str) else ": give the name of one"
    check.problem(where, f"unknown aggregator {brief(name)}{hint}")
    return None


def check_counterparts(check: Check, plugins: Plugins) -> None:
    """Find modules that exchange variables with a module that the other side lacks.

    declearn's server hangs on a variable without a receiver.
    """
    for problem in shared_problems(plugins):
        check.problem(f"[optim.{problem.where}]", problem.text)
    for side, other in (("client_opt", "server_opt"), ("server_opt", "client_opt")):
        sent = {plugin.aux_name for plugin in plugins.get(side, ()) if _sends(plugin)}
        received = {getattr(plugin, "aux_name", None) for plugin in plugins.get(other, ())}
        for aux in sorted(sent - received):
            sender = next(p for p in plugins[side] if getattr(p, "aux_name", None) == aux)
            candidates = [
                name
                for name, cls in list_optim_modules().items()
                if getattr(cls, "aux_name", None) == aux and not isinstance(sender, cls)
            ]
            what = f" ({', '.join(map(repr, candidates))})" if candidates else ""
            text = f"{sender.name} exchanges {aux!r} with a counterpart{what}, and {other} has none"
            check.problem(f"[optim.{side}]", f"{text}: the run would hang")


def _sends(plugin: Plugin) -> bool:
    """Whether a module sends variables to the other side; having a name for them is not enough."""
    # A shared clipper sends nothing before its server does; `shared_problems` has checked it.
    if not getattr(plugin, "aux_name", None) or is_shared(plugin):
        return False
    if plugin.auxvar_cls is not None:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return plugin.collect_aux_var() is not None
    except Exception:  # a module, such as scaffold-client, that cannot say before its first step
        return True
