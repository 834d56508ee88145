# SPDX-License-Identifier: Apache-2.0
"""Check declearn's settings: unknown or missing keys, wrong types, values out of range.

declearn's dataclasses and the constructors of its plug-ins say which settings there are, and of
which type. So the checks fit the version of declearn that is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from declearn.communication import NetworkServerConfig, list_available_protocols
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.quickrun import DataSourceConfig, ExperimentConfig, ModelConfig

from fedclip.cli.check.findings import CLIENT, SERVER, Finding, Section, problem
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.engines.declearn.samplers import NamedClients
from fedclip.engines.local.crowd import SimulateConfig
from fedclip.errors import Unchecked, nearest, shown
from fedclip.privacy.guarantees import Plugin

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

_KWARGS: Mapping[str, Callable[..., float]] = {
    "patience": parameters.positive,
    "min_replies": functools.partial(parameters.integer, 1),
}
"""The parameters of fedclip's network protocol, each with its check."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Facts about a federation, of which all plug-ins could be built.

    Attributes
    ----------
    config, optim, run
        The file, its optimizers, and [run], which is empty if something is wrong in it.
    client, server
        The plug-ins of the optimizers, in the order in which they act.
    sites
        How many clients have files in the data folder, if known.
    protected
        How many records or persons the smallest client has, and which of the two, if known.
    quickrun
        Whether it is a quickrun file, so that a section that is not in it does not exist. Then
        the server keeps checkpoints, evaluates after the last round, and checks each reply.
    """

    config: Section
    optim: Section
    run: Section
    client: Sequence[Plugin]
    server: Sequence[Plugin]
    aggregator: Plugin
    sites: int
    protected: tuple[int, str] | None
    quickrun: bool

    @property
    def sides(self) -> dict[str, Sequence[Plugin]]:
        """The plug-ins of each optimizer, by its section."""
        return {CLIENT: self.client, SERVER: self.server}

    @property
    def rounds(self) -> int | None:
        """The number of rounds, if known."""
        return as_count(self.run.get("rounds"))

    @property
    def privacy(self) -> Section | None:
        """The section [run.privacy], if there is one."""
        section = self.run.get("privacy")
        return section if isinstance(section, dict) else None

    @property
    def central(self) -> Plugin:
        """The server's module that adds noise to the average, if there is one."""
        return next((p for p in self.server if getattr(p, "noise_multiplier", 0.0)), None)

    @property
    def registered(self) -> int | None:
        """The largest number of clients that register, if known."""
        low, high = registered(part_of(self.config, "run"))
        return high or low

    @property
    def sampler(self) -> Section:
        """The section of the sampler that draws clients, without those that only wrap it."""
        sampler = part_of(self.config, "client_sampler")
        while sampler.get("strategy") == NamedClients.strategy and "sampler" in sampler:
            sampler = part_of(sampler, "sampler")
        return sampler

    @property
    def clients(self) -> int | None:
        """The largest number of clients in a round, if known."""
        return as_count(self.sampler.get("n_samples", self.registered))

    @property
    def population(self) -> int | None:
        """The number of all clients, if known."""
        known = max(filter(None, (self.registered, self.sites)), default=None)
        return as_count(part_of(self.config, "simulate").get("clients", known))

    @property
    def secagg(self) -> Section | None:
        """The section about secure aggregation, if there is one and its range is a number."""
        section = self.config.get("secagg")
        return section if isinstance(section, dict) and not range_problems(section) else None

    @property
    def watched(self) -> bool:
        """Whether the server has the protocol ``fedclip-websockets``, or quickrun gives it that."""
        protocol = part_of(self.config, "network").get("protocol")
        return protocol == "fedclip-websockets" or (self.quickrun and protocol == "websockets")

    @property
    def vetted(self) -> bool:
        """Whether the server checks each reply."""
        strategy = part_of(self.config, "client_sampler").get("strategy")
        return self.quickrun or strategy == NamedClients.strategy


def part_of(config: Section, *names: str) -> Config:
    """Return a section of a file, or a section of that; empty if it is missing."""
    for name in names:
        value = config.get(name)
        config = value if isinstance(value, dict) else {}
    return dict(config)


def as_count(value: object) -> int | None:
    """Return a number of rounds or clients; None if the value is not valid."""
    return value if type(value) is int and 0 < value < 2**63 else None


def registered(run: Section) -> tuple[int | None, int | None]:
    """Return how many clients register at least, and at most, if known."""
    register = run.get("register")
    if not isinstance(register, Mapping):
        return as_count(register), as_count(register)
    low = as_count(register.get("min_clients", 1)) if register else None
    return low, as_count(register.get("max_clients"))


def refusals(check: Callable[..., object], **values: object) -> list[str]:
    """Return what a check of a parameter says of a value; nothing if it accepts it."""
    try:
        check(**values)
    except (TypeError, ValueError) as exc:
        return [str(exc)]
    return []


def range_problems(secagg: Section) -> list[Finding]:
    """Return what is wrong with the range of secure aggregation."""
    texts = refusals(parameters.positive, clipval=secagg.get("clipval", 1.0))
    return [problem("[secagg]", text) for text in texts]


def section_problems(section: str, values: Section) -> Iterator[Finding]:
    """Yield the problems of one section of a quickrun file."""
    yield from _problems(section, SECTIONS[section], values)
    if section == "network":
        yield from (problem("[network]", text) for text in _network(values))
    privacy = part_of(values, "privacy")
    budget = privacy.get("budget")
    epsilon = budget[0] if isinstance(budget, list) and budget else None
    for key, value in (("sclip_norm", privacy.get("sclip_norm")), ("epsilon", epsilon)):
        for text in refusals(parameters.positive, **{key: value}) if fits(value, float) else ():
            yield problem("[run.privacy]", text)
    low, high = registered(values)
    if low and high and high < low:
        yield problem("[run.register]", f"max_clients = {high} is below min_clients = {low}")


def _problems(section: str, cls: Any, values: Section) -> Iterator[Finding]:
    # A Python caller may pass a logger, and a file cannot.
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "logger"}
    for key, value in values.items():
        where, hint = f"[{section}]", fields[key].type if key in fields else None
        inner = next((t for t in _types(hint) if dataclasses.is_dataclass(t)), None)
        if key not in fields:
            home = elsewhere(key, section)
            what = f"; write it in [{home}]" if home else nearest(key, fields)
            what = what or f" (it takes: {', '.join(fields)})"
            yield problem(where, f"declearn knows no {shown(key)} here{what}")
        elif inner and isinstance(value, Mapping):
            yield from _problems(f"{section}.{key}", inner, value)
        elif inner and not isinstance(value, str) and not (key == "register" and fits(value, int)):
            # A string is the path of a file. A number of clients may stand for a section.
            yield problem(where, f"{key} must be a section, got {shown(value)}")
        elif not (key == "timeout" and fits(value, float)):
            # Whole numbers other than seeds are counts or seconds.
            counts = key != "seed" and float not in _types(hint) and fits(value, int)
            yield from (problem(where, t) for t in _wrong(key, value, hint, 1 if counts else None))
    # declearn has a default for these, or fills them in from another setting.
    filled = {"register", *getattr(cls, "autofill_fields", ())}
    filled |= set() if section == "run.training" else {"batch_size"}
    for name, field in fields.items():
        free = field.default is field.default_factory is dataclasses.MISSING
        if free and name not in values and name not in filled:
            yield problem(f"[{section}]", f"{name} is missing")


def _types(hint: object) -> tuple[object, ...]:
    return hint, *typing.get_args(hint)


def _wrong(key: str, value: Unchecked, hint: object, least: int | None) -> Iterator[str]:
    """Yield what is wrong with a value of an annotated type."""
    if not fits(value, hint):
        nan = " (declearn's TOML reads nan as None)" if value is None else ""
        yield f"{key} must be {_words(hint)}, got {shown(value)}{nan}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} must be a finite number, got {value!r}"
    elif least is not None and fits(value, float) and value < least:
        yield f"{key} must be at least {least}, got {shown(value)}"
    elif fits(value, int) and not -(2**63) <= value < 2**63:
        yield f"{key} must be an int of 64 bits, got {shown(value)}"


def _network(values: Section) -> Iterator[str]:
    port, protocol = values.get("port"), values.get("protocol")
    known = sorted(list_available_protocols())
    if isinstance(port, int) and port > 65535:
        yield f"port must be at most 65535, got {shown(port)}"
    if isinstance(protocol, str) and protocol.strip().lower() not in known:
        hint = nearest(protocol, known) or f" (installed: {', '.join(known)})"
        yield f"unknown protocol {shown(protocol)}{hint}"
    if fits(heartbeat := values.get("heartbeat"), float):
        yield from refusals(parameters.positive, heartbeat=heartbeat)
    for key, value in part_of(values, "kwargs").items():
        if key not in _KWARGS:
            takes = nearest(key, _KWARGS) or f" (it takes: {', '.join(_KWARGS)})"
            yield f"unknown parameter {shown(key)} in kwargs{takes}"
        elif isinstance(protocol, str) and not protocol.strip().lower().endswith("websockets"):
            yield f"{key} in kwargs goes with protocol = 'fedclip-websockets', not {protocol!r}"
        else:
            yield from (f"{text}, in kwargs" for text in refusals(_KWARGS[key], **{key: value}))


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
    """Yield what is wrong with the parameters of one of declearn's own classes.

    Their constructors check few of them. All numbers that they take are sizes, rates or shares,
    and none of these may be below 0.
    """
    allowed = parameters.signature_of(cls)
    try:
        hints = typing.get_type_hints(cls.__init__)
    except (NameError, TypeError):
        hints = {}
    takes = f"it takes: {', '.join(allowed)}" if allowed else "it takes none"
    free = any(p.kind is p.VAR_KEYWORD for p in allowed.values())
    for key, value in config.items():
        if key in hints:
            yield from _wrong(key, value, hints[key], least=0)
        elif key not in allowed and not free:
            yield f"unknown parameter {shown(key)}{nearest(key, allowed)} ({takes})"
    for key, parameter in allowed.items():
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
    words: dict[object, str] = {int: "an int", float: "a number", str: "a string"}
    return "true or false" if hint is bool else words.get(hint, str(hint))
