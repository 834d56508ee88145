# SPDX-License-Identifier: Apache-2.0
"""The one task on Flower's simulation engine: python equal_flower.py FOLDER ROUNDS SETTINGS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from equal_task import first, flat, train
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedclip.engines.flower import UpdateClipMod, UpdateClipStrategy
from fedclip.updates.store import client_of


def main(folder: Path, rounds: int, settings: dict[str, object], clients: int = 3) -> None:
    app, server = ClientApp(mods=[UpdateClipMod(client_of(settings))]), ServerApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        before = {name: array.numpy() for name, array in message.content["arrays"].items()}
        after, steps = train(int(context.node_config["partition-id"]), before)
        content = {
            "arrays": ArrayRecord({name: Array(array) for name, array in after.items()}),
            "metrics": MetricRecord({"num-examples": steps}),
        }
        return Message(RecordDict(content), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy = UpdateClipStrategy(inner, settings, folder=folder)
        start = ArrayRecord({name: Array(array) for name, array in first().items()})
        result = strategy.start(grid, start, num_rounds=rounds)
        np.save(folder / "model.npy", flat({k: a.numpy() for k, a in result.arrays.items()}))

    run_simulation(server, app, clients)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
