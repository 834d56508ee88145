# SPDX-License-Identifier: Apache-2.0
"""The private step of plain loops: as Opacus and optax have it; and what is learnt with it."""

from typing import Any

import numpy as np
import pytest
from dpsgd_wire import seeded
from helpers import require

from fedclip.dpsgd.step import IndependentNoise, PrivateMean, SampleClipping

pytestmark = pytest.mark.slow

C = 0.2
QUIET = {"max_norm": C, "noise_multiplier": 0.0, "expected_batch_size": 13}


def torch_case() -> tuple[Any, Any, Any, Any]:
    """Return a module, records, targets, and the private gradients of their mean loss."""
    torch = require("torch")
    from fedclip.loops.torch import private_gradients

    torch.manual_seed(0)
    nn = torch.nn
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def gradients(net: Any, *settings: Any, **more: Any) -> Any:
        return private_gradients(net, nn.CrossEntropyLoss(), *settings, **more)

    net = nn.Sequential(*layers)
    return net, torch.randn(13, 1, 8, 8), torch.randint(0, 3, (13,)), gradients


@pytest.mark.filterwarnings("ignore")
def test_torch_gradients_are_those_of_opacus() -> None:
    opacus = pytest.importorskip("opacus")
    net, x, y, gradients = torch_case()
    import torch

    found = gradients(net, x, y, PrivateMean(**QUIET), micro_batch=5)
    sampled = opacus.GradSampleModule(net, loss_reduction="mean")
    settings = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": 13}
    plain = torch.optim.SGD(sampled.parameters(), lr=1.0)
    optimizer = opacus.optimizers.DPOptimizer(plain, **settings)
    torch.nn.CrossEntropyLoss()(sampled(x), y).backward()
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


@pytest.mark.soak
def test_the_audit_of_twenty_runs() -> None:
    pytest.importorskip("opacus")
    from benchmarks.dpsgd_audit import main

    assert main(["20"]) == 0


def test_the_digits_are_learnt_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    pytest.importorskip("opacus")
    seeded(monkeypatch.setattr)
    from benchmarks.dpsgd_accuracy import DIGITS, Setting, accuracy, digits

    assert accuracy("linear", digits(), DIGITS["linear"][0], seed=100) > 0.8
    # As much noise as for a thousandth of epsilon leaves little to learn.
    assert accuracy("linear", digits(), Setting("flat", 1.0, 0.5), 100, epsilon=3e-3) < 0.5


def test_a_layer_that_mixes_records_and_settings_out_of_range_are_refused() -> None:
    net, x, y, gradients = torch_case()
    import torch

    quiet = PrivateMean(**QUIET)
    with pytest.raises(ValueError, match="mixes the records"):
        gradients(torch.nn.Sequential(torch.nn.BatchNorm2d(1), net), x, y, quiet)
    with pytest.raises(ValueError, match="micro_batch must be"):
        gradients(net, x, y, quiet, micro_batch=0)
    wrong = {"max_norm": 0.0, "noise_multiplier": -1.0, "expected_batch_size": 0, "mode": "slow"}
    for name, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            PrivateMean(**{**QUIET, name: value})


def test_noise_is_as_large_as_it_says() -> None:
    net, x, y, gradients = torch_case()
    ones = PrivateMean(**{**QUIET, "noise_multiplier": 2.0}, noise=IndependentNoise(np.ones))
    noisy, right = (gradients(net, x, y, mean) for mean in (ones, PrivateMean(**QUIET)))
    for name, gradient in noisy.items():
        np.testing.assert_allclose(gradient - right[name], 2 * C / 13, rtol=1e-4)
    # A step without records has noise alone, which is drawn anew each time.
    mean = PrivateMean(max_norm=C, noise_multiplier=1.5, expected_batch_size=4)
    first, other = (gradients(net, x[:0], y[:0], mean) for _ in range(2))
    assert all((first[name] != other[name]).all() for name in first)


def test_the_noise_on_votes_is_rounded_to_its_grid() -> None:
    def following(draw: float) -> float:
        norms, clipping = np.array([0.5, 2.0]), SampleClipping(mode="adaptive")
        return clipping.next_bound(1.0, norms, 1.0, 2.0, lambda size: np.full(size, draw))

    # The first of these draws is finer than the grid.
    assert following(2.0**-40) == following(0.0) != following(2.0**-20)
