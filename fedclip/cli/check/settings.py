# SPDX-License-Identifier: Apache-2.0
"""Check declearn's settings: unknown or missing keys, wrong types, values out of range.

declearn's dataclasses and the constructors of its plug-ins say which settings there are, and of
which type. So the checks fit the version of declearn that is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from declearn.communication import NetworkServerConfig, list_available_protocols
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import DataSourceConfig, ExperimentConfig, ModelConfig

from fedclip.cli.check.findings import Section, brief
from fedclip.core import parameters
from fedclip.engines.local.crowd import SimulateConfig
from fedclip.errors import Problem, Unchecked, nearest

SECTIONS: dict[str, Any] = {
    "network": NetworkServerConfig,
    "data": DataSourceConfig,
    "model": ModelConfig,
    "optim": FLOptimConfig,
    "run": FLRunConfig,
    "experiment": ExperimentConfig,
    "simulate": SimulateConfig,
}
"""The sections of a quickrun file, each with the class that reads it."""

# A Python caller may pass it, and a file cannot.
_NOT_IN_TOML = ("logger",)

_KWARGS: Mapping[str, Callable[..., float]] = {
    "patience": parameters.positive,
    "min_replies": functools.partial(parameters.integer, 1),
}
"""The parameters of fedclip's network protocol, each with its check."""


def section_problems(section: str, values: Section) -> Iterator[Problem]:
    """Yield the problems of one section of a quickrun file, each with its section."""
    yield from _problems(section, SECTIONS[section], values)
    register = values.get("register")
    if section == "network":
        yield from (Problem(text, section) for text in _network(values))
    if isinstance(values.get("privacy"), Mapping):
        yield from (Problem(text, "run.privacy") for text in _privacy(values["privacy"]))
    if isinstance(register, Mapping):
        low, high = register.get("min_clients", 1), register.get("max_clients")
        if isinstance(low, int) and isinstance(high, int) and 0 < high < low:
            yield Problem(f"max_clients = {high} is below min_clients = {low}", "run.register")


def _problems(section: str, cls: Any, values: Section) -> Iterator[Problem]:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in _NOT_IN_TOML}
    for key, value in values.items():
        if key not in fields:
            home = elsewhere(key, section)
            what = f"; write it in [{home}]" if home else nearest(key, fields)
            what = what or f" (it takes: {', '.join(fields)})"
            yield Problem(f"declearn knows no {brief(key)} here{what}", section)
            continue
        hint = fields[key].type
        inner = next((t for t in _types(hint) if dataclasses.is_dataclass(t)), None)
        if inner and isinstance(value, Mapping):
            yield from _problems(f"{section}.{key}", inner, value)
        elif inner and not isinstance(value, str) and not (key == "register" and fits(value, int)):
            # A string is the path of a file. A number of clients may stand for a section.
            yield Problem(f"{key} must be a section, got {brief(value)}", section)
        elif not fits(value, hint) and not (key == "timeout" and fits(value, float)):
            yield Problem(f"{key} must be {_words(hint)}, got {brief(value)}{_nan(value)}", section)
        elif text := _out_of_range(key, value, hint):
            yield Problem(f"{key} {text}", section)
    # declearn has a default for these, or fills them in from another setting.
    filled = {"register", *getattr(cls, "autofill_fields", ())}
    filled |= set() if section == "run.training" else {"batch_size"}
    for name, field in fields.items():
        free = field.default is field.default_factory is dataclasses.MISSING
        if free and name not in values and name not in filled:
            yield Problem(f"{name} is missing", section)


def _types(hint: object) -> tuple[object, ...]:
    return hint, *typing.get_args(hint)


def _out_of_range(key: str, value: Unchecked, hint: object) -> str:
    """Say what is wrong with a number; whole numbers, other than seeds, are counts or seconds."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, got {value!r}"
    if fits(value, int) and key != "seed" and float not in _types(hint) and value < 1:
        return f"must be at least 1, got {brief(value)}"
    if fits(value, int) and not -(2**63) <= value < 2**63:
        return f"must be an int of 64 bits, got {brief(value)}"
    return ""


def _network(values: Mapping[str, object]) -> Iterator[str]:
    port, protocol, host = (values.get(key) for key in ("port", "protocol", "host"))
    known = sorted(list_available_protocols())
    if isinstance(port, int) and port > 65535:
        yield f"port must be at most 65535, got {brief(port)}"
    if isinstance(protocol, str) and protocol.strip().lower() not in known:
        hint = nearest(protocol, known) or f" (installed: {', '.join(known)})"
        yield f"unknown protocol {brief(protocol)}{hint}"
    if isinstance(host, str) and not (0 < len(host) <= 253 and host.isprintable()):
        yield f"host must be a name or an address, got {brief(host)}"
    heartbeat = values.get("heartbeat", 1.0)
    if isinstance(heartbeat, (int, float)) and heartbeat <= 0:
        yield f"heartbeat must be > 0 seconds, got {brief(heartbeat)}"
    kwargs = values.get("kwargs")
    for key, value in kwargs.items() if isinstance(kwargs, Mapping) else ():
        if key not in _KWARGS:
            takes = nearest(key, _KWARGS) or f" (it takes: {', '.join(_KWARGS)})"
            yield f"unknown parameter {brief(key)} in kwargs{takes}"
        elif isinstance(protocol, str) and not protocol.strip().lower().endswith("websockets"):
            yield f"{key} in kwargs goes with protocol = 'fedclip-websockets', not {protocol!r}"
        else:
            try:
                _KWARGS[key](**{key: value})
            except (TypeError, ValueError) as exc:
                yield f"{exc}, in kwargs"


def _privacy(values: Mapping[str, object]) -> Iterator[str]:
    """Yield problems that declearn would report less clearly."""
    budget, limit = values.get("budget"), values.get("sclip_norm")
    if isinstance(limit, (int, float)) and not 0 < limit < math.inf:
        yield f"sclip_norm must be a finite number > 0, got {brief(limit)}"
    match budget:
        case [int() | float() as epsilon, _] if not 0 < epsilon < math.inf:
            yield f"epsilon, first in budget, must be a finite number > 0, got {brief(epsilon)}"


def elsewhere(key: str, section: str) -> str | None:
    """Return the one other section in which declearn knows a setting of this name, if it is one."""
    homes = {"network.kwargs"} if key in _KWARGS else set()
    for name, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            homes |= {name} if field.name == key else set()
            for inner in filter(dataclasses.is_dataclass, _types(field.type)):
                if key in (f.name for f in dataclasses.fields(inner)):
                    homes.add(f"{name}.{field.name}")
    homes.discard(section)
    homes = {home for home in homes if home.startswith(f"{section}.")} or homes
    return homes.pop() if len(homes) == 1 else None


def argument_problems(cls: Any, config: Section) -> Iterator[str]:
    """Yield what is wrong with the parameters of one of declearn's own plug-ins.

    Their constructors check few of them. All numbers that they take are sizes, rates or shares,
    and none of these may be below 0.
    """
    try:
        hints = typing.get_type_hints(cls.__init__)
    except (NameError, TypeError):
        return
    for key, value in config.items():
        if key not in hints:
            continue
        if not fits(value, hints[key]):
            yield f"{key} must be {_words(hints[key])}, got {brief(value)}{_nan(value)}"
        elif fits(value, float) and not value >= 0:
            yield f"{key} must be >= 0, got {brief(value)}"
        elif isinstance(value, float) and math.isinf(value):
            yield f"{key} must be a finite number, got {value!r}"
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        if key in hints and parameter.default is parameter.empty and key not in config:
            yield f"{key} is missing"


def fits(value: object, hint: object) -> bool:
    """Whether a value from a file is of an annotated type; True for types that no file holds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is list:
        return isinstance(value, list) and all(fits(v, args[0]) for v in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(args) and all(map(fits, value, args))
    if origin is dict:
        return isinstance(value, dict) and all(fits(v, args[1]) for v in value.values())
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, type(None)) else True


def _words(hint: object) -> str:
    """Return an annotated type in words, as for a file."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"a list, each item {_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(map(_words, args))}"
    if origin is dict:
        return f"a section, each value {_words(args[1])}"
    words: dict[object, str] = {
        int: "an int",
        float: "a number",
        str: "a string",
        bool: "true or false",
    }
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _nan(value: object) -> str:
    return " (declearn's TOML reads nan as None)" if value is None else ""
