# SPDX-License-Identifier: Apache-2.0
"""Work of clients, which Flower's simulation engine spreads over processes.

::

    server:  replies = ask({client: task, ...})      one message to the node of each client
    node:    reply = work(task)                      in a process of Ray, several at a time
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

__all__ = ["Ask", "spread"]

_PATIENCE = 600.0

Ask = Callable[[Mapping[int, Any]], dict[int, Any]]
"""The function that a server calls: from tasks by client to their replies."""


def spread(serve: Callable[[Ask], object], work: Callable[[Any], Any], clients: int) -> None:
    """Run a server with its clients on Flower's simulation engine.

    Parameters
    ----------
    serve
        Is called once, with the function that asks clients.
    work
        Is called with a task, in another process; both go there and back by pickle.
    clients
        Number of nodes, one for each client.

    Raises
    ------
    Exception
        Whatever `serve` raises. The function that asks raises a RuntimeError if a client fails.

    Examples
    --------
    A task of each client, and all of their replies (this starts Ray, which takes seconds)::

        def serve(ask):
            print(ask({0: 3, 1: 4}))   # {0: 9, 1: 16}

        spread(serve, lambda task: task * task, clients=2)
    """
    client_app, server_app = ClientApp(), ServerApp()
    raised: list[BaseException] = []

    @client_app.query()
    def reply(message: Message, context: Context) -> Message:
        done = work(pickle.loads(message.content["task"]["pickled"]))
        return Message(_packed(done), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            nodes = _nodes(grid, clients)
            serve(lambda tasks: _asked(grid, nodes, tasks))
        except BaseException as exc:  # Flower would only log it
            raised.append(exc)

    # Without it, each process of Ray warns about GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    level = FLOWER_LOGGER.level
    # A line for each message and worker.
    FLOWER_LOGGER.setLevel(logging.ERROR)
    try:
        run_simulation(server_app, client_app, clients)
    finally:
        FLOWER_LOGGER.setLevel(level)
    if raised:
        raise raised[0]


def _nodes(grid: Grid, clients: int) -> list[int]:
    """Return the nodes in order, when all of them are connected."""
    end = time.monotonic() + _PATIENCE
    while len(nodes := list(grid.get_node_ids())) < clients:
        if time.monotonic() > end:
            raise RuntimeError(
                f"{len(nodes)} of {clients} nodes are connected after {_PATIENCE:g} s"
            )
        time.sleep(0.1)
    return sorted(nodes)


def _packed(content: object) -> RecordDict:
    return RecordDict({"task": ConfigRecord({"pickled": pickle.dumps(content)})})


def _asked(grid: Grid, nodes: list[int], tasks: Mapping[int, Any]) -> dict[int, Any]:
    places = {nodes[client]: client for client in tasks}
    messages = [
        Message(_packed(task), nodes[client], MessageType.QUERY) for client, task in tasks.items()
    ]
    replies: dict[int, Any] = {}
    for reply in grid.send_and_receive(messages):
        client = places[reply.metadata.src_node_id]
        if reply.has_error():
            raise RuntimeError(f"client {client} could not train: {reply.error.reason}")
        replies[client] = pickle.loads(reply.content["task"]["pickled"])
    if lost := sorted(tasks.keys() - replies.keys()):
        raise RuntimeError(f"client {lost[0]} has not replied: the engine has lost it")
    return {client: replies[client] for client in tasks}
