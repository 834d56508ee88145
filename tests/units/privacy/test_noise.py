"""Noise from a secure generator, and what it costs."""

import importlib.util
import math
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers import BACKENDS, FRAMEWORKS, to_numpy, to_vector
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclip.arrays import backend_named
from fedclip.errors import StateError
from fedclip.privacy import accounting, noise
from fedclip.privacy.accounting import Accountant, Release, account, epsilon, state_of
from fedclip.privacy.noise import add_noise, noised, secure_normals

LARGEST = {"float16": 65504.0, "float32": 3.4028234e38, "bfloat16": 3.3895e38}


def test_each_draw_is_the_stream_of_a_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    urandom = mock.Mock(side_effect=bytes)
    monkeypatch.setattr(os, "urandom", urandom)
    # RFC 8439, appendix A.1: the first words for a key of zeros.
    first, second = (noise.random_words(2).tobytes().hex() for _ in range(2))
    assert first == second == "76b8e0ada0f13d90405d6ae55386bd28"
    assert urandom.call_args_list == [mock.call(32)] * 2


# With torch, and with NumPy where it is absent.
@pytest.fixture(params=[torch for torch in ("torch", "numpy") if torch in BACKENDS])
def transform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "backend_named", lambda name: backend_named(request.param))


@pytest.mark.usefixtures("transform")
def test_secure_noise_is_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    """From bytes that are the same each time."""
    from scipy import stats

    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    draws = secure_normals(400_001)
    assert (draws.shape, draws.dtype) == ((400_001,), np.float64)
    assert abs(draws.mean()) < 4 / math.sqrt(draws.size)
    assert abs(draws.std() - 1) < 4 / math.sqrt(2 * draws.size)
    assert stats.kstest(draws[:100_000], "norm").pvalue > 1e-4
    # Pairs that come from the same two numbers, and neighbours, are independent.
    for lag in (1, 1 << 14):
        assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 0.01
    assert 10 <= (np.abs(draws) > 4).sum() <= 45  # 25 expected


@pytest.mark.usefixtures("transform")
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_the_extreme_draws_are_finite(byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    word = int.from_bytes(bytes([byte]) * 8, "big")
    monkeypatch.setattr(noise, "random_words", lambda n: np.full(n, word, dtype=np.uint64))
    draws = secure_normals(8)
    assert np.isfinite(draws).all()
    assert np.abs(draws).max() <= math.sqrt(2 * 117 * math.log(2)) + 1e-12


# Each framework, and each dtype.
KINDS = [
    (framework, dtype)
    for i, framework in enumerate(FRAMEWORKS)
    for dtype in ("float64", ("float32", "float16", "bfloat16")[(i + 1) % 3])
    if (framework, dtype) != ("numpy", "bfloat16") and framework in BACKENDS
]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "dtype"), KINDS)
def test_noised_values_keep_their_dtype_and_are_on_a_grid(framework: str, dtype: str) -> None:
    """The last bits of a small sum would tell from which value it started."""
    values = np.repeat([0.0, 0.3, -8.0, 1e-5], 500).reshape(-1, 4)
    arrays, std = {"w": values, "b": np.array(1.0), "none": np.zeros((0, 3))}, 0.7
    vector = to_vector(arrays, framework, dtype)
    before = to_numpy(vector)["w"].copy()
    result = type(vector)(add_noise(vector.coefs, std, secure_normals))
    for name, array in vector.coefs.items():
        assert result.coefs[name].dtype == array.dtype
        assert tuple(result.coefs[name].shape) == tuple(array.shape)
    np.testing.assert_array_equal(to_numpy(vector)["w"], before)
    # Rounding to a float of any width leaves multiples of a power of two what they are; what is
    # below the subnormals of float16 is rounded to one of them.
    grid = 2.0**-31 if dtype != "float16" else 2.0**-24
    assert grid <= 2.0**-30 * std or dtype == "float16"
    whole = to_numpy(result)["w"].astype(np.float64) / grid
    assert (whole == np.rint(whole)).all()
    assert len(np.unique(whole)) > 50


def test_the_grid_of_extreme_noise() -> None:
    values = np.array([0.0, 1.0, 1e308, -1e308])
    for std in (5e-324, 1e-300, 1e-12, 1e300):
        out = noised(values, std, lambda n: np.full(n, 0.6))
        np.testing.assert_allclose(out, values + 0.6 * std, rtol=1e-9)
    assert noised(np.array([1 / 3]), 0.0, secure_normals)[0] == 1 / 3
    assert noised(np.array(2.0), 1.0, secure_normals).shape == ()


@pytest.mark.usefixtures("transform")
def test_pairs_are_as_fine_in_their_tail_and_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The radius of a pair must not betray that it is one of few."""
    words: list[list[int]] = []
    monkeypatch.setattr(noise, "random_words", lambda size: np.array(words.pop(0), np.uint64))

    def radius(k: int, more: int = 0) -> float:
        words[:] = [[k, 0], [more]]
        x, y = secure_normals(2)
        return math.hypot(x, y)

    # In the tail, neighbours that 53 bits do not tell apart.
    assert 0 < radius(5, 1 << 30) - radius(5, 2 << 30) < 2.0**-31
    assert 0 < radius((1 << 32) + 1) - radius((1 << 32) + 2) < 2.0**-31
    top = (1 << 64) - 1
    assert radius(top) == 0.0
    assert 0 < radius(top - 2) < radius(top - 3) < 2.0**-30


@pytest.mark.slow
def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    assert epsilon([Release(1.0)], 1e-5) == pytest.approx(4.377, abs=5e-4)
    # Eight units of budget at z = 5: 69 rounds, where Rényi's accountant sees 61.
    assert Accountant(1e-5).affordable(5.0, 8.0, 1000) == 69
    # Between the truth (Balle & Wang, 2018) in 60 digits, and a little above.
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        for mu in (1e-4, 0.01, 0.3, 1.0, 3.0, 30.0, 1e3, 1e6):
            for delta in (1e-12, 1e-9, 1e-5, 1e-2, 0.3):
                found = accounting.epsilon_of(mu, delta)

                def truth(eps: float, mu: float = mu) -> Any:
                    low, high = eps / mpmath.mpf(mu) - mu / 2, eps / mpmath.mpf(mu) + mu / 2
                    return mpmath.ncdf(-low) - mpmath.exp(eps) * mpmath.ncdf(-high)

                assert truth(found) <= delta
                assert found == 0 or truth(found * (1 - 1e-7)) > delta
                if 1e-3 < found < 1e6:
                    assert mu * (1 - 1e-6) <= accounting.mu_of(found, delta) <= mu * (1 + 1e-9)


def test_releases_of_all_kinds_add_up() -> None:
    one = epsilon([Release(2.0, 4)], 1e-5)
    assert one == epsilon([Release(1.0)], 1e-5)
    assert epsilon([Release(2.0, 2), Release(4.0, 8)], 1e-5) == pytest.approx(one, rel=1e-12)
    assert epsilon([Release(4.0, 4)], 1e-5, "replace-one") == one
    # In any order, and however they are counted.
    apart = [Release(2.0, 2), Release(3.0, 1), Release(2.0, 3)]
    assert epsilon(apart, 1e-5) == epsilon([Release(2.0, 5), Release(3.0, 1)], 1e-5)
    assert epsilon([], 1e-5) == 0.0
    assert epsilon([Release(1.0, 0)], 1e-5) == 0.0


@pytest.mark.slow
def test_samples_are_counted_by_pld_and_renyi_is_above(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("dp_accounting")
    release = Release(1.841, 80, 64 / 479)
    pld, rdp = account([release], 1e-5), accounting._renyi((release,), 1e-5, "add-remove")
    assert (pld.accountant, rdp.accountant) == ("pld", "rdp")
    assert pld.epsilon < rdp.epsilon < 1.2 * pld.epsilon
    # No sampling is worse.
    assert rdp.epsilon < epsilon([release._replace(sampling=1.0)], 1e-5)
    # An order that is left out alarms nobody.
    assert accounting.order_for(Release(1.1325, 15, 0.2), 1e-3) > 1.1
    assert not caplog.records


def test_accountants_agree_without_samples() -> None:
    pytest.importorskip("dp_accounting")
    release = Release(2.0, 20)
    for relation in ("add-remove", "replace-one"):
        exact = epsilon([release], 1e-5, relation)
        assert accounting._pld((release,), 1e-5, relation).epsilon == pytest.approx(exact, rel=1e-3)


@given(st.floats(0.3, 100.0), st.floats(0.001, 1.0), st.integers(1, 30), st.floats(1e-8, 0.99))
@settings(max_examples=12, deadline=None)
def test_no_epsilon_is_below_zero(z: float, rate: float, steps: int, delta: float) -> None:
    pytest.importorskip("dp_accounting")
    one, other = Release(z, steps, rate), Release(2.0 * z, steps, rate / 2.0)
    for relation in ("add-remove", "replace-one"):
        assert epsilon([one], delta, relation) >= 0.0
        assert account([one, other], delta, relation, order=2.0).epsilon >= 0.0


def test_without_dp_accounting_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    accounting._epsilon.cache_clear()
    for relation in ("add-remove", "replace-one"):
        with pytest.raises(ModuleNotFoundError, match="needs dp-accounting: pip"):
            epsilon([Release(1.0, 10, 0.1)], 1e-5, relation)
    assert epsilon([Release(1.0)], 1e-5) > 0


@pytest.mark.parametrize(
    ("release", "options", "text"),
    [
        (Release(0.0), {}, "noise_multiplier must be"),
        (Release(1.0, -1), {}, "steps must be an int >= 1"),
        (Release(1.0, 1, 0.0), {}, "sampling must be"),
        (Release(1.0), {"delta": 0.0}, "delta must be"),
        (Release(1.0), {"relation": "replace"}, "relation must be one of"),
    ],
)
def test_what_can_not_be_accounted(release: Release, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        epsilon([release], **{"delta": 1e-5, **options})


def test_delta_is_left_to_what_transforms_may_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much of it for each step; and Rényi's accountant counts where that is most of it."""
    pytest.importorskip("dp_accounting")
    steps, rounding = 400, 400 * 2.0**-49
    release, delta = Release(2.0, steps, 0.01), rounding / 0.4
    found = account([release], delta)
    assert found.accountant == "pld"
    assert account([release], rounding / 0.6).accountant == "rdp"
    with monkeypatch.context() as patch:
        accounting._epsilon.cache_clear()
        patch.setattr(accounting, "_ROUNDING", 0.0)
        assert found == account([release], delta - rounding)
        assert found.epsilon > account([release], delta).epsilon
    accounting._epsilon.cache_clear()


@pytest.mark.parametrize(
    ("here", "loaded", "rounds"),
    [
        ([[2.0, 5]], [[2.0, 3]], 5),
        ([[2.0, 3], [3.0, 4]], [[2.0, 3]], 7),
        ([[2.0, 3]], [[3.0, 3]], 6),
        ([[2.0, 3], [3.0, 1]], [[2.0, 4]], 8),
        ([[2.0, 3]], [[2.0, 3, 0.1]], 6),
    ],
)
def test_a_state_that_is_loaded_takes_nothing_from_what_was_spent(
    here: list[list[float]], loaded: list[list[float]], rounds: int
) -> None:
    accountant = Accountant(1e-5)
    accountant.set_state(here)
    accountant.set_state(loaded)
    assert accountant.rounds == rounds


@pytest.mark.slow
def test_a_budget_adds_up_and_is_restored() -> None:
    pytest.importorskip("dp_accounting")
    first = Accountant(1e-5)
    assert (first.epsilon(), first.rounds) == (0.0, 0)
    for steps, sampling in ((3, 0.1), (4, 0.1), (1, 1.0)):
        first.add(2.0, steps, sampling)
    assert state_of(first.spent) == [[2.0, 7, 0.1], [2.0, 1]]
    second = Accountant(1e-5)
    second.set_state(state_of(first.spent))
    assert (second.spent, second.rounds) == (first.spent, 8)
    assert second.epsilon() == first.epsilon() < Accountant(1e-5).epsilon(2.0, 8)
    for wrong in ([[2.0, 7, 1.1]], [[2.0, 0]]):
        with pytest.raises(StateError):
            second.set_state(wrong)
    assert Accountant(1e-5).epsilon(2.0, 8, 0.1) == epsilon([Release(2.0, 8, 0.1)], 1e-5)
    left = second.affordable(2.0, 3.0, 100, 0.1)
    assert second.epsilon(2.0, left, 0.1) <= 3.0 < second.epsilon(2.0, left + 1, 0.1)


@pytest.mark.slow
def test_hardly_any_noise_and_tiny_budgets_are_accounted_all_the_same() -> None:
    for sampling in (0.1, 1.0):
        assert epsilon([Release(5e-324, 3, sampling)], 1e-5) == math.inf
    z = accounting.noise_multiplier(1e-200, 1e-15, steps=7)
    assert 0.999e-200 <= epsilon([Release(z, 7)], 1e-15) <= 1e-200
    with pytest.raises(ValueError, match="no noise is enough for epsilon=5e"):
        accounting.noise_multiplier(5e-324, 5e-324, 1)


@pytest.mark.parametrize(("framework", "dtype"), [kind for kind in KINDS if kind[1] in LARGEST])
def test_noise_beyond_a_dtype_is_its_largest_number(framework: str, dtype: str) -> None:
    largest = LARGEST[dtype]
    vector = to_vector({"w": np.zeros(999)}, framework, dtype)
    out = to_numpy(type(vector)(add_noise(vector.coefs, largest, secure_normals)))["w"]
    assert np.isfinite(out).all()
    assert np.abs(out.astype(np.float64)).max() == pytest.approx(largest, rel=1e-4)
