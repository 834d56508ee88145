# SPDX-License-Identifier: Apache-2.0
"""What all commands print in the same way."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer

__all__ = ["JsonFlag", "fail", "say"]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def say(text: str, **style: Any) -> None:
    """Print a line as it is, without markup, because names in it are other people's text."""
    from fedclip.report import printable

    typer.secho(printable(text), **style)


def fail(message: object, code: int = 1) -> NoReturn:
    """End the command with one sentence on standard error."""
    say(f"fedclip: {message}", err=True)
    raise typer.Exit(code)
