"""What weights cost: ``python -m benchmarks.averaging``.

A round of `clipped-averaging` with 100 clients and a million values: each clips its update, and the
server measures the replies again and averages them. Processor time, the least of several rounds;
the kinds of weights take turns, and equal weights come first and last.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import numpy as np
from declearn.aggregator import Aggregator
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector
from rich.console import Console
from rich.table import Table

import fedclip  # noqa: F401  registers the aggregator
from fedclip.engines.declearn.context import note
from fedclip.engines.declearn.samplers import note_senders


def kinds(clients: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each kind of weights."""
    table = {f"client_{i}": 1.0 + i for i in range(clients)}
    return {
        "equal": {},
        "steps": {"weights": "steps"},
        "table": {"weights": table},
        "table, capped": {"weights": table, "max_share": 1.5 / clients},
        "equal again": {},
    }


def round_of(weights: dict[str, Any], updates: list[NumpyVector]) -> tuple[float, float]:
    """Return the seconds that the clients and the server take for a round."""
    settings = {"name": "clipped-averaging", "max_norm": 1.0, **weights}
    aggregator: Any = Aggregator.from_config(settings)
    begun = time.process_time()
    shared = [
        aggregator.prepare_for_sharing(updates=update, n_steps=1 + i)
        for i, update in enumerate(updates)
    ]
    clipped = time.process_time()
    replies = {
        f"client_{i}": TrainReply(updates=one, aux_var={}, n_epoch=1, n_steps=1 + i, t_spent=0.0)
        for i, one in enumerate(shared)
    }
    note_senders(replies)
    aggregator.finalize_updates(sum(shared))
    ended = time.process_time()
    note(None, {})
    return clipped - begun, ended - clipped


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaging", description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    title = f"A round of {options.clients} clients with {options.values:,} values, ms"
    table = Table(title=title, title_justify="left")
    for head in ("", "weights", "clients", "server", "both", "server, times equal", "both, times"):
        table.add_column(head, justify="left" if head in ("", "weights") else "right")
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        updates = [
            NumpyVector({"w": rng.standard_normal(options.values).astype(dtype)})
            for _ in range(options.clients)
        ]
        settings = kinds(options.clients)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in settings}
        for _ in range(options.rounds):
            for name, weights in settings.items():
                times[name].append(round_of(weights, updates))
        least = {
            name: [min(t) for t in (*zip(*found, strict=True), map(sum, found))]
            for name, found in times.items()
        }
        for name, found in least.items():
            ratios = [found[i] / least["equal"][i] for i in (1, 2)]
            shown = [f"{1000 * seconds:.0f}" for seconds in found]
            table.add_row(dtype, name, *shown, *(f"{ratio:.2f}" for ratio in ratios))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
