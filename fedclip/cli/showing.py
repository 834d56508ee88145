# SPDX-License-Identifier: Apache-2.0
"""Show reports in a terminal, and write them to files."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fedclip.cli.output import fail, say
from fedclip.errors import nearest
from fedclip.report import Report, ReportError, page_of, read_report
from fedclip.report.findings import Advice
from fedclip.report.results import result_of
from fedclip.report.rows import experiment_of, site_of

if TYPE_CHECKING:
    from rich.console import Console


# So many nodes fit on one screen.
_SHOWN = 12


def console() -> Console:
    """Return a console for other people's text; a pipe or a file, which has no width, is wide."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)


def read(folder: Path, excluded: Collection[Path] = ()) -> Report:
    """Read a report, without runs in the folders `excluded`; end the command if that fails."""
    try:
        result = _newest(_without(excluded, folder))
    except ReportError as exc:
        if os.path.exists(folder):
            fail(str(exc), code=1 if os.path.isdir(folder) else 2)
        above = folder.parent
        beside = [p.name for p in above.iterdir() if p.is_dir()] if os.path.isdir(above) else []
        fail(f"{exc}{nearest(folder.name, beside)}", code=2)
    for path in result.skipped:
        say(f"fedclip: skipped {path}, which cannot be read (yet)", err=True)
    return result


def _without(excluded: Collection[Path], folder: Path) -> Report:
    report = read_report(folder)
    names = [
        name for name in report.experiments if not name or (folder / name).resolve() not in excluded
    ]
    return report.only(names or report.experiments)


def _newest(report: Report) -> Report:
    """Leave out the older runs where a federation lies in the folder of another, and say so."""
    experiments = report.experiments
    if len(experiments) == 1 or "" not in experiments:
        return report

    def written(node: str) -> float:
        # A folder that is a node itself has its own name.
        path = report.folder / node
        return (path if path.is_dir() else report.folder).stat().st_mtime

    newest = experiment_of(max((*report.nodes, *report.private), key=written))
    text = f"this is the newest of {len(experiments)} runs, in {report.folder / newest}"
    say(f"fedclip: {text}; the others are left out", err=True)
    return report.only([newest])


def show(report: Report, rounds: bool | None) -> None:
    """Print the answer, what was measured, and the table.

    None of `rounds` shows a line for each node: of many nodes, the outliers and some others.
    """
    advice = _advice(report)
    for sentence in (*([advice.answer] if advice else []), *_last(report), *report.in_words()):
        say(sentence)
    nodes = [row.node for row in report.whole]
    if rounds is None and len(dict.fromkeys(nodes)) > _SHOWN:
        odd = {name for run in report.experiments for name in result_of(report, run).outliers}
        order = sorted(dict.fromkeys(nodes), key=lambda node: site_of(node) not in odd)
        say(f"{_SHOWN} of {len(order)} nodes are shown; --summary shows all.")
        rows = tuple(row for row in report.rows if row.node in order[:_SHOWN])
        report = dataclasses.replace(report, rows=rows)
    if report.rows:
        console().print(report.table(bool(rounds)))
    if report.private:
        for line in (line for lines in _spent(report.folder).values() for line in lines):
            say(line)


def _last(report: Report) -> Iterator[str]:
    """Yield the last loss and metrics of each federation, by the healthy sites."""
    for experiment in report.experiments:
        text = result_of(report, experiment).in_words()
        curves = [curve for curve in report.curves if curve.experiment == experiment]
        if curves and text:
            round_ = max(curve.last[0] for curve in curves)
            # Without records, nothing says in which round an evaluation was.
            when = f"round {round_}" if report.rows else "the last evaluation"
            about = f"{experiment}: " if len(report.experiments) > 1 else ""
            yield f"{about}After {when}: {text}."


def write(file: str | Path, text: str, quiet: bool = False) -> None:
    """Write a file, or "-" to standard output; end the command if that fails."""
    if file == "-":
        sys.stdout.write(text)
        return
    file = Path(file)
    # Whoever reads the file while it is written anew gets all of one.
    part = file.with_name(f".{file.name}.part") if os.path.isfile(file) else file
    try:
        part.write_bytes(text.encode(errors="backslashreplace"))
        if part != file:
            part.replace(file)
    except (OSError, ValueError) as exc:
        fail(f"cannot write {file}: {exc}")
    if not quiet:
        say(f"wrote {file}")


def can_write(html: Path | None) -> None:
    """End with a sentence if a page could not be written, before what takes long."""
    if html is None:
        return
    if os.path.isdir(html):
        fail(f"cannot write {html}: it is a folder; give a file, such as {html / 'report.html'}")
    for package in ("jinja2", "vl_convert"):
        try:
            import_module(package)
        except ModuleNotFoundError:
            fail(f"--html needs {package}: pip install jinja2 vl-convert-python")


def save_page(report: Report, file: Path) -> None:
    """Write a report as a page, with what to do first, and what was spent of privacy budgets."""
    write(file, page_of(report, _spent(report.folder), _advice(report)))


def _advice(report: Report) -> Advice | None:
    """Return what is advised after the run of one federation."""
    if len(report.experiments) != 1:
        return None
    try:
        from fedclip.cli.suggest import advised

        return advised(report, *report.experiments)
    except (ModuleNotFoundError, TypeError, ValueError) as exc:
        # Clippers are built to be tried, which needs declearn; a damaged file may say anything.
        say(f"fedclip: no advice: {exc}", err=True)
        return None


def _spent(folder: Path) -> dict[str, list[str]]:
    """Return what each ledger, and each server with noise, has spent, in lines of text."""
    from fedclip.cli.spent import NothingSpent, in_words, read_spent

    try:
        # Without the lines of a ledger, which tell how many records a client has.
        return {s.where: [*in_words({**s.cost(), "entries": ()})] for s in read_spent(folder)}
    except NothingSpent:
        return {}
    except ValueError as exc:
        return {"": [f"the spent budget is unknown: {exc}"]}
