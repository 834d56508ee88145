# SPDX-License-Identifier: Apache-2.0
"""Run the demo's federations one after the other, and show what came out."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from fedclip.report import read_report
from fedclip.tools.compare import Outcome, table_of
from fedclip.tools.demo.data import FACTOR, SITES, write_data
from fedclip.tools.demo.results import outcomes, plot, sentences
from fedclip.tools.output import ToolError, say, typed
from fedclip.tools.progress import Tell, latest, progress
from fedclip.tools.quickrun import Federation
from fedclip.tools.showing import console
from fedclip.tools.sweep import free_port

__all__ = ["run_demo"]

MARKER = ".fedclip-demo"


class Way(NamedTuple):
    """One way to train: what it is, and the parts of its configuration as TOML."""

    title: str
    aggregator: str = '"clipped-averaging"'
    modules: str = '["update-clip-client"]'
    server: str = "[]"


WAYS = {
    "no-clipping": Way("no clipping (the module no-op only measures)", '"averaging"', '["no-op"]'),
    "fixed-bound": Way(
        "updates clipped to one bound, in every round",
        server='[["update-clip-server", {start_norm = $bound, learning_rate = 0.0}]]',
    ),
    "adaptive-bound": Way(
        "updates clipped to a bound that follows the median of their norms",
        server='[["update-clip-server", {learning_rate = 1.0}]]',
    ),
}
"""The three ways to train, each in a folder of its name."""


def run_demo(
    folder: Path, rounds: int = 30, seeds: int = 6, bound: float = 1.0, timeout: float = 600.0
) -> list[Outcome]:
    """Train in all three ways, print the table, write the plot.

    The folder is new, empty, or that of an earlier demo. Every seed splits the records over the
    hospitals in another way. A training is given up after `timeout` seconds. If the folder can not
    be used, a node fails or the time is up, raise a `ToolError`.
    """
    try:
        folder = folder.resolve()
        _prepare(folder)
        for seed in range(seeds):
            write_data(folder / "data" / f"seed-{seed}", seed)
        trainings = [(way, seed) for way in WAYS for seed in range(seeds)]
        for way, seed in trainings:
            _write_config(
                folder, way, seed, {"rounds": rounds, "bound": bound, "port": free_port()}
            )
    except OSError as exc:
        raise ToolError(f"can not write to {folder}: {exc.strerror}") from exc
    total = rounds * len(trainings)
    # A tenth of a second for a round, on a core that has nothing else to do.
    say(
        f"{len(SITES)} hospitals train one model. {SITES[-1]} trains on lengths in a unit "
        f"{FACTOR:.0f} times smaller than the others', and nobody noticed. {len(trainings)} "
        f"federations train for {rounds} rounds each, over the network of this machine: about "
        f"{10 + 0.1 * total:.0f} seconds if it has little else to do."
    )
    tell = progress({"demo": total})
    for number, (way, seed) in enumerate(trainings):
        _train(folder / way / f"seed-{seed}", number * rounds, timeout, tell)
    say("")
    reports = {way: read_report(folder / way) for way in WAYS}
    found = outcomes(reports)
    title = f"After {rounds} rounds, on records that nobody trained on: mean ± 95 % interval"
    console().print(table_of(title, found))
    for sentence in (*sentences(reports), plot(folder, reports)):
        say(sentence)
    # `make demo` does not put the environment's scripts on the path.
    command = "fedclip" if shutil.which("fedclip") else f"{typed(sys.executable)} -m fedclip"
    say(f"Round by round: {command} report {typed(folder / trainings[-1][0] / 'seed-0')}")
    return found


def _prepare(folder: Path) -> None:
    """Make the folder, and what all trainings share."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise ToolError(f"{folder} is a file; give a folder to write the demo to")
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise ToolError(f"{folder} holds something else; give an empty or new folder")
    for old in ("data", *WAYS):
        shutil.rmtree(folder / old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    (folder / "model.py").write_text(_file("model.py"), encoding="utf-8")


def _file(name: str) -> str:
    return (files("fedclip.tools.demo") / name).read_text(encoding="utf-8")


def _write_config(folder: Path, way: str, seed: int, settings: Mapping[str, float]) -> None:
    """Write one training's configuration."""
    place = folder / way / f"seed-{seed}"
    place.mkdir(parents=True)
    text = Template(Template(_file("config.toml")).safe_substitute(WAYS[way]._asdict()))
    filled = text.substitute(
        settings,
        file=(place / "config.toml").relative_to(folder.parent).as_posix(),
        clients=len(SITES),
        # JSON escapes what TOML wants escaped, and as TOML reads it.
        data=json.dumps(str(folder / "data" / f"seed-{seed}")),
        model=json.dumps(str(folder / "model.py")),
        checkpoint=json.dumps(str(place)),
    )
    (place / "config.toml").write_text(filled, encoding="utf-8")


def _train(folder: Path, before: int, timeout: float, tell: Tell) -> None:
    """Run one federation, and tell of its rounds."""
    way, split, server = folder.parent.name, folder.name, folder / "server" / "metrics.csv"

    def told(done: int) -> None:
        tell("demo", before + done, f"{way}, {split}: {latest(server)}")

    try:
        federation = Federation(folder / "config.toml")
        federation.told = told
        # The splits differ, and the order of the records in them does not.
        asyncio.run(asyncio.wait_for(federation.run(seed=0), timeout))
    except TimeoutError:
        raise ToolError(
            f"{way} did not finish within {timeout:.0f} s and was ended; the logs are "
            f"{typed(folder)}/*/logs.txt"
        ) from None
    except ToolError:
        raise
    except Exception as exc:  # whatever a node raises
        raise ToolError(f"{way} failed: {type(exc).__name__}: {exc}") from exc
