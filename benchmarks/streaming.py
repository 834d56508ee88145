"""What a round of many replies takes: ``python -m benchmarks.streaming``.

Replies of float32 are added to `UpdateServer` as they arrive. Stated are the peak of memory above
the model and one reply, as `tracemalloc` counts it, and the processor time of a reply; and how far
sums in another order are apart, relative to the sum of absolute terms.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

import numpy as np

from fedclip.updates.aggregation import ExactSum
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer


def round_of(clients: int, values: int) -> float:
    """Return the processor time in which a round of such replies is added and closed."""
    server, rng = UpdateServer(AdaptiveBound(1.0)), np.random.default_rng(0)
    model = {"w": np.zeros(values, np.float32)}
    update = {"w": (rng.standard_normal(values) / values).astype(np.float32)}
    server.open()
    begun = time.process_time()
    for i in range(clients):
        server.add(Reply(update, 1, 1, sender=str(i)), model)
    server.close()
    return time.process_time() - begun


def apart(clients: int, values: int) -> float:
    """Return how far sums in two orders are apart."""
    rng = np.random.default_rng(1)
    rows = rng.lognormal(0.0, 3.0, (clients, values)).astype(np.float32)
    sums = []
    for order in (rows, rows[::-1]):
        total = ExactSum()
        for row in order:
            total.add({"w": row})
        sums.append(total.divided(1.0)["w"])
    return float(np.max(np.abs(sums[0] - sums[1]) / rows.astype(float).sum(axis=0)))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--values", type=int, default=100_000)
    options = parser.parse_args()
    seconds = round_of(options.clients, options.values)
    tracemalloc.start()
    round_of(options.clients, options.values)
    peak = tracemalloc.get_traced_memory()[1] - 8 * options.values
    tracemalloc.stop()
    print(f"{options.clients} replies of {options.values} values: {peak / 1e6:.1f} MB")
    print(f"{1e6 * seconds / options.clients:.0f} µs a reply")
    print(f"sums in two orders: {apart(options.clients, 100):.1e} apart")


if __name__ == "__main__":
    main()
