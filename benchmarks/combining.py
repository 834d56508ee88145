"""What it costs to make one update of many: ``python -m benchmarks.combining``.

A round of `UpdateServer.close`: all replies are vetted, which is the same for all, and combined.
Time is the processor's, of rounds in turn; memory is the largest beyond the replies, which the
server holds anyway.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

import numpy as np
from rich.console import Console
from rich.table import Table

from fedclip.updates.aggregation import Combining
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer
from fedclip.updates.weights import Shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--values", type=int, default=10**6)
    parser.add_argument("--hostile", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rng, model = np.random.default_rng(0), {"w": np.zeros(options.values, np.float32)}
    replies = []
    for i in range(options.clients):
        row = rng.standard_normal(options.values, dtype=np.float32)
        update = {"w": row / np.float32(2 * np.linalg.norm(row))}
        replies.append(Reply(update, sender=str(i), steps=1 + i))
    settings = {
        "mean": {},
        "weights": {"shares": Shares("steps")},
        "arc": {"combining": Combining("arc", options.hostile)},
        "trimmed": {"combining": Combining("trimmed", options.hostile)},
    }
    servers = {
        name: UpdateServer(AdaptiveBound(1.0, learning_rate=0.0), **more)
        for name, more in settings.items()
    }
    times: dict[str, list[float]] = {name: [] for name in servers}
    peaks = {}
    for round_ in range(options.rounds + 1):
        for name, server in servers.items():
            server.open()
            if not round_:
                tracemalloc.start()
            begun = time.process_time()
            assert not any(server.close(replies, model).faults)
            times[name].append(time.process_time() - begun)
            if not round_:
                peaks[name] = tracemalloc.get_traced_memory()[1] / 2**20
                tracemalloc.stop()
    title = f"{options.clients} clients, {options.values:,} values, {options.hostile} hostile"
    table = Table("", "seconds", "times the mean's", "MB", title=title)
    first = np.median(times["mean"][1:])
    for name, spent in times.items():
        seconds = np.median(spent[1:])
        row = (f"{seconds:.2f}", f"{seconds / first:.2f}", f"{peaks[name]:.0f}")
        table.add_row(name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
