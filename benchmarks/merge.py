"""Time and memory of the server's merge, by number of clients: ``python -m benchmarks.merge``.

A client's reply is what declearn hands to the module: a message that has been read off the wire.
Time is the processor's, for adding up the replies of one round and moving the state on; memory is
what that takes besides the replies themselves.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from typing import Any

import numpy as np
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize
from rich.console import Console
from rich.table import Table

import fedclip  # noqa: F401  (registers the clippers)

NAMES = ("zscore-clip", "ema-clip", "auto-clip", "percentile-norm-clip", "adaptive-clip")
SIZES = (100, 1000, 10_000, 100_000)
STEPS = 14


def replies(name: str, server: Optimizer, kinds: int = 20) -> list[bytes]:
    """Return the replies of some clients, as they are on the wire."""
    sent = server.collect_aux_var()
    rng = np.random.default_rng(0)
    result = []
    for _ in range(kinds):
        client = Optimizer(0.1, modules=[(name, {"shared": True})])
        client.process_aux_var(sent)
        client.start_round()
        for norm in rng.lognormal(0.0, 0.5, STEPS):
            client.modules[0].run(NumpyVector({"w": np.array([norm])}))
        result.append(msgpack_serialize(client.collect_aux_var()))
    return result


def merge(server: Optimizer, messages: list[dict[str, Any]]) -> None:
    total: dict[str, Any] = {}
    for message in messages:
        for key, aux in message.items():
            total[key] = total.get(key, 0) + aux
    server.process_aux_var(total)


def measure(name: str, clients: int) -> tuple[float, int]:
    """Return the seconds and the bytes that one round of so many clients takes."""
    server = Optimizer(1.0, modules=[f"{name}-server"])
    wire = replies(name, server)

    def received() -> list[dict[str, Any]]:
        return [msgpack_deserialize(wire[i % len(wire)]) for i in range(clients)]

    messages = received()
    start = time.process_time()
    merge(server, messages)
    seconds = time.process_time() - start
    assert not server.modules[0].refused  # type: ignore[attr-defined]
    messages = received()
    tracemalloc.start()
    merge(server, messages)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=SIZES)
    parser.add_argument("--plot", metavar="FILE", help="draw times by clients as well")
    options = parser.parse_args()
    sizes, lines = options.clients, {}
    table = Table(title="The server's merge of one round")
    for head in ("clipper", "clients", "ms", "µs a client", "KiB besides", "bytes a client"):
        table.add_column(head, justify="left" if head == "clipper" else "right")
    for name in NAMES:
        for clients in sizes:
            seconds, peak = measure(name, clients)
            lines.setdefault(name, []).append(seconds)
            table.add_row(
                name,
                f"{clients:,}",
                f"{1e3 * seconds:.1f}",
                f"{1e6 * seconds / clients:.1f}",
                f"{peak / 1024:.0f}",
                f"{peak / clients:.0f}",
            )
    Console().print(table)
    if options.plot:
        draw(sizes, lines, options.plot)


def draw(sizes: list[int], lines: dict[str, list[float]], file: str) -> None:
    """Draw the seconds of a merge by number of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, seconds in lines.items():
        axes.loglog(sizes, seconds, marker="o", label=name)
    axes.set(xlabel="clients in a round", ylabel="processor time of the server's merge, s")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
