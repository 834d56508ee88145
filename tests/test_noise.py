"""Noise from a secure generator, and what it costs."""

from __future__ import annotations

import builtins
import importlib.util
import math
import os
from typing import Any

import numpy as np
import pytest
from declearn.optimizer import Optimizer
from helpers import FRAMEWORKS, to_numpy, to_vector

from fedclip.errors import StateError
from fedclip.privacy.accounting import Accountant, default_bits_noise, split_noise
from fedclip.privacy.noise import add_noise, insecure_normals, secure_normals


def test_secure_noise_is_normal() -> None:
    from scipy import stats

    draws = secure_normals(400_001)
    assert draws.shape == (400_001,)
    assert draws.dtype == np.float64
    assert abs(draws.mean()) < 5 / math.sqrt(draws.size)
    assert abs(draws.std() - 1) < 5 / math.sqrt(2 * draws.size)
    assert stats.kstest(draws[:100_000], "norm").pvalue > 1e-6
    # Pairs that come from the same two numbers, and neighbours, are independent.
    half = 1 << 14
    for lag in (1, half):
        assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 0.01
    tail = (np.abs(draws) > 4).sum()
    assert 5 <= tail <= 60  # 25 expected


@pytest.mark.parametrize("size", [0, 1, 2, 3, 32767, 32768, 32769])
def test_any_number_of_draws(size: int) -> None:
    assert secure_normals(size).shape == (size,)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_the_extreme_draws_are_finite(byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda n: bytes([byte]) * n)
    draws = secure_normals(8)
    assert np.isfinite(draws).all()
    assert np.abs(draws).max() <= math.sqrt(2 * 53 * math.log(2)) + 1e-12


def test_every_draw_asks_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))
    np.random.seed(0)
    first = secure_normals(1000)
    np.random.seed(0)
    assert not np.array_equal(first, secure_normals(1000))
    assert sum(asked) == 2 * 8 * 1000


def test_insecure_noise_repeats() -> None:
    assert np.array_equal(insecure_normals(3, 1)(5), insecure_normals(3, 1)(5))
    assert not np.array_equal(insecure_normals(3, 1)(5), insecure_normals(3, 2)(5))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_noise_keeps_dtype_shape_and_inputs(framework: str, dtype: str) -> None:
    if framework == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    arrays = {"w": np.full((200, 50), 0.25), "b": np.array(1.0), "none": np.zeros((0, 3))}
    if framework != "numpy" and dtype == "bfloat16":
        vector: Any = _bfloat16(framework, arrays)
    else:
        vector = to_vector({k: v.astype(dtype) for k, v in arrays.items()}, framework)
    out = type(vector)(add_noise(vector.coefs, 0.5, secure_normals))
    for name in arrays:
        assert out.coefs[name].dtype == vector.coefs[name].dtype
        assert tuple(out.coefs[name].shape) == tuple(vector.coefs[name].shape)
    if dtype != "bfloat16":
        noise = to_numpy(out)["w"].astype(np.float64) - 0.25
        assert abs(noise.std() - 0.5) < 0.02
        assert abs(noise.mean()) < 0.03
        assert (to_numpy(vector)["w"] == 0.25).all()


def _bfloat16(framework: str, arrays: dict[str, Any]) -> Any:
    vector = to_vector({k: v.astype("float32") for k, v in arrays.items()}, framework)
    if framework == "torch":
        return type(vector)({k: v.bfloat16() for k, v in vector.coefs.items()})
    if framework == "jax":
        return type(vector)({k: v.astype("bfloat16") for k, v in vector.coefs.items()})
    import tensorflow as tf

    return type(vector)({k: tf.cast(v, tf.bfloat16) for k, v in vector.coefs.items()})


# -- accounting ---------------------------------------------------------------------------------


def test_split_costs_what_the_accountant_is_told() -> None:
    """Gaussian(z_delta) and Gaussian(2 sigma_b) together cost what Gaussian(z) does."""
    rdp = pytest.importorskip("opacus.accountants").RDPAccountant
    for z, m in ((1.0, 3), (1.0, 100), (0.7, 20), (4.0, 1000)):
        sigma = default_bits_noise(z, m)
        both = rdp()
        both.history = [(split_noise(z, sigma), 1.0, 50), (2 * sigma, 1.0, 50)]
        one = rdp()
        one.history = [(z, 1.0, 50)]
        assert both.get_epsilon(delta=1e-5) == pytest.approx(one.get_epsilon(delta=1e-5), rel=1e-9)


def test_epsilon_is_that_of_an_established_accountant() -> None:
    """96.1163: dp-accounting's RDP accountant for z = 1, 100 rounds, delta = 1e-5."""
    assert Accountant(1e-5).epsilon(1.0, 100) == pytest.approx(96.1163, abs=1e-3)
    # And above the exact value of the Gaussian mechanism (Balle & Wang, 2018), by little.
    from scipy.optimize import brentq
    from scipy.stats import norm

    for z, rounds in ((1.0, 1), (1.0, 100), (5.0, 10), (20.0, 3), (0.01, 1)):
        mu = math.sqrt(rounds) / z

        def excess(eps: float, mu: float = mu) -> float:
            tail = norm.logcdf(-eps / mu - mu / 2) + eps
            return float(norm.cdf(mu / 2 - eps / mu) - math.exp(min(tail, 700)) - 1e-5)

        exact = brentq(excess, 0, mu * mu + 20 * mu)
        stated = Accountant(1e-5).epsilon(z, rounds)
        assert exact <= stated <= 1.2 * exact


def test_budget_adds_up_and_is_restored() -> None:
    first = Accountant(1e-5)
    assert (first.epsilon(), first.rounds) == (0.0, 0)
    for z in (2.0, 2.0, 3.0):
        first.add(z)
    assert first.get_state() == [[2.0, 2], [3.0, 1]]
    second = Accountant(1e-5)
    second.set_state(first.get_state())
    assert second.epsilon() == first.epsilon() > 0
    assert second.rounds == 3
    assert first.epsilon(3.0, 4) > first.epsilon()
    assert first.get_state() == [[2.0, 2], [3.0, 1]]
    with pytest.raises(StateError):
        second.set_state([[2.0, 0]])


def test_affordable_rounds_are_exactly_so_many() -> None:
    accountant = Accountant(1e-5)
    rounds = accountant.affordable(2.0, 10.0, 10**6)
    assert accountant.epsilon(2.0, rounds) <= 10.0 < accountant.epsilon(2.0, rounds + 1)
    assert accountant.affordable(2.0, 10.0, 3) == 3
    assert accountant.affordable(0.1, 10.0, 10) == 0


def test_without_opacus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = importlib.util.find_spec

    def find(name: str, *args: Any) -> Any:
        return None if name == "opacus" else real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    imported: list[str] = []
    load = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *a, **k: imported.append(name) or load(name, *a, **k)
    )
    config = {"noise_multiplier": 1.0, "expected_clients": 3}
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedclip\[dp\]'"):
        Optimizer(lrate=1.0, modules=[("update-clip-server", config)])
    assert not [name for name in imported if name.startswith("opacus")]
    # A bound without noise needs no accountant.
    Optimizer(lrate=1.0, modules=["update-clip-server"])
