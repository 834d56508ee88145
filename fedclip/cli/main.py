# SPDX-License-Identifier: Apache-2.0
"""The command line: ``fedclip list | check | quickrun | simulate | report | privacy | site | …``.

Exit codes: 0 all is well, 1 there is a problem (one sentence on standard error says which),
2 the command was called wrongly. ``fedclip run`` returns the exit code of the script.
Each command imports only what it needs, so that it starts fast.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import fedclip
from fedclip.cli import choosing, privacy, running, site
from fedclip.cli.output import (
    Commands,
    ConfigPath,
    HtmlFile,
    JsonFlag,
    Results,
    fail,
    results,
    say,
    typed,
)

if TYPE_CHECKING:
    from fedclip.cli.check.findings import Check


app = typer.Typer(
    name="fedclip",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(privacy.app, name="privacy")
app.add_typer(site.app, name="site")


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


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One to explain.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the clippers, or explain one with its parameters."""
    from fedclip.cli.catalogue import catalogue, documentation
    from fedclip.errors import nearest

    entries = catalogue()
    if name is not None:
        names = [entry["name"] for entry in entries]
        if name not in names:
            fail(f"there is no clipper {name!r}{nearest(name, names)}", code=2)
        entries = [entries[names.index(name)]]
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    if name is not None:
        typer.echo(documentation(entries[0]["kind"], name))
        return
    for entry in entries:
        kind = "" if entry["kind"] == "module" else f" ({entry['kind']})"
        typer.secho(entry["name"], bold=True, nl=False)
        typer.echo(f"{kind}  {entry['summary']}")
    typer.echo("To read about one of them, and its parameters: fedclip list NAME")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; new or empty.")],
    model: Annotated[
        Literal["sklearn", "torch", "tensorflow", "jax"],
        typer.Option(help="A linear model, or a small network."),
    ],
    privacy: Annotated[
        Literal["records", "persons"] | None,
        typer.Option(help="Train with DP-SGD, and protect each record or each person."),
    ] = None,
) -> None:
    """Write a project for CSV files at several sites.

    It prepares data, trains with a server and clients, and predicts. You edit its files.
    """
    from fedclip.cli.init import write_project

    missing = write_project(folder, model, privacy)
    run = "quickrun" if privacy else "simulate"
    say(f"{folder} is written. Start with its README.md, or try it with example data:")
    for line in (
        *(f"pip install {packages}" for packages in missing),
        f"cd {typed(folder)}",
        "python prepare.py --example",
        f"fedclip {run}",
    ):
        say(f"  {line}")


@app.command()
def check(
    config: ConfigPath = Path(),
    as_json: JsonFlag = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail for notes, too.")] = False,
) -> None:
    """Check a federation's configuration before it runs."""
    from fedclip.cli.check.configuration import check_config

    result = check_config(config)
    fine = result.ok and not result.leaks
    if as_json:
        facts = {"file": str(result.path), "ok": fine, "places": result.places}
        print(json.dumps({**facts, "findings": [vars(finding) for finding in result.findings]}))
    else:
        _print_check(result)
    raise typer.Exit(0 if fine and not (strict and result.notes) else 1)


def _print_check(result: Check) -> None:
    colours = {"ok": "green", "note": "yellow", "leak": "magenta", "problem": "red"}
    say(str(result.path))
    for finding in result.findings:
        typer.secho(f"  {finding.level:7}", fg=colours[finding.level], nl=False)
        say(f" {finding.where} {finding.message}")
    if result.places:
        typer.echo("What is clipped where:")
    for place in result.places:
        say(f"  {place}")
    levels = [finding.level for finding in result.findings]
    counts_by_level = {kind: levels.count(kind) for kind in ("problem", "leak", "note")}
    counts = [
        f"{n or 'No'} {kind}{'s' * (n > 1)}"
        for kind, n in counts_by_level.items()
        if n or kind == "problem"
    ]
    typer.echo(f"{', '.join(counts)}.")


app.command()(running.quickrun)
app.command()(running.simulate)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(
    running.run
)


@app.command()
def report(
    folder: Results = None,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write CSV; - is stdout.")] = None,
    as_json: JsonFlag = False,
    rounds: Annotated[
        bool | None,
        typer.Option("--rounds/--summary", help="A line for each round, or for each node."),
    ] = None,
    html: HtmlFile = None,
) -> None:
    """Show what the clippers did in a run, by node and round."""
    from fedclip.cli import showing

    if as_json and csv is not None:
        fail("give either --json or --csv", code=2)
    showing.can_write(html)
    folder = results(folder)
    result = showing.read(folder)
    if as_json:
        print(json.dumps(result.as_dict()))
    elif csv is not None:
        text = io.StringIO()
        result.write_csv(text)
        showing.write(csv, text.getvalue())
    else:
        showing.show(result, rounds)
    if html is not None:
        showing.save_page(result, html)


# Commands are listed in the order in which they are added.
app.command()(choosing.suggest)
app.command()(choosing.tune)
app.command()(choosing.compare)


@app.command()
def translate(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="As in torchzero, optax, …")],
    cls: Annotated[str, typer.Argument(metavar="CLASS", help="Its class or function.")],
    config: Annotated[
        list[str] | None, typer.Argument(metavar="PARAMETER=VALUE", help="As given there.")
    ] = None,
) -> None:
    """Translate another package's clipper into a line of TOML."""
    from fedclip import translate
    from fedclip.cli.catalogue import build
    from fedclip.cli.check.findings import text_of
    from fedclip.core.toml import toml_line, value_of

    values: dict[str, object] = {}
    for item in config or []:
        key, equals, value = item.partition("=")
        if not equals:
            fail(f"{item!r} must be PARAMETER=VALUE", code=2)
        values[key.strip()] = value_of(value.strip())
    try:
        kind, name, parameters = translate.translate(package, cls, values)
        # Build the clipper, so that a line with invalid parameters is refused.
        build(kind, name, parameters)
    except (TypeError, ValueError, OverflowError) as exc:
        text = text_of(exc)
        fail(text if package in text else f"{cls} of {package}: {text}")
    typer.echo(toml_line(kind, name, parameters))
    for note in translate.notes(package, cls, values):
        say(f"note: {note}", err=True)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Show versions, for a bug report."""
    from fedclip.cli.catalogue import versions
    from fedclip.errors import DECLEARN, FEDERATIONS, fits, requirement

    facts = versions()
    fitting = fits(DECLEARN)
    if as_json:
        print(json.dumps({**facts, "ok": fitting}))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:13} {value or 'not installed'}")
    if not fitting:
        fail(requirement("fedclip on declearn", DECLEARN))
    if not fits(FEDERATIONS) and not as_json:
        needed = requirement(
            "a server, a client or a command that reads a config.toml", FEDERATIONS
        )
        say(f"Clippers work. {needed[0].upper()}{needed[1:]}")


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write; is made, or must be empty.")
    ] = Path("fedclip-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each training.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each kind.")] = 6,
    bound: Annotated[float, typer.Option(help="The fixed bound, > 0.")] = 1.0,
) -> None:
    """Train over three hospitals, without clipping and with it.

    It prints a table and writes a picture.
    """
    from fedclip.cli.demo import run_demo

    run_demo(folder, rounds, seeds, bound)
