# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip suggest | compare | sweep``: from runs to a choice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclip.tools.output import fail, say

if TYPE_CHECKING:
    from fedclip.report import Report
    from fedclip.tools.suggest import Proposal

__all__ = ["add_to"]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (suggest,):
        app.command()(command)


def read(folder: Path) -> Report:
    """Read a report; end with a sentence if there is none."""
    from fedclip.report import ReportError, read_report

    try:
        result = read_report(folder)
    except ReportError as exc:
        fail(str(exc), code=1 if os.path.isdir(folder) else 2)
    for path in result.skipped:
        say(f"fedclip: skipped {path}, which can not be read (yet)", err=True)
    return result


def suggest(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with checkpoints.")],
    write: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Write a proposal into this TOML file.")
    ] = None,
    use: Annotated[
        str, typer.Option(metavar="NAME", help="The proposal to write, such as step.fixed.")
    ] = "step.learnt",
    as_json: JsonFlag = False,
) -> None:
    """Propose limits, by the norms of a run: lines of TOML, what they clip and what they reveal."""
    report = read(folder)
    if len(report.experiments) > 1:
        names = ", ".join(str(folder / name) for name in report.experiments[:3])
        fail(f"{folder} holds {len(report.experiments)} experiments: give one of them ({names}, …)")
    from fedclip.tools.suggest import in_words, suggestions

    try:
        places = suggestions(report, report.experiments[0])
    except (TypeError, ValueError) as exc:
        fail(str(exc))
    if as_json:
        facts = [place.as_dict() for place in places]
        print(json.dumps({"schema": "fedclip-suggest/1", "folder": str(folder), "places": facts}))
    else:
        for place in places:
            for line in in_words(place):
                say(line)
            typer.echo()
    proposals = {p.name: p for place in places for p in place.proposals}
    if write is not None:
        if use not in proposals:
            fail(f"there is no proposal {use!r} (there are: {', '.join(proposals) or 'none'})")
        save(write, proposals[use])
    elif proposals and not as_json:
        say(f"To write one:  fedclip suggest {folder} --use NAME --write config.toml")


def save(file: Path, proposal: Proposal) -> None:
    """Write a proposal into a configuration, unless that would then not run."""
    from fedclip.tools.check import check_config, find_config
    from fedclip.tools.suggest import rewritten

    try:
        file = find_config(file)
        with file.open(encoding="utf-8", newline="") as old:
            text = rewritten(old.read(), proposal)
        known = {(f.where, f.message) for f in check_config(file).problems}
        # Next to it, so that paths in it lead to the same files.
        trial = file.with_name(f".{file.name}.fedclip")
        with trial.open("w", encoding="utf-8", newline="") as new:
            new.write(text)
        try:
            problems = [
                f for f in check_config(trial).problems if (f.where, f.message) not in known
            ]
            if problems:
                first = problems[0]
                fail(
                    f"{file} was left as it is: with {proposal.name} it would not run "
                    f"({first.where} {first.message})"
                )
            trial.replace(file)
        finally:
            trial.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError) as exc:
        fail(f"{file} can not be changed: {exc}")
    say(f"wrote {proposal.name} into {file}; check it with  fedclip check {file}")
