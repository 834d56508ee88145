# SPDX-License-Identifier: Apache-2.0
"""Runs configurations with several seeds, each in a process with a folder for its results.

A run's folder is ``OUT/SETTING/seed-1``: it gets a copy of the configuration, the checkpoints and
the output. A finished run leaves a mark there with its configuration, and is not repeated. Where
the system allows, processes are forked from one that has imported everything beforehand.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import tomlkit

from fedclip.cli import running
from fedclip.cli.check.configuration import check_config
from fedclip.cli.output import say
from fedclip.core.parameters import Config
from fedclip.errors import ToolError

MARK = "run-done.toml"
_CONFIG, _OUTPUT = "config.toml", "output.txt"
_FORKED = "forkserver" in multiprocessing.get_all_start_methods()
_PROCESSES: Any = multiprocessing.get_context("forkserver" if _FORKED else "spawn")


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
    """Return the run of a changed configuration in ``SETTING/seed-N``."""
    if rounds is not None:
        document["run"]["rounds"] = rounds
    folder = folder.absolute()
    _relocate(document, file, folder)
    count, seed = document["run"].get("rounds", 0), int(folder.name.rpartition("-")[2])
    return Planned(folder.parent.name, seed, folder, tomlkit.dumps(document), int(count))


def _relocate(document: Config, file: Path, folder: Path) -> None:
    """Change the paths of a configuration so that it works from another folder."""
    for section in ("data", "model", "experiment"):
        document.setdefault(section, tomlkit.table())
    home = file.resolve().parent
    if not document["data"].get("data_folder"):
        folders = [path for path in home.glob("data*") if path.is_dir()]
        if len(folders) == 1:
            document["data"]["data_folder"] = str(folders[0])
    if not document["model"].get("model_file"):
        document["model"]["model_file"] = str(home / "model.py")
    document["experiment"]["checkpoint"] = str(folder)


def refuse(file: Path, planned: Planned, command: str) -> None:
    """Raise a `ToolError` if a run that is not done would not start."""
    if not planned.done and (
        problems := check_config(file, text=planned.text, **{command: True}).problems
    ):
        where, message = problems[0].where, problems[0].message
        raise ToolError(f"{planned.label} would not run: {where} {message}")


def run(planned: Planned, tell: Callable[[int], None], command: str) -> None:
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
    config = folder / _CONFIG
    config.write_text(tomlkit.dumps(document), encoding="utf-8")
    metrics = folder / ("simulated" * (command == "simulate")) / "server" / "metrics.csv"
    if _FORKED:
        _PROCESSES.set_forkserver_preload(
            ["fedclip.engines.local.simulate", "fedclip.cli.check.configuration"]
        )
    process = _PROCESSES.Process(
        target=_run, args=(command, config, planned.seed, folder / _OUTPUT), daemon=True
    )
    process.start()
    try:
        while process.is_alive():
            tell(_rounds(metrics))
            process.join(0.2)
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        output = (folder / _OUTPUT).read_text(errors="replace").strip().rpartition("\n")[2]
        raise ToolError(
            f"{planned.label}, seed {planned.seed}, failed: {output or 'it printed nothing'}"
        )
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
    done = dict.fromkeys(todo, 0)

    def start(planned: Planned) -> str:
        def count(rounds: int) -> None:
            if stop.is_set():
                raise ToolError("interrupted")
            done[planned] = rounds
            tell(sum(done.values()), f"{planned.label}, seed {planned.seed}")

        try:
            run(planned, count, command)
        except ToolError as exc:
            return str(exc)
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        try:
            messages = list(pool.map(start, todo))
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            text = "interrupted; the same command continues from here"
            raise ToolError(text, code=130) from None
    return {planned: text for planned, text in zip(todo, messages, strict=True) if text}


def _run(command: str, config: Path, seed: int, output: Path) -> None:
    """Run ``quickrun`` or ``simulate`` in this process, and write its output to a file."""
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        if command == "quickrun":
            running.quickrun(config, seed=seed)
        else:
            running.simulate(config, seed=seed)
    except ToolError as exc:
        say(f"fedclip: {exc}", err=True)
        sys.exit(exc.code)


def free_port() -> int:
    """Return a port on which nobody listens, below those that systems choose (32768 or more)."""
    for port in random.SystemRandom().sample(range(16_384, 32_768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ToolError("no port is free between 16384 and 32767")


def _rounds(metrics: Path) -> int:
    try:
        return max(0, metrics.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0
