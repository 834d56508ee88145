# SPDX-License-Identifier: Apache-2.0
"""What all commands print, or check, in the same way."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fedclip.errors import FEDERATIONS, NEEDS_CLI, OF_CLI, fits, requirement

if TYPE_CHECKING:
    from fedclip.cli.check.findings import Check


ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A declearn TOML file, or a folder with config.toml."),
]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser as well.")
]

Results = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR", help="A folder with checkpoints; else that of the config.toml here."
    ),
]


class ToolError(RuntimeError):
    """What was asked for can not be done; the message says why, in a sentence.

    Whatever raises it ends the command with this sentence, and with its exit code.
    """

    def __init__(self, message: object, code: int = 1) -> None:
        super().__init__(str(message))
        self.code = code


class Commands(TyperGroup):
    """A group of commands, each of which ends in a sentence if it can not do its work."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ToolError as exc:
            say(f"fedclip: {exc}", err=True)
            raise typer.Exit(exc.code) from None
        except ImportError as exc:
            package = (exc.name or "").partition(".")[0]
            if exc.name == "declearn" or (package == "declearn" and not fits(FEDERATIONS)):
                say(f"fedclip: {requirement('this command', FEDERATIONS)}", err=True)
            elif package in OF_CLI:
                say(f"fedclip: this command {NEEDS_CLI}", err=True)
            else:
                raise
            raise typer.Exit(1) from None


def say(text: str, **style: Any) -> None:
    """Print a line as it is, without markup, because names in it are other people's text."""
    from fedclip.report import printable

    typer.secho(printable(text), **style)


def fail(message: object, code: int = 1) -> NoReturn:
    """End the command with one sentence on standard error."""
    raise ToolError(message, code) from None


def typed(path: str | Path) -> str:
    """Return a path as short as one can type it in a shell from here."""
    path, here = Path(path), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def results(folder: Path | None) -> Path:
    """Return a folder, or without one that of the results of the configuration here, or this."""
    if folder is not None:
        return folder
    try:
        experiment = tomllib.loads(Path("config.toml").read_text("utf-8"))["experiment"]
        found = Path(experiment["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return Path()
    return found if found.is_dir() else Path()


def runnable(config: Path, *, quickrun: bool = False, simulate: bool = False) -> Check:
    """Return the findings for a configuration; end the command if it would not run."""
    from fedclip.cli.check.configuration import check_config

    result = check_config(config, quickrun=quickrun, simulate=simulate)
    if not result.ok:
        for finding in result.problems:
            say(f"fedclip: {finding.where} {finding.message}", err=True)
        fail(f"{result.path} would not run; nothing was started")
    return result
