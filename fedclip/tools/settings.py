# SPDX-License-Identifier: Apache-2.0
"""declearn's own settings: unknown keys, missing ones, values of another type or out of range.

What there is, and of which type, is asked of declearn's dataclasses and of its plug-ins'
constructors, so that it is that of the version installed.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from declearn.communication import NetworkServerConfig, list_available_protocols
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import DataSourceConfig, ExperimentConfig, ModelConfig

from fedclip.errors import nearest
from fedclip.tools.findings import brief

__all__ = ["SECTIONS", "Fault", "argument_faults", "elsewhere", "section_faults"]

SECTIONS: dict[str, Any] = {
    "network": NetworkServerConfig,
    "data": DataSourceConfig,
    "model": ModelConfig,
    "optim": FLOptimConfig,
    "run": FLRunConfig,
    "experiment": ExperimentConfig,
}
"""The sections of a quickrun file, and what declearn makes of each."""

# What a Python caller may give, and a file can not.
_NOT_IN_TOML = ("kwargs", "logger")


class Fault(NamedTuple):
    """What is wrong, and in which section, as in ``run.training``."""

    section: str
    message: str


def section_faults(section: str, values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with the settings of one section of a quickrun file."""
    yield from _faults(section, SECTIONS[section], values)
    register = values.get("register")
    if section == "network":
        yield from _network(values)
    elif section == "run" and isinstance(register, Mapping):
        yield from _register(register)


def _faults(section: str, cls: Any, values: Mapping[str, Any]) -> Iterator[Fault]:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in _NOT_IN_TOML}
    for key, value in values.items():
        if key not in fields:
            home = elsewhere(key, section)
            what = f"; write it in [{home}]" if home else nearest(key, fields)
            what = what or f" (it takes: {', '.join(fields)})"
            yield Fault(section, f"declearn knows no {brief(key)} here{what}")
            continue
        hint = fields[key].type
        inner = next((t for t in _types(hint) if dataclasses.is_dataclass(t)), None)
        if inner and isinstance(value, Mapping):
            yield from _faults(f"{section}.{key}", inner, value)
        elif inner and not isinstance(value, str) and not (key == "register" and _fits(value, int)):
            # A string is the path of a file, a number of clients may stand for a section.
            yield Fault(section, f"{key} must be a section, got {brief(value)}")
        elif not _fits(value, hint) and not (key == "timeout" and _fits(value, float)):
            yield Fault(section, f"{key} must be {_words(hint)}, got {brief(value)}{_nan(value)}")
        else:
            yield from (Fault(section, f"{key} {text}") for text in _out_of_range(key, value, hint))
    for name in fields.keys() - values.keys():
        if _is_required(fields[name], cls, section):
            yield Fault(section, f"{name} is missing")


def _types(hint: Any) -> tuple[Any, ...]:
    return hint, *typing.get_args(hint)


def _is_required(field: Any, cls: Any, section: str) -> bool:
    """Whether declearn neither has a default nor fills the setting in from another one."""
    missing = dataclasses.MISSING
    filled = {*getattr(cls, "autofill_fields", ()), "register"}
    if section != "run.training":
        filled.add("batch_size")
    return (
        field.default is missing and field.default_factory is missing and field.name not in filled
    )


def _out_of_range(key: str, value: Any, hint: Any) -> Iterator[str]:
    """Say what is wrong with a number: whole ones are counts or seconds, but for seeds."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"must be a finite number, got {value!r}"
    elif _fits(value, int):
        if key != "seed" and float not in _types(hint) and value < 1:
            yield f"must be at least 1, got {brief(value)}"
        elif not -(2**63) <= value < 2**63:
            yield f"must be an int of 64 bits, got {brief(value)}"


def _network(values: Mapping[str, Any]) -> Iterator[Fault]:
    port, protocol, host = (values.get(key) for key in ("port", "protocol", "host"))
    if isinstance(port, int) and port > 65535:
        yield Fault("network", f"port must be at most 65535, got {brief(port)}")
    if isinstance(protocol, str) and protocol.strip().lower() not in list_available_protocols():
        known = sorted(list_available_protocols())
        hint = nearest(protocol, known) or f" (installed: {', '.join(known)})"
        yield Fault("network", f"unknown protocol {brief(protocol)}{hint}")
    if isinstance(host, str) and not (0 < len(host) <= 253 and host.isprintable()):
        yield Fault("network", f"host must be a name or an address, got {brief(host)}")
    heartbeat = values.get("heartbeat", 1.0)
    if isinstance(heartbeat, (int, float)) and heartbeat <= 0:
        yield Fault("network", f"heartbeat must be > 0 seconds, got {brief(heartbeat)}")


def _register(values: Mapping[str, Any]) -> Iterator[Fault]:
    low, high = values.get("min_clients", 1), values.get("max_clients")
    if isinstance(low, int) and isinstance(high, int) and 0 < high < low:
        text = f"max_clients = {high} is below min_clients = {low}"
        yield Fault("run.register", text)


def elsewhere(key: str, section: str) -> str | None:
    """Return the one other section in which declearn knows a setting of this name, if it is one."""
    homes = {path for path in _homes(key) if path != section}
    return homes.pop() if len(homes) == 1 else None


def _homes(key: str) -> Iterator[str]:
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            if field.name == key:
                yield section
            for inner in filter(dataclasses.is_dataclass, _types(field.type)):
                if key in (f.name for f in dataclasses.fields(inner)):
                    yield f"{section}.{field.name}"


def argument_faults(cls: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the parameters of one of declearn's own plug-ins.

    Their constructors look at few of them. All numbers that they take are sizes, rates or shares,
    none of which is below zero.
    """
    try:
        hints = typing.get_type_hints(cls.__init__)
    except (NameError, TypeError):
        return
    for key, value in config.items():
        hint = hints.get(key)
        if hint is None:
            continue
        if not _fits(value, hint):
            yield f"{key} must be {_words(hint)}, got {brief(value)}{_nan(value)}"
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not value >= 0:
            yield f"{key} must be >= 0, got {brief(value)}"
        elif isinstance(value, float) and math.isinf(value):
            yield f"{key} must be a finite number, got {value!r}"
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        if key in hints and parameter.default is parameter.empty and key not in config:
            yield f"{key} is missing"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from a file is of an annotated type; True for types that no file holds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    if origin is tuple:
        fitting = isinstance(value, list) and len(value) == len(args)
        return fitting and all(_fits(v, arg) for v, arg in zip(value, args, strict=True))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, args[1]) for v in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    return True


def _words(hint: Any) -> str:
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
    words = {int: "an int", float: "a number", str: "a string", bool: "true or false"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _nan(value: Any) -> str:
    return " (declearn's TOML reads nan as None)" if value is None else ""
