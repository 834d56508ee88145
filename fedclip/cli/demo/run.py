# SPDX-License-Identifier: Apache-2.0
"""Run the demo's federations one after the other, and show what came out."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

import tomlkit

from fedclip.cli.demo.data import FACTOR, SITES, write_data
from fedclip.cli.demo.results import plot, ranked, sentences
from fedclip.cli.output import ToolError, say, typed
from fedclip.cli.progress import progress
from fedclip.cli.ranking import Ranking, drawn
from fedclip.cli.runner import Planned, planned_run, reports, run_all
from fedclip.cli.showing import console
from fedclip.core.parameters import Config

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


def run_demo(folder: Path, rounds: int = 30, seeds: int = 6, bound: float = 1.0) -> Ranking:
    """Train in all three ways, print the table, write the plot.

    The folder is new, empty, or that of an earlier demo, which goes on if it was interrupted. Every
    seed splits the records over the hospitals in another way. If the folder can not be used, or a
    node fails, raise a `ToolError`.
    """
    folder = folder.resolve()
    try:
        prepare(folder)
        for seed in range(seeds):
            write_data(folder / "data" / f"seed-{seed}", seed)
    except OSError as exc:
        raise ToolError(f"can not write to {folder}: {exc.strerror}") from exc
    runs = [planned(folder, way, seed, rounds, bound) for way in WAYS for seed in range(seeds)]
    total = rounds * len(runs)
    # A tenth of a second for a round, on a core that has nothing else to do.
    say(
        f"{len(SITES)} hospitals train one model, {SITES[-1]} on lengths in a unit {FACTOR:.0f} "
        f"times smaller than the others'. {len(runs)} federations train for {rounds} rounds each, "
        f"in about {10 + 0.1 * total:.0f} seconds if this machine has little else to do."
    )
    todo = [run for run in runs if not run.done]
    tell = progress({"demo": sum(run.rounds for run in todo)})
    for why in run_all(todo, "quickrun", 1, partial(tell, "demo")).values():
        raise ToolError(why)
    say("")
    read = {name: report for name, _, report in reports(runs)}
    found = ranked(read)
    table = found.tables()[0]
    console().print(drawn(table | {"name": f"After {rounds} rounds"}))
    for sentence in (table["caption"], *sentences(read, found), plot(folder, read)):
        say(sentence)
    # `make demo` does not put the environment's scripts on the path.
    command = "fedclip" if shutil.which("fedclip") else f"{typed(sys.executable)} -m fedclip"
    say(f"Round by round: {command} report {typed(runs[-1].folder.with_name('seed-0'))}")
    return found


def prepare(folder: Path) -> None:
    """Make the folder, and what all trainings share."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise ToolError(f"{folder} is a file; give a folder to write the demo to")
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise ToolError(f"{folder} holds something else; give an empty or new folder")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    (folder / "model.py").write_text(_file("model.py"), encoding="utf-8")


def _file(name: str) -> str:
    return (files("fedclip.cli.demo") / name).read_text(encoding="utf-8")


def planned(folder: Path, way: str, seed: int, rounds: int, bound: float) -> Planned:
    """Return one training."""
    text = Template(_file("config.toml")).safe_substitute(WAYS[way]._asdict())
    document: Config = tomlkit.parse(Template(text).substitute(bound=bound))
    document["data"]["data_folder"] = str(folder / "data" / f"seed-{seed}")
    place = folder / way / f"seed-{seed}"
    # The splits differ, and the order of the records in them does not.
    return planned_run(document, folder / "config.toml", place, rounds)._replace(seed=0)
