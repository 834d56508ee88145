# SPDX-License-Identifier: Apache-2.0
"""Models of each framework, and torch models as users have them, with thirteen records."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers import require

from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import clipped_sum, part

C = 0.3

Model = tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]


def flat(norms: Any) -> Any:
    return SampleClipping().factors(norms, C)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def torch_model(depth: int = 0, dtype: str = "float32") -> Model:
    torch = require("torch")
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    nn, kind = torch.nn, getattr(torch, dtype)
    deep = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), *deep, nn.Linear(8, 3))
    x = torch.from_numpy(rng().normal(size=(13, 1, 8, 8)).astype("float32")).to(kind)
    return TorchModel(net.to(kind), nn.CrossEntropyLoss()), x, rng().integers(0, 3, 13)


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
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    model = keras_model(keras.Sequential(layers), loss, (6,))
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


MODELS: dict[str, Callable[..., Model]] = {
    "torch": torch_model,
    "jax": jax_model,
    "tensorflow": tensorflow_model,
    "sklearn": sklearn_model,
}


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


def keras_model(net: Any, loss: Any = None, shape: Any = (4,)) -> Any:
    import keras
    from declearn.model.tensorflow import TensorflowModel

    model = TensorflowModel(net, loss or keras.losses.MeanSquaredError())
    model.initialize({"features_shape": shape})
    return model


def keras_tokens(kind: str) -> Model:
    keras = require("keras")
    layers, inputs = keras.layers, keras.Input((7,))
    found = layers.Embedding(11, 6)(inputs)
    if kind == "attention":
        found = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 3)(found, found))
    else:
        found = layers.LSTM(5)(found)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras_model(keras.Model(inputs, layers.Dense(3)(found)), loss, (7,))
    return model, rng().integers(0, 11, (13, 7)), rng().integers(0, 3, 13)


def numbers(array: Any) -> Any:
    if hasattr(array, "dense_shape"):
        array = require("tensorflow").convert_to_tensor(array)
    array = array.detach().double().numpy() if hasattr(array, "detach") else array
    return np.asarray(array, dtype=np.float64)


def assert_alone(model: Any, x: Any, y: Any, micro_batch: int) -> Any:
    """Compare with declearn's own gradients of batches of one record; return the clipped sum."""
    right: dict[str, Any] = {}
    lengths = []
    for i in range(len(y)):
        alone = (*copy.deepcopy(part([x, y], slice(i, i + 1))), None)
        found = model.compute_batch_gradients(alone).coefs
        gradients = {n: numbers(a) for n, a in found.items()}
        lengths.append(np.sqrt(sum((a**2).sum() for a in gradients.values())))
        for name, array in gradients.items():
            right[name] = right.get(name, 0.0) + min(1.0, C / (lengths[-1] or C)) * array
    batch = (*copy.deepcopy([x, y]), None)
    sums, norms = clipped_sum(model, [batch], flat, micro_batch=micro_batch)
    assert sums.keys() == right.keys()
    np.testing.assert_allclose(norms[:, 0], lengths, rtol=1e-4, atol=1e-6)
    for name, array in right.items():
        # JAX's two passes, taken if they are the faster ones, count norms as larger by 2**-16.
        np.testing.assert_allclose(sums[name], array, rtol=2.0**-15, atol=2e-6)
    return sums
