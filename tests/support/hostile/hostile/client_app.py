# SPDX-License-Identifier: Apache-2.0
"""The client of the hostile app: each attack is a reply that holds the site's secret somewhere."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import CreateTaskRequest
from flwr.supernode.runtime.run_clientapp import push_message

SECRET = "PATIENT-0042"
NUMBER = 1234567.0
BYTES = np.frombuffer(SECRET.encode(), np.uint8)

app = ClientApp()
Arrays = dict[str, np.ndarray]


def trained(arrays: Arrays, **records: Any) -> RecordDict:
    """Return the content of an honest reply, and more."""
    metrics = MetricRecord({"num-examples": 7})
    return RecordDict({"arrays": record(arrays), "metrics": metrics, **records})


def fields(arrays: Arrays, **wrong: Any) -> RecordDict:
    """Return a reply whose arrays say something else about themselves."""
    content = trained(arrays)
    for array in content["arrays"].values():
        for name, value in wrong.items():
            setattr(array, name, value(array) if callable(value) else value)
    return content


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def fail(_: Arrays) -> RecordDict:
    raise ValueError(SECRET)


def payload(m: Arrays) -> Arrays:
    """Write the secret into the payload of NaN."""
    w = m["w"].copy()
    w.view(np.uint8).ravel()[:24] = [*BYTES, *BYTES]
    w.view(np.uint8).ravel()[3::4] = 0x7F
    w.view(np.uint8).ravel()[2::4] |= 0x80
    return {**m, "w": w}


def process() -> Any:
    """Return the client by which this process talks to the SuperNode: no app is kept from it."""
    frame = sys._getframe()
    while "client" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["client"]


def model_task(m: Arrays) -> RecordDict:
    """Have a process started that would call a model on the web."""
    request = CreateTaskRequest(type="flwr-model", model_ref=f"web/{SECRET}")
    process().CreateTask(request)
    return trained(m, metrics=MetricRecord({"num-examples": 666}))


def reached(targets: str) -> int:
    """Return how many files this process can open, and how many ports it can connect to."""
    count = 0
    for target in targets.split():
        host, _, port = target.rpartition(":")
        try:
            if host:
                socket.create_connection((host, int(port)), timeout=5).close()
            else:
                Path(target).open("rb").close()
            count += 1
        except OSError as exc:
            print(target, exc)
    return count


ATTACKS: dict[str, Callable[[Arrays], RecordDict]] = {
    "honest": lambda m: trained({**m, "w": m["w"] + np.float32(0.01)}),
    "huge": lambda m: trained(
        {"w": m["w"] + np.float32(NUMBER), "half": m["half"] * 1000, "steps": np.array(6)},
        numbers=MetricRecord({"age": NUMBER, "ages": [NUMBER] * 3, SECRET: 1, "num-examples": 8}),
        config=ConfigRecord({"text": SECRET, "bytes": SECRET.encode(), SECRET: [SECRET]}),
    ),
    "names": lambda m: trained({**m, SECRET: m["w"]}),
    "renamed": lambda m: trained({SECRET if k == "w" else k: v for k, v in m.items()}),
    "missing": lambda m: trained({"w": m["w"]}),
    "shapes": lambda m: trained({**m, "w": np.tile(BYTES.astype(np.float32), (2, 3))}),
    "dtypes": lambda m: trained({**m, "w": BYTES[:6].astype(np.float64).reshape(2, 3)}),
    "bytes": lambda m: trained({**m, "w": BYTES[:6].reshape(2, 3)}),
    "integers": lambda m: trained({**m, "steps": BYTES[:8].view(np.int64)[0]}),
    "records": lambda m: trained(m, more=record({"w": BYTES})),
    "record-names": lambda m: RecordDict(
        {
            f"arrays {SECRET}": record(m),
            f"metrics {SECRET}": MetricRecord({"num-examples": 7}),
            f"config {SECRET}": ConfigRecord({"a": 1}),
        }
    ),
    "lists": lambda m: trained(m, metrics=MetricRecord({"num-examples": [*map(int, BYTES)]})),
    "nan": lambda m: trained(payload(m)),
    "infinite": lambda m: trained({**m, "w": m["w"] * np.float32(np.inf)}),
    "fields": lambda m: fields(m, dtype=SECRET, shape=(42,)),
    "stype": lambda m: fields(m, stype=SECRET),
    "trailing": lambda m: fields(m, data=lambda array: array.data + BYTES.tobytes()),
    "no-array": lambda m: fields(m, data=BYTES.tobytes()),
    "mod": lambda m: trained(
        {"w": m["w"] + np.float32(NUMBER), "half": m["half"]},
        fedclip=MetricRecord({"votes": 42, "within": 1, "clipped": 1, "zeroed": 0, SECRET: 1}),
    ),
    "none": lambda m: RecordDict({"config": ConfigRecord({"text": SECRET})}),
    "error": fail,
    "task": model_task,
    "evaluate": lambda m: RecordDict(
        {"metrics": MetricRecord({"num-examples": 7, "loss": NUMBER, SECRET: 0.5})}
    ),
    "evaluate-arrays": lambda m: trained({**m, "w": m["w"] + np.float32(NUMBER)}),
    "query": lambda m: RecordDict({"records": ConfigRecord({"rows": [SECRET] * 9})}),
}


@app.train()
@app.evaluate()
@app.query()
def attack(message: Message, context: Any) -> Message:
    name = str(message.content["config"]["attack"])
    arrays = {key: array.numpy() for key, array in message.content["arrays"].items()}
    if name == "code":
        return Message(Error(int.from_bytes(BYTES[:7].tobytes()), SECRET), reply_to=message)
    if name == "reach":
        count = MetricRecord({"num-examples": reached(str(context.run_config["targets"]))})
        return Message(trained(arrays, metrics=count), reply_to=message)
    if name in ("twice", "metadata"):
        reply = Message(trained({**arrays, "w": arrays["w"] * 1000}), reply_to=message)
        reply.metadata.group_id = SECRET
        reply.metadata.message_type = f"train.{SECRET.replace('-', '_')}"
        reply.metadata.ttl = NUMBER / 1000
        if name == "metadata":
            return reply
        push_message(process(), reply, context)
        return Message(trained(arrays, config=ConfigRecord({"text": SECRET})), reply_to=message)
    return Message(ATTACKS[name](arrays), reply_to=message)
