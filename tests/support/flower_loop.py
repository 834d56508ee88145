# SPDX-License-Identifier: Apache-2.0
"""A federation in one process, of Flower's own messages, mods and strategies, but no network."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedclip.engines.flower import UpdateClipMod, UpdateClipStrategy
from fedclip.engines.flower.clipping import RECORD

# Flower sets these in the processes that it starts.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

TEN = range(1, 11)
SIZE = 50
ZEROS = {"w": np.zeros(SIZE)}
NORMS = np.exp(np.random.default_rng(0).normal(0.0, 0.4, len(TEN)))
NOISE = {"noise_multiplier": 1.0, "expected_clients": 10, "start_norm": 1.0}
SEEDED = {**NOISE, "generator": "insecure", "seed": 1}

Update = Callable[[int, int], Mapping[str, Any]]
"""What a node's training subtracts from its model, by node and round."""
Change = Callable[[Message], Message | None]
"""What becomes of a reply on its way."""


def record(arrays: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array.numpy() for name, array in found.items()}


def context(node: int, settings: Mapping[str, Any] = {}) -> Context:
    run_config = {f"update-clip.{k.replace('_', '-')}": v for k, v in settings.items()}
    return Context(1, node, {"partition-id": node}, RecordDict(), run_config)


def rewritten(change: Callable[[RecordDict], None]) -> Callable[[Message], Message]:
    def rewrite(message: Message) -> Message:
        change(message.content)
        return message

    return rewrite


class Loop:
    """Nodes 1 to n, and what `Strategy.start` asks of a grid."""

    def __init__(
        self,
        nodes: Iterable[int],
        update: Update,
        settings: Mapping[str, Any] = {},
        *,
        mods: Callable[[int], list[Any]] = lambda node: [UpdateClipMod()],
        metrics: Callable[[int], dict[str, Any]] = lambda node: {"num-examples": 10},
        change: Mapping[int, Change] = {},
    ) -> None:
        self.nodes, self.update, self.metrics, self.change = list(nodes), update, metrics, change
        self.contexts = {node: context(node, settings) for node in self.nodes}
        self.apps = {node: self._app(node, mods(node)) for node in self.nodes}
        self.asked: list[list[int]] = []
        self.round = 0

    def _app(self, node: int, mods: list[Any]) -> ClientApp:
        app = ClientApp(mods=mods)

        @app.train()
        def train(message: Message, context: Context) -> Message:
            assert RECORD not in message.content
            model = arrays_of(message.content["arrays"])
            for name, by in self.update(node, self.round).items():
                model[name] = np.asarray(model[name] - by, dtype=model[name].dtype)
            content = {"arrays": record(model), "metrics": MetricRecord(self.metrics(node))}
            return Message(RecordDict(content), reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            content = RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.5})})
            return Message(content, reply_to=message)

        return app

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        messages = list(messages)
        if any(m.metadata.message_type == "train" for m in messages):
            self.round += 1
            self.asked.append(sorted(m.metadata.dst_node_id for m in messages))
        replies = []
        # Who replies first is left to chance in a network.
        for message in reversed(messages):
            node = message.metadata.dst_node_id
            try:
                reply = self.apps[node](message, self.contexts[node])
            except Exception as exc:  # as Flower's engines do
                reply = Message(Error(4, str(exc)), reply_to=message)
            if message.metadata.message_type == "train" and node in self.change:
                reply = self.change[node](reply)
            if reply is not None:
                replies.append(reply)
        return replies

    def run(self, strategy: UpdateClipStrategy, model: Any, rounds: int) -> tuple[Any, Any]:
        result = strategy.start(self, record(model), rounds)
        return arrays_of(result.arrays), result


def directions(norms: Any, seed: int = 0, size: int = 50) -> Update:
    """Return updates in random directions, each node's with its norm."""

    def update(node: int, round_: int) -> dict[str, Any]:
        drawn = np.random.default_rng([seed, node, round_]).normal(size=size)
        return {"w": norms[node - 1] * drawn / np.linalg.norm(drawn)}

    return update


def start(strategy: UpdateClipStrategy, loop: Loop, model: Any, rounds: int) -> list[Any]:
    """Return the model after each round; the first one is that before."""
    seen: list[Any] = []

    def look(round_: int, arrays: ArrayRecord) -> None:
        seen.append(arrays_of(arrays))

    strategy.start(loop, record(model), rounds, evaluate_fn=look)
    return seen
