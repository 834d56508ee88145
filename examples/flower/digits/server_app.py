"""The server: one of Flower's strategies, and update clipping around it."""

from __future__ import annotations

import time

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits import task
from fedclip.engines.flower import UpdateClipStrategy

app = ServerApp()
TEST = task.load_test()
ended = time.monotonic()


def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord:
    global ended
    seconds, ended = time.monotonic() - ended, time.monotonic()
    model = {name: array.numpy() for name, array in arrays.items()}
    return MetricRecord({"accuracy": task.accuracy(model, *TEST), "seconds": seconds})


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    nodes = int(settings["nodes"])
    inner = FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)
    strategy = UpdateClipStrategy.from_run_config(
        inner, settings, folder=settings["folder"] or None
    )
    model = ArrayRecord({name: Array(array) for name, array in task.initial().items()})
    strategy.start(grid, model, int(settings["num-server-rounds"]), evaluate_fn=evaluate)
