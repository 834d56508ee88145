"""Measure, and print a table: ``python -m benchmarks [--quick] [--gradients a,b] [--threads 1,2]``.

Each cell, of a framework, a gradient and whether all or nothing is clipped, is a process of its
own, so that the memory of one is not the next one's; and their order is random.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import ALIKE, GRADIENTS

FRAMEWORKS = ("numpy", "torch", "tensorflow", "jax")
HOST = ("numpy", "torch")
"""Frameworks whose new gradients fedclip writes; the others write theirs."""
LARGE = ("ResNet-50", "ViT-S", "BERT-base")
SOME, MANY, TINY = ALIKE

Times = dict[str, float]
Cell = tuple[int, str, str, str]
"""Threads (0: as many as are allowed), gradient, framework, mode."""


def read(t: Times) -> float:
    """Return the time of reading, with as many cores as is fastest."""
    return min(value for name, value in t.items() if name.startswith("read, "))


def product(t: Times) -> float:
    """Return the time of a product into memory that is there."""
    return min(value for name, value in t.items() if name.startswith("product, "))


def least(gradient: str, framework: str, mode: str, t: Times) -> float:
    """Return the floor of a cell."""
    if mode == "quiet":
        return read(t)
    warm = gradient in LARGE and framework in HOST
    return read(t) + (product(t) if warm else t["multiply"])


TARGETS: dict[tuple[str, str], float] = {
    ("MLP", "quiet"): 3,
    ("LSTM", "quiet"): 1.3,
    ("MLP", "clipped"): 1.8,
    ("LSTM", "clipped"): 1.1,
    (MANY, "quiet"): 2,
    (TINY, "quiet"): 5,
}
MORE = {"zscore minus norm": 50.0, "zscore minus norm, by tensor": 150.0}
"""Most microseconds that zscore-clip takes besides."""


def target(gradient: str, framework: str, mode: str) -> float:
    """Return the largest multiple of its floor that norm-clip should take."""
    if gradient in LARGE and mode == "clipped":
        return 1.25 if framework in HOST else 1.1
    return TARGETS.get((gradient, mode), 1.3 if mode == "quiet" else 1.2)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="default: %(default)s")
    parser.add_argument("--gradients", metavar="A,B", default="", help="by the start of the names")
    parser.add_argument("--threads", metavar="1,2,4", default="0", help="default: all allowed")
    parser.add_argument("--at-once", metavar="N", type=int, default=1, help="processes at a time")
    parser.add_argument("--quick", action="store_true", help="five rounds of each cell")
    parser.add_argument("--seed", type=int, default=None, help="for the order of the cells")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the times as well")
    options = parser.parse_args()
    chosen = options.frameworks.split(",")
    unknown = sorted(set(chosen) - set(FRAMEWORKS))
    if unknown:
        parser.error(f"no framework {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    starts = tuple(options.gradients.lower().split(","))
    gradients = [name for name in GRADIENTS if name.lower().startswith(starts)]
    if not gradients:
        parser.error(f"no gradient {options.gradients}; there are {', '.join(GRADIENTS)}")
    threads = [int(n) for n in options.threads.split(",")]
    seconds = 0.0 if options.quick else 2.0
    cells: list[Cell] = [*itertools.product(threads, gradients, chosen, ("quiet", "clipped"))]
    every = "numpy" in chosen and not options.gradients
    if every:
        cells.append((threads[0], SOME, "numpy", "clippers"))
    random.Random(options.seed).shuffle(cells)
    console = Console(highlight=False)
    found: dict[Cell, Any] = {}
    with console.status("") as status:
        for i, cell in enumerate(cells):
            status.update(f"cell {i + 1} of {len(cells)}: {', '.join(map(str, cell[1:]))}")
            found[cell] = measure(cell, seconds, options.at_once)
    if options.json:
        rows = [{"cell": cell, "times": times} for cell, times in found.items()]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    # A pipe has no width of its own; a table must not be cut there.
    wide = console if console.is_terminal else Console(highlight=False, width=130)
    wide.print(ratios(found, threads, gradients, chosen))
    if every:
        wide.print(clippers("numpy", found[(threads[0], SOME, "numpy", "clippers")]))


def measure(cell: Cell, seconds: float, at_once: int) -> dict[str, Any]:
    """Return what a process of its own measures; medians over all processes at once."""
    threads, gradient, framework, mode = cell
    command = [sys.executable, "-m", "benchmarks.measure", framework, gradient, mode]
    command += ["--seconds", str(seconds)]
    allowed = sorted(os.sched_getaffinity(0))[: threads or None]
    settings = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    running = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parent.parent,
            env={**os.environ, **settings},
            # A framework's own threads go by the affinity.
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
            stdout=subprocess.PIPE,
            # What frameworks say on loading is shown only where the measuring failed.
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(at_once)
    ]
    results: list[dict[str, Any]] = []
    for process in running:
        output, errors = process.communicate()
        if process.returncode:
            sys.exit(f"{errors}\nbenchmarks: measuring {cell} failed")
        results.append(json.loads(output.splitlines()[-1]))
    if mode == "clippers":
        return results[0]
    return {name: statistics.median(r[name] for r in results) for name in results[0]}


def _mark(value: float, most: float) -> str:
    return f"{value:,.2f} {'[green]✓[/]' if value <= most else '[red]✗[/]'}"


def ratios(
    found: dict[Cell, Times],
    threads: Sequence[int],
    gradients: Iterable[str],
    frameworks: Sequence[str],
) -> Table:
    """Return the ratios, one column a framework, each with a mark: target met or not."""
    table = Table(
        title="norm-clip on float32 on the CPU, medians in µs. Floor, quiet: reading with all\n"
        "cores; clipped: and the framework's own product, of the three largest models\n"
        "in NumPy and torch a product into memory that is there. Targets are in brackets.",
        title_justify="left",
    )
    for head in ("gradient", "threads", "what"):
        table.add_column(head, no_wrap=True)
    for head in frameworks:
        table.add_column(head, justify="right", no_wrap=True)
    for gradient, allowed in itertools.product(gradients, threads):
        first = (gradient, str(allowed or "all"))
        table.add_section()

        def row(
            what: str,
            mode: str,
            text: Callable[[str, Times], str],
            gradient: str = gradient,
            allowed: int = allowed,
        ) -> None:
            nonlocal first
            each = [text(f, found[(allowed, gradient, f, mode)]) for f in frameworks]
            table.add_row(*first, what, *each)
            first = ("", "")

        for mode in ("quiet", "clipped"):

            def floor(f: str, t: Times, mode: str = mode, gradient: str = gradient) -> float:
                return least(gradient, f, mode, t)

            most = [target(gradient, f, mode) for f in frameworks]
            shown = "; ".join(f"{m:g}" for m in dict.fromkeys(most))
            row(f"{mode}: floor", mode, lambda f, t: f"{floor(f, t):,.0f}  ")
            row(f"{mode}: norm-clip", mode, lambda f, t: f"{t['norm-clip']:,.0f}  ")
            row(
                f"{mode}: norm-clip / floor (≤ {shown})",
                mode,
                lambda f, t, mode=mode, gradient=gradient: _mark(
                    t["norm-clip"] / floor(f, t), target(gradient, f, mode)
                ),
            )
            row(
                f"{mode}: norm-clip / declearn (≤ 0.5)",
                mode,
                lambda _, t: _mark(t["norm-clip"] / t["declearn"], 0.5),
            )
        row(
            "clipped: MiB, norm-clip and declearn",
            "clipped",
            lambda _, t: f"{t['MiB, norm-clip']:,.0f}, {t['MiB, declearn']:,.0f}  ",
        )
        for what, most_more in MORE.items():
            if all(what in found[(allowed, gradient, f, "quiet")] for f in frameworks):
                row(
                    f"{what} (≤ {most_more:g})",
                    "quiet",
                    lambda _, t, what=what, most=most_more: _mark(t[what], most),
                )
    return table


def clippers(framework: str, found: dict[str, dict[str, float | None]]) -> Table:
    """Return the cost of every clipper, on the largest gradient and by tensor."""
    table = Table(
        title=f"Every clipper on {framework}: {SOME}; and scope 'tensor' over 1,000 of 64",
        title_justify="left",
    )
    table.add_column("clipper", no_wrap=True)
    for head in ("ms", "times norm-clip", "by tensor, ms"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for name, entry in found.items():
        each = entry["by tensor, ms"]
        table.add_row(
            name,
            f"{(entry['microseconds'] or 0) / 1000:.2f}",
            f"{entry['times norm-clip']:.2f}",
            "-" if each is None else f"{each:.2f}",
            "writes a new gradient" if entry["changed"] else "",
        )
    return table


if __name__ == "__main__":
    main()
