# SPDX-License-Identifier: Apache-2.0
"""Models of each framework, and torch models as users have them, with thirteen records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers import require

Model = tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def torch_model() -> Model:
    require("torch")
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))
    x: Any = torch.from_numpy(rng().normal(size=(13, 1, 8, 8)).astype("float32"))
    return TorchModel(net, nn.CrossEntropyLoss()), x, rng().integers(0, 3, 13)


def jax_model() -> Model:
    require("jax")
    import haiku as hk
    import jax
    import jax.numpy as jnp
    from declearn.model.haiku import HaikuModel

    def net(x: Any) -> Any:
        return hk.Sequential([hk.Flatten(), hk.Linear(8), jnp.tanh, hk.Linear(3)])(x)

    def loss(found: Any, y: Any) -> Any:
        return -jnp.sum(jax.nn.log_softmax(found) * jax.nn.one_hot(y, 3), axis=-1)

    model = HaikuModel(net, loss, seed=0)
    model.initialize({"features_shape": (6,), "data_type": "float32"})
    return model, rng().normal(size=(13, 6)).astype("float32"), rng().integers(0, 3, 13)


def tensorflow_model() -> Model:
    keras = require("keras")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    layers = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)
    model = keras_model(*layers, loss=loss, shape=(6,))
    return model, rng().normal(size=(13, 6)).astype("float32"), rng().integers(0, 3, 13)


def sklearn_model(**config: Any) -> Model:
    from declearn.model.sklearn import SklearnSGDModel

    config = {"kind": "classifier", "loss": "log_loss", "alpha": 0.05, **config}
    classes = config.pop("classes", 4)
    model = SklearnSGDModel.from_parameters(**config)
    model.initialize({"features_shape": (5,), "classes": list(range(classes))})
    start = model.get_weights()
    values = {n: rng().normal(size=a.shape) for n, a in start.coefs.items()}
    model.set_weights(type(start)(values))
    x = rng().normal(size=(13, 5))
    continuous = config["kind"] == "regressor"
    return model, x, rng().normal(size=13) if continuous else rng().integers(0, classes, 13)


MODELS: dict[str, Callable[[], Model]] = {
    "torch": torch_model,
    "jax": jax_model,
    "tensorflow": tensorflow_model,
    "sklearn": sklearn_model,
}


# -- models of torch as users have them ---------------------------------------------------------
def calls(call: Callable[..., Any], **layers: Any) -> Any:
    """Return a module that has layers, and is a function of them."""
    nn = require("torch").nn

    class Module(nn.Module):  # type: ignore[misc]
        def forward(self, *inputs: Any) -> Any:
            return call(self, *inputs)

    made = Module()
    for name, layer in layers.items():
        setattr(made, name, layer)
    return made


def encoder(nn: Any) -> Any:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=True)
    return calls(
        lambda net, x: net.out(net.mix(net.embed(x) + net.place).mean(1)),
        embed=nn.Embedding(11, 6),
        place=nn.Parameter(require("torch").randn(1, 7, 6)),
        mix=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        out=nn.Linear(6, 3),
    )


def two_inputs(nn: Any) -> Any:
    return calls(
        lambda net, x, y: net.out(net.embed(x).mean(1) + net.wide(y)),
        embed=nn.Embedding(11, 6),
        wide=nn.Linear(4, 6),
        out=nn.Linear(6, 3),
    )


def two_outputs(nn: Any) -> Any:
    return calls(
        lambda net, x: (net.first(net.body(x).tanh()), net.second(x)),
        body=nn.Linear(4, 8),
        first=nn.Linear(8, 3),
        second=nn.Linear(4, 1),
    )


def two_losses(nn: Any) -> Any:
    entropy = nn.CrossEntropyLoss(reduction="none")
    return calls(lambda net, out, y: entropy(out[0], y) + out[1][:, 0] ** 2)


def images(nn: Any) -> Any:
    return nn.Sequential(
        *(nn.ConvTranspose2d(1, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 3, 3), nn.PReLU(), nn.Flatten()),
    )


def buffers(nn: Any) -> Any:
    made = calls(lambda net, x: net.layer(input=x - net.mean), layer=nn.Linear(4, 3))
    made.register_buffer("mean", require("torch").randn(4))
    return made


def checkpointed(nn: Any) -> Any:
    run = require("torch.utils.checkpoint").checkpoint
    return calls(
        lambda net, x: net.out(run(net.layer, x, use_reentrant=False).tanh()),
        layer=nn.Linear(4, 4),
        out=nn.Linear(4, 3),
    )


def one_layer(call: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda nn: calls(call, layer=nn.Linear(4, 3))


# Module, and the shape of a record, or how many tokens it has.
ZOO: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "encoder": (encoder, 7),
    "two inputs": (two_inputs, [7, (4,)]),
    "two outputs": (two_outputs, (4,)),
    "images": (images, (1, 5, 5)),
    "buffers": (buffers, (4,)),
    "in place": (one_layer(lambda net, x: net.layer(x.mul_(2.0))), (4,)),
    "branches": (one_layer(lambda net, x: net.layer(x if x.sum() > 0 else 2 * x)), (4,)),
    "checkpointed": (checkpointed, (4,)),
}


def of_zoo(name: str) -> Model:
    torch = require("torch")
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    make, shape = ZOO[name]
    loss = two_losses(torch.nn) if name == "two outputs" else torch.nn.CrossEntropyLoss()

    def inputs(of: Any) -> Any:
        return torch.randint(0, 11, (13, of)) if isinstance(of, int) else torch.randn(13, *of)

    x: Any = [*map(inputs, shape)] if isinstance(shape, list) else inputs(shape)
    return TorchModel(make(torch.nn), loss), x, torch.randint(0, 3, (13,))


def keras_model(*made: Any, loss: Any = None, shape: Any = (4,)) -> Any:
    import keras
    from declearn.model.tensorflow import TensorflowModel

    model = TensorflowModel(keras.Sequential([*made]), loss or keras.losses.MeanSquaredError())
    model.initialize({"features_shape": shape})
    return model


def keras_tokens(kind: str) -> Model:
    """Return a model with layers that have no vectorized gradient."""
    layers, losses = require("keras").layers, require("keras").losses

    class Attention(layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers.MultiHeadAttention(2, 3)

        def call(self, x: Any) -> Any:
            return self.inner(x, x)

    mixing = [layers.LSTM(5)]
    if kind == "attention":
        mixing = [Attention(), layers.GlobalAveragePooling1D()]
    parts = (layers.Embedding(11, 6), *mixing, layers.Dense(3))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras_model(*parts, loss=loss, shape=(7,))
    return model, rng().integers(0, 11, (13, 7)), rng().integers(0, 3, 13)


def numbers(array: Any) -> Any:
    if hasattr(array, "dense_shape"):
        array = require("tensorflow").convert_to_tensor(array)
    array = array.detach().double().numpy() if hasattr(array, "detach") else array
    return np.asarray(array, dtype=np.float64)
