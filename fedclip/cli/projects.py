# SPDX-License-Identifier: Apache-2.0
"""Folders that fedclip writes: a project for CSV files from templates, and the demo.

In the demo, three hospitals train one model, and one of them has trouble with its units.
The data are scikit-learn's breast-cancer records: 569 records of 30 measurements of cell nuclei.
Each hospital gets 152 records to train on and 37 or 38 to validate with. All scale their features
with the same means and standard deviations, those of site-a. Site-c trains on lengths in
millimetres, and areas in square millimetres, where the others use centimetres. The validation
records have the right units everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tomlkit
import typer
from numpy.typing import NDArray

from fedclip.cli.output import commands, fail, progress, say, typed
from fedclip.cli.reporting import Ranking, console
from fedclip.cli.running import Planned, planned_run, run_all
from fedclip.core.parameters import Config
from fedclip.core.toml import toml_item
from fedclip.report import Report, read_report
from fedclip.report.results import results_of

app = commands()

Model = Literal["sklearn", "torch", "tensorflow", "jax"]
Units = Literal["records", "persons"]

MARKER = ".fedclip-demo"

PACKAGES = {
    "sklearn": ("sklearn", "scikit-learn"),
    "torch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "jax": ("haiku", "jax dm-haiku"),
}
"""For each model, the module that it imports, and what to install for it."""


# -- a project for CSV files ----------------------------------------------------------------------
@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; new or empty.")],
    model: Annotated[Model, typer.Option(help="A linear model, or a small network.")],
    privacy: Annotated[Units | None, typer.Option(help="Protect each by DP-SGD.")] = None,
) -> None:
    """Write a project for CSV files at several sites.

    It prepares data, trains with a server and clients, and predicts. You edit its files.
    """
    kind = "private" if privacy else "plain"
    shared = ("columns.toml", "prepare.py", "server.py", "predict.py", "README.md")
    texts = {name: template(name) for name in shared} | {
        "config.toml": template(f"config_{kind}.toml"),
        "model.py": template(f"model_{model}.py"),
        "client.py": template(f"client_{kind}.py"),
    }
    texts["README.md"] += template("privacy.md") if privacy else ""
    if privacy == "persons":
        texts["columns.toml"] = texts["columns.toml"].replace('unit = "record"', 'unit = "person"')
    create(folder, texts)
    needed = [PACKAGES[model], *([("dp_accounting", "dp-accounting")] if privacy else [])]
    lines = [f"pip install {packages}" for module, packages in needed if not find_spec(module)]
    lines += [f"cd {typed(folder)}", "python prepare.py --example"]
    lines += [f"fedclip {'quickrun' if privacy else 'simulate'}"]
    say(f"{folder} is written. Start with its README.md, or try it with example data:")
    say(*(f"  {line}" for line in lines))


def create(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files into a new or empty folder, or a demo into that of an earlier demo."""
    try:
        again = MARKER in texts and (folder / MARKER).exists()
        if folder.exists() and not again and (not folder.is_dir() or any(folder.iterdir())):
            fail(f"{folder} is not empty: give a new or empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        fail(f"cannot write to {folder}: {exc.strerror}")


def template(name: str) -> str:
    """Return the text of a template."""
    return (Path(__file__).with_name("templates") / name).read_text(encoding="utf-8")


# -- the demo -------------------------------------------------------------------------------------
SITES = ("site-a", "site-b", "site-c")

FACTOR = 10.0
"""Site-c's lengths are this many times too large."""

WAYS = ("no-clipping", "fixed-bound", "adaptive-bound")
"""The three ways to train, each in a folder of its name."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="New or empty.")] = Path("fedclip-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each training.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each kind.")] = 6,
    bound: Annotated[float, typer.Option(help="The fixed bound, > 0.")] = 1.0,
) -> Ranking:
    """Train over three hospitals, without clipping and with it.

    It prints a table and writes a picture. An earlier demo in the folder goes on if it was
    interrupted. Every seed splits the records over the hospitals in another way.
    """
    folder = folder.resolve()
    splits = [f"seed-{seed}" for seed in range(seeds)]
    prepare(folder)
    for seed, split in enumerate(splits):
        write_data(folder / "data" / split, seed)
    runs = [planned(folder, way, seed, rounds, bound) for way in WAYS for seed in range(seeds)]
    unit = f"{SITES[-1]} has lengths in a unit {FACTOR:.0f} times smaller than the other sites"
    say(f"{len(runs)} federations train for {rounds} rounds each; {unit}.")
    show, total = progress("demo"), sum(run.rounds for run in runs if not run.done)
    for why in run_all(runs, "quickrun", 1, lambda done, text: show(done, total, text)).values():
        fail(why)
    # An earlier demo may have left more seeds.
    reports = {way: read_report(folder / way).only(splits) for way in WAYS}
    results = {way: results_of(report) for way, report in reports.items()}
    # All sites count: what they validate with has the right unit.
    ranking = Ranking(results, "fixed-bound", SITES)
    (table, caption), _ = ranking.tables()
    table.title = f"After {rounds} rounds"
    say("")
    console().print(table)
    say(caption, *sentences(reports, ranking), plot(folder, reports))
    say(f"Round by round: fedclip report {typed(folder / 'adaptive-bound' / 'seed-0')}")
    return ranking


def prepare(folder: Path) -> None:
    """Create the folder, and the files that all trainings share."""
    create(folder, {MARKER: "", "model.py": template("demo_model.py")})


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
    valid, train = (np.array_split(part, len(SITES)) for part in np.split(order, [held_out]))
    mean, std = records[train[0]].mean(axis=0), records[train[0]].std(axis=0)
    for word, power in (("radius", 1), ("perimeter", 1), ("area", 2)):
        columns = np.flatnonzero([word in name for name in source.feature_names])
        records[np.ix_(train[-1], columns)] *= FACTOR**power
    for part, split in (("train", train), ("valid", valid)):
        for site, rows in zip(SITES, split, strict=True):
            (folder / site).mkdir(parents=True, exist_ok=True)
            np.save(folder / site / f"{part}_data.npy", (records[rows] - mean) / std)
            np.save(folder / site / f"{part}_target.npy", target[rows])


def planned(folder: Path, way: str, seed: int, rounds: int, bound: float) -> Planned:
    """Return one training."""
    document: Config = tomlkit.parse(template("demo_config.toml"))
    optim = document["optim"]
    if way == "fixed-bound":
        fixed = {"start_norm": bound, "learning_rate": 0.0}
        optim["server_opt"]["modules"] = toml_item([["update-clip-server", fixed]])
    elif way == "no-clipping":
        # The module no-op only measures.
        optim["aggregator"], optim["client_opt"]["modules"] = "averaging", ["no-op"]
        optim["server_opt"]["modules"] = []
    document["data"]["data_folder"] = str(folder / "data" / f"seed-{seed}")
    place = folder / way / f"seed-{seed}"
    # The splits differ, and the order of the records in them does not.
    return planned_run(document, folder / "config.toml", place, rounds)._replace(seed=0)


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
    ratios = (pulls(reports[way]) for way in WAYS[1:])
    late = [np.median(ratio[:, ratio.shape[1] * 2 // 3 :]) for ratio in ratios]
    text = f"Without clipping, {SITES[-1]}'s updates outweigh those of the others. With the fixed"
    text += f" bound, it pulls the model {late[0]:.1f} times as hard as the median site in the last"
    yield f"{text} third of the rounds, and {late[1]:.1f} times with the adaptive one."
    low = ranking.worst("adaptive-bound")
    none, fixed, adaptive = (f"{ranking.mean(way, low)[0]:.1%}" for way in WAYS)
    text = f"With the adaptive bound, the lowest site is {low}: accuracy {adaptive}, with the fixed"
    yield f"{text} bound {fixed}, without clipping {none}."


def plot(folder: Path, reports: Mapping[str, Report]) -> str:
    """Draw the accuracies of all trainings, and the updates and bounds of the first split."""
    if not find_spec("matplotlib"):
        return "No plot without matplotlib: pip install matplotlib"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    axes[2].sharey(axes[1])
    styles = dict(zip(reports, ("C3", "C1", "C0"), strict=True))
    for way, report in reports.items():
        for curve in report.curves:
            if curve.metric == "accuracy" and curve.node in report.servers:
                label = way if curve.node.startswith("seed-0/") else None
                axes[0].plot(*zip(*curve.points, strict=True), styles[way], alpha=0.7, label=label)
    title = "the model: accuracy, one line for each split"
    axes[0].set(title=title, xlabel="round", ylabel="accuracy")
    axes[0].legend(frameon=False, loc="lower right")
    for ax, way in zip(axes[1:], WAYS[1:], strict=True):
        for site in SITES:
            norms, bounds = _updates(reports[way], "seed-0", site)
            numbers = range(1, len(norms) + 1)
            colour = "C3" if site == SITES[-1] else "0.45"
            line = "--" if site == SITES[1] else "-"
            ax.plot(numbers, norms, line, color=colour, label=f"update of {site}")
        ax.plot(numbers, bounds, color=styles[way], linewidth=3, label="bound")
        ax.set(title=f"{way}: norms of the updates", xlabel="round", ylabel="norm", yscale="log")
    axes[2].legend(frameon=False, loc="best")
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.savefig(folder / "demo.png", dpi=120)
    return f"Accuracy, updates and bounds: {typed(folder / 'demo.png')}"
