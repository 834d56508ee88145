# SPDX-License-Identifier: Apache-2.0
"""The command line: ``fedclip list | check | quickrun | simulate | report | privacy | site | …``.

Exit codes: 0 all is well, 1 there is a problem (one sentence on standard error says which),
2 the command was called wrongly. ``fedclip run`` returns the exit code of the script.
The file of a command is imported when the command is called, so that each one starts fast.
"""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import fedclip
from fedclip.cli.output import say
from fedclip.errors import FEDERATIONS, NEEDS_CLI, OF_CLI, ToolError, fits, requirement

_FILES = {
    "running": "check quickrun simulate run",
    "reporting": "report compare",
    "suggest": "suggest",
    "tune": "tune",
    "privacy": "privacy",
    "site": "site",
    "projects": "init demo",
    "catalogue": "list translate doctor",
}
COMMANDS = {command: file for file, names in _FILES.items() for command in names.split()}
"""The file of each command, or group of commands, in the order of the help."""


class Commands(TyperGroup):
    """The commands, each of which ends with a message if it fails."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or a group of commands; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        group = typer.main.get_group(import_module(f"fedclip.cli.{COMMANDS[cmd_name]}").app)
        return group.commands.get(cmd_name, group)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ToolError as exc:
            text, code = str(exc), exc.code
        except ImportError as exc:
            package, code = (exc.name or "").partition(".")[0], 1
            if exc.name == "declearn" or (package == "declearn" and not fits(FEDERATIONS)):
                text = requirement("this command", FEDERATIONS)
            elif package in OF_CLI:
                text = f"this command {NEEDS_CLI}"
            else:
                raise
        say(f"fedclip: {text}", err=True)
        raise typer.Exit(code)


app = typer.Typer(
    name="fedclip",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Do not fail on a character that the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="fedclip")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Gradient and update clipping for federated learning with declearn."""
    if version:
        typer.echo(f"fedclip {fedclip.__version__}")
        raise typer.Exit
