# SPDX-License-Identifier: Apache-2.0
"""Start the demo's federations one after the other, watch them, show what came out."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedclip.report import draw_panels, read_report
from fedclip.tools.demo.data import FACTOR, SITES, write_data

__all__ = ["WAYS", "DemoError", "Result", "Way", "run_demo"]

MARKER = ".fedclip-demo"

MODEL = '''\
"""The model that the hospitals train: logistic regression."""

from declearn.model.sklearn import SklearnSGDModel

model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty="l2")
'''

CONFIG = """\
# {title}
# In one process:  fedclip quickrun {file}

[network]
protocol = "websockets"
host = "127.0.0.1"
port = {port}
heartbeat = 0.02  # seconds between two looks for a message; declearn's default is 1.0

[data]
data_folder = {data}

[model]
model_file = {model}

[optim]
aggregator = "averaging"

[optim.client_opt]
lrate = 0.1
modules = {modules}

[optim.server_opt]
lrate = 1.0
modules = {server}

[run]
rounds = {rounds}

[run.register]
min_clients = {clients}
max_clients = {clients}  # without it, registration lasts its whole timeout
timeout = 600

[run.training]
batch_size = 8
n_epoch = 1
shuffle = true

[experiment]
metrics = [["binary-classif", {{thresh = 0.0}}]]
checkpoint = {checkpoint}
"""


class DemoError(RuntimeError):
    """The demo can not start or did not finish; the message says why."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train: a folder name, what it is, and modules of clients and server as TOML."""

    name: str
    title: str
    modules: str
    server: str = "[]"


WAYS = (
    Way("no-clipping", "no clipping (the module no-op only measures)", '["no-op"]'),
    Way(
        "l2-global-clipping",
        "declearn's own clipper, with its usual limit (the module no-op only measures)",
        '[["no-op", {max_norm = 1.0}], ["l2-global-clipping", {max_norm = 1.0}]]',
    ),
    Way(
        "mad-clip",
        "fedclip's mad-clip, one limit for all hospitals, which follows their norms",
        '[["mad-clip", {shared = true}]]',
        '["mad-clip-server"]',
    ),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one way, read from the files of its processes."""

    way: Way
    loss: float
    accuracy: float
    clipped_share: float
    norm_max: float


def run_demo(
    folder: Path,
    *,
    rounds: int = 15,
    port: int = 0,
    timeout: float = 600.0,
    console: Console | None = None,
) -> list[Result]:
    """Train in all three ways, print the table, write the plot.

    The folder is new, empty, or that of an earlier demo. Port 0 takes any free one; a training is
    given up after `timeout` seconds. If the folder can not be used, a process fails or the time is
    up, raise a `DemoError`; all processes have ended by then.
    """
    console = console or Console(highlight=False, markup=False)
    try:
        folder = folder.resolve()
        _prepare(folder)
    except OSError as exc:
        raise DemoError(f"can not write to {folder}: {exc.strerror}") from exc
    console.print(
        f"{len(SITES)} hospitals train one model on {folder.name}/data; {SITES[-1]} reports its "
        f"perimeters in a unit {FACTOR:.0f} times smaller than the others do.",
        soft_wrap=True,
    )
    results = []
    with _terminable(), _progress(console, rounds) as advance:
        for way in WAYS:
            config = _write_config(folder, way, rounds, port or _free_port())
            _run_federation(folder / way.name, config, timeout, lambda *a, w=way: advance(w, *a))
            results.append(_read_result(folder, way))
    console.print()
    console.print(_table(results, rounds))
    console.print(_in_words(folder), soft_wrap=True)
    console.print(_plot(folder), soft_wrap=True)
    # `make demo` does not put the environment's scripts on the path.
    command = "fedclip" if shutil.which("fedclip") else f"{_shown(Path(sys.executable))} -m fedclip"
    console.print(f"Round by round: {command} report {_shown(folder)}", soft_wrap=True)
    return results


def _prepare(folder: Path) -> None:
    """Make the folder and what all ways share."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file; give a folder to write the demo to")
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise DemoError(f"{folder} holds something else; give an empty or new folder")
    for old in ("data", *(way.name for way in WAYS)):
        shutil.rmtree(folder / old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    write_data(folder / "data")


def _write_config(folder: Path, way: Way, rounds: int, port: int) -> Path:
    file = folder / way.name / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(
        title=way.title,
        file=f"{folder.name}/{way.name}/config.toml",
        port=port,
        # JSON escapes what TOML wants escaped, and as TOML reads it.
        data=json.dumps(str(folder / "data")),
        model=json.dumps(str(folder / "model.py")),
        checkpoint=json.dumps(str(folder / way.name)),
        modules=way.modules,
        server=way.server,
        rounds=rounds,
        clients=len(SITES),
    )
    file.write_text(text, encoding="utf-8")
    return file


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run_federation(
    folder: Path, config: Path, timeout: float, advance: Callable[[int, str], None]
) -> None:
    """Run one server and its clients as processes until the server is done."""
    deadline = time.monotonic() + timeout
    # One thread each: four processes that compete for all cores are slower.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node in ("server", *SITES):
            (folder / node).mkdir()
            with (folder / node / "output.txt").open("wb") as output:
                processes[node] = subprocess.Popen(
                    [sys.executable, "-m", "fedclip.tools.demo.node", node, str(config)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        while any(process.poll() is None for process in processes.values()):
            advance(*_progress_of(folder))
            _look_for_failures(folder, processes)
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{folder.name} did not finish within {timeout:.0f} s and was ended; the "
                    f"logs are {_shown(folder)}/*/logs.txt"
                )
            time.sleep(0.1)
        _look_for_failures(folder, processes)
        advance(*_progress_of(folder))
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _look_for_failures(folder: Path, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Raise an error that says why a node failed, by the last line that it wrote."""
    node = next((node for node, process in processes.items() if process.poll()), None)
    if node is None:
        return
    output = folder / node / "output.txt"
    last = output.read_text(errors="replace").rstrip().rpartition("\n")[2] or "it said nothing"
    if "address already in use" in last.lower():
        last = "its port is in use by another program"
    raise DemoError(f"{node} of {folder.name} failed: {last.strip()} (output: {_shown(output)})")


def _metrics(folder: Path) -> list[dict[str, str]]:
    """Return what the server has measured so far, one row a round."""
    try:
        with (folder / "server" / "metrics.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []


def _progress_of(folder: Path) -> tuple[int, str]:
    rows = _metrics(folder)
    # The last row may be half written.
    if not rows or not all(rows[-1].get(key) for key in ("loss", "accuracy")):
        return max(0, len(rows) - 1), ""
    return len(rows), f"loss {float(rows[-1]['loss']):.3g}"


@contextlib.contextmanager
def _progress(console: Console, rounds: int) -> Iterator[Callable[[Way, int, str], None]]:
    """Show progress: bars on a terminal, a line every few rounds anywhere else."""
    if not console.is_terminal:
        said: dict[str, int] = {}

        def say(way: Way, done: int, text: str) -> None:
            if way.name not in said:
                console.print(f"{way.name}: starting a server and {len(SITES)} clients")
                said[way.name] = 0
            if done >= min(rounds, said[way.name] + 5):
                if done > said[way.name]:
                    console.print(f"{way.name}: round {done} of {rounds}, {text}")
                said[way.name] = done

        yield say
        return
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def show(way: Way, done: int, text: str) -> None:
            if way.name not in tasks:
                tasks[way.name] = progress.add_task(way.name, total=rounds, text="starting")
            if text:
                progress.update(tasks[way.name], completed=done, text=text)

        yield show


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let a polite kill take the same way out as Ctrl-C, by which the processes are ended."""
    try:
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not in the main thread, which alone may ask
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _read_result(folder: Path, way: Way) -> Result:
    rows = _metrics(folder / way.name)
    if not rows:
        raise DemoError(f"{way.name} ended without a result; see {_shown(folder / way.name)}")
    records = [row.record for row in read_report(folder / way.name).rows]
    steps = sum(record.steps for record in records)
    return Result(
        way=way,
        loss=float(rows[-1]["loss"]),
        accuracy=float(rows[-1]["accuracy"]),
        clipped_share=sum(record.clipped for record in records) / steps,
        norm_max=max(record.norm_max or 0.0 for record in records),
    )


def _table(results: list[Result], rounds: int) -> Table:
    table = Table(
        title=f"After {rounds} rounds, on records that nobody trained on", title_justify="left"
    )
    table.add_column("training", no_wrap=True)
    for head in ("loss", "accuracy", "clipped steps", "largest norm"):
        table.add_column(head, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.way.name,
            f"{result.loss:.3g}",
            f"{result.accuracy:.1%}",
            f"{result.clipped_share:.1%}",
            f"{result.norm_max:.3g}",
        )
    return table


def _in_words(folder: Path) -> str:
    """Say what the other unit does to the gradients, in numbers of this run."""
    report = read_report(folder / WAYS[0].name)
    medians = []
    for site in (SITES[0], SITES[-1]):
        records = [row.record for row in report.select(node=site)]
        middles = sorted(record.norm_median or 0.0 for record in records)
        medians.append(middles[len(middles) // 2])
    return (
        f"Without clipping, a median gradient has a norm of {medians[0]:.2g} at {SITES[0]} and of "
        f"{medians[1]:.2g} at {SITES[-1]}, whose updates outweigh the others'."
    )


def _plot(folder: Path) -> str:
    """Draw norms and limits: a row of panels for each way, a column for each site."""
    file = folder / "norms.png"
    panels = {
        f"{way.name}, {site}": read_report(folder / way.name).select(node=site)
        for way in WAYS
        for site in SITES
    }
    try:
        draw_panels(panels, len(SITES), sharey="row").savefig(file, dpi=120)
    except ModuleNotFoundError:
        return "No plot without matplotlib: pip install 'fedclip[plot]'"
    return f"Norms and limits of every site: {_shown(file)}"


def _shown(path: Path) -> str:
    """Return a path as short as one can type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
