"""The client: an ordinary app, and a mod that clips what it sends."""

from __future__ import annotations

import json

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits import task
from fedclip import ZScoreClip
from fedclip.engines.flower import UpdateClipMod

# The first mod is the last to touch a reply.
app = ClientApp(mods=[UpdateClipMod()])


def step_clipper(context: Context) -> ZScoreClip:
    """Return a clipper of single steps that knows the norms of earlier rounds.

    Flower may start a process for each round: what is to last is in `context.state`.
    """
    clipper = ZScoreClip()
    if "step-clip" in context.state:
        clipper.set_state(json.loads(context.state["step-clip"]["state"]))
    clipper.on_round_start()
    return clipper


@app.train()
def train(message: Message, context: Context) -> Message:
    settings, node = context.run_config, context.node_config
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    data = task.load(int(node["partition-id"]), int(node["num-partitions"]))
    how = data, int(settings["local-epochs"]), float(settings["learning-rate"])
    if settings["step-clip"]:
        clipper = step_clipper(context)
        trained = task.train(model, *how, clip=clipper.clip)
        state = json.dumps(clipper.get_state())
        context.state["step-clip"] = ConfigRecord({"state": state})
    else:
        trained = task.train(model, *how)
    metrics = {"train_loss": task.loss(trained, *data), "num-examples": len(data[1])}
    content = {
        "arrays": ArrayRecord({name: Array(array) for name, array in trained.items()}),
        "metrics": MetricRecord(metrics),
    }
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    node = context.node_config
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    data = task.load(int(node["partition-id"]), int(node["num-partitions"]))
    metrics = {"accuracy": task.accuracy(model, *data), "num-examples": len(data[1])}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
