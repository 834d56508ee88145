# SPDX-License-Identifier: Apache-2.0
"""The server of the hostile app: asks for one attack after another, and writes down what came."""

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

MODEL = {
    "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "half": np.full(4, 3.0, np.float16),
    "steps": np.array(5),
}


def plain(reply: Message) -> Any:
    if reply.has_error():
        return reply.error.code, reply.error.reason
    return {
        name: {key: v.numpy() if isinstance(v, Array) else v for key, v in record.items()}
        for name, record in reply.content.items()
    }


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Send all messages to the first node, and wait for their replies."""
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    attacks = str(context.run_config["attacks"]).split()
    model = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
    messages = []
    for i, attack in enumerate(attacks):
        content = RecordDict({"arrays": model, "config": ConfigRecord({"attack": attack, "n": i})})
        if attack == "mod":
            content["fedclip"] = ConfigRecord({"bound": 9.0})
        kind = attack.partition("-")[0]
        kind = kind if kind in ("evaluate", "query") else "train"
        messages.append(Message(content, nodes[0], kind))

    ids = [*grid.push_messages(messages)]
    came: dict[str, Any] = {}
    while len(came) < len(ids):
        for reply in grid.pull_messages(set(ids) - came.keys()):
            came[reply.metadata.reply_to_message_id] = plain(reply)
        time.sleep(0.2)
    out = Path(str(context.run_config["out"]))
    out.with_suffix(".part").write_bytes(pickle.dumps([came[name] for name in ids]))
    out.with_suffix(".part").rename(out)
