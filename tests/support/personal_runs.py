"""Models and clients with personal layers."""

import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.messaging import TrainRequest
from declearn.model.sklearn import SklearnSGDModel
from declearn.optimizer import Optimizer
from declearn.training import TrainingManager
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize
from helpers import require

import fedclip
from fedclip import PersonalModel

D, CLASSES = 4, 2
BODY = ["module.body.weight", "module.body.bias", "module.bn.weight", "module.bn.bias"]


def torch_model(seed: int = 0) -> Any:
    """Return a network with a body, BatchNorm and a head, as declearn's model."""
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(seed)
    nn = torch.nn
    parts = OrderedDict(body=nn.Linear(D, 5), bn=nn.BatchNorm1d(5), act=nn.Tanh())
    net = nn.Sequential(OrderedDict(**parts, head=nn.Linear(5, CLASSES)))
    return TorchModel(net, nn.CrossEntropyLoss())


def keras_model(seed: int = 0) -> Any:
    import keras
    from declearn.model.tensorflow import TensorflowModel

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    body = layers.Dense(5, activation="tanh", name="body"), layers.BatchNormalization(name="bn")
    net = keras.Sequential([keras.Input((D,)), *body, layers.Dense(CLASSES, name="head")])
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


def client(seed: int = 0, **settings: Any) -> fedclip.PersonalFederatedClient:
    address = {"protocol": "websockets", "server_uri": "ws://127.0.0.1:1", "name": "client"}
    records = data(seed), data(seed + 10)
    return fedclip.PersonalFederatedClient(address, *records, verbose=False, **settings)


def weights(model: Any) -> dict[str, bytes]:
    coefs = model.get_weights().coefs
    return {name: np.asarray(array).tobytes() for name, array in coefs.items()}


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
    aggregator = aggregator or AveragingAggregator(steps_weighted=False)
    parts = model, Optimizer(**{"lrate": 0.1, **optim}), aggregator
    node.trainmanager = TrainingManager(*parts, node.train_data, node.valid_data, verbose=False)
    return node.trainmanager


def request(model: Any = None, **more: Any) -> TrainRequest:
    sent = None if model is None else model.get_weights(trainable=True)
    settings: dict[str, Any] = {"aux_var": {}, "batches": {"batch_size": 8}, "n_epoch": 1}
    return TrainRequest(round_i=1, weights=sent, **{**settings, **more})
