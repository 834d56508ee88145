"""Models, clients and federations with personal layers, over websockets or without a network."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.main.config import FLRunConfig
from declearn.messaging import Message, TrainRequest
from declearn.model.sklearn import SklearnSGDModel
from declearn.optimizer import Optimizer
from declearn.secagg.utils import IdentityKeys
from declearn.training import TrainingManager
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize
from federation_helpers import SHORT_BIPRIME
from helpers import free_port, require

import fedclip
from fedclip import PersonalModel

N, D, CLASSES = 3, 4, 2
HEAD = ["module.head.weight", "module.head.bias"]
BODY = ["module.body.weight", "module.body.bias", "module.bn.weight", "module.bn.bias"]
SECONDS = 120.0


def torch_model(seed: int = 0) -> Any:
    """Return a network with a body, BatchNorm and a head, as declearn's model."""
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(seed)
    parts = {
        "body": torch.nn.Linear(D, 5),
        "bn": torch.nn.BatchNorm1d(5),
        "act": torch.nn.Tanh(),
        "head": torch.nn.Linear(5, CLASSES),
    }
    net = torch.nn.Sequential()
    for name, layer in parts.items():
        net.add_module(name, layer)
    return TorchModel(net, torch.nn.CrossEntropyLoss())


def keras_model(seed: int = 0) -> Any:
    """Return the same in Keras."""
    import keras
    from declearn.model.tensorflow import TensorflowModel

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((D,)),
            layers.Dense(5, activation="tanh", name="body"),
            layers.BatchNormalization(name="bn"),
            layers.Dense(CLASSES, name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return TensorflowModel(net, loss)


def haiku_model(seed: int = 0) -> Any:
    """Return the same in Haiku, without BatchNorm, which declearn can not train there."""
    from declearn.model.haiku import HaikuModel

    model = HaikuModel(_haiku_net, _haiku_loss, seed=seed)
    model.initialize({"features_shape": (D,), "data_type": "float32"})
    return model


def _haiku_net(x: Any) -> Any:
    import haiku as hk
    import jax.numpy as jnp

    return hk.Sequential([hk.Linear(5, name="body"), jnp.tanh, hk.Linear(CLASSES, name="head")])(x)


def _haiku_loss(found: Any, y: Any) -> Any:
    import jax

    return -(jax.nn.log_softmax(found) * jax.nn.one_hot(y, CLASSES)).sum(-1)


MODELS = {"torch": torch_model, "tensorflow": keras_model, "jax": haiku_model}


def data(seed: int, n: int = 24) -> InMemoryDataset:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D)).astype(np.float32)
    # Each site has labels of its own kind, so that heads come apart.
    return InMemoryDataset(x, target=(x[:, seed % D] > 0).astype(int), expose_classes=True)


def client(seed: int = 0, port: int = 1, **settings: Any) -> fedclip.PersonalFederatedClient:
    address = {"protocol": "websockets", "server_uri": f"ws://127.0.0.1:{port}"}
    kind = settings.pop("kind", fedclip.PersonalFederatedClient)
    found: fedclip.PersonalFederatedClient = kind(
        {**address, "name": f"client_{seed}"},
        data(seed),
        data(seed + 10),
        verbose=False,
        **settings,
    )
    return found


def weights(model: Any) -> dict[str, bytes]:
    """Return the bits of all weights."""
    coefs = model.get_weights().coefs
    return {name: np.asarray(array).tobytes() for name, array in coefs.items()}


def secure(kind: str | None) -> tuple[Any, list[Any]]:
    """Return the settings of secure aggregation: the server's, and those of clients."""
    if kind is None:
        return None, [None] * N
    keys = [Ed25519PrivateKey.generate() for _ in range(N)]
    trusted: list[Ed25519PublicKey | str] = [key.public_key() for key in keys]
    more = {"biprime": SHORT_BIPRIME} if kind == "joye-libert" else {}
    clients = [{"secagg_type": kind, "id_keys": IdentityKeys(key, trusted), **more} for key in keys]
    return {"secagg_type": kind}, clients


class Federation:
    """A server and clients that have run; all that clients have sent is noted."""

    def __init__(self, model: Any, optim: dict[str, Any], secagg: str | None = None) -> None:
        self.port = free_port()
        server, self.secagg = secure(secagg)
        address = {"protocol": "fedclip-websockets", "host": "127.0.0.1", "port": self.port}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.server = FederatedServer(
                model, {**address, "heartbeat": 0.02}, optim, secagg=server
            )
        self.sent: list[tuple[Message, bytes]] = []
        self.clients: list[FederatedClient] = []
        self.errors: list[Any] = []

    def run(self, folder: Path | None = None, rounds: int = 2, **settings: Any) -> None:
        """Run all rounds, within a time, or raise what ends the server."""
        run = settings.pop("run", {})
        for i in range(N):
            checkpoint = None if folder is None else str(folder / f"client_{i}")
            more = {"secagg": self.secagg[i], "checkpoint": checkpoint, **settings}
            self.clients.append(client(i, self.port, **more))
        config = FLRunConfig.from_params(
            rounds=rounds,
            register={"min_clients": N, "max_clients": N, "timeout": SECONDS},
            training={"batch_size": 8},
            evaluate={"batch_size": 24},
            **run,
        )
        with warnings.catch_warnings():
            # Of declearn's own, about its pickles and its next version.
            warnings.simplefilter("ignore")
            asyncio.run(asyncio.wait_for(self._run(config), SECONDS))

    async def _run(self, config: FLRunConfig) -> None:
        server = asyncio.create_task(self.server.async_run(config))
        await asyncio.sleep(0.3)
        nodes = [asyncio.create_task(self._take_part(node)) for node in self.clients]
        try:
            await server
            await asyncio.gather(*nodes)
        finally:
            for task in (server, *nodes):
                task.cancel()
            self.errors = await asyncio.gather(*nodes, return_exceptions=True)

    async def _take_part(self, node: FederatedClient) -> None:
        send = node.netwk.send_message

        async def noted(message: Message) -> None:
            self.sent.append((message, message.serialize()))
            await send(message)

        node.netwk.send_message = noted  # type: ignore[method-assign]
        await node.async_run()


def linear() -> Any:
    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    model.initialize({"features_shape": (4,), "classes": {0, 1}})
    return model


def made(framework: str, personal: Any = "head") -> PersonalModel:
    """Return a model of this framework, the same one each time."""
    require({"jax": "haiku"}.get(framework, framework))
    return PersonalModel(MODELS[framework](), personal)


def manager(node: Any, model: Any, aggregator: Any = None, **optim: Any) -> Any:
    """Give a client what a server has sent it; return what trains."""
    if isinstance(model, PersonalModel):
        with warnings.catch_warnings():
            # declearn's, about its pickles.
            warnings.simplefilter("ignore")
            model = msgpack_deserialize(msgpack_serialize(model))
    node.trainmanager = TrainingManager(
        model,
        Optimizer(**{"lrate": 0.1, **optim}),
        aggregator or AveragingAggregator(steps_weighted=False),
        node.train_data,
        node.valid_data,
        verbose=False,
    )
    return node.trainmanager


def request(model: Any = None, **more: Any) -> TrainRequest:
    sent = None if model is None else model.get_weights(trainable=True)
    settings: dict[str, Any] = {"aux_var": {}, "batches": {"batch_size": 8}, "n_epoch": 1}
    return TrainRequest(round_i=1, weights=sent, **{**settings, **more})
