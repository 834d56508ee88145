# SPDX-License-Identifier: Apache-2.0
"""Runs a configuration with several values of its settings, and several seeds.

Each run is a process of its own, with its own copy of the configuration, its checkpoints and its
output in a folder: ``OUT/SETTING/seed-1``. A run that has come to its end leaves a mark there, with
the configuration that it ran, and is not run again. Where the system can, these processes are
copies of one that has imported all of this before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import tomlkit
from declearn.optimizer import list_optim_modules

from fedclip.parameters import Config
from fedclip.report import Report
from fedclip.toml import value_of
from fedclip.tools.catalogue import is_ours
from fedclip.tools.check import check_config
from fedclip.tools.editing import modules_of, relocate, set_value
from fedclip.tools.output import ToolError
from fedclip.tools.progress import latest
from fedclip.tools.showing import read

MARK = "sweep-done.toml"
_CONFIG, _OUTPUT = "config.toml", "output.txt"
_COPIED = "forkserver" in multiprocessing.get_all_start_methods()
_PROCESSES: Any = multiprocessing.get_context("forkserver" if _COPIED else "spawn")


class Planned(NamedTuple):
    """One run of a sweep."""

    label: str
    seed: int
    folder: Path
    text: str
    """Its configuration; the port is chosen when it starts."""
    rounds: int

    @property
    def done(self) -> bool:
        """Whether this very configuration has been run to its end."""
        mark = self.folder / MARK
        return mark.is_file() and mark.read_bytes() == self.text.encode()

    @property
    def seconds(self) -> float:
        """How long it took, once it is done."""
        return (self.folder / MARK).stat().st_mtime - (self.folder / _CONFIG).stat().st_mtime


def parse(setting: str) -> tuple[str, list[object]]:
    """Return key and values of ``key=v1,v2``; values are TOML, or else words.

    Examples
    --------
    >>> parse("zscore-clip.z_max=1.5,2")
    ('zscore-clip.z_max', [1.5, 2])
    >>> parse("run.training.shuffle=true,false")
    ('run.training.shuffle', [True, False])
    >>> parse('optim.client_opt.modules=["no-op"],["auto-clip"]')
    ('optim.client_opt.modules', [['no-op'], ['auto-clip']])
    >>> parse("zscore-clip.action=max,mean")
    ('zscore-clip.action', ['max', 'mean'])
    """
    key, equals, values = setting.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ToolError(f"{setting!r} must be KEY=VALUE,VALUE")
    try:
        found = tomllib.loads(f"x = [{values}]")["x"]
    except (ValueError, RecursionError):
        found = [value_of(word.strip()) for word in values.split(",")]
    return key.strip(), found


def plan(
    file: Path, settings: Sequence[str], seeds: int, out: Path, rounds: int | None = None
) -> list[Planned]:
    """Return the runs of a sweep, seed by seed, so that an early end leaves all settings alike.

    Raises
    ------
    ToolError
        If a key is not in the configuration, or can not be told from others.
    """
    text = file.read_text(encoding="utf-8")
    parsed = [parse(setting) for setting in settings]
    known: Mapping[str, type] = list_optim_modules()
    runs = []
    for seed in range(1, seeds + 1):
        for values in itertools.product(*(found for _, found in parsed)):
            document: Config = tomlkit.parse(text)
            for (key, _), value in zip(parsed, values, strict=True):
                set_value(document, key, value)
            if not any(is_ours(known.get(name, object)) for name, _, _ in modules_of(document)):
                raise ToolError(
                    'no module of fedclip would measure anything: add "no-op" to the modules of '
                    "client_opt"
                )
            folder = out / _label(parsed, values) / f"seed-{seed}"
            runs.append(placed(document, file, folder, rounds))
    if len({run.folder for run in runs}) < len(runs):
        raise ToolError("two values of a setting are the same")
    return runs


def placed(document: Config, file: Path, folder: Path, rounds: int | None) -> Planned:
    """Return the run of a changed configuration in a folder, which names its setting and seed."""
    if rounds is not None:
        document["run"]["rounds"] = rounds
    folder = folder.absolute()
    relocate(document, file, folder)
    count, seed = document["run"].get("rounds", 0), int(folder.name.rpartition("-")[2])
    return Planned(folder.parent.name, seed, folder, tomlkit.dumps(document), int(count))


def refuse(file: Path, runs: Sequence[Planned], command: str = "quickrun") -> None:
    """Raise a `ToolError` if one of these settings of a file that are not done would not run."""
    for planned in {planned.label: planned for planned in runs if not planned.done}.values():
        if problems := check_config(file, text=planned.text, **{command: True}).problems:
            where, message = problems[0].where, problems[0].message
            raise ToolError(f"{planned.label} would not run: {where} {message}")


def _label(parsed: Sequence[tuple[str, object]], values: Sequence[object]) -> str:
    """Return a name for the settings that a folder can have."""
    words = [
        f"{key.rpartition('.')[2]}={value if isinstance(value, str) else json.dumps(value)}"
        for (key, _), value in zip(parsed, values, strict=True)
    ]
    plain = re.sub(r'[][{}"]', "", ",".join(words))
    return re.sub(r"[^\w.=,+-]+", "_", plain).strip("_.")[:120] or "as-it-is"


def run(planned: Planned, told: Callable[[int, str], None], command: str = "quickrun") -> None:
    """Run one run as a process, from nothing; tell its round, and its last loss and metrics.

    What `told` raises ends the process.

    Raises
    ------
    ToolError
        If the process fails; the message has the last line of what it said.
    """
    folder = planned.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    document: Config = tomlkit.parse(planned.text)
    document["network"]["port"] = free_port()
    config = folder / _CONFIG
    config.write_text(tomlkit.dumps(document), encoding="utf-8")
    words = [command, str(config), "--seed", str(planned.seed)]
    metrics = folder / ("simulated" * (command == "simulate")) / "server" / "metrics.csv"
    if _COPIED:
        _PROCESSES.set_forkserver_preload(["fedclip.tools.simulate", "fedclip.tools.check"])
    process = _PROCESSES.Process(target=_run, args=(words, folder / _OUTPUT), daemon=True)
    process.start()
    try:
        while process.is_alive():
            told(_rounds(metrics), latest(metrics))
            process.join(0.2)
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        said = (folder / _OUTPUT).read_text(errors="replace").strip().rpartition("\n")[2]
        raise ToolError(
            f"{planned.label}, seed {planned.seed}, failed: {said or 'it said nothing'}"
        )
    told(planned.rounds, latest(metrics))
    (folder / MARK).write_bytes(planned.text.encode())


def run_all(
    runs: Sequence[Planned], command: str, jobs: int, tell: Callable[[int, str], None]
) -> dict[Planned, str]:
    """Run those that are not done, so many side by side; tell of the rounds of all.

    Returns
    -------
    failures
        What those said that failed.
    """
    todo, stop = [planned for planned in runs if not planned.done], Event()
    done = dict.fromkeys(todo, 0)

    def one(planned: Planned) -> str:
        def told(rounds: int, text: str) -> None:
            if stop.is_set():
                raise ToolError("interrupted")
            done[planned] = rounds
            tell(sum(done.values()), f"{planned.label}, seed {planned.seed}: {text or 'starts'}")

        try:
            run(planned, told, command)
        except ToolError as exc:
            return str(exc)
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        try:
            said = list(pool.map(one, todo))
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            text = "interrupted; the same command goes on from here"
            raise ToolError(text, code=130) from None
    return {planned: text for planned, text in zip(todo, said, strict=True) if text}


def reports(runs: Sequence[Planned]) -> list[tuple[str, Path, Report]]:
    """Return name, folder and report of each setting, without seeds of other plans."""
    found = []
    for folder in dict.fromkeys(planned.folder.parent for planned in runs if planned.done):
        report = read(folder)
        seeds = {planned.folder.name for planned in runs}
        kept = [run for run in report.experiments if run.partition("/")[0] in seeds]
        found.append((folder.name, folder, report.only(kept)))
    return found


def _run(words: list[str], output: Path) -> None:
    """Be the command of these words, whose output goes to a file."""
    os.utime(words[1])  # the first of these processes was waited for
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from fedclip.tools.cli import main

    sys.argv = ["fedclip", *words]
    main()


def free_port() -> int:
    """Return a port on which nobody listens, and which no system gives away before it is used.

    What a system chooses by itself, for a connection say, is 32768 or more.
    """
    for port in random.SystemRandom().sample(range(16_384, 32_768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ToolError("no port is free between 16384 and 32767")


def _rounds(metrics: Path) -> int:
    try:
        return max(0, metrics.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0
