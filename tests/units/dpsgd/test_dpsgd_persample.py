# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records: against oracles, and what a record can change at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import require

from fedclip.dpsgd.persample.base import UnsupportedModelError
from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import check, clipped_sum, vector

pytestmark = pytest.mark.slow

C = 0.3
Model = tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def flat(norms: Any) -> Any:
    return SampleClipping().factors(norms, C)


# -- models ------------------------------------------------------------------------------------
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
    require("tensorflow")
    import keras
    from declearn.model.tensorflow import TensorflowModel

    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = TensorflowModel(keras.Sequential(layers), loss)
    model.initialize({"features_shape": (6,)})
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

each_model = pytest.mark.parametrize("name", MODELS)


def numbers(array: Any) -> Any:
    array = array.detach().double().numpy() if hasattr(array, "detach") else array
    return np.asarray(array, dtype=np.float64)


def expected(model: Any, x: Any, y: Any, dense: Any = None) -> dict[str, Any]:
    """Return the clipped sum from declearn's own gradients of batches of one record."""
    dense = dense or (lambda array: array)
    total: dict[str, Any] = {}
    for i in range(len(x)):
        given = (x[i : i + 1], y[i : i + 1], None)
        found = model.compute_batch_gradients(given).coefs
        grads = {n: numbers(dense(a)) for n, a in found.items()}
        norm = np.sqrt(sum((a**2).sum() for a in grads.values()))
        for name, array in grads.items():
            total[name] = total.get(name, 0.0) + min(1.0, C / norm if norm else 1.0) * array
    return total


# -- oracles -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "micro_batch"),
    [("torch", 5), ("torch", 100), ("jax", 5), ("tensorflow", 5), ("sklearn", 13)],
)
def test_sums_are_those_of_records_alone(name: str, micro_batch: int) -> None:
    model, x, y = MODELS[name]()
    check(model)
    sums, norms = clipped_sum(model, [(x, y, None)], flat, micro_batch=micro_batch)
    right = expected(model, x, y)
    assert norms.shape == (13, 1)
    assert sums.keys() == right.keys()
    for key, array in right.items():
        np.testing.assert_allclose(sums[key], array, rtol=0, atol=1e-6)
    made = vector(model, sums)
    assert type(made) is type(model.get_weights())
    like = model.get_weights(trainable=True).coefs
    assert {n: a.dtype for n, a in made.coefs.items()} == {n: a.dtype for n, a in like.items()}


LOSSES = {
    "classifier": "hinge log_loss modified_huber squared_hinge perceptron squared_error huber "
    "epsilon_insensitive squared_epsilon_insensitive",
    "regressor": "squared_error huber epsilon_insensitive squared_epsilon_insensitive",
}


@pytest.mark.parametrize(
    ("kind", "loss", "penalty"),
    [
        (kind, loss, (None, "l2", "l1", "elasticnet")[i % 4])
        for kind, names in LOSSES.items()
        for i, loss in enumerate(names.split())
    ],
)
def test_closed_forms_are_what_scikit_learn_does(kind: str, loss: str, penalty: Any) -> None:
    from scipy.sparse import csr_matrix

    for classes, intercept, sparse in [(2, True, False), (4, False, False), (4, True, True)]:
        model, x, y = sklearn_model(
            kind=kind, loss=loss, penalty=penalty, fit_intercept=intercept, classes=classes
        )
        data: Any = csr_matrix(x) if sparse else x
        weights = rng().uniform(0, 3, 13)
        unclipped, _ = clipped_sum(model, [(data, y, weights)], np.ones_like, micro_batch=5)
        total = sum(
            model._compute_sample_gradient(data[i : i + 1] if sparse else x[i], y[i]) * weights[i]
            for i in range(13)
        )
        for name, array in unclipped.items():
            np.testing.assert_allclose(array, total.coefs[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_keras_layers_without_a_vectorized_gradient(kind: str) -> None:
    tf = require("tensorflow")
    import keras
    from declearn.model.tensorflow import TensorflowModel

    layers = keras.layers
    inputs = keras.Input((7,))
    embedded = layers.Embedding(11, 6)(inputs)
    if kind == "attention":
        found = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 3)(embedded, embedded))
    else:
        found = layers.LSTM(5)(embedded)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = TensorflowModel(keras.Model(inputs, layers.Dense(3)(found)), loss)
    model.initialize({"features_shape": (7,)})
    x, y = rng().integers(0, 11, (13, 7)), rng().integers(0, 3, 13)
    sums, _ = clipped_sum(model, [(x, y, None)], flat, micro_batch=5)
    for name, array in expected(model, x, y, tf.convert_to_tensor).items():
        np.testing.assert_allclose(sums[name], array, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_each_record_has_its_own_dropout_and_no_seed_foretells_it(backend: str) -> None:
    def one() -> Any:
        if backend == "tensorflow":
            keras = require("keras")
            from declearn.model.tensorflow import TensorflowModel

            drop = keras.layers.Dropout(0.5, seed=1)
            net = keras.Sequential([drop, keras.layers.Dense(1, use_bias=False)])
            return TensorflowModel(net, keras.losses.MeanSquaredError())
        require("jax")
        import haiku as hk
        from declearn.model.haiku import HaikuModel

        def dropped(x: Any) -> Any:
            return hk.Linear(1, with_bias=False)(hk.dropout(hk.next_rng_key(), 0.5, x))

        return HaikuModel(dropped, lambda found, y: ((found - y) ** 2).sum(-1), seed=0)

    # What is dropped has a gradient of zero. The server knows the seeds of both models.
    batch = (np.ones((40, 64), "float32"), np.full((40, 1), 9.0, "float32"), None)
    seen: list[Any] = []

    def look(arrays: Any) -> Any:
        seen.append(next(iter(arrays.values())) != 0)
        return arrays

    for model in (one(), one()):
        model.initialize({"features_shape": (64,), "data_type": "float32"})
        clipped_sum(model, [batch], flat, each=look)
    assert len({row.tobytes() for row in seen}) == 80


# -- refusals ----------------------------------------------------------------------------------
def test_keras_batch_normalization_is_refused_by_name() -> None:
    require("tensorflow")
    import keras
    from declearn.model.tensorflow import TensorflowModel

    net = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(name="bn")])
    model = TensorflowModel(net, keras.losses.MeanSquaredError())
    model.initialize({"features_shape": (4,)})
    with pytest.raises(ValueError, match=r"the layer 'bn' \(BatchNormalization\) mixes"):
        check(model)


def test_class_weights_and_other_models_are_refused() -> None:
    model, _, _ = sklearn_model()
    model._model.set_params(class_weight={0: 2.0})
    with pytest.raises(ValueError, match="class_weight lets"):
        check(model)
    with pytest.raises(TypeError, match="no gradients of single records for object"):
        check(object())


@each_model
def test_no_record_at_all_is_a_sum_of_zeros(name: str) -> None:
    model, x, y = MODELS[name]()
    for batches in ([], [(x[:0], y[:0], None)]):
        sums, norms = clipped_sum(model, batches, flat)
        assert norms.shape == (0, 1)
        assert all(not a.any() for a in sums.values())
        shapes = {n: a.shape for n, a in model.get_weights(trainable=True).coefs.items()}
        assert {n: a.shape for n, a in sums.items()} == {n: tuple(s) for n, s in shapes.items()}


# -- what a trial shows ------------------------------------------------------------------------
def test_what_is_used_and_not_followed_is_refused_and_numbers_are_trained() -> None:
    torch = require("torch")
    from fedclip.dpsgd.step import PrivateMean
    from fedclip.loops.torch import private_gradients

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Frozen layers with a gradient of their inputs, as PEFT has them, and a scale."""

        def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
            super().__init__()
            self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
            self.frozen.register_forward_hook(lambda m, i, out: out.requires_grad_())
            self.layer, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.reentrant, self.drop = reentrant, torch.nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            run = torch.utils.checkpoint.checkpoint
            x = run(self.layer, self.frozen(x), use_reentrant=self.reentrant)
            return (
                self.last(self.drop(torch.nn.functional.linear(x, self.layer.weight))) * self.scale
            )

    x, y = torch.randn(4, 3), torch.randn(4, 1)
    mean = PrivateMean(max_norm=1e6, noise_multiplier=1e-12, expected_batch_size=4)
    net = Net(reentrant=False)
    found = private_gradients(net, torch.nn.MSELoss(), x, y, mean)
    torch.nn.MSELoss()(net(x), y).backward()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, net.get_parameter(name).grad)
    private_gradients(Net(False, dropout=0.5), torch.nn.MSELoss(), x, y, mean)
    with pytest.raises((UnsupportedModelError, RuntimeError), match="use_reentrant=False"):
        private_gradients(Net(reentrant=True), torch.nn.MSELoss(), x, y, mean)
