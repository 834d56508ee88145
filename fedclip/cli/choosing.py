# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip suggest | compare | tune``: from runs to a choice."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclip.cli import output
from fedclip.cli.output import JsonFlag, Results, fail, say, typed
from fedclip.errors import nearest

if TYPE_CHECKING:
    from fedclip.cli.tune import Ranking, Tuning


def suggest(
    folder: Results = None,
    write: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Write a proposal into this TOML file.")
    ] = None,
    use: Annotated[
        str, typer.Option(metavar="NAME", help="The proposal to show or write, not the first one.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Propose what to clip first, by the norms of a run, and say why.

    The first proposals come with their TOML, the share of each client's norms that they would have
    clipped, and what they reveal about the data. `--use NAME` shows another proposal in full.
    """
    from fedclip.cli.check.configuration import find_config
    from fedclip.cli.suggest import advised, in_words, rewritten

    folder = output.results(folder)
    report = output.read(folder)
    runs = report.experiments
    if len(runs) > 1:
        names = ", ".join(str(folder / name) for name in runs[:3]) + ", …" * (len(runs) > 3)
        fail(f"{folder} holds {len(runs)} experiments: give one of them ({names})")
    try:
        advice = advised(report, min(runs))
    except (TypeError, ValueError) as exc:
        fail(exc)
    proposals = {proposal.name: proposal for proposal in advice.proposals}
    if use and use not in proposals:
        known = ", ".join(proposals) or "none"
        fail(f"there is no proposal {use!r}{nearest(use, proposals)} (there are: {known})")
    chosen = use or advice.start
    if as_json:
        facts = {"schema": "fedclip-suggest/2", "folder": str(folder), **dataclasses.asdict(advice)}
        print(json.dumps(facts))
    if write is not None:
        if not chosen:
            fail(f"{advice.answer} To write a proposal anyway, name it: --use NAME")
        file = find_config(write)
        try:
            text = rewritten(file.read_bytes().decode(), proposals[chosen])
        except (OSError, ValueError, TypeError) as exc:
            fail(f"{file} cannot be changed: {exc}")
        save(file, chosen, text)
    elif not as_json:
        for line in in_words(advice, use):
            say(line)
        if chosen:
            named = f" --use {use}" if use else ""
            typer.echo()
            say(f"To write it:  fedclip suggest {typed(folder)}{named} --write config.toml")


def save(file: Path, name: str, text: str) -> None:
    """Write a configuration with a setting; end the command if it would not run."""
    from fedclip.cli.check.configuration import check_config

    known = check_config(file).problems
    for fresh in (f for f in check_config(file, text=text).problems if f not in known):
        why = f"with {name} it would not run ({fresh.where} {fresh.message})"
        fail(f"{file} was not changed: {why}")
    output.write(file, text, quiet=True)
    say(f"wrote {name} into {file}; check it with  fedclip check {typed(file)}")


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    as_json: JsonFlag = False,
) -> None:
    """Rank finished runs by the metric of each site.

    The first folder is what the others are compared with.

    Each folder is a setting; the runs below it are its seeds. The folder that `tune` writes stands
    for all its settings.
    """
    from fedclip.cli.running import MARK
    from fedclip.cli.tune import Ranking
    from fedclip.report.results import Result, result_of

    named: dict[str, Path] = {}
    for folder in folders:
        inner = sorted({mark.parent.parent for mark in folder.glob(f"*/*/{MARK}")}, key=str)
        for path in inner or [folder]:
            name = path.resolve().name
            named[str(path) if name in named else name] = path
    resolved = {path.resolve() for path in named.values()}
    results: dict[str, dict[str, Result]] = {}
    for name, path in named.items():
        report = output.read(path, excluded=resolved)
        runs = {seed.partition("/")[0]: result_of(report, seed) for seed in report.experiments}
        results[name] = runs
    show_ranking(Ranking(results, next(iter(results))), "fedclip-compare/2", as_json)


def show_ranking(ranking: Ranking, schema: str, as_json: bool) -> None:
    """Print a ranking."""
    if as_json:
        print(json.dumps({"schema": schema, **ranking.as_dict()}))
        return
    for table, caption in ranking.tables():
        output.console().print(table)
        say(caption)
        typer.echo()
    say(ranking.answer())


def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A quickrun file.")] = Path(),
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=V1,V2",
            help="A key of a section, such as optim.client_opt.lrate, or of a module, such as "
            "zscore-clip.z_max, and its values; without any, what `suggest` proposes.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each setting.")] = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, not as in the file.")] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="Run nodes over websockets.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; else by cores.")] = None,
    sites: Annotated[
        str, typer.Option(metavar="A,B", help="Sites that count; else all but outliers.")
    ] = "",
    write: Annotated[bool, typer.Option("--write", help="Write the winner into CONFIG.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rank values, or what `suggest` proposes, over several seeds.

    The ranking goes by the metric of each site, against no clipping. Several runs go on at a time.
    After an interruption the same command continues.
    """
    from fedclip.cli.check.configuration import find_config
    from fedclip.cli.tune import AS_IS, NONE, Tuning

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = jobs or cores or 1
    # Several runs share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // jobs)))
    chosen = [name.strip() for name in sites.split(",") if name.strip()]
    try:
        file = find_config(config)
        out = file.with_name(f"{file.stem}-tune{'-nodes' * nodes}")
        command = "quickrun" if nodes else "simulate"
        tuning = Tuning(file, out, seeds, rounds, command, settings or [], chosen)
        _tuned(tuning, jobs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        fail(f"{config} cannot be tuned: {exc}")
    ranking = tuning.ranking
    show_ranking(ranking, "fedclip-tune/2", as_json)
    if "noise_multiplier" in tuning.text and not as_json:
        say("This choice uses the data, and the epsilon of a run does not cover it.")
    winner = ranking.winner
    fresh = winner not in ("", NONE, AS_IS)
    if write and fresh:
        save(file, winner, tuning.texts[winner])
    elif write:
        say(f"{typed(file)} was not changed", err=True)
    elif fresh and not as_json:
        words = [*tuning.settings, "--seeds", str(seeds)]
        words += ["--rounds", str(rounds)] * bool(rounds) + ["--nodes"] * nodes
        words += ["--sites", sites] * bool(sites)
        say(f"To write it:  fedclip tune {typed(file)} {shlex.join(words)} --write")


def _tuned(tuning: Tuning, jobs: int) -> None:
    """Run all settings, and print the progress."""
    from fedclip.cli.running import run_all

    show, before, total = output.progress("tune"), 0, tuning.left
    for number, wave in enumerate(tuning.waves()):
        todo = [run for run in wave if not run.done]

        def tell(done: int, text: str, before: int = before, total: int = total) -> None:
            show(before + done, total, text)

        failed = run_all(todo, tuning.command, jobs, tell)
        before += sum(run.rounds for run in todo)
        for why in failed.values():
            if not number:
                fail(why)
            say(why, err=True)
        tuning.judge(wave, failed)
        if not number and not tuning.settings:
            advice, left_out = tuning.advised()
            for line in (*advice.findings, advice.answer):
                say(line, err=True)
            for name, why in left_out.items():
                say(f"{name} is not tried: {why}", err=True)
        if not number:
            names = ", ".join(tuning.runs)
            say(f"{len(tuning.runs)} settings with {tuning.seeds} seeds each: {names}", err=True)
        total = before + tuning.left
