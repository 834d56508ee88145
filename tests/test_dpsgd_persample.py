# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records: against oracles, and what a record can change at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from declearn.utils import set_device_policy
from helpers import require

from fedclip.dpsgd.clipping import SampleClipping
from fedclip.dpsgd.persample import check, clipped_sum, vector
from fedclip.scopes import resolve

pytestmark = pytest.mark.slow

C = 0.3
Model = tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu() -> None:
    set_device_policy(gpu=False)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def flat(norms: Any) -> Any:
    return SampleClipping().factors(norms, C)


# -- models ------------------------------------------------------------------------------------
def torch_model(dtype: str = "float32") -> Model:
    require("torch")
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    nn, kind = torch.nn, getattr(torch, dtype)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)).to(kind)
    x = torch.from_numpy(rng().normal(size=(13, 1, 8, 8))).to(kind)
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


def expected(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Return the clipped sum from declearn's own gradients of batches of one record."""
    total: dict[str, Any] = {}
    for i in range(len(x)):
        given = (x[i : i + 1], y[i : i + 1], None)
        grads = {n: numbers(a) for n, a in model.compute_batch_gradients(given).coefs.items()}
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


# -- what a record can change ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    model, x, y = torch_model(dtype)
    sums = clipped_sum(model, [(x, y, None)], flat, micro_batch=4)[0]
    for i in range(13):
        keep = [j for j in range(13) if j != i]
        less = clipped_sum(model, [(x[keep], y[keep], None)], flat, micro_batch=4)[0]
        change = np.sqrt(sum(((sums[n] - less[n]) ** 2).sum() for n in sums))
        total = np.sqrt(sum((sums[n] ** 2).sum() for n in sums))
        unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}[dtype]
        assert change <= C * (1 + 1e-6) + 2 * unit * total


@each_model
def test_no_record_at_all_is_a_sum_of_zeros(name: str) -> None:
    model, x, y = MODELS[name]()
    for batches in ([], [(x[:0], y[:0], None)]):
        sums, norms = clipped_sum(model, batches, flat)
        assert norms.shape == (0, 1)
        assert all(not a.any() for a in sums.values())
        shapes = {n: a.shape for n, a in model.get_weights(trainable=True).coefs.items()}
        assert {n: a.shape for n, a in sums.items()} == {n: tuple(s) for n, s in shapes.items()}


def test_what_comes_before_is_applied_to_each_record() -> None:
    model, x, y = sklearn_model()
    groups = resolve("tensor", None, ("coef", "intercept"))
    signs = clipped_sum(
        *(model, [(x, y, None)], np.ones_like),
        groups=groups,
        each=lambda arrays: {n: np.sign(a) for n, a in arrays.items()},
        micro_batch=5,
    )[0]
    right = sum(
        np.sign(model._compute_sample_gradient(x[i], y[i]).coefs["coef"]) for i in range(13)
    )
    np.testing.assert_array_equal(signs["coef"], right)


def test_each_record_has_its_own_dropout() -> None:
    require("torch")
    import torch
    from declearn.model.torch import TorchModel

    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    model = TorchModel(net, torch.nn.MSELoss())
    x = np.ones((40, 64), dtype="float32")
    seen: list[Any] = []

    def look(arrays: Any) -> Any:
        seen.append(arrays["module.1.weight"] != 0)
        return arrays

    clipped_sum(model, [(x, np.full((40, 1), 9.0, dtype="float32"), None)], flat, each=look)
    assert len({row.tobytes() for row in seen}) == 40


def keras_layers(kind: str) -> Any:
    import keras

    layers = keras.layers
    inputs = keras.Input((7,))
    found = layers.Embedding(11, 6)(inputs)
    if kind == "attention":
        found = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 3)(found, found))
    else:
        found = {"lstm": layers.LSTM, "gru": layers.GRU}[kind](5)(found)
    return keras.Model(inputs, layers.Dense(3)(found))


@pytest.mark.parametrize("kind", ["lstm", "gru", "attention"])
def test_keras_layers_without_a_vectorized_gradient(kind: str) -> None:
    require("tensorflow")
    import keras
    import tensorflow as tf
    from declearn.model.tensorflow import TensorflowModel

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = TensorflowModel(keras_layers(kind), loss)
    model.initialize({"features_shape": (7,)})
    x, y = rng().integers(0, 11, (13, 7)), rng().integers(0, 3, 13)
    sums, _ = clipped_sum(model, [(x, y, None)], flat, micro_batch=5)
    total: dict[str, Any] = {}
    for i in range(13):
        grads = model.compute_batch_gradients((x[i : i + 1], y[i : i + 1], None)).coefs
        dense = {n: numbers(tf.convert_to_tensor(a)) for n, a in grads.items()}
        factor = min(1.0, C / np.sqrt(sum((a**2).sum() for a in dense.values())))
        for name, array in dense.items():
            total[name] = total.get(name, 0.0) + factor * array
    for name, array in total.items():
        np.testing.assert_allclose(sums[name], array, rtol=0, atol=1e-6)


def test_each_record_has_its_own_dropout_in_keras_and_haiku() -> None:
    require("tensorflow")
    require("jax")
    import haiku as hk
    import keras
    from declearn.model.haiku import HaikuModel
    from declearn.model.tensorflow import TensorflowModel

    net = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(1, use_bias=False)])

    def dropped(x: Any) -> Any:
        return hk.Linear(1, with_bias=False)(hk.dropout(hk.next_rng_key(), 0.5, x))

    models: list[Any] = [
        TensorflowModel(net, keras.losses.MeanSquaredError()),
        HaikuModel(dropped, lambda found, y: ((found - y) ** 2).sum(-1), seed=0),
    ]
    batch = (np.ones((40, 64), "float32"), np.full((40, 1), 9.0, "float32"), None)
    for model in models:
        model.initialize({"features_shape": (64,), "data_type": "float32"})
        seen: list[Any] = []

        def look(arrays: Any, seen: list[Any] = seen) -> Any:
            seen.append(next(iter(arrays.values())) != 0)
            return arrays

        clipped_sum(model, [batch], flat, each=look)
        assert len({row.tobytes() for row in seen}) == 40


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_seed_which_the_server_knows_foretells_no_dropout(backend: str) -> None:
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

    # Of a single record, what is dropped has a gradient of zero.
    batch = (np.ones((1, 64), "float32"), np.full((1, 1), 9.0, "float32"), None)
    left = []
    for model in (one(), one()):
        model.initialize({"features_shape": (64,), "data_type": "float32"})
        (sums,) = clipped_sum(model, [batch], flat)[0].values()
        left.append(sums.ravel() != 0)
    assert not np.array_equal(*left)


# -- refusals ----------------------------------------------------------------------------------
def test_layers_that_mix_records_are_refused_by_name() -> None:
    require("torch")
    import torch
    from declearn.model.torch import TorchModel

    for layer in (torch.nn.BatchNorm1d(4), torch.nn.InstanceNorm1d(4, track_running_stats=True)):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
        with pytest.raises(ValueError, match=r"the layer '1' \(\w+\) mixes the records"):
            check(TorchModel(net, torch.nn.MSELoss()))


def test_a_buffer_that_training_changes_is_refused_by_name() -> None:
    require("torch")
    import torch
    from declearn.model.torch import TorchModel

    class Counting(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.seen.add_(x.detach().sum(0))
            return super().forward(x)

    model = TorchModel(Counting(), torch.nn.MSELoss())
    batch = (np.ones((3, 4), "float32"), np.ones((3, 1), "float32"), None)
    with pytest.raises(ValueError, match="training changes the buffer 'seen'"):
        clipped_sum(model, [batch], flat)
    assert not model._raw_model.module.seen.any()


def test_keras_batch_normalization_is_refused_by_name() -> None:
    require("tensorflow")
    import keras
    from declearn.model.tensorflow import TensorflowModel

    net = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(name="bn")])
    model = TensorflowModel(net, keras.losses.MeanSquaredError())
    model.initialize({"features_shape": (4,)})
    with pytest.raises(ValueError, match=r"the layer 'bn' \(BatchNormalization\) mixes"):
        check(model)


def test_haiku_models_with_a_state_are_refused_by_haiku() -> None:
    require("jax")
    import haiku as hk
    from declearn.model.haiku import HaikuModel

    def normed(x: Any) -> Any:
        return hk.Linear(1)(hk.BatchNorm(True, True, 0.9)(x, is_training=True))

    model = HaikuModel(normed, lambda found, y: found.sum(-1), seed=0)
    with pytest.raises(ValueError, match="transform_with_state"):
        model.initialize({"features_shape": (4,), "data_type": "float32"})


def test_class_weights_and_other_models_are_refused() -> None:
    model, _, _ = sklearn_model()
    model._model.set_params(class_weight={0: 2.0})
    with pytest.raises(ValueError, match="class_weight lets"):
        check(model)
    with pytest.raises(TypeError, match="no gradients of single records for object"):
        check(object())
