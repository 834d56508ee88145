# SPDX-License-Identifier: Apache-2.0
"""The findings of a check of a file."""

from __future__ import annotations

import codecs
import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from fedclip.core.parameters import Config
from fedclip.engines.declearn.samplers import NamedClients
from fedclip.privacy.guarantees import Plugin

Section: TypeAlias = Mapping[str, Any]
Plugins: TypeAlias = Mapping[str, Sequence[Plugin]]
"""The plug-ins of client_opt and server_opt, in the order in which they act."""


class Setting(NamedTuple):
    """Facts about a federation whose plug-ins could be built."""

    plugins: Plugins
    aggregator: Plugin
    run: Section
    """Empty, if something is wrong in it."""
    sampler: Section
    secagg: Section | None
    fairness: bool
    clients: int | None
    """The largest number in a round."""
    protected: tuple[int, str] | None
    """How many records or persons the smallest client has, and which of the two, if known."""
    metrics: Sequence[object] = ()
    """Metrics besides the loss."""
    population: int | None = None
    """The number of all clients, if known."""
    checkpoints: bool = True
    """Whether the server keeps checkpoints, and so evaluates after the last round."""
    watched: bool = True
    """Whether the server has the protocol ``fedclip-websockets``, or `quickrun` gives it that."""
    quickrun: bool = True
    """Whether the file is a quickrun file, so that a section that is not in it does not exist."""

    @property
    def rounds(self) -> int | None:
        """The number of rounds, if known."""
        return as_count(self.run.get("rounds"))

    @property
    def vetted(self) -> bool:
        """Whether the server checks each reply."""
        return self.quickrun or self.sampler.get("strategy") == NamedClients.strategy

    @property
    def named(self) -> bool:
        """Whether the server knows the sender of each reply, or with secagg clients their names."""
        return self.quickrun or self.watched or (self.vetted and self.secagg is None)


Level = Literal["ok", "note", "leak", "problem"]
Found: TypeAlias = tuple[Level, str, str]
"""Level, section (of [optim], or "run.…", "secagg", "client_sampler"), message."""

LONGEST = 120


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding, and the part of the file that it is about."""

    level: Level
    where: str
    message: str


@dataclasses.dataclass
class Check:
    """The findings for one file.

    Attributes
    ----------
    path
        The file.
    config
        Its parsed contents; empty if it is not TOML.
    findings
        In the order of the file.
    places
        A line for each stage: where clipping happens, and what it guarantees.
    quickrun
        Whether the optimizers are in [optim], as in a quickrun file; else they are alone in it.
    """

    path: Path
    config: Config = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)
    quickrun: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way of a run."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        """The findings that would stop a run, or make it differ from what is written."""
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def leaks(self) -> list[Finding]:
        """The findings about what leaves without being covered by a guarantee."""
        return [finding for finding in self.findings if finding.level == "leak"]

    @property
    def notes(self) -> list[Finding]:
        """The findings to read before a run."""
        return [finding for finding in self.findings if finding.level == "note"]

    def add(self, level: Level, where: str, message: str) -> None:
        """Add a finding, its message on one line."""
        where = where if self.quickrun else where.replace("[optim.", "[")
        self.findings.append(Finding(level, where, " ".join(message.split())))

    def problem(self, where: str, *messages: str) -> bool:
        """Add a problem for each message; return whether there is one."""
        for message in messages:
            self.add("problem", where, message)
        return bool(messages)

    def note(self, where: str, message: str) -> None:
        """Add a note."""
        self.add("note", where, message)


def part_of(config: Section, name: str) -> Config:
    """Return a section of a file; empty if it is missing."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def as_count(value: object) -> int | None:
    """Return a number of rounds or clients; None if the value is not valid."""
    return value if type(value) is int and 0 < value < 2**63 else None


def registered(run: Section) -> int | None:
    """Return the largest number of clients that register; None if it is not known."""
    most = run.get("register")
    if isinstance(most, Mapping):
        most = most.get("max_clients", most.get("min_clients"))
    return as_count(most)


def innermost(sampler: Section) -> Section:
    """Return the section of the sampler that draws clients, without those that only wrap it."""
    while sampler.get("strategy") == "named-clients" and isinstance(sampler.get("sampler"), dict):
        sampler = sampler["sampler"]
    return sampler


def brief(value: object, written: Callable[[object], str] = repr) -> str:
    """Return a value as written in Python, or elsewhere, cut off if it is long.

    Examples
    --------
    >>> brief([1, "a"]), len(brief("x" * 5000))
    ("[1, 'a']", 120)
    """
    try:
        text = written(value)
    except (RecursionError, ValueError):  # nested too deeply, or an int of thousands of digits
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def text_of(exc: BaseException) -> str:
    """Return an exception's message; a KeyError would quote its own."""
    text = str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc)
    return text if len(text) <= 400 else text[:399] + "…"


def read_json(check: Check, path: Path, where: str, text: str | None = None) -> Config | None:
    """Parse a file of JSON that holds an object; report what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8") if text is None else text)
        if isinstance(content, dict):
            return content
        check.problem(where, f"{path.name} must hold an object, got a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as exc:
        check.problem(where, f"{path.name} is not valid JSON: {text_of(exc)}")
    return None


def read_toml(check: Check, path: Path, where: str, text: str | None = None) -> Config | None:
    """Parse a TOML file as declearn does, where nan means None; report what is wrong with it.

    With a `text`, that is what the file is taken to hold.
    """
    data = b""
    try:
        data = path.read_bytes() if text is None else text.encode()
        return tomllib.loads(data.decode(), parse_float=lambda s: None if s == "nan" else float(s))
    except RecursionError:
        check.problem(where, f"{path.name} nests its values too deeply")
    except ValueError as exc:  # no TOML, no UTF-8, or an int of thousands of digits
        mark = data.startswith(codecs.BOM_UTF8)
        hint = ": save it without a byte order mark" if mark else ""
        check.problem(where, f"{path.name} is not valid TOML: {text_of(exc)}{hint}")
    except OSError as exc:
        check.problem(where, f"cannot read {path}: {exc.strerror}")
    return None
