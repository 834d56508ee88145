# SPDX-License-Identifier: Apache-2.0
"""Optimizers and aggregators of a configuration: each plug-in is looked up and built on its own."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from declearn.main.config import FLOptimConfig
from declearn.optimizer import Optimizer, list_optim_modules, list_optim_regularizers
from declearn.optimizer.schedulers import Scheduler
from declearn.utils import access_types_mapping

from fedclip import parameters
from fedclip.errors import nearest
from fedclip.federation.statistics.check import is_shared, shared_problems
from fedclip.tools.catalogue import is_ours
from fedclip.tools.findings import Check, brief, read_toml, text_of
from fedclip.tools.settings import argument_faults

__all__ = ["check_aggregator", "check_counterparts", "check_optimizer"]


def check_optimizer(check: Check, value: Any, key: str, where: str) -> list[Any]:
    """Check one optimizer in any of the forms it may take; return the plug-ins it holds."""
    if isinstance(value, str):
        # Relative to the working directory, not to the file: so does declearn.
        if not os.path.isfile(value):
            text = f"there is no file {brief(value)} in {Path.cwd().name}/"
            check.add("problem", where, text)
            return []
        loaded = read_toml(check, Path(value), where)
        if loaded is None:
            return []
        try:
            FLOptimConfig.from_params(**{"client_opt": 0.1, key: value})
        except RuntimeError as exc:
            if "Unsupported inputs" in str(exc):
                text = f"this declearn takes no path here: write the section of {value!r} itself"
                check.add("problem", where, text)
        where = f"{value} {where}"
        value = loaded.get(key, loaded)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        before = len(check.problems)
        for text in _rate_faults(key, value):
            check.add("problem", where, text)
        if len(check.problems) == before:
            check.add("ok", where, f"plain SGD, learning rate {value}")
        return []
    if not isinstance(value, dict):
        check.add("problem", where, f"must be a learning rate or a section, got {brief(value)}")
        return []
    allowed = parameters.signature_of(Optimizer)
    for name in value:
        if name not in allowed:
            known = ", ".join(allowed)
            hint = nearest(name, allowed)
            check.add("problem", where, f"unknown field {brief(name)}{hint} (allowed: {known})")
    if "lrate" not in value:
        check.add("problem", where, "lrate is missing")
    for name in ("lrate", "w_decay"):
        if name in value:
            for text in _rate_faults(name, value[name]):
                check.add("problem", where, text)
    plugins = []
    for field, registry, other in (
        ("regularizers", list_optim_regularizers(), list_optim_modules()),
        ("modules", list_optim_modules(), list_optim_regularizers()),
    ):
        specs = value.get(field, [])
        if not isinstance(specs, list):
            text = f"{field} must be a list, got {brief(specs)}"
            check.add("problem", where, text + (f": write [{brief(specs)}]" if specs else ""))
            continue
        for spec in specs:
            plugin = _check_plugin(check, spec, field, registry, other, where)
            if plugin is not None:
                plugins.append(plugin)
    if not (value.get("modules") or value.get("regularizers")):
        check.add("ok", where, "no module")
    return plugins


def _rate_faults(name: str, value: Any) -> Iterator[str]:
    """Say what is wrong with a learning rate or a decay: a number, or a schedule."""
    if isinstance(value, list):
        yield from (f"{name}: {text}" for text in _schedule_faults(value))
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        yield f"{name} must be a number, got {brief(value)}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} must be a finite number, got {value!r}"
    elif name == "w_decay" and value < 0:
        yield f"{name} must be >= 0, got {brief(value)}"
    elif name != "w_decay" and value <= 0:
        yield f"{name} must be > 0, got {brief(value)}"
    elif isinstance(value, int):
        yield f"{name} = {brief(value)} must be a float: write {brief(value)}.0"


def _schedule_faults(value: list[Any]) -> Iterator[str]:
    match value:
        case [str() as kind, dict() as config]:
            pass
        case _:
            yield f"must be a number, or [schedule, {{parameter = value}}], got {brief(value)}"
            return
    known: Mapping[str, Any] = access_types_mapping("Scheduler")
    if kind not in known:
        yield f"unknown schedule {brief(kind)}{nearest(kind, known)}"
        return
    faults = [*_unknown(known[kind], config), *argument_faults(known[kind], config)]
    if not faults:
        try:
            Scheduler.from_specs(kind, dict(config))
        except Exception as exc:  # whatever a schedule's constructor may raise
            faults.append(text_of(exc))
    yield from (f"{kind}: {text}" for text in faults)


def _unknown(cls: Any, config: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each parameter that a plug-in does not have."""
    allowed = parameters.signature_of(cls)
    if any(p.kind is p.VAR_KEYWORD for p in allowed.values()):
        return []
    takes = f" (it takes: {', '.join(allowed)})" if allowed else " (it takes none)"
    return [
        f"unknown parameter {brief(key)}{nearest(key, allowed)}{takes}"
        for key in config
        if key not in allowed
    ]


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
            text = f"{brief(spec)} in {field} must be a name, or [name, {{parameter = value}}]"
            check.add("problem", where, text)
            return None
    if name not in registry:
        if name in other:
            right = "modules" if field == "regularizers" else "regularizers"
            check.add("problem", where, f"{name!r} is not one of the {field}: put it in {right}")
        else:
            hint = nearest(name, registry) or "; `fedclip list` shows the names"
            check.add("problem", where, f"unknown {field.removesuffix('s')} {brief(name)}{hint}")
        return None
    cls: Any = registry[name]
    faults = _unknown(cls, config)
    if not is_ours(cls):
        faults += argument_faults(cls, config)
    for text in faults:
        check.add("problem", where, f"{name}: {text}")
    if faults:
        return None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin = cls.from_config(dict(config))
    except Exception as exc:  # anything at all that a plug-in's constructor may raise
        check.add("problem", where, f"{name}: {text_of(exc)}")
        return None
    shown = ", ".join(f"{key} = {brief(value)}" for key, value in config.items())
    check.add("ok", where, f"{name} {{{shown}}}" if shown else name)
    for warning in caught:
        check.add("note", where, f"{name}: {warning.message}")
    return plugin


def check_aggregator(check: Check, value: Any, where: str) -> Any:
    """Check the aggregator; return it, or None where there is none, or none that can be built."""
    if value is None:
        return None
    config = dict(value) if isinstance(value, dict) else {"name": value}
    name = config.pop("name", None)
    registry = access_types_mapping("Aggregator")
    if not isinstance(name, str) or name not in registry:
        hint = nearest(name, registry) if isinstance(name, str) else ": give the name of one"
        check.add("problem", where, f"unknown aggregator {brief(name)}{hint}")
        return None
    cls: Any = registry[name]
    faults = _unknown(cls, config)
    if not is_ours(cls):
        faults += argument_faults(cls, config)
    try:
        aggregator = None if faults else cls(**config)
    except Exception as exc:  # anything at all that a plug-in's constructor may raise
        faults.append(text_of(exc))
    for text in faults:
        check.add("problem", where, f"{name}: {text}")
    if faults:
        return None
    check.add("ok", where, name)
    return aggregator


def check_counterparts(check: Check, plugins: Mapping[str, Iterable[Any]], prefix: str) -> None:
    """Find modules that exchange variables with a module which the other side lacks.

    declearn's server does not survive a variable without a receiver: it hangs.
    """
    for side, problem in shared_problems(plugins):
        check.add("problem", f"[{prefix}{side}]", problem)
    for side, other in (("client_opt", "server_opt"), ("server_opt", "client_opt")):
        sent = {plugin.aux_name for plugin in plugins.get(side, ()) if _sends(plugin)}
        received = {getattr(plugin, "aux_name", None) for plugin in plugins.get(other, ())}
        for aux in sorted(sent - received):
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


def _sends(plugin: Any) -> bool:
    """Whether a module sends variables to the other side; having a name for them is not enough."""
    # Shared clippers stay silent until they are spoken to, and have been looked at already.
    if not getattr(plugin, "aux_name", None) or is_shared(plugin):
        return False
    if plugin.auxvar_cls is not None:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return plugin.collect_aux_var() is not None
    except Exception:  # scaffold-client, for one, can not say before its first step
        return True
