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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from fedclip.report import read_report
from fedclip.tools.compare import interval
from fedclip.tools.demo.data import FACTOR, SITES, write_data
from fedclip.tools.progress import Tell, progress

__all__ = ["DemoError", "Result", "Way", "run_demo", "ways"]

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
aggregator = {aggregator}

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
    """One way to train: a folder name, what it is, and the parts of its configuration as TOML."""

    name: str
    title: str
    aggregator: str = '"clipped-averaging"'
    modules: str = '["update-clip-client"]'
    server: str = "[]"


def ways(bound: float) -> tuple[Way, ...]:
    """Return the three ways to train; `bound` is that of the second."""
    return (
        Way(
            "no-clipping",
            "no clipping (the module no-op only measures)",
            aggregator='"averaging"',
            modules='["no-op"]',
        ),
        Way(
            "fixed-bound",
            f"updates clipped to {bound:g}, in every round",
            server=f'[["update-clip-server", {{start_norm = {bound}, learning_rate = 0.0}}]]',
        ),
        Way(
            "adaptive-bound",
            "updates clipped to a bound that follows the median of their norms",
            server='[["update-clip-server", {learning_rate = 0.5}]]',
        ),
    )


@dataclasses.dataclass(frozen=True)
class Training:
    """One training: a way, and a split of the records over the hospitals."""

    way: Way
    seed: int
    folder: Path
    config: Path

    def rows(self) -> list[dict[str, float]]:
        """Return what the server has measured so far, one row a round."""
        try:
            with (self.folder / "server" / "metrics.csv").open(
                newline="", encoding="utf-8"
            ) as file:
                rows = list(csv.DictReader(file))
        except FileNotFoundError:
            return []
        # The last row may be half written.
        keys = ("loss", "accuracy")
        return [{k: float(row[k]) for k in keys} for row in rows if all(row.get(k) for k in keys)]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one way, read from the files of its processes: one of each for every seed."""

    way: Way
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]


def run_demo(
    folder: Path,
    *,
    rounds: int = 30,
    seeds: int = 3,
    bound: float = 1.0,
    port: int = 0,
    timeout: float = 600.0,
    console: Console | None = None,
) -> list[Result]:
    """Train in all three ways, print the table, write the plot.

    The folder is new, empty, or that of an earlier demo. Every seed splits the records over the
    hospitals in another way. Port 0 takes any free ones; another is the first of several. A
    training is given up after `timeout` seconds. If the folder can not be used, a process fails
    or the time is up, raise a `DemoError`; all processes have ended by then.
    """
    console = console or Console(highlight=False, markup=False)
    try:
        folder = folder.resolve()
        _prepare(folder, bound)
        trainings = [_training(folder, way, seed) for way in ways(bound) for seed in range(seeds)]
        for number, training in enumerate(trainings):
            _write_config(folder, training, rounds, port + number if port else _free_port())
    except OSError as exc:
        raise DemoError(f"can not write to {folder}: {exc.strerror}") from exc
    console.print(
        f"{len(SITES)} hospitals train one model. {SITES[-1]} trains on lengths in a unit "
        f"{FACTOR:.0f} times smaller than the others', and nobody noticed.",
        soft_wrap=True,
    )
    with _terminable(), progress({w.name: rounds * seeds for w in ways(bound)}) as tell:
        _run(folder, trainings, rounds, timeout, tell)
    results = [_result(way, trainings) for way in ways(bound)]
    console.print()
    console.print(_table(results, rounds))
    console.print(_in_words(results), soft_wrap=True)
    console.print(_plot(folder, trainings), soft_wrap=True)
    # `make demo` does not put the environment's scripts on the path.
    command = "fedclip" if shutil.which("fedclip") else f"{_shown(Path(sys.executable))} -m fedclip"
    one = _shown(trainings[-1].folder)
    console.print(f"Round by round: {command} report {one}", soft_wrap=True)
    return results


def _prepare(folder: Path, bound: float) -> None:
    """Make the folder, and what all trainings share."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file; give a folder to write the demo to")
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise DemoError(f"{folder} holds something else; give an empty or new folder")
    for old in ("data", "output", *(way.name for way in ways(bound))):
        shutil.rmtree(folder / old, ignore_errors=True)
    (folder / "output").mkdir(parents=True)
    marker.touch()
    (folder / "model.py").write_text(MODEL, encoding="utf-8")


def _training(folder: Path, way: Way, seed: int) -> Training:
    place = folder / way.name / f"seed-{seed}"
    return Training(way, seed, place, place / "config.toml")


def _write_config(folder: Path, training: Training, rounds: int, port: int) -> None:
    """Write one training's configuration, and its data if no other has."""
    way, data = training.way, folder / "data" / f"seed-{training.seed}"
    if not data.exists():
        write_data(data, training.seed)
    training.folder.mkdir(parents=True)
    text = CONFIG.format(
        title=way.title,
        file=training.config.relative_to(folder.parent).as_posix(),
        port=port,
        # JSON escapes what TOML wants escaped, and as TOML reads it.
        data=json.dumps(str(data)),
        model=json.dumps(str(folder / "model.py")),
        checkpoint=json.dumps(str(training.folder)),
        aggregator=way.aggregator,
        modules=way.modules,
        server=way.server,
        rounds=rounds,
        clients=len(SITES),
    )
    training.config.write_text(text, encoding="utf-8")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(
    folder: Path,
    trainings: Sequence[Training],
    rounds: int,
    timeout: float,
    tell: Tell,
) -> None:
    """Run one server and its clients as processes until all trainings are done."""
    # One thread each: four processes that compete for all cores are slower.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    configs = [str(training.config) for training in trainings]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    current, deadline = 0, time.monotonic() + timeout
    try:
        for node in ("server", *SITES):
            with (folder / "output" / f"{node}.txt").open("wb") as output:
                processes[node] = subprocess.Popen(
                    [sys.executable, "-m", "fedclip.tools.demo.node", node, *configs],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        while any(process.poll() is None for process in processes.values()):
            _look_for_failures(folder, trainings[current], processes)
            rows = trainings[current].rows()
            way = trainings[current].way
            before = sum(training.way is way for training in trainings[:current])
            text = f"loss {rows[-1]['loss']:.3g}" if rows else "starts"
            tell(way.name, before * rounds + len(rows), text)
            if len(rows) == rounds and current + 1 < len(trainings):
                current, deadline = current + 1, time.monotonic() + timeout
                continue
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{way.name} did not finish within {timeout:.0f} s and was ended; the "
                    f"logs are {_shown(trainings[current].folder)}/*/logs.txt"
                )
            time.sleep(0.1)
        _look_for_failures(folder, trainings[current], processes)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _look_for_failures(
    folder: Path, training: Training, processes: Mapping[str, subprocess.Popen[bytes]]
) -> None:
    """Raise an error that says why a node failed, by the last line that it wrote."""
    node = next((node for node, process in processes.items() if process.poll()), None)
    if node is None:
        return
    output = folder / "output" / f"{node}.txt"
    last = output.read_text(errors="replace").rstrip().rpartition("\n")[2] or "it said nothing"
    if "address already in use" in last.lower():
        last = "its port is in use by another program"
    raise DemoError(
        f"{node} of {training.way.name} failed: {last.strip()} (output: {_shown(output)})"
    )


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


def _result(way: Way, trainings: Sequence[Training]) -> Result:
    last = []
    for training in trainings:
        if training.way == way:
            rows = training.rows()
            if not rows:
                raise DemoError(f"{way.name} ended without a result; see {_shown(training.folder)}")
            last.append(rows[-1])
    return Result(way, tuple(r["loss"] for r in last), tuple(r["accuracy"] for r in last))


def _table(results: Sequence[Result], rounds: int) -> Table:
    seeds = len(results[0].losses)
    table = Table(
        title=f"After {rounds} rounds, on records that nobody trained on"
        + f": mean of {seeds} splits, with its 95 % interval" * (seeds > 1),
        title_justify="left",
    )
    table.add_column("training", no_wrap=True)
    for head in ("accuracy", "lowest", "loss", "largest"):
        table.add_column(head, justify="right", no_wrap=True)

    def shown(values: Sequence[float], form: str) -> str:
        mean, half = interval(values)
        return f"{mean:{form}}" + (f" ± {half:{form}}" if half is not None else "")

    for result in results:
        table.add_row(
            result.way.name,
            shown(result.accuracies, ".1%"),
            f"{min(result.accuracies):.1%}",
            shown(result.losses, ".3f"),
            f"{max(result.losses):.3f}",
        )
    return table


def _in_words(results: Sequence[Result]) -> str:
    """Say what the bound did, in numbers of this run."""
    none, _, adaptive = (fmean(result.accuracies) for result in results)
    return (
        f"Without clipping, {SITES[-1]}'s updates outweigh the others': {none:.0%} of the records "
        f"are told right. With a bound that follows the updates, {adaptive:.0%} are."
    )


def _plot(folder: Path, trainings: Sequence[Training]) -> str:
    """Draw the accuracies of all trainings, and the updates and bounds of the first seed."""
    file = folder / "demo.png"
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "No plot without matplotlib: pip install matplotlib"
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    axes[2].sharey(axes[1])
    styles = dict(
        zip((t.way.name for t in trainings if not t.seed), ("C3", "C1", "C0"), strict=True)
    )
    for training in trainings:
        name, curve = training.way.name, [row["accuracy"] for row in training.rows()]
        label = name if not training.seed else None
        axes[0].plot(range(1, len(curve) + 1), curve, color=styles[name], alpha=0.8, label=label)
    axes[0].set(title="the model: accuracy, one line for each split", ylabel="accuracy")
    axes[0].legend(frameon=False, loc="lower right")
    for ax, name in zip(axes[1:], ("fixed-bound", "adaptive-bound"), strict=True):
        training = next(t for t in trainings if t.way.name == name)
        report = read_report(training.folder)
        for site, line in zip(SITES, ("-", "--", "-"), strict=True):
            records = [row.record for row in report.select(node=site)]
            numbers = [record.round for record in records]
            colour = "C3" if site == SITES[-1] else "0.45"
            norms = [record.norm_median for record in records]
            ax.plot(numbers, norms, line, color=colour, label=f"update of {site}")
        bounds = [record.limit for record in records]
        ax.plot(numbers, bounds, color=styles[name], linewidth=3, label="bound")
        ax.set(title=f"{name}: norms of the updates", ylabel="norm", yscale="log")
    axes[2].legend(frameon=False, loc="best")
    for ax in axes:
        ax.set_xlabel("round")
        ax.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return f"Accuracy, updates and bounds: {_shown(file)}"


def _shown(path: Path) -> str:
    """Return a path as short as one can type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
