"""Weights, and means that resist, where sites are not alike: ``python -m benchmarks.weights``.

The task of `benchmarks.unlike_sites`, in one process (as ``fedclip simulate`` runs it): accuracy on
the test digits after the last round, in the mean over the splits, which are the same in all cells,
and half of the 95 % interval by Student's t. `--alike` takes sites that are alike, for which
weights say nothing.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import unlike_sites as task


def accuracy(
    folder: Path, aggregator: Mapping[str, Any], attack: tuple[str, float] | None
) -> float:
    """Return the accuracy after the last round."""
    from fedclip.tools.simulate import Simulation

    file = folder / "config.toml"
    hostile = "" if attack is None else f"\n[simulate]\nfactor = {attack[1]}\n"
    file.write_text(task.config(folder, aggregator) + hostile, encoding="utf-8")
    simulation = Simulation(file, 0)
    if attack is not None:
        simulation.crowd.hostile = frozenset([task.SITES.index(attack[0])])
    for _ in range(task.ROUNDS):
        simulation.step()
    model = simulation.model.get_weights(trainable=True)
    return float(simulation.crowd.evaluate(model, simulation.config.evaluate)[0]["accuracy"])


def shown(values: list[float]) -> str:
    """Return a mean and half of its 95 % interval."""
    from scipy import stats

    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return f"{np.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=task.SPLITS)
    parser.add_argument("--rows", nargs="+", choices=task.ROWS, default=list(task.ROWS))
    parser.add_argument("--alike", action="store_true", help="sites that are alike")
    options = parser.parse_args()
    rows = [row for row in options.rows if not (options.alike and "weights" in task.ROWS[row])]
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(options.splits):
        with tempfile.TemporaryDirectory() as path:
            folder = task.write(Path(path), seed, alike=options.alike)
            for row in rows:
                for name, attack in task.ATTACKS.items():
                    result = accuracy(folder, task.ROWS[row], attack)
                    found.setdefault((row, name), []).append(result)
    table = Table("", *task.ATTACKS, title=f"accuracy, {options.splits} splits")
    for row in rows:
        table.add_row(row, *(shown(found[row, name]) for name in task.ATTACKS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
