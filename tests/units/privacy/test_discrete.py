# SPDX-License-Identifier: Apache-2.0
"""The discrete Gaussian: its probabilities, to the last bit, and what a sum of several is worth."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fedclip.privacy import discrete
from fedclip.privacy.discrete import draws, gap, honest_sites, site_variance

ZERO, ONES = np.zeros(1, np.uint64), np.full(1, 2**64 - 1, np.uint64)


def seeded(seed=1):
    rng = np.random.default_rng(seed)
    return lambda size: rng.integers(0, 2**64, size, np.uint64)


def density(variance, reach):
    """The probabilities of the integers up to this distance."""
    x = np.arange(-reach, reach + 1)
    found = np.exp(-(x**2) / (2.0 * variance))
    return found / found.sum()


@pytest.mark.parametrize("variance", [1, 2, 11, 45, 1000])
def test_draws_have_the_probabilities_of_the_definition(variance):
    size, reach = 400_000, 9 * math.isqrt(variance) + 3
    found = draws(variance, size, seeded())
    assert np.abs(found).max() <= reach
    counts = np.bincount(found + reach, minlength=2 * reach + 1)
    expected = size * density(variance, reach)
    keep = expected > 5
    counts = np.append(counts[keep], counts.sum() - counts[keep].sum())
    expected = np.append(expected[keep], max(expected.sum() - expected[keep].sum(), 1e-9))
    free = len(counts) - 1
    # chi^2, in standard deviations above its mean.
    assert (((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free) < 5


@pytest.mark.parametrize("variance", [1, 45, 10**12, 2**96])
def test_exact_comparisons_decide_as_floats_do(variance, monkeypatch):
    as_floats = draws(variance, 1000, seeded())
    monkeypatch.setattr(discrete, "_MARGIN", 2.0)
    np.testing.assert_array_equal(draws(variance, 1000, seeded()), as_floats)


@pytest.mark.parametrize(("k", "exponent"), [(0, Fraction(1, 2)), (3, Fraction(2**105 + 1, 2**98))])
def test_a_number_at_the_bound_gets_more_bits(k, exponent):
    bound = int(2.0 ** (64 + k) * math.exp(-exponent))
    numbers = range(bound + 2**11, -1, -1)
    u = next(u for u in numbers if discrete._below(u, k, exponent, lambda _: ZERO))
    assert abs(u - bound) < 2**11
    assert not discrete._below(u, k, exponent, lambda _: ONES)
    # Bits that do not end the doubt are followed by others.
    words = iter([ZERO, ONES, ZERO] * 9)
    assert discrete._below(u - 9, k, exponent, lambda _: next(words))
    # Zeros go on in the next word.
    words = iter([np.array([0, 4], np.uint64), np.array([2], np.uint64)])
    found = discrete._zeros(np.array([0, 0, 1, 8], np.uint64), 10, lambda _: next(words))
    assert found.tolist() == [10 + 64 + 1, 10 + 2, 0, 3]


def summed(variance, sites, reach):
    found = density(variance, reach)
    for _ in range(sites - 1):
        found = np.convolve(found, density(variance, reach))
    return found


@pytest.mark.parametrize(("variance", "sites"), [(1, 2), (2, 2), (1, 5)])
def test_a_sum_is_as_near_to_a_discrete_gaussian_as_is_said(variance, sites):
    found = summed(variance, sites, 12)
    middle = len(found) // 2
    near = slice(middle - 6, middle + 7)
    off = np.abs(np.log(found[near] / density(variance * sites, middle)[near])).max()
    assert off <= gap(variance, sites)
    assert sites > 2 or off > gap(variance, sites) / 3


@pytest.mark.parametrize("rounding", [0.2, 0.5])
def test_a_discrete_gaussian_is_as_near_to_a_rounded_continuous_one_as_is_said(rounding):
    variance, y = rounding + 0.02, np.arange(-5, 6)
    w = np.linspace(-1.5, 1.5, 3001)
    to = np.exp(-((y[:, None] - w) ** 2) / (2 * rounding))
    found = (to / to.sum(0)) @ np.exp(-(w**2) / (2 * (variance - rounding)))
    off = np.abs(np.log(found / found.sum() / density(variance, 5))[2:-2]).max()
    assert discrete._log_ratio(rounding) / 20 < off <= discrete._log_ratio(rounding)


def losses(std, sites, shift):
    """Probabilities of what several sites' noise gives, and the loss of a shift at each."""
    variance = site_variance(std, sites)
    found = summed(variance, sites, 9 * math.isqrt(variance))
    kept, moved = found[shift:], found[:-shift]
    return kept, np.log(kept / moved)


@pytest.mark.parametrize(("sites", "shift"), [(1, 20), (3, 20), (6, 40)])
def test_releases_cost_what_the_closed_form_says(sites, shift):
    # An update and a vote, each a number.
    update, one = losses(40.0, sites, shift)
    vote, other = losses(25.0, sites, shift // 4)
    mu = math.hypot(shift / 40, shift // 4 / 25)
    for epsilon in (0.0, 0.5, 1.5):
        left = np.maximum(-np.expm1(epsilon - np.add.outer(one, other)), 0.0)
        # The closed form of the Gaussian mechanism (Balle & Wang, 2018).
        above, below = (0.5 * math.erfc((epsilon / mu + s * mu / 2) / 2**0.5) for s in (-1, 1))
        exact, claimed = update @ left @ vote, above - math.exp(epsilon) * below
        assert exact <= claimed
        assert exact >= claimed * (0.97 - 0.06 * epsilon)


def test_noise_of_sites_by_hand():
    assert site_variance(100.0, 10) == 1001
    assert site_variance(100.0, 1) == 10_009
    with pytest.raises(ValueError, match="a grid at least 9"):
        site_variance(1.0, 8)
    for variance in (0, -1, 2**96 + 1):
        with pytest.raises(ValueError, match="variance must be in"):
            draws(variance, 1)
    assert [honest_sites(8, share) for share in (0.75, 0.01, 1.0)] == [6, 1, 8]
