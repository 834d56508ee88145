"""A hostile server of declearn: it sends what it likes, and keeps all bytes that arrive.

It knows declearn's protocol and nothing of the client.
"""

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from declearn import messaging
from declearn.aggregator import AveragingAggregator, ModelUpdates
from declearn.communication.api import NetworkClient
from declearn.communication.api.backend.actions import Accept, ActionMessage, Join, Ping, Recv, Send
from declearn.dataset import InMemoryDataset
from declearn.messaging import Error, InitRequest, Message, TrainReply, TrainRequest
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from declearn.optimizer import Optimizer
from helpers import norm

import fedclip
from fedclip.engines.declearn.messages import ClippedUpdates
from fedclip.site.gate import REFUSED

D = 200
C = 0.5
SECRET = 8191.015625
"""A value of the data that no computation makes; exact in float32 and in float64."""
WORD = "HIV+"

Script = Sequence[Message | Callable[[], Any]]


def model() -> Any:
    made = SklearnSGDModel.from_parameters(kind="regressor", loss="squared_error")
    made.initialize({"features_shape": (D,)})
    return made


def init(modules: Sequence[Any] = (), aggregator: Any = None, **settings: Any) -> InitRequest:
    aggregator = aggregator or AveragingAggregator(steps_weighted=False)
    optimizer = Optimizer(lrate=settings.pop("lrate", 0.1), modules=[*modules])
    return InitRequest(model(), optimizer, aggregator, **settings)


def train(round_i: int = 1, weights: Any = None, aux: Any = None, **batches: Any) -> TrainRequest:
    weights = model().get_weights() if weights is None else weights
    return TrainRequest(round_i, weights, aux or {}, {"batch_size": 8, **batches}, n_epoch=1)


def data(n: int = 32) -> InMemoryDataset:
    x = np.random.default_rng(1).normal(size=(n, D))
    x[0] = SECRET
    return InMemoryDataset(x, target=np.linspace(-3.0, 3.0, n), expose_classes=False)


class Wire(NetworkClient, register=False):
    """A client's end of a connection to a server that sends one message after the other.

    It keeps all bytes that arrive from the client. What is no message is called in its turn.
    """

    def __init__(self, script: Script = ()) -> None:
        super().__init__("ws://nowhere", "site-1")
        self.left: list[Any] = [*script, messaging.CancelTraining("the end")]
        self.frames: list[bytes] = []

    @staticmethod
    def _setup_ssl_context(certificate: str | None = None) -> None:
        pass

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def _send_message(self, bin_msg: bytes) -> bytes:
        self.frames.append(bin_msg)
        asked = ActionMessage.deserialize(bin_msg)
        if isinstance(asked, Join):
            return Accept(flag="registered").serialize()
        if not isinstance(asked, Recv):
            return Ping().serialize()
        while not isinstance(self.left[0], Message):
            self.left.pop(0)()
        return Send(self.left.pop(0).serialize()).serialize()

    @property
    def messages(self) -> list[Any]:
        actions = map(ActionMessage.deserialize, self.frames)
        found = [action.content for action in actions if isinstance(action, Send)]
        return [messaging.SerializedMessage.from_bin_message(one).deserialize() for one in found]

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def norms(self) -> list[float]:
        return [norm(vector.coefs) for vector in self.updates]

    @property
    def updates(self) -> list[NumpyVector]:
        found = [getattr(message, "updates", None) for message in self.messages]
        return [one.updates for one in found if one is not None]

    def holds(self, *what: bytes) -> bool:
        return any(one in frame for one in what for frame in self.frames)


def attack(script: Script, policy: Path | None, **settings: Any) -> Wire:
    """Return what a client with a policy, or without, has sent to such a server."""
    wire, kind = Wire(script), settings.pop("kind", fedclip.PersonalFederatedClient)
    client = kind(wire, policy=policy, **{"train_data": data(), "verbose": False, **settings})
    # Whatever ends the client.
    with contextlib.suppress(Exception):
        asyncio.run(client.async_run())
    return wire


def leaks(wire: Wire) -> Iterator[str]:
    """Yield what has left, although a policy with nothing but a norm forbids it."""
    for kind in ("<d", "<f"):
        if wire.holds(struct.pack(kind, SECRET)):
            yield "a value of the data"
    if wire.holds(WORD.encode()):
        yield "a word of the data"
    for message in wire.messages:
        if isinstance(message, TrainReply):
            vector, told = message.updates.updates, vars(message).copy()
            if type(message.updates) not in (ModelUpdates, ClippedUpdates):
                yield f"an update as {type(message.updates).__name__}"
            if message.updates.weights != 1:
                yield "a weight"
            if not norm(vector.coefs or [0.0]) <= C:
                yield "an update beyond the bound"
            if set(message.aux_var) - {"update-clip"}:
                yield f"auxiliary variables: {set(message.aux_var)}"
            told.pop("updates"), told.pop("aux_var")
        elif isinstance(message, Error):
            told = {}
            if message != Error(REFUSED):
                yield f"an error's own words: {message.message}"
        else:
            told = vars(message).copy()
            if told.get("n_steps") == 1 and math.isnan(told["loss"]):
                told = {}
        if any(told.values()):
            yield f"{type(message).__name__} says {told}"
