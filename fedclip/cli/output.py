# SPDX-License-Identifier: Apache-2.0
"""Output, progress, files and checks that all commands share."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedclip.errors import ToolError, nearest

if TYPE_CHECKING:
    from fedclip.report import Report

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, or its folder.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
CsvFile = Annotated[str | None, typer.Option(metavar="FILE", help="Write CSV; - is stdout.")]
Results = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="Folder of checkpoints; else that of the config.toml here."),
]


def commands(about: str | None = None) -> typer.Typer:
    """Return the commands of a file, to which it adds them."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)


def say(*lines: str, **style: Any) -> None:
    """Print lines without interpreting markup, because names in them may come from others."""
    from fedclip.report import printable

    for line in lines:
        typer.secho(printable(line), **style)


def fail(message: object, code: int = 1) -> NoReturn:
    """End the command with one sentence on standard error."""
    raise ToolError(message, code) from None


def typed(path: str | Path) -> str:
    """Return a path as you would type it in a shell, relative to this folder if possible."""
    path, here = Path(path), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def progress(task: str, quiet: bool = False) -> Callable[[int, int, str], None]:
    """Return a function that shows, given rounds done, all rounds and a text, how far a task is.

    On a terminal each line replaces the one before; elsewhere there is one for each twentieth of
    the task.
    """
    from fedclip.report import printable

    over, begun, last = sys.stderr.isatty(), time.monotonic(), 0

    def show(done: int, total: int, text: str) -> None:
        nonlocal begun, last
        begun = begun if done else time.monotonic()
        if quiet or done <= last or not (over or done >= min(total, last + total / 20)):
            return
        last = done
        remaining = timedelta(seconds=round((time.monotonic() - begun) / done * (total - done)))
        about = f", about {remaining} left" if done < total else ""
        # A narrow terminal cuts off the end of a line.
        line = printable(f"{task}: {done} of {total} rounds done{about}" + f", {text}" * bool(text))
        if over:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if over and done < total else "\n", file=sys.stderr, flush=True)

    return show


def write(file: str | Path, text: str, quiet: bool = False) -> None:
    """Write a file, or "-" to standard output; end the command if that fails."""
    if file == "-":
        sys.stdout.write(text)
        return
    file = Path(file)
    # A program that reads the file at this moment gets all of the old one, or of the new one.
    part = file.with_name(f".{file.name}.part") if os.path.isfile(file) else file
    try:
        part.write_bytes(text.encode(errors="backslashreplace"))
        if part != file:
            part.replace(file)
    except (OSError, ValueError) as exc:
        fail(f"cannot write {file}: {exc}")
    if not quiet:
        say(f"wrote {file}")


def existing(path: Path) -> Path:
    """Return a path; end the command if there is nothing."""
    if not os.path.exists(path):
        names = [file.name for file in path.parent.glob("*")]
        fail(f"there is no {path}{nearest(path.name, names)}", 2)
    return path


def read(folder: Path | None, excluded: Collection[Path] = ()) -> Report:
    """Read a report, without runs in the folders `excluded`; end the command if that fails.

    Without a folder, it is that of the config.toml here, or this one. If a federation lies in the
    folder of another, the report is that of the newest run.
    """
    from fedclip.report import ReportError, read_report
    from fedclip.report.rows import experiment_of

    if folder is None:
        folder = Path()
        with suppress(OSError, ValueError, KeyError, TypeError):
            experiment = tomllib.loads(Path("config.toml").read_text("utf-8"))["experiment"]
            path = Path(experiment["checkpoint"])
            folder = path if path.is_dir() else folder
    try:
        report = read_report(existing(folder))
    except ReportError as exc:
        fail(exc, code=1 if folder.is_dir() else 2)
    runs = [r for r in report.experiments if not r or (folder / r).resolve() not in excluded]
    report = report.only(runs or report.experiments)
    if len(runs) > 1 and "" in runs:

        def written(node: str) -> float:
            # A folder that is a node itself has its name.
            path = folder / node
            return (path if path.is_dir() else folder).stat().st_mtime

        newest = experiment_of(max((*report.nodes, *report.private), key=written))
        text = f"this is the newest of {len(runs)} runs, in {folder / newest}"
        say(f"fedclip: {text}; the others are left out", err=True)
        report = report.only([newest])
    unread = (f"fedclip: skipped {path}, which cannot be read (yet)" for path in report.skipped)
    say(*unread, err=True)
    return report
