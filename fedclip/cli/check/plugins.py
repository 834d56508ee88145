# SPDX-License-Identifier: Apache-2.0
"""Check optimizers and aggregators: look up and build each plug-in of a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from declearn.aggregator import Aggregator
from declearn.optimizer import Optimizer
from declearn.utils import access_types_mapping

from fedclip.cli.catalogue import is_ours, registries
from fedclip.cli.check.findings import CLIENT, SERVER, Check, Finding, Section, problem, text_of
from fedclip.cli.check.settings import Setting, argument_problems, fits, refusals
from fedclip.core import parameters
from fedclip.core.toml import toml_value
from fedclip.engines.declearn.statistics_server import SharedServer
from fedclip.errors import nearest, shown
from fedclip.privacy.guarantees import Plugin


def is_shared(plugin: object) -> bool:
    """Whether a plug-in is a clipper with ``shared = true``, or the counterpart of one."""
    return isinstance(plugin, SharedServer) or getattr(plugin, "_sharing", None) is not None


def counterpart_problems(setting: Setting) -> Iterator[Finding]:
    """Yield modules that exchange variables with a module that the other optimizer lacks.

    declearn's server hangs on a variable without a receiver.
    """
    sides = {where: [*_exchanging(where, chosen)] for where, chosen in setting.sides.items()}
    for where, other in ((CLIENT, SERVER), (SERVER, CLIENT)):
        names = [plugin.aux_name for plugin in sides[where]]
        received = {plugin.aux_name: plugin for plugin in sides[other]}
        for name in sorted({name for name in names if names.count(name) > 1}):
            text = f"{names.count(name)} modules exchange {name!r}: keep one, or set shared_name"
            yield problem(where, text)
        for plugin in sides[where]:
            if plugin.aux_name in received:
                if where == CLIENT and is_shared(plugin):
                    yield from _unlike(plugin, received[plugin.aux_name])
            elif is_shared(plugin) or _sends(plugin):
                text = f"{plugin.name} needs {_counterpart(plugin)} in {other}"
                yield problem(where, f"{text}: add it, or remove {plugin.name}")
    misplaced = [plugin for plugin in setting.client if isinstance(plugin, SharedServer)]
    yield from (problem(CLIENT, f"{plugin.name} belongs in {SERVER}") for plugin in misplaced)


def _exchanging(where: str, plugins: Sequence[Plugin]) -> Iterator[Plugin]:
    """Yield the modules that exchange variables on this side.

    A shared clipper in the server's optimizer is an ordinary clipper.
    """
    for plugin in plugins:
        misplaced = is_shared(plugin) and isinstance(plugin, SharedServer) != (where == SERVER)
        if getattr(plugin, "aux_name", None) and not misplaced:
            yield plugin


def _unlike(clipper: Plugin, other: Plugin) -> Iterator[Finding]:
    """Yield in what a shared clipper and the module that receives its counts differ."""
    if not (is_shared(other) and isinstance(clipper, other.clipper)):
        text = f"{clipper.aux_name!r} is {clipper.name}'s, and {other.name}'s in {SERVER}"
        yield problem(CLIENT, text)
        return
    for key, expected in other.settings.items():
        if (actual := getattr(clipper, key)) != expected:
            text = f"{clipper.name} has {key} = {actual!r}, {other.name} {expected!r}"
            yield problem(CLIENT, f"{text}: write the same in both")


def _counterpart(plugin: Plugin) -> str:
    """Return the name of the module that a module needs on the other side, as in a file."""
    if is_shared(plugin):
        name = f"'{plugin.name}-server'"
        if isinstance(plugin, SharedServer):
            name = f"{plugin.clipper.name!r} with shared = true"
        return name + (f" with shared_name = {plugin.shared_name!r}" if plugin.shared_name else "")
    names = [
        repr(name)
        for name, cls in registries()["module"].items()
        if getattr(cls, "aux_name", None) == plugin.aux_name and not isinstance(plugin, cls)
    ]
    return " or ".join(names) or f"a module that exchanges {plugin.aux_name!r}"


def _sends(plugin: Plugin) -> bool:
    """Whether a module sends variables to the other side; having a name for them is not enough."""
    if plugin.auxvar_cls is not None:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return plugin.collect_aux_var() is not None
    except Exception:  # a module, such as scaffold-client, that cannot say before its first step
        return True


def check_optimizer(check: Check, value: object, key: str, where: str) -> list[Plugin]:
    """Check one optimizer in any of the forms it may take; return the plug-ins it holds."""
    if fits(value, float):
        _check_rate(check, where, key, value)
        return []
    if not isinstance(value, dict):
        check.add(problem(where, f"must be a learning rate or a section, got {shown(value)}"))
        return []
    rates = ("lrate", "w_decay")  # which have checks of their own
    config = {key: 1.0 if key in rates else entry for key, entry in value.items()}
    check.add(*(problem(where, text) for text in argument_problems(Optimizer, config)))
    for name in rates:
        if name in value:
            _check_rate(check, where, name, value[name])
    plugins = []
    for kind in ("regularizer", "module"):
        specs = value.get(f"{kind}s", [])
        if isinstance(specs, list):
            plugins += [_check_plugin(check, spec, kind, where) for spec in specs]
        else:
            check.add(problem(where, f"{kind}s must be a list, got {shown(specs)}"))
    return [plugin for plugin in plugins if plugin is not None]


def _check_rate(check: Check, where: str, name: str, value: object) -> None:
    """Check a learning rate or a decay, a number or a schedule."""
    schedules, texts = access_types_mapping("Scheduler"), list[str]()
    match value:
        case [str() as kind, dict() as config] if kind in schedules:
            _build(check, where, f"{name}: {kind}", schedules[kind], config)
        case [str() as kind, dict()]:
            texts = [f"{name}: unknown schedule {shown(kind)}{nearest(kind, schedules)}"]
        case list():
            form = "must be a number, or [schedule, {parameter = value}]"
            texts = [f"{name}: {form}, got {shown(value)}"]
        case _:
            allowed = parameters.non_negative if name == "w_decay" else parameters.positive
            texts = refusals(allowed, **{name: value})
            if not texts and isinstance(value, int):
                texts = [f"{name} = {shown(value)} must be a float: write {shown(value)}.0"]
    check.add(*(problem(where, text) for text in texts))


def _build(check: Check, where: str, label: str, cls: type[Plugin], config: Section) -> Plugin:
    """Build a plug-in; report what is wrong with its parameters, and what it warns of."""
    # The constructors of fedclip say themselves what is wrong.
    faults = [] if is_ours(cls) else [*argument_problems(cls, config)]
    plugin = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Only an aggregator's `from_config` wants its name too.
            make = (lambda c: cls(**c)) if issubclass(cls, Aggregator) else cls.from_config
            plugin = None if faults else make(dict(config))
        except Exception as exc:  # anything at all that a plug-in's constructor may raise
            faults.append(text_of(exc))
    check.add(*(problem(where, f"{label}: {text}") for text in faults))
    check.add(*(Finding("note", where, f"{label}: {warning.message}") for warning in caught))
    return plugin


def _check_plugin(check: Check, spec: object, kind: str, where: str) -> Plugin:
    """Look up and build one plug-in; return it, or None if it cannot be built."""
    known, plugin = registries(), None
    match [spec, {}] if isinstance(spec, str) else spec:
        case [str() as name, dict() as config] if name in known[kind]:
            plugin = _build(check, where, name, known[kind][name], config)
            if plugin is not None:
                chosen = ", ".join(f"{key} = {toml_value(v):.120}" for key, v in config.items())
                check.add(Finding("ok", where, f"{name} {{{chosen}}}" if chosen else name))
        case [str() as name, dict()]:
            hint = nearest(name, known[kind]) or "; `fedclip list` shows the names"
            text = f"unknown {kind} {shown(name)}{hint}"
            if right := next((other for other, names in known.items() if name in names), None):
                text = f"{name!r} is a {right}, not a {kind}: move it to {right}s"
            check.add(problem(where, text))
        case _:
            form = "must be a name, or [name, {parameter = value}]"
            check.add(problem(where, f"{shown(spec)} in {kind}s {form}"))
    return plugin


def check_aggregator(check: Check, value: object, where: str) -> Plugin:
    """Check the aggregator; return it, or None if it is missing or cannot be built."""
    if value is None:
        return None
    config = dict(value) if isinstance(value, dict) else {"name": value}
    return _check_plugin(check, [str(config.pop("name", None)), config], "aggregator", where)
