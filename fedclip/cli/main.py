# SPDX-License-Identifier: Apache-2.0
"""The command line: ``fedclip list | check | quickrun | simulate | report | privacy | site | …``.

Exit codes: 0 all is well, 1 there is a problem (one sentence on standard error says which),
2 the command was called wrongly. ``fedclip run`` returns the exit code of the script.
Each command imports only what it needs, so that it starts fast.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

import fedclip
from fedclip.cli import catalogue, choosing, output, privacy, running, site
from fedclip.cli.output import Commands, ConfigPath, CsvFile, JsonFlag, Results, fail, say, typed

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


# Commands are listed in the order in which they are added.
app.command("list")(catalogue.list_)


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
    from fedclip.cli.projects import write_project

    missing = write_project(folder, model, privacy)
    say(f"{folder} is written. Start with its README.md, or try it with example data:")
    for line in (
        *(f"pip install {packages}" for packages in missing),
        f"cd {typed(folder)}",
        "python prepare.py --example",
        f"fedclip {'quickrun' if privacy else 'simulate'}",
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
        colours = {"ok": "green", "note": "yellow", "leak": "magenta", "problem": "red"}
        say(str(result.path))
        for finding in result.findings:
            typer.secho(f"  {finding.level:7}", fg=colours[finding.level], nl=False)
            say(f" {finding.where} {finding.message}")
        if result.places:
            typer.echo("What is clipped where:")
        for place in result.places:
            say(f"  {place}")
        levels = Counter(finding.level for finding in result.findings)
        counts = [(levels[level], level) for level in ("problem", "leak", "note")]
        texts = [f"{n} {level}{'s' * (n > 1)}" for n, level in counts if n]
        typer.echo(f"{', '.join(texts if levels['problem'] else ['No problem', *texts])}.")
    raise typer.Exit(0 if fine and not (strict and result.notes) else 1)


app.command()(running.quickrun)
app.command()(running.simulate)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(
    running.run
)


@app.command()
def report(
    folder: Results = None,
    csv: CsvFile = None,
    as_json: JsonFlag = False,
    rounds: Annotated[
        bool | None,
        typer.Option("--rounds/--summary", help="A line for each round, or for each node."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page for a browser as well."),
    ] = None,
) -> None:
    """Show what the clippers did in a run, by node and round."""
    if as_json and csv is not None:
        fail("give either --json or --csv", code=2)
    # What would keep the page from being written is found before what takes long.
    if html is not None and os.path.isdir(html):
        fail(f"cannot write {html}: it is a folder; give a file, such as {html / 'report.html'}")
    for package in ("jinja2", "vl_convert") if html is not None else ():
        if not find_spec(package):
            fail(f"--html needs {package}: pip install jinja2 vl-convert-python")
    result = output.read(output.results(folder))
    if as_json:
        print(json.dumps(result.as_dict()))
    elif csv is not None:
        text = io.StringIO()
        result.write_csv(text)
        output.write(csv, text.getvalue())
    else:
        output.show(result, rounds)
    if html is not None:
        from fedclip.report import page_of

        page = page_of(result, output.spent_by(result.folder), output.advice_on(result))
        output.write(html, page)


for command in (choosing.suggest, choosing.tune, choosing.compare):
    app.command()(command)
app.command()(catalogue.translate)
app.command()(catalogue.doctor)


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
    from fedclip.cli.projects import run_demo

    run_demo(folder, rounds, seeds, bound)
