# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records: against oracles, and what a record can change at most."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import dpsgd_models
import numpy as np
import pytest
from dpsgd_models import MODELS, Model, assert_alone, calls, flat, numbers, rng
from helpers import require
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedclip.dpsgd.persample.base import UnsupportedModelError
from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import check, clipped_sum, vector

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("micro_batch", [5, 100])
@pytest.mark.parametrize("name", [*MODELS, "lstm", "attention"])
def test_sums_are_those_of_records_alone(name: str, micro_batch: int) -> None:
    model, x, y = MODELS[name]() if name in MODELS else dpsgd_models.keras_tokens(name)
    check(model)
    made = vector(model, assert_alone(model, x, y, micro_batch))
    like = model.get_weights(trainable=True).coefs
    assert {n: a.dtype for n, a in made.coefs.items()} == {n: a.dtype for n, a in like.items()}


LOSSES = "squared_error huber epsilon_insensitive squared_epsilon_insensitive"
OF_CLASSES = f"hinge log_loss modified_huber squared_hinge perceptron {LOSSES}"


@pytest.mark.parametrize(
    ("kind", "loss", "penalty"),
    [
        (kind, loss, (None, "l2", "l1", "elasticnet")[i % 4])
        for kind, names in (("classifier", OF_CLASSES), ("regressor", LOSSES))
        for i, loss in enumerate(names.split())
    ],
)
def test_closed_forms_are_what_scikit_learn_does(kind: str, loss: str, penalty: Any) -> None:
    from scipy.sparse import csr_matrix

    for classes, intercept, sparse in [(2, True, False), (4, False, False), (4, True, True)]:
        settings = {"penalty": penalty, "fit_intercept": intercept, "classes": classes}
        model, x, y = dpsgd_models.sklearn_model(kind=kind, loss=loss, **settings)
        data: Any = csr_matrix(x) if sparse else x
        weights = rng().uniform(0, 3, 13)
        unclipped, _ = clipped_sum(model, [(data, y, weights)], np.ones_like, micro_batch=5)
        rows = [data[i : i + 1] for i in range(13)] if sparse else x
        alone = map(model._compute_sample_gradient, rows, y)
        total: Any = sum(one * weight for one, weight in zip(alone, weights, strict=True))
        for name, array in unclipped.items():
            np.testing.assert_allclose(array, total.coefs[name], rtol=0, atol=1e-9)


def dropping(backend: str) -> Any:
    """Return a model whose inputs drop out; a server knows its seed."""
    if backend == "tensorflow":
        keras = require("keras")
        layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1, use_bias=False)]
        return dpsgd_models.keras_model(keras.Sequential(layers), shape=(64,))
    if backend == "torch":
        return torch_model(lambda nn: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False)))
    require("jax")
    import haiku as hk
    from declearn.model.haiku import HaikuModel

    def dropped(x: Any) -> Any:
        return hk.Linear(1, with_bias=False)(hk.dropout(hk.next_rng_key(), 0.5, x))

    model = HaikuModel(dropped, lambda found, y: ((found - y) ** 2).sum(-1), seed=0)
    model.initialize({"features_shape": (64,), "data_type": "float32"})
    return model


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_each_record_has_its_own_dropout_and_no_seed_foretells_it(backend: str) -> None:
    batch = (np.ones((40, 64), "float32"), np.full((40, 1), 9.0, "float32"), None)
    seen: list[Any] = []

    def look(arrays: Any) -> Any:
        # What is dropped has a gradient of zero.
        seen.append(numbers(next(iter(arrays.values()))) != 0)
        return arrays

    for _ in range(1 if backend == "torch" else 2):
        clipped_sum(dropping(backend), [batch], flat, each=look)
    assert len({row.tobytes() for row in seen}) == len(seen) >= 40


def torch_model(make: Callable[[Any], Any]) -> Any:
    torch = require("torch")
    from declearn.model.torch import TorchModel

    torch.manual_seed(1)
    return TorchModel(make(torch.nn), torch.nn.MSELoss())


def of_torch(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return partial(torch_model, make)


def batch_normalized() -> Any:
    keras = require("keras")
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(name="bn")]
    return dpsgd_models.keras_model(keras.Sequential(layers))


def weighted_classes() -> Any:
    model, _, _ = dpsgd_models.sklearn_model()
    model._model.set_params(class_weight={0: 2.0})
    return model


REFUSED: dict[str, Callable[[], Any]] = {
    "is a spectral norm": of_torch(
        lambda nn: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    ),
    "no trainable weights": of_torch(lambda nn: nn.Linear(4, 3).requires_grad_(False)),
    r"layer '0' \(BatchNorm1d\) mixes": of_torch(lambda nn: nn.Sequential(nn.BatchNorm1d(4))),
    r"'' \(InstanceNorm1d\) mixes": of_torch(lambda nn: nn.InstanceNorm1d(4, 0, 0.1, True, True)),
    r"'' \(BatchNorm1d\) mixes": of_torch(lambda nn: nn.BatchNorm1d(4, 0, 0.1, True, False)),
    r"compiled by torch\.jit": of_torch(lambda nn: require("torch").jit.script(nn.Linear(4, 3))),
    r"layer 'table' \(Embedding\) has max_norm": of_torch(
        lambda nn: calls(lambda net, x: net.table(x), table=nn.Embedding(5, 4, max_norm=1.0))
    ),
    r"the layer 'bn' \(BatchNormalization\) mixes": batch_normalized,
    "class_weight lets": weighted_classes,
    "no gradients of single records for object": object,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("words", REFUSED)
def test_what_can_not_be_private_is_refused_by_name(words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        check(REFUSED[words]())


@pytest.mark.parametrize("name", MODELS)
def test_no_record_at_all_is_a_sum_of_zeros(name: str) -> None:
    model, x, y = MODELS[name]()
    shapes = {n: tuple(a.shape) for n, a in model.get_weights(trainable=True).coefs.items()}
    for batches in ([], [(x[:0], y[:0], None)]):
        sums, norms = clipped_sum(model, batches, flat)
        assert norms.shape == (0, 1)
        assert not any(a.any() for a in sums.values())
        assert {n: a.shape for n, a in sums.items()} == shapes


def test_what_is_used_and_not_followed_is_refused_and_numbers_are_trained() -> None:
    torch = require("torch")
    from fedclip.dpsgd.step import PrivateMean
    from fedclip.loops.torch import private_gradients

    class Net(torch.nn.Module):
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
            x = torch.nn.functional.linear(x, self.layer.weight)
            return self.last(self.drop(x)) * self.scale

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


Records = list[tuple[int, float, float]]

C = 0.3
MODES = ("flat", "tensor", "layer", "patterns", "automatic", "adaptive")
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


# What is trained, and in which dtype its gradients are.
MAKERS: dict[str, tuple[Callable[[], Model], str]] = {
    "jax": (MODELS["jax"], "float32"),
    "tensorflow": (MODELS["tensorflow"], "float32"),
    "sklearn": (MODELS["sklearn"], "float64"),
    "torch, 20 tensors": (partial(MODELS["torch"], 9, "float32"), "float32"),
    "torch, float16": (partial(MODELS["torch"], 0, "float16"), "float16"),
    "torch, bfloat16": (partial(MODELS["torch"], 9, "bfloat16"), "bfloat16"),
}


@functools.cache
def model_of(name: str) -> Model:
    return MAKERS[name][0]()


LOUD = st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6, 1e30, -1.0, np.nan, np.inf])
WEIGHTS = st.sampled_from([0.0, 1.0, 5.0, 1e6, 1e-6, np.nan])
PLACES = st.integers(0, 12)
RECORDS = st.lists(st.tuples(PLACES, LOUD, WEIGHTS), min_size=2, max_size=13)
LOUDEST = [(i, 1e6, 1e6) for i in range(13)]
ODD = [*zip((0, 1, 2, 3, 4, 4), (np.nan, np.inf, 1, 1, 0, 1), (1, 5, 0, 1e6, 1, 5), strict=True)]


def sum_of(name: str, mode: str, records: Records) -> Any:
    model, x, y = model_of(name)
    batches = []
    if records:
        at, loud, weights = map(np.array, zip(*records, strict=True))
        scale = loud.reshape(-1, *[1] * (x.ndim - 1))
        if hasattr(x, "new_tensor"):
            inputs = x[at] * x.new_tensor(scale)
        else:
            with np.errstate(all="ignore"):
                inputs = (x[at] * scale).astype(x.dtype)
        batches = [(inputs, y[at], weights.astype("float32"))]
    names = [*model.get_weights(trainable=True).coefs]
    clipping = SampleClipping([names[0], names[1]] if mode == "patterns" else mode)
    factors, groups = partial(clipping.factors, bound=C), clipping.groups(names)
    sums, norms = clipped_sum(model, batches, factors, groups=groups, micro_batch=4)
    assert len(norms) == len(records)
    return np.concatenate([sums[n].ravel() for n in names])


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(records=RECORDS, mode=st.sampled_from(MODES), at=PLACES, other=PLACES)
@example(records=LOUDEST, mode="layer", at=12, other=1)
@example(records=ODD, mode="flat", at=0, other=3)
@example(records=ODD, mode="automatic", at=3, other=1)
def test_a_record_moves_the_sum_by_the_bound_at_most(
    name: str, records: Records, mode: str, at: int, other: int
) -> None:
    at %= len(records)
    whole = sum_of(name, mode, records)
    assert np.isfinite(whole).all()
    rounding = 2 * UNITS[MAKERS[name][1]] * np.linalg.norm(whole)
    without = sum_of(name, mode, records[:at] + records[at + 1 :])
    assert np.linalg.norm(whole - without) <= C * (1 + 1e-6) + rounding
    replaced = [*records]
    replaced[at] = (other, 1.0, 1e6)
    assert np.linalg.norm(whole - sum_of(name, mode, replaced)) <= 2 * C * (1 + 1e-6) + rounding
