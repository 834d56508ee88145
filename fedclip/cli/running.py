# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip check | quickrun | simulate | run``, and runs of many configurations.

Each of many runs is a process with a folder for its results, ``OUT/SETTING/seed-1``: it gets a copy
of the configuration, the checkpoints and the output. A finished run leaves a mark there with its
configuration, and is not repeated. Where the system allows, processes are forked from one that has
imported everything beforehand.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Annotated, Any, NamedTuple

import tomlkit
import typer

from fedclip.cli.output import ConfigPath, JsonFlag, commands, fail, progress, say, typed
from fedclip.core.parameters import Config
from fedclip.errors import FEDERATIONS, ToolError, fits

app = commands()

MARK = "run-done.toml"
_IMPORTED = ["fedclip.engines.local.simulate", "fedclip.cli.check.configuration"]


def runnable(config: Path, *, quickrun: bool = False, simulate: bool = False) -> Path:
    """Return the file of a configuration; end the command if it would not run."""
    from fedclip.cli.check.configuration import check_config

    result = check_config(config, quickrun=quickrun, simulate=simulate)
    say(*(f"fedclip: {f.where} {f.message}" for f in result.problems), err=True)
    if not result.ok:
        fail(f"{result.path} would not run; nothing was started")
    return result.path


@app.command()
def check(
    config: ConfigPath = Path(),
    as_json: JsonFlag = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail for notes, too.")] = False,
) -> None:
    """Check a federation's configuration before it runs."""
    from fedclip.cli.check.configuration import check_config

    result = check_config(config)
    fine = not result.of("problem", "leak")
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
            say(*(f"  {place}" for place in result.places))
        levels = Counter(finding.level for finding in result.findings)
        counts = [(levels[level], level) for level in ("problem", "leak", "note")]
        texts = [f"{n} {level}{'s' * (n > 1)}" for n, level in counts if n]
        typer.echo(f"{', '.join(texts if levels['problem'] else ['No problem', *texts])}.")
    raise typer.Exit(0 if fine and not (strict and result.of("note")) else 1)


@app.command()
def quickrun(
    config: ConfigPath = Path(),
    verbose: Annotated[bool, typer.Option("--verbose", help="Show declearn's log too.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Draw batches from this seed.")] = None,
) -> None:
    """Check a configuration, then run all of it on this machine."""
    path, show = runnable(config, quickrun=True), progress("quickrun", quiet=verbose)

    from fedclip.engines.declearn.quickrun import run

    clients, results, finished = run(path, verbose=verbose, seed=seed, progress=show)
    if not finished:
        fail(f"interrupted; what was done until then: fedclip report {typed(results)}", code=130)
    weights = typed(Path(results, "server", "model_state_best.mpk"))
    say(f"Best weights (lowest mean loss of the healthy sites): {weights}")
    spent = any(Path(results).rglob("privacy_spent.json"))
    also = f", and what was spent:  fedclip privacy spent {typed(results)}" if spent else ""
    say(f"fedclip: {clients} clients; see  fedclip report {typed(results)}{also}")


@app.command()
def simulate(
    config: ConfigPath = Path(),
    seed: Annotated[int | None, typer.Option(min=0, help="A seed, not that of [simulate].")] = None,
) -> None:
    """Check a configuration, then run it in one process.

    It has as many clients as the section [simulate] says.
    """
    path = runnable(config, simulate=True)

    from fedclip.engines.local.simulate import EARLY, run

    done = run(path, seed, progress=progress("simulate"))
    see = f"fedclip report {typed(done.results)}"
    after = f"after {done.rounds} rounds: {done.ended}; what was done until then: {see}"
    if done.ended and done.ended != EARLY:
        fail(after, code=130 if done.ended == "interrupted" else 1)
    if done.ended:
        say(f"fedclip: {after}")
        return
    say(f"fedclip: {done.clients} clients, {done.rounds} rounds of {done.seconds:.2g} s")
    weights = typed(Path(done.results, "server", "model_state_best.mpk"))
    say(f"Best weights (round {done.best}, lowest mean loss of the healthy sites): {weights}")
    say(f"See  {see}")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="server.py, client.py, …")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS")] = None,
) -> None:
    """Run a Python script, unedited, with fedclip registered."""
    import runpy

    if not os.path.isfile(script):
        fail(f"there is no script {str(script)!r}", code=2)
    if fits(FEDERATIONS) and find_spec("websockets"):
        from fedclip.engines.declearn.network import watch_plain_clients

        watch_plain_clients()
    sys.argv = [str(script), *(args or [])]
    # Like `python SCRIPT`, put the script's folder first, in place of that of `fedclip`.
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        raise SystemExit(130) from None


# -- many runs ------------------------------------------------------------------------------------
class Planned(NamedTuple):
    """One run of a setting with a seed."""

    label: str
    seed: int
    folder: Path
    text: str
    """Its configuration; the port is chosen when it starts."""
    rounds: int

    @property
    def done(self) -> bool:
        """Whether this very configuration has finished."""
        mark = self.folder / MARK
        return mark.is_file() and mark.read_bytes() == self.text.encode()


def planned_run(document: Config, file: Path, folder: Path, rounds: int | None) -> Planned:
    """Return the run in ``SETTING/seed-N`` of a configuration, whose paths then work from there."""
    if rounds is not None:
        document["run"]["rounds"] = rounds
    folder, home = folder.absolute(), file.resolve().parent
    for section in ("data", "model", "experiment"):
        document.setdefault(section, tomlkit.table())
    folders = [path for path in home.glob("data*") if path.is_dir()]
    if not document["data"].get("data_folder") and len(folders) == 1:
        document["data"]["data_folder"] = str(folders[0])
    if not document["model"].get("model_file"):
        document["model"]["model_file"] = str(home / "model.py")
    document["experiment"]["checkpoint"] = str(folder)
    count, seed = document["run"].get("rounds", 0), int(folder.name.rpartition("-")[2])
    return Planned(folder.parent.name, seed, folder, tomlkit.dumps(document), int(count))


def run_one(planned: Planned, tell: Callable[[int], None], command: str) -> None:
    """Start a run in a process, and report the rounds done.

    What `tell` raises ends the process.

    Raises
    ------
    ToolError
        If the process fails; the message has the last line of its output.
    """
    folder = planned.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    document: Config = tomlkit.parse(planned.text)
    if "network" in document:
        document["network"]["port"] = free_port()
    config, output = folder / "config.toml", folder / "output.txt"
    config.write_text(tomlkit.dumps(document), encoding="utf-8")
    metrics = folder / ("simulated" * (command == "simulate")) / "server" / "metrics.csv"
    forked = "forkserver" in multiprocessing.get_all_start_methods()
    processes: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        processes.set_forkserver_preload(_IMPORTED)
    words = command, config, planned.seed, output
    process = processes.Process(target=_run, args=words, daemon=True)
    process.start()
    try:
        while process.is_alive():
            text = metrics.read_bytes() if metrics.is_file() else b""
            tell(max(0, text.count(b"\n") - 1))
            process.join(0.2)
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        last = output.read_text(errors="replace").strip().rpartition("\n")[2]
        fail(f"{planned.label}, seed {planned.seed}, failed: {last or 'it printed nothing'}")
    tell(planned.rounds)
    (folder / MARK).write_bytes(planned.text.encode())


def run_all(
    runs: Sequence[Planned], command: str, jobs: int, tell: Callable[[int, str], None]
) -> dict[Planned, str]:
    """Start the runs that are not done, `jobs` at a time, and report the rounds done.

    Returns
    -------
    failures
        The messages of the runs that failed.
    """
    todo, stop = [planned for planned in runs if not planned.done], Event()
    done, failures = dict.fromkeys(todo, 0), dict[Planned, str]()

    def start(planned: Planned) -> None:
        def count(rounds: int) -> None:
            if stop.is_set():
                fail("interrupted")
            done[planned] = rounds
            tell(sum(done.values()), f"{planned.label}, seed {planned.seed}")

        try:
            run_one(planned, count, command)
        except ToolError as exc:
            failures[planned] = str(exc)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            [*pool.map(start, todo)]
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            fail("interrupted; the same command continues from here", code=130)
    return failures


def _run(command: str, config: Path, seed: int, output: Path) -> None:
    """Run ``quickrun`` or ``simulate`` in this process, and write its output to a file."""
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        start: Any = quickrun if command == "quickrun" else simulate
        start(config, seed=seed)
    except ToolError as exc:
        say(f"fedclip: {exc}", err=True)
        sys.exit(exc.code)


def free_port() -> int:
    """Return a port on which nobody listens, below those that systems choose (32768 or more)."""
    for port in random.SystemRandom().sample(range(16_384, 32_768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ToolError("no port is free between 16384 and 32767")
