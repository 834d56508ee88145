# SPDX-License-Identifier: Apache-2.0
"""The findings of a check of a file."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedclip.core.parameters import Config

Section: TypeAlias = Mapping[str, Any]
Level = Literal["ok", "note", "leak", "problem"]

CLIENT, SERVER, AGGREGATOR = "[optim.client_opt]", "[optim.server_opt]", "[optim.aggregator]"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding, and the part of the file that it is about.

    Attributes
    ----------
    level
        "problem": the run would stop, or differ from what is written, or there is no guarantee.
        "leak": the run goes on, and something leaves that epsilon does not cover. "note": read it
        before the run. "ok": nothing to do.
    """

    level: Level
    where: str
    message: str


problem = partial(Finding, "problem")
leak = partial(Finding, "leak")
note = partial(Finding, "note")


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
        return self.of("problem")

    def of(self, *levels: Level) -> list[Finding]:
        """Return the findings of some levels."""
        return [finding for finding in self.findings if finding.level in levels]

    def add(self, *findings: Finding) -> None:
        """Add findings, each message on one line."""
        for finding in findings:
            where, message = finding.where, " ".join(finding.message.split())
            if not self.quickrun:
                where, message = (text.replace("[optim.", "[") for text in (where, message))
            self.findings.append(Finding(finding.level, where, message))


def text_of(exc: BaseException) -> str:
    """Return an exception's message; a KeyError would quote its own."""
    text = str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc)
    return text if len(text) <= 400 else text[:399] + "…"


def read(check: Check, path: Path, where: str, text: str | None = None) -> Config | None:
    """Parse a file of TOML or JSON; report what is wrong with it.

    TOML is read as declearn does it, where nan means None. With a `text`, that is what the file is
    taken to hold.
    """
    kind, data = "JSON" if path.suffix == ".json" else "TOML", b""
    try:
        data = path.read_bytes() if text is None else text.encode()
        if kind == "JSON":
            content = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError("it must hold an object")
            return content
        return tomllib.loads(data.decode(), parse_float=lambda s: None if s == "nan" else float(s))
    except OSError as exc:
        check.add(problem(where, f"cannot read {path}: {exc.strerror}"))
    except (ValueError, RecursionError) as exc:  # no TOML, no UTF-8, thousands of digits, too deep
        hint = ": save it without a byte order mark" * data.startswith(b"\xef\xbb\xbf")
        check.add(problem(where, f"{path.name} is not valid {kind}: {text_of(exc)}{hint}"))
    return None
