# SPDX-License-Identifier: Apache-2.0
"""The private step of plain loops: as Opacus and optax have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import require

from fedclip.dpsgd.step import IndependentNoise, PrivateMean

pytestmark = pytest.mark.slow

C = 0.2
QUIET = {"max_norm": C, "noise_multiplier": 0.0, "expected_batch_size": 13}


def torch_case() -> Any:
    torch = require("torch")
    torch.manual_seed(0)
    nn = torch.nn
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    return nn.Sequential(*layers), torch.randn(13, 1, 8, 8), torch.randint(0, 3, (13,))


@pytest.mark.filterwarnings("ignore")
def test_torch_gradients_are_those_of_opacus() -> None:
    opacus = pytest.importorskip("opacus")
    import torch

    from fedclip.loops.torch import private_gradients

    net, x, y = torch_case()
    loss = torch.nn.CrossEntropyLoss()
    found = private_gradients(net, loss, x, y, PrivateMean(**QUIET), micro_batch=5)
    sampled = opacus.GradSampleModule(net, loss_reduction="mean")
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(sampled.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=13,
    )
    loss(sampled(x), y).backward()
    optimizer.pre_step()
    right = {n: p.grad for n, p in sampled._module.named_parameters()}
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


def test_jax_gradients_are_those_of_optax() -> None:
    optax = require("optax")
    import jax
    import jax.numpy as jnp

    from fedclip.loops.jax import private_gradients

    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(6, 3)), "float32"), "b": jnp.zeros(3)}
    x = jnp.asarray(rng.normal(size=(13, 6)), "float32")
    y = jnp.asarray(rng.integers(0, 3, 13))

    def loss(params: Any, record: Any) -> Any:
        features, label = record
        return -jax.nn.log_softmax(jnp.tanh(features) @ params["w"] + params["b"])[label]

    theirs = optax.contrib.differentially_private_aggregate(C, 0.0, 0)
    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, (x, y))
    right, _ = theirs.update(each, theirs.init(params))
    for micro_batch in (5, 128):
        mean = PrivateMean(**QUIET)
        found = private_gradients(loss, params, (x, y), mean, micro_batch=micro_batch)
        assert jax.tree.structure(found) == jax.tree.structure(params)
        for name in params:
            assert found[name].dtype == params[name].dtype
            np.testing.assert_allclose(found[name], right[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("framework", "records"), [("torch", 0), ("jax", 13)])
def test_noise_is_as_large_as_it_says(framework: str, records: int) -> None:
    mean = PrivateMean(max_norm=C, noise_multiplier=1.5, expected_batch_size=4)
    if framework == "torch":
        torch = require("torch")
        from fedclip.loops import torch as adapter

        wide = torch.nn.Linear(100_000, 1, bias=False)
        x = torch.zeros(records, 100_000)
        found = adapter.private_gradients(
            wide, torch.nn.MSELoss(), x, torch.zeros(records, 1), mean
        )["weight"].numpy()
    else:
        jnp = require("jax").numpy
        require("optax")
        from fedclip.loops import jax as other

        found = np.asarray(
            other.private_gradients(
                *(_product, {"w": jnp.ones(100_000)}, jnp.zeros((records, 100_000))), mean
            )["w"]
        )
    # Six of its standard deviations, and more.
    assert found.std() == pytest.approx(1.5 * C / 4, rel=0.014)


def _product(params: Any, x: Any) -> Any:
    return params["w"] @ x


def test_a_layer_that_mixes_records_and_settings_out_of_range_are_refused() -> None:
    net, x, y = torch_case()
    import torch

    from fedclip.loops.torch import private_gradients

    loss = torch.nn.CrossEntropyLoss()
    quiet = PrivateMean(**QUIET)
    with pytest.raises(ValueError, match="mixes the records"):
        private_gradients(torch.nn.Sequential(torch.nn.BatchNorm2d(1), net), loss, x, y, quiet)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_norm": 0.0}, "max_norm must be"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"expected_batch_size": 0}, "expected_batch_size must be"),
        ({"mode": "adaptive"}, "mode must be"),
    ]
    for change, words in wrong:
        with pytest.raises((TypeError, ValueError), match=words):
            PrivateMean(**{**QUIET, **change})
    with pytest.raises(ValueError, match="micro_batch must be"):
        private_gradients(net, loss, x, y, quiet, micro_batch=0)


def test_noise_may_be_another() -> None:
    net, x, y = torch_case()
    import torch

    from fedclip.loops.torch import private_gradients

    step = {**QUIET, "noise_multiplier": 2.0}
    loss = torch.nn.CrossEntropyLoss()
    louder = PrivateMean(**step, noise=IndependentNoise(np.ones))
    ones = private_gradients(net, loss, x, y, louder)
    none = private_gradients(net, loss, x, y, PrivateMean(**QUIET))
    for name, gradient in ones.items():
        torch.testing.assert_close(gradient - none[name], torch.full_like(gradient, 2 * C / 13))
