# SPDX-License-Identifier: Apache-2.0
"""No record changes the sum by more than the bound, whatever it and the others hold.

Between two sums that differ in a record, the others are in other places of other batches, and may
be rounded otherwise there: to what one record may add comes 2u times the sum, for gradients of
unit roundoff u.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.optimizer import Optimizer
from dpsgd_managers import request
from helpers import require
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from units.dpsgd.test_dpsgd_persample import MODELS, Model, numbers, rng

from fedclip.dpsgd.step import IndependentNoise, SampleClipping
from fedclip.engines.declearn.persample import clipped_sum
from fedclip.engines.declearn.private_client import PrivateTrainingManager
from fedclip.engines.declearn.sample_clip import SampleClip
from fedclip.privacy.noise import insecure_normals


def without_noise(name: str, mode: str, positions: Any) -> tuple[Any, float]:
    """Return the sum of a step, once the noise that was drawn for it is taken away, and its norm.

    What the optimizer gets is looked at: weights would round it once more.
    """
    model, x, y = model_of(name)
    data = InMemoryDataset(np.asarray(x), target=y)
    optim = Optimizer(lrate=1.0, modules=[SampleClip(mode=mode, micro_batch=4)])
    made = PrivateTrainingManager(model, optim, AveragingAggregator(), data, data, verbose=False)
    made.make_private(request(batches={"batch_size": 6}, sclip_norm=C))
    made.noise, made._normals = IndependentNoise(insecure_normals(3)), np.zeros
    given: list[Any] = []
    optim.apply_gradients = lambda model, gradients: given.append(gradients)  # type: ignore[method-assign]
    made.run_train_step(made.records.take(positions))
    clipping = SampleClip(mode=mode).clipping
    std = clipping.noise_multiplier(made.calibration.noise_multiplier, 6.0) * C
    names = [*given[0].coefs]
    noisy = [numbers(given[0].coefs[n]) * 6.0 / clipping.scale(C) for n in names]
    drawn = insecure_normals(3)
    sums = [a - std * drawn(a.size).reshape(a.shape) for a in noisy]
    flat = np.concatenate([a.ravel() for a in sums])
    return flat, float(np.linalg.norm(np.concatenate([a.ravel() for a in noisy])))


pytestmark = pytest.mark.slow

Records = list[tuple[int, float, float]]

C = 0.3
MODES = ("flat", "tensor", "layer", "patterns", "automatic", "adaptive")
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def torch_model(kind: str = "mlp", dtype: str = "float32") -> Model:
    require("torch")
    import torch
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    nn = torch.nn
    x: Any = rng().normal(size=(13, 1, 8, 8)).astype("float32")

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 6)
            self.norm = nn.LayerNorm(6)
            self.out = nn.Linear(6, 3)
            self.out.weight = self.embed.weight

        def forward(self, x: Any) -> Any:
            return self.out(self.norm(self.embed(x).mean(1)))

    deep = [layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())]
    nets: dict[str, Callable[[], Any]] = {
        "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)),
        "deep": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *deep, nn.Linear(8, 3)),
        "tied": Tied,
    }
    if kind == "tied":
        x = rng().integers(0, 3, (13, 7))
    net = nets[kind]().to(getattr(torch, dtype))
    if x.dtype == np.float32:
        x = torch.from_numpy(x).to(getattr(torch, dtype))
    return TorchModel(net, nn.CrossEntropyLoss()), x, rng().integers(0, 3, 13)


# What is trained, and in which dtype its gradients are.
MAKERS: dict[str, tuple[Callable[[], Model], str]] = {
    "jax": (MODELS["jax"], "float32"),
    "tensorflow": (MODELS["tensorflow"], "float32"),
    "sklearn": (MODELS["sklearn"], "float64"),
    "torch, 20 tensors": (partial(torch_model, "deep"), "float32"),
    "torch, shared": (partial(torch_model, "tied"), "float32"),
    "torch, float16": (partial(torch_model, "mlp", "float16"), "float16"),
    "torch, bfloat16": (partial(torch_model, "deep", "bfloat16"), "bfloat16"),
}


@functools.cache
def model_of(name: str) -> Model:
    return MAKERS[name][0]()


LOUD = st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6, 1e30, -1.0, np.nan, np.inf])
WEIGHTS = st.sampled_from([0.0, 1.0, 5.0, 1e6, 1e-6, np.nan])
RECORDS = st.lists(st.tuples(st.integers(0, 12), LOUD, WEIGHTS), min_size=2, max_size=13)
LOUDEST = [(i, 1e6, 1e6) for i in range(13)]
ODD = [
    (0, np.nan, 1.0),
    (1, np.inf, 5.0),
    (2, 1.0, 0.0),
    (3, 1.0, 1e6),
    (4, 0.0, 1.0),
    (4, 1.0, 5.0),
]


def batch_of(name: str, records: Records) -> Any:
    _, x, y = model_of(name)
    at = np.array([i for i, _, _ in records])
    loud = np.array([scale for _, scale, _ in records])
    weights = np.array([weight for _, _, weight in records], dtype="float32")
    inputs: Any = x[at]
    if hasattr(inputs, "new_tensor"):
        inputs = inputs * inputs.new_tensor(loud).reshape(-1, *[1] * (inputs.ndim - 1))
    elif inputs.dtype.kind == "f":
        with np.errstate(all="ignore"):
            scaled = inputs * loud.reshape(-1, *[1] * (inputs.ndim - 1))
            inputs = scaled.astype(inputs.dtype)
    return inputs, y[at], weights


def sum_of(name: str, mode: str, records: Records) -> Any:
    model = model_of(name)[0]
    names = [*model.get_weights(trainable=True).coefs]
    clipping = SampleClipping([names[0], names[1]] if mode == "patterns" else mode)
    sums, norms = clipped_sum(
        *(model, [batch_of(name, records)] if records else []),
        partial(clipping.factors, bound=C),
        groups=clipping.groups(names),
        micro_batch=4,
    )
    assert len(norms) == len(records)
    return np.concatenate([sums[n].ravel() for n in names])


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    records=RECORDS, mode=st.sampled_from(MODES), at=st.integers(0, 12), other=st.integers(0, 12)
)
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
    changed = np.linalg.norm(whole - sum_of(name, mode, replaced))
    assert changed <= 2 * C * (1 + 1e-6) + rounding


@pytest.mark.parametrize(
    ("name", "mode"),
    [("torch, 20 tensors", "layer"), ("jax", "automatic"), ("sklearn", "adaptive")],
)
def test_without_its_noise_a_step_is_moved_by_the_bound_at_most(name: str, mode: str) -> None:
    pytest.importorskip("opacus")
    whole, norm = without_noise(name, mode, np.arange(6))
    unit = UNITS[MAKERS[name][1]]
    # All of them are clipped: what is found is no rounding.
    assert np.linalg.norm(whole) > C / 10
    for at in range(6):
        others = np.delete(np.arange(6), at)
        changed = np.linalg.norm(whole - without_noise(name, mode, others)[0])
        assert changed <= C * (1 + 1e-6) + 2 * unit * norm
        replaced = without_noise(name, mode, np.append(others, 7))[0]
        assert np.linalg.norm(whole - replaced) <= 2 * C * (1 + 1e-6) + 2 * unit * norm
