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
from dpsgd_models import MODELS, Model, rng
from helpers import require
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedclip.dpsgd.clipping import SampleClipping
from fedclip.engines.declearn.persample import clipped_sum

pytestmark = pytest.mark.slow

Records = list[tuple[int, float, float]]

C = 0.3
MODES = ("flat", "tensor", "layer", "patterns", "automatic", "adaptive")
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def torch_model(depth: int, dtype: str) -> Model:
    torch = require("torch")
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    nn = torch.nn
    deep = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), *deep, nn.Linear(8, 3))
    kind = getattr(torch, dtype)
    x: Any = torch.from_numpy(rng().normal(size=(13, 1, 8, 8)).astype("float32")).to(kind)
    return TorchModel(net.to(kind), nn.CrossEntropyLoss()), x, rng().integers(0, 3, 13)


# What is trained, and in which dtype its gradients are.
MAKERS: dict[str, tuple[Callable[[], Model], str]] = {
    "jax": (MODELS["jax"], "float32"),
    "tensorflow": (MODELS["tensorflow"], "float32"),
    "sklearn": (MODELS["sklearn"], "float64"),
    "torch, 20 tensors": (partial(torch_model, 9, "float32"), "float32"),
    "torch, float16": (partial(torch_model, 0, "float16"), "float16"),
    "torch, bfloat16": (partial(torch_model, 9, "bfloat16"), "bfloat16"),
}


@functools.cache
def model_of(name: str) -> Model:
    return MAKERS[name][0]()


LOUD = st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6, 1e30, -1.0, np.nan, np.inf])
WEIGHTS = st.sampled_from([0.0, 1.0, 5.0, 1e6, 1e-6, np.nan])
RECORDS = st.lists(st.tuples(st.integers(0, 12), LOUD, WEIGHTS), min_size=2, max_size=13)
LOUDEST = [(i, 1e6, 1e6) for i in range(13)]
ODD = [*zip((0, 1, 2, 3, 4, 4), (np.nan, np.inf, 1, 1, 0, 1), (1, 5, 0, 1e6, 1, 5), strict=True)]


def batch_of(name: str, records: Records) -> Any:
    _, x, y = model_of(name)
    at, loud, weights = map(np.array, zip(*records, strict=True))
    inputs: Any = x[at]
    scale = loud.reshape(-1, *[1] * (inputs.ndim - 1))
    if hasattr(inputs, "new_tensor"):
        inputs = inputs * inputs.new_tensor(scale)
    else:
        with np.errstate(all="ignore"):
            inputs = (inputs * scale).astype(inputs.dtype)
    return inputs, y[at], weights.astype("float32")


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
