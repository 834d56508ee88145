# SPDX-License-Identifier: Apache-2.0
"""What all commands print in the same way."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

__all__ = ["HtmlFile", "JsonFlag", "fail", "say", "typed"]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser as well.")
]


def say(text: str, **style: Any) -> None:
    """Print a line as it is, without markup, because names in it are other people's text."""
    from fedclip.report import printable

    typer.secho(printable(text), **style)


def fail(message: object, code: int = 1) -> NoReturn:
    """End the command with one sentence on standard error."""
    say(f"fedclip: {message}", err=True)
    raise typer.Exit(code)


def typed(path: str | Path) -> str:
    """Return a path as short as one can type it in a shell from here."""
    path, here = Path(path), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
