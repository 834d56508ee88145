# SPDX-License-Identifier: Apache-2.0
"""Three hospitals train one model, and one of them has trouble with its units.

The data are scikit-learn's breast-cancer records: 569 records of 30 measurements of cell nuclei.
Each hospital gets 152 records to train on and 37 or 38 to validate with. All scale their features
with the same means and standard deviations, those of site-a. Site-c trains on lengths in
millimetres, and areas in square millimetres, where the others use centimetres. The validation
records have the right units everywhere.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np
import tomlkit
from numpy.typing import NDArray

from fedclip.cli.init import TEMPLATES
from fedclip.cli.output import progress, say, typed
from fedclip.cli.ranking import Ranking, drawn
from fedclip.cli.runner import Planned, planned_run, run_all
from fedclip.cli.showing import console
from fedclip.core.parameters import Config
from fedclip.errors import ToolError
from fedclip.report import Report, read_report
from fedclip.report.results import result_of

SITES = ("site-a", "site-b", "site-c")

FACTOR = 10.0
"""Site-c's lengths are this many times too large."""


def write_data(folder: Path, seed: int = 0) -> None:
    """Write each site's records into a separate folder, as declearn's quickrun expects them.

    The seed decides which records each site has, and which it validates with.
    """
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    records = np.asarray(source.data, dtype=np.float64)
    target = np.asarray(source.target, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(target))
    held_out = len(target) // 5
    valid = np.array_split(order[:held_out], len(SITES))
    train = np.array_split(order[held_out:], len(SITES))
    mean, std = records[train[0]].mean(axis=0), records[train[0]].std(axis=0)
    for word, power in (("radius", 1), ("perimeter", 1), ("area", 2)):
        columns = np.flatnonzero([word in name for name in source.feature_names])
        records[np.ix_(train[-1], columns)] *= FACTOR**power
    for site, train_rows, valid_rows in zip(SITES, train, valid, strict=True):
        path = folder / site
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "train_data.npy", (records[train_rows] - mean) / std)
        np.save(path / "train_target.npy", target[train_rows])
        np.save(path / "valid_data.npy", (records[valid_rows] - mean) / std)
        np.save(path / "valid_target.npy", target[valid_rows])


def ranked(reports: Mapping[str, Report]) -> Ranking:
    """Return the ranking of the ways against the fixed bound, over the same splits.

    All sites count: what they validate with has the right unit.
    """
    results = {
        way: {run: result_of(report, run) for run in report.experiments}
        for way, report in reports.items()
    }
    return Ranking(results, "fixed-bound", SITES)


def pulls(report: Report) -> NDArray[np.float64]:
    """Return, by split and round, the influence of the odd site relative to the median site.

    A site pulls as hard as its update is long after it was clipped.
    """
    runs = report.experiments
    norms = np.array([[_updates(report, run, site).min(axis=0) for site in SITES] for run in runs])
    return np.asarray(norms[:, -1] / np.median(norms, axis=1))


def _updates(report: Report, run: str, site: str) -> NDArray[np.float64]:
    """Return the norms of a site's updates, and their bounds, by round."""
    records = [row.record for row in report.select(f"{run}/{site}", "update-clip-client")]
    return np.array([[r.norm_median for r in records], [r.limit for r in records]], np.float64)


def sentences(reports: Mapping[str, Report], ranking: Ranking) -> Iterator[str]:
    """Yield sentences about the table and the picture."""
    ratios = (pulls(reports[way]) for way in ("fixed-bound", "adaptive-bound"))
    late = [np.median(some[:, some.shape[1] * 2 // 3 :]) for some in ratios]
    yield (
        f"Without clipping, {SITES[-1]}'s updates outweigh those of the others. With the fixed "
        f"bound, it pulls the model {late[0]:.1f} times as hard as the median site in the last "
        f"third of the rounds, and {late[1]:.1f} times with the adaptive one."
    )
    low = ranking.worst([*reports][-1])
    none, fixed, adaptive = (ranking.mean(way, low)[0] for way in reports)
    yield (
        f"With the adaptive bound, the lowest site is {low}: accuracy {adaptive:.1%}, with the "
        f"fixed bound {fixed:.1%}, without clipping {none:.1%}."
    )


def plot(folder: Path, reports: Mapping[str, Report]) -> str:
    """Draw the accuracies of all trainings, and the updates and bounds of the first split."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "No plot without matplotlib: pip install matplotlib"
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    axes[2].sharey(axes[1])
    styles = dict(zip(reports, ("C3", "C1", "C0"), strict=True))
    for way, report in reports.items():
        for curve in report.curves:
            if curve.metric == "accuracy" and curve.node in report.servers:
                label = way if curve.node.startswith("seed-0/") else None
                axes[0].plot(*zip(*curve.points, strict=True), styles[way], alpha=0.7, label=label)
    axes[0].set(title="the model: accuracy, one line for each split", ylabel="accuracy")
    axes[0].legend(frameon=False, loc="lower right")
    for ax, way in zip(axes[1:], ("fixed-bound", "adaptive-bound"), strict=True):
        for site, line in zip(SITES, ("-", "--", "-"), strict=True):
            norms, bounds = _updates(reports[way], "seed-0", site)
            numbers = range(1, len(norms) + 1)
            colour = "C3" if site == SITES[-1] else "0.45"
            ax.plot(numbers, norms, line, color=colour, label=f"update of {site}")
        ax.plot(numbers, bounds, color=styles[way], linewidth=3, label="bound")
        ax.set(title=f"{way}: norms of the updates", ylabel="norm", yscale="log")
    axes[2].legend(frameon=False, loc="best")
    for ax in axes:
        ax.set_xlabel("round")
        ax.grid(alpha=0.3)
    figure.savefig(folder / "demo.png", dpi=120)
    return f"Accuracy, updates and bounds: {typed(folder / 'demo.png')}"


MARKER = ".fedclip-demo"


class Way(NamedTuple):
    """One way to train: its title, and the parts of its configuration as TOML."""

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
        server='["update-clip-server"]',
    ),
}
"""The three ways to train, each in a folder of its name."""


def run_demo(folder: Path, rounds: int = 30, seeds: int = 6, bound: float = 1.0) -> Ranking:
    """Train in all three ways, print the table, write the plot.

    The folder is new, empty, or that of an earlier demo, which goes on if it was interrupted. Every
    seed splits the records over the hospitals in another way. If the folder cannot be used, or a
    node fails, raise a `ToolError`.
    """
    folder = folder.resolve()
    try:
        prepare(folder)
        for seed in range(seeds):
            write_data(folder / "data" / f"seed-{seed}", seed)
    except OSError as exc:
        raise ToolError(f"cannot write to {folder}: {exc.strerror}") from exc
    runs = [planned(folder, way, seed, rounds, bound) for way in WAYS for seed in range(seeds)]
    total = rounds * len(runs)
    # A tenth of a second for a round, on a core that has nothing else to do.
    say(
        f"{len(SITES)} hospitals train one model, {SITES[-1]} on lengths in a unit {FACTOR:.0f} "
        f"times smaller than the other two. {len(runs)} federations train for {rounds} rounds "
        f"each, in about {10 + 0.1 * total:.0f} seconds if this machine has little else to do."
    )
    todo = [run for run in runs if not run.done]
    show, total = progress("demo"), sum(run.rounds for run in todo)
    for why in run_all(todo, "quickrun", 1, lambda done, text: show(done, total, text)).values():
        raise ToolError(why)
    say("")
    # An earlier demo may have left more seeds.
    chosen = [f"seed-{seed}" for seed in range(seeds)]
    read = {way: read_report(folder / way).only(chosen) for way in WAYS}
    ranking = ranked(read)
    table = ranking.tables()[0]
    console().print(drawn(table | {"name": f"After {rounds} rounds"}))
    for sentence in (table["caption"], *sentences(read, ranking), plot(folder, read)):
        say(sentence)
    # `make demo` does not put the environment's scripts on the path.
    command = "fedclip" if shutil.which("fedclip") else f"{typed(sys.executable)} -m fedclip"
    say(f"Round by round: {command} report {typed(runs[-1].folder.with_name('seed-0'))}")
    return ranking


def prepare(folder: Path) -> None:
    """Create the folder, and the files that all trainings share."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise ToolError(f"{folder} is a file; give a folder to write the demo to")
    if folder.is_dir() and any(folder.iterdir()) and not marker.exists():
        raise ToolError(f"{folder} holds something else; give an empty or new folder")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    (folder / "model.py").write_text(_file("model.py"), encoding="utf-8")


def _file(name: str) -> str:
    return (TEMPLATES / f"demo_{name}").read_text(encoding="utf-8")


def planned(folder: Path, way: str, seed: int, rounds: int, bound: float) -> Planned:
    """Return one training."""
    text = Template(_file("config.toml")).safe_substitute(WAYS[way]._asdict())
    document: Config = tomlkit.parse(Template(text).substitute(bound=bound))
    document["data"]["data_folder"] = str(folder / "data" / f"seed-{seed}")
    place = folder / way / f"seed-{seed}"
    # The splits differ, and the order of the records in them does not.
    return planned_run(document, folder / "config.toml", place, rounds)._replace(seed=0)
