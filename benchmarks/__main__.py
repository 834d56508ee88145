"""Measure, and print two tables: ``python -m benchmarks [--json FILE] [--frameworks a,b]``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import GRADIENTS

FRAMEWORKS = ("numpy", "torch", "tensorflow", "jax")
SLOW = ("tensorflow", "jax")
"""Where declearn's own clipper pays for each tensor, and more is expected."""

LARGE, MIDDLE, SMALL = (name for name, _, _ in GRADIENTS)

Times = dict[str, float]


def floor(t: Times) -> float:
    return t["norm-clip"] / t["floor"]


def faster(t: Times) -> float:
    return t["declearn"] / t["norm-clip"]


def clipped(t: Times) -> float:
    return t["norm-clip, clipped"] / (t["floor, clipped"] + t["multiply"])


def clipped_faster(t: Times) -> float:
    return t["declearn, clipped"] / t["norm-clip, clipped"]


# Gradient, what is shown, how it is had from the times, "<=" or ">=", target, target where SLOW.
ROWS: tuple[tuple[str, str, Callable[[Times], float], str, float, float], ...] = (
    (LARGE, "norm-clip / floor", floor, "≤", 1.3, 1.3),
    (LARGE, "declearn / norm-clip", faster, "≥", 5, 5),
    (LARGE, "clipped: norm-clip / (floor + multiply)", clipped, "≤", 1.2, 1.2),
    (LARGE, "clipped: declearn / norm-clip", clipped_faster, "≥", 1, 1),
    (MIDDLE, "norm-clip / floor", floor, "≤", 2, 2),
    (MIDDLE, "declearn / norm-clip", faster, "≥", 5, 12),
    (MIDDLE, "clipped: norm-clip / (floor + multiply)", clipped, "≤", 1.2, 1.2),
    (MIDDLE, "clipped: declearn / norm-clip", clipped_faster, "≥", 1, 1),
    (MIDDLE, "zscore-clip minus norm-clip, µs", lambda t: t["zscore minus norm"], "≤", 50, 50),
    (
        MIDDLE,
        "the same with 200 groups, µs",
        lambda t: t["zscore minus norm, by tensor"],
        "≤",
        150,
        150,
    ),
    (SMALL, "norm-clip / floor", floor, "≤", 5, 5),
    (SMALL, "declearn / norm-clip", faster, "≥", 3, 15),
    (SMALL, "clipped: norm-clip / (floor + multiply)", clipped, "≤", 1.2, 1.2),
    (SMALL, "clipped: declearn / norm-clip", clipped_faster, "≥", 1, 1),
    (SMALL, "zscore-clip minus norm-clip, µs", lambda t: t["zscore minus norm"], "≤", 50, 50),
)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the times as well")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    chosen = options.frameworks.split(",")
    unknown = sorted(set(chosen) - set(FRAMEWORKS))
    if unknown:
        parser.error(f"no framework {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    console = Console(highlight=False)
    found = {}
    for framework in chosen:
        console.print(f"measuring {framework} …", style="dim")
        found[framework] = measure(framework, options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    # A pipe has no width of its own; a table must not be cut there.
    wide = console if console.is_terminal else Console(highlight=False, width=130)
    wide.print(ratios({name: times["gradients"] for name, times in found.items()}))
    for name, times in found.items():
        if "clippers" in times:
            wide.print(clippers(name, times["clippers"]))


def measure(framework: str, quick: bool) -> dict[str, Any]:
    """Return what a process of its own measures."""
    command = [sys.executable, "-m", "benchmarks.measure", framework, *["--quick"] * quick]
    root = Path(__file__).resolve().parent.parent
    # What frameworks say on loading is shown only where the measuring failed.
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr}\nbenchmarks: measuring {framework} failed")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def ratios(found: dict[str, dict[str, Times]]) -> Table:
    """Return the ratios, one column a framework, each with a mark: target met or not."""
    table = Table(
        title="float32 on the CPU, medians; floor: np.vdot over the same arrays, one by one",
        title_justify="left",
    )
    for head in ("gradient", "what"):
        table.add_column(head, no_wrap=True)
    for head in ("target", *found):
        table.add_column(head, justify="right", no_wrap=True)
    previous = ""
    for gradient, what, value_of, relation, target, slow in ROWS:
        if gradient != previous:
            table.add_section()
            times = [f"{t[gradient]['floor']:,.0f}" for t in found.values()]
            table.add_row(gradient, "floor, µs", "", *times)
            times = [f"{t[gradient]['norm-clip']:,.0f}" for t in found.values()]
            table.add_row("", "norm-clip, µs", "", *times)
        previous = gradient
        cells = []
        for framework, t in found.items():
            value, wanted = value_of(t[gradient]), slow if framework in SLOW else target
            met = value <= wanted if relation == "≤" else value >= wanted
            cells.append(f"{value:,.2f} {'[green]✓[/]' if met else '[red]✗[/]'}")
        text = f"{relation} {target:g}" + (f"; TF, JAX {slow:g}" if slow != target else "")
        table.add_row("", what, text, *cells)
    return table


def clippers(framework: str, found: dict[str, dict[str, float | None]]) -> Table:
    """Return the cost of every clipper, on the largest gradient and by tensor."""
    table = Table(
        title=f"Every clipper on {framework}: {LARGE}; and scope 'tensor' over 1,000 of 64",
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
