"""Weights, and means that resist, where sites are not alike: ``python -m benchmarks.weights``.

The task of `benchmarks.unlike_sites` over the core of update clipping, in NumPy: accuracy on the
test digits after the last round, in the mean over the splits, which are the same in all cells, and
half of the 95 % interval by Student's t. `--alike` takes sites that are alike, for which weights
say nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks import unlike_sites as task
from fedclip.updates.aggregation import Combining
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.server import UpdateServer
from fedclip.updates.weights import Shares


def server_of(settings: Mapping[str, Any]) -> UpdateServer:
    """Return a server for the settings of `clipped-averaging`."""
    most = settings.get("max_norm")
    bound = AdaptiveBound(task.START_NORM)
    if most:
        bound = AdaptiveBound(most, learning_rate=0.0, min_norm=most, max_norm=most)
    return UpdateServer(
        bound,
        shares=Shares(settings.get("weights", "equal"), settings.get("max_share")),
        combining=Combining(settings.get("combine", "mean"), settings.get("n_hostile")),
    )


def chances(model: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Return the probability of each label for each record."""
    scores = data @ model
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def accuracy(
    sites: Sequence[task.Records],
    test: task.Records,
    settings: Mapping[str, Any],
    attack: tuple[str, float] | None,
) -> float:
    """Return the accuracy after the last round; records have a column of ones for the bias."""
    server, client, model = server_of(settings), UpdateClient(), {"w": np.zeros((65, 10))}
    for _ in range(task.ROUNDS):
        sent, replies = server.open(), []
        for name, (data, labels) in zip(task.SITES, sites, strict=True):
            trained = model["w"].copy()
            for _ in range(task.STEPS):
                off = chances(trained, data) - np.eye(10)[labels]
                trained -= task.LRATE * data.T @ off / len(labels)
            times = attack[1] if attack and attack[0] == name else 1.0
            reply = client.clip({"w": (model["w"] - trained) * times}, sent, steps=task.STEPS)
            replies.append(replace(reply, sender=name))
        model = {"w": model["w"] - server.close(replies, like=model).average["w"]}
    data, labels = test
    return float((chances(model["w"], data).argmax(axis=1) == labels).mean())


def shown(values: list[float]) -> str:
    """Return a mean and half of its 95 % interval."""
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
        sites, test = task.split(seed, options.alike)
        *sites, test = [(np.c_[data, np.ones(len(data))], of) for data, of in [*sites, test]]
        for row in rows:
            for name, attack in task.ATTACKS.items():
                result = accuracy(sites, test, task.ROWS[row], attack)
                found.setdefault((row, name), []).append(result)
    table = Table("", *task.ATTACKS, title=f"accuracy, {options.splits} splits")
    for row in rows:
        table.add_row(row, *(shown(found[row, name]) for name in task.ATTACKS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
