# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip suggest | compare | sweep | tune``: from runs to a choice."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclip.tools.output import HtmlFile, JsonFlag, Results, fail, results, say, typed

if TYPE_CHECKING:
    from fedclip.report import Report
    from fedclip.report.advice import Proposal
    from fedclip.tools.progress import Tell
    from fedclip.tools.tune import Tuning


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (suggest, compare, sweep, tune):
        app.command()(command)


def suggest(
    folder: Results = None,
    write: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Write a proposal into this TOML file.")
    ] = None,
    use: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The proposal to show, or write, not the first one."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Decide by the norms of a run what to clip first, and say why.

    The first proposals come as lines of TOML, with the share of each client's norms that they would
    have clipped, and with what they reveal of the data; `--use NAME` shows another so.
    """
    from fedclip.errors import nearest
    from fedclip.tools.showing import read
    from fedclip.tools.suggest import advised, in_words

    folder = results(folder)
    report = read(folder)
    found = report.experiments
    if len(found) > 1:
        names = ", ".join(str(folder / name) for name in found[:3]) + ", …" * (len(found) > 3)
        fail(f"{folder} holds {len(found)} experiments: give one of them ({names})")
    try:
        advice = advised(report, min(found))
    except (TypeError, ValueError) as exc:
        fail(str(exc))
    proposals = {proposal.name: proposal for proposal in advice.proposals}
    if use is not None and use not in proposals:
        known = ", ".join(proposals) or "none"
        fail(f"there is no proposal {use!r}{nearest(use, proposals)} (there are: {known})")
    chosen = use or advice.start
    if as_json:
        facts = {"schema": "fedclip-suggest/2", "folder": str(folder), **dataclasses.asdict(advice)}
        print(json.dumps(facts))
    if write is not None:
        if not chosen:
            fail(f"{advice.answer} To write one all the same, name it: --use NAME")
        save(write, proposals[chosen])
    elif not as_json:
        for line in in_words(advice, use or ""):
            say(line)
        if chosen:
            named = f" --use {use}" if use else ""
            say("")
            say(f"To write it:  fedclip suggest {typed(folder)}{named} --write config.toml")


def save(file: Path, proposal: Proposal) -> None:
    """Write a proposal into a configuration, unless that would then not run."""
    from fedclip.tools.check import check_config, find_config
    from fedclip.tools.editing import rewritten
    from fedclip.tools.showing import write

    file = find_config(file)
    try:
        text = rewritten(file.read_bytes().decode(), proposal)
    except (OSError, ValueError, TypeError) as exc:
        fail(f"{file} can not be changed: {exc}")
    known = check_config(file).problems
    for fresh in (f for f in check_config(file, text=text).problems if f not in known):
        fail(
            f"{file} was left as it is: with {proposal.name} it would not run "
            f"({fresh.where} {fresh.message})"
        )
    write(file, text, quiet=True)
    say(f"wrote {proposal.name} into {file}; check it with  fedclip check {typed(file)}")


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs.")],
    html: HtmlFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare runs: last loss and metrics, and what was clipped.

    Each folder is a setting; the runs below it are taken for seeds of it. The folder of a sweep
    stands for all its settings.
    """
    from fedclip.tools import showing
    from fedclip.tools.sweep import MARK

    showing.can_write(html=html)
    named: dict[str, Path] = {}
    for folder in folders:
        inner = sorted({mark.parent.parent for mark in folder.glob(f"*/*/{MARK}")}, key=str)
        for path in inner or [folder]:
            name = path.resolve().name
            named[str(path) if name in named else name] = path
    found = {path.resolve() for path in named.values()}
    read = [(name, path, showing.read(path, apart=found)) for name, path in named.items()]
    show_compared(read, html, as_json)


def show_compared(
    read_: Sequence[tuple[str, Path, Report]], html: Path | None, as_json: bool = False
) -> None:
    """Print the table of several settings, and write the page of all."""
    from fedclip.tools import showing
    from fedclip.tools.compare import compared, drawn, table_of

    outcomes = compared([(name, report) for name, _, report in read_])
    table = table_of(outcomes)
    if as_json:
        facts = [outcome.as_dict() for outcome in outcomes]
        print(json.dumps({"schema": "fedclip-compare/1", "settings": facts}))
    else:
        showing.console().print(drawn(table))
        say(table["caption"])
    if html is not None:
        showing.save_page(read_, html, [table], "Comparison of runs")


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A quickrun file.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=V1,V2",
            help="A section's key, as in optim.client_opt.lrate, or a module's, as in "
            "zscore-clip.z_max, and its values.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds, in place of the file's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; by default CONFIG-sweep.")
    ] = None,
    html: HtmlFile = None,
) -> None:
    """Run a configuration with several settings and seeds.

    At the end it compares them. A sweep that was interrupted goes on where it stopped.
    """
    from fedclip.tools import showing
    from fedclip.tools.check import find_config
    from fedclip.tools.progress import progress
    from fedclip.tools.sweep import plan, refuse, reports, run_all

    showing.can_write(html=html)
    try:
        file = find_config(config)
        out = out or file.with_name(f"{file.stem}-sweep")
        runs = plan(file, settings or [], seeds, out, rounds)
        todo = [planned for planned in runs if not planned.done]
        refuse(file, todo)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        fail(f"the sweep of {config} can not be planned: {exc}")
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} of {len(runs)} runs are done already", err=True)
    tell = progress({"sweep": sum(planned.rounds for planned in todo)})
    failed = run_all(todo, "quickrun", 1, partial(tell, "sweep"))
    for planned, why in failed.items():
        fail(f"{why} (output: {planned.folder / 'output.txt'})")
    show_compared(reports(runs), html)
    if html is None:
        say(f"As a page:  fedclip compare {typed(out)} --html compare.html")


def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A quickrun file.")] = Path(),
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each setting.")] = 5,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds, in place of the file's.")
    ] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Run nodes over websockets, not in one process.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; by default one for each core.")
    ] = None,
    sites: Annotated[
        str, typer.Option(metavar="A,B", help="Sites to rank by; else those alike in their norms.")
    ] = "",
    write: Annotated[
        bool, typer.Option("--write", help="Write the winner into CONFIG, if there is one.")
    ] = False,
    html: HtmlFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Try over seeds what `suggest` proposes, and rank it.

    It is ranked beside no clipping, by the metric of each site. Runs go on side by side, and what
    is hopeless is given up. After an interruption the same command goes on where it stopped.
    """
    from fedclip.tools import showing
    from fedclip.tools.check import find_config
    from fedclip.tools.compare import drawn
    from fedclip.tools.sweep import reports
    from fedclip.tools.tune import Tuning

    showing.can_write(html=html)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = jobs or cores or 1
    # What runs beside others leaves them their cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // jobs)))
    try:
        file = find_config(config)
        out = file.with_name(f"{file.stem}-tune{'-nodes' * nodes}")
        tuning = Tuning(file, out, seeds, rounds, "quickrun" if nodes else "simulate", jobs)
        _tuned(tuning, [name.strip() for name in sites.split(",") if name.strip()])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        fail(f"{config} can not be tuned: {exc}")
    standings = tuning.standings
    if as_json:
        print(json.dumps({"schema": "fedclip-tune/1", "config": str(file), **standings.as_dict()}))
    else:
        # The last one grows with settings and sites: a page and --json have it.
        for table in standings.tables()[:2]:
            showing.console().print(drawn(table))
            say(table["caption"])
            typer.echo()
        say(standings.answer())
        if "noise_multiplier" in tuning.text:
            say("This choice is made from the data: the epsilon of a run does not cover it.")
    if html is not None:
        runs = [run for name in standings.ranking() for run in tuning.runs[name]]
        tables = standings.tables()
        tables[0]["caption"] = f"{standings.answer()} {tables[0]['caption']}"
        showing.save_page(reports(runs), html, tables, f"Tuning of {file.name}")
    winner = standings.winner
    if write and winner in tuning.proposals:
        save(file, tuning.proposals[winner])
    elif write:
        say(f"{typed(file)} was left as it is", err=True)
    elif winner in tuning.proposals and not as_json:
        same = f" --seeds {seeds}" + f" --rounds {rounds}" * bool(rounds) + " --nodes" * nodes
        same += f" --sites {shlex.quote(sites)}" * bool(sites)
        say(f"To write it:  fedclip tune {typed(file)}{same} --write")


def _tuned(tuning: Tuning, chosen: list[str]) -> None:
    """Run all that is to be tried, and say how far it is."""
    from fedclip.tools.progress import progress
    from fedclip.tools.standings import NONE
    from fedclip.tools.sweep import run_all

    begin = [run for run in tuning.runs[NONE][: tuning.jobs] if not run.done]
    tell = progress({"first runs": sum(run.rounds for run in begin)})
    for why in run_all(begin, tuning.command, tuning.jobs, partial(tell, "first runs")).values():
        fail(why)
    advice = tuning.advised(chosen)
    left_out = (f"{name} is not tried: {why}" for name, why in tuning.left_out.items())
    for line in (*advice.findings, advice.answer, *left_out):
        say(line, err=True)
    settings = ", ".join(tuning.runs)
    text = f"{len(tuning.runs)} settings ({settings}) with {tuning.seeds} seeds each"
    if tuning.left:
        time = timedelta(seconds=math.ceil(tuning.seconds()))
        text += f", {tuning.jobs} runs side by side: at most about {time} from here"
    say(text, err=True)
    tasks, before = {"tune": sum(run.rounds for run in tuning.left)}, 0
    tell = progress(tasks)
    for wave in tuning.waves():
        todo = [run for run in wave if not run.done]
        failed = run_all(todo, tuning.command, tuning.jobs, partial(_onward, tell, before))
        before += sum(run.rounds for run in todo)
        for name, why in tuning.judge(wave, failed).items():
            typer.echo(err=True)
            say(f"{name} is given up: {why}", err=True)
        tasks["tune"] = before + sum(run.rounds for run in tuning.left)


def _onward(tell: Tell, before: int, done: int, text: str) -> None:
    tell("tune", before + done, text)
