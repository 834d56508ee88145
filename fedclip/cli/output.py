# SPDX-License-Identifier: Apache-2.0
"""Output, progress and checks that all commands share."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fedclip.errors import FEDERATIONS, NEEDS_CLI, OF_CLI, ToolError, fits, requirement

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


class Commands(TyperGroup):
    """A group of commands, each of which ends with a message if it fails."""

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
    """Print a line without interpreting markup, because names in it may come from others."""
    from fedclip.report import printable

    typer.secho(printable(text), **style)


def fail(message: object, code: int = 1) -> NoReturn:
    """End the command with one sentence on standard error."""
    raise ToolError(message, code) from None


def typed(path: str | Path) -> str:
    """Return a path as you would type it in a shell, relative to this folder if possible."""
    path, here = Path(path), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def results(folder: Path | None) -> Path:
    """Return a folder; without one, the results of the config.toml here, or this folder."""
    if folder is not None:
        return folder
    try:
        experiment = tomllib.loads(Path("config.toml").read_text("utf-8"))["experiment"]
        path = Path(experiment["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return Path()
    return path if path.is_dir() else Path()


def runnable(config: Path, *, quickrun: bool = False, simulate: bool = False) -> Check:
    """Return the findings for a configuration; end the command if it would not run."""
    from fedclip.cli.check.configuration import check_config

    result = check_config(config, quickrun=quickrun, simulate=simulate)
    if not result.ok:
        for finding in result.problems:
            say(f"fedclip: {finding.where} {finding.message}", err=True)
        fail(f"{result.path} would not run; nothing was started")
    return result


def progress(task: str, quiet: bool = False) -> Callable[[int, int, str], None]:
    """Return a function that shows, given rounds done, all rounds and a text, how far a task is.

    On a terminal each line replaces the one before; elsewhere there is one for each twentieth of
    the task.
    """
    from fedclip.report import printable

    over = sys.stderr.isatty()
    begun, last = time.monotonic(), 0

    def show(done: int, total: int, text: str) -> None:
        nonlocal begun, last
        if not done:
            begun = time.monotonic()
        early = done < total and not over and done < last + total / 20
        if quiet or early or done <= last:
            return
        last = done
        line = f"{task}: {done} of {total} rounds done"
        # A narrow terminal cuts off the end of a line.
        if done < total:
            each = (time.monotonic() - begun) / done
            line += f", about {timedelta(seconds=round(each * (total - done)))} left"
        line = printable(f"{line}, {text}" if text else line)
        if over:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        end = "" if over and done < total else "\n"
        print(line, end=end, file=sys.stderr, flush=True)

    return show
