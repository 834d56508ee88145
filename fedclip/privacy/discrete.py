# SPDX-License-Identifier: Apache-2.0
r"""Exact discrete Gaussian noise, and what the sum of several sites' noise is worth.

A site adds integers that have *exactly* the probabilities ``p(x) ~ exp(-x^2 / (2 v))``: the sum of
integers then tells nothing by its last bits. They are drawn by rejection (after Canonne, Kamath &
Steinke, 2020, "The discrete Gaussian for differential privacy", arXiv:2004.00010), here from a
proposal that is made of bits alone::

    t       the least power of two with t^2 >= 2 ln(2) v
    x       = +-(j + t k),   j uniform below t,   k with probability 2^-(k + 1)
    accept  if u < 2^k exp(-x^2 / (2 v)),   which is at most 1;   u uniform, and not -0

u is a number of 64 bits, compared in float64; where that could be wrong, once in about 2^47 times,
u gets as many more bits, and the bound as many more digits, as it takes.

How much the sum is worth
---------------------
By Poisson's summation formula, for any real c::

    sum over integers y of exp(-(y - c)^2 / (2 v))  =  sqrt(2 pi v) (1 + a),
    |a| <= a(v) = 2 q / (1 - q),   q = exp(-2 pi^2 v)

1. Draw a continuous Gaussian w of variance v - r about an integer c; then an integer with
   probabilities proportional to ``exp(-(y - w)^2 / (2 r))``. That this is y has a probability of
   ``exp(-(y - c)^2 / (2 v))``, but for a factor that does not depend on y and the average of
   ``1 / (1 + a)``. So a discrete Gaussian of variance v is a *post-processing of a continuous one*
   of variance v - r, up to a factor of ``(1 + a(r)) / (1 - a(r))`` (Peikert, 2010, "An efficient
   and parallel Gaussian sampler for lattices", theorem 3.1).
2. Adding one of variance v to a sum of k of them gives, for the same reason, one of variance
   (k + 1) v up to that factor with ``r = v k / (k + 1)`` (Kairouz, Liu & Steinke, 2021, "The
   distributed discrete Gaussian mechanism", arXiv:2102.06387, whose tau has ten times ``q``).

With g the sum of the logarithms of these factors, for one value (`gap`). For all events, all
releases and D values in all of them, each release chosen in view of those before it: the
probability is at most ``exp(D g)`` times that with continuous noise, and at least ``exp(-D g)``
times. Hence the sum has epsilon + 2 D g at ``exp(D g) delta`` where continuous noise has epsilon
at delta. `site_variance` refuses a grid that is too coarse for ``g <= 2^-150``: a rounding error
of the accountant is larger than ``D g`` for any model, and any number of rounds. So the closed
form (`fedclip.privacy.accounting`) holds for sums of integers, as it stands.

Examples
--------
>>> site_variance(1000.0, sites=honest_sites(8, 0.75))
166669
>>> draws(166669, 5).dtype
dtype('int64')
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.core import parameters
from fedclip.privacy.noise import Words, random_words

Integers: TypeAlias = NDArray[np.int64]

_LARGEST = 1 << 96
# Proposals at a time: they stay in the cache.
_BLOCK = 1 << 15
# More than the rounding errors of u and its bound: with x^2 / (2 v) correct to 5 parts in 2^53, and
# an exponential to 8, the bound is wrong by 2^-49 at most.
_MARGIN = 2.0**-48
# The variance, in squared steps, that goes into rounding a continuous draw.
_ROUNDING = 9
_LARGEST_GAP = 2.0**-150


def draws(variance: int, size: int, words: Words = random_words) -> Integers:
    """Return independent draws of the discrete Gaussian: no probability is off, by however little.

    Parameters
    ----------
    variance
        The parameter v, from 1 to 2^96. The variance of the draws is v too, to 7 digits from 1.
    size
        Number of draws.
    words
        Returns a number of uniform words of 64 bits; those of the secure generator.
        How many are taken depends on the draws, so that the time taken does as well.

    Raises
    ------
    ValueError
        If the variance is not as above.
    """
    if not 1 <= variance <= _LARGEST:
        raise ValueError(f"variance must be in [1, 2^96], got {variance}: take another grid")
    result, filled = np.empty(size, np.int64), 0
    while filled < size:
        some = _accepted(variance, min(_BLOCK, 4 * (size - filled) + 16), words)[: size - filled]
        result[filled : filled + some.size] = some
        filled += some.size
    return result


def _accepted(variance: int, size: int, words: Words) -> Integers:
    """Return those of a number of proposals that are accepted."""
    # 1.3863 is above 2 ln 2.
    log_t = next(b for b in range(64) if 10_000 << 2 * b >= 13_863 * variance)
    bits, uniform = words(size), words(size)
    j = (bits & np.uint64((1 << log_t) - 1)).astype(np.int64)
    minus = bits >> np.uint64(63) == 1
    k = _zeros((bits << np.uint64(1)) >> np.uint64(1 + log_t), 63 - log_t, words)
    x = j + (k << log_t)
    bound = np.ldexp(np.exp(-(x.astype(np.float64) ** 2) / (2.0 * variance)), k.astype(np.int32))
    difference = uniform * 2.0**-64 - bound
    taken = difference < 0.0
    for i in np.flatnonzero(np.abs(difference) <= _MARGIN):
        exponent = Fraction(int(x[i]) ** 2, 2 * variance)
        taken[i] = _below(int(uniform[i]), int(k[i]), exponent, words)
    taken &= ~(minus & (x == 0))
    return np.where(minus, -x, x)[taken]


def _zeros(bits: NDArray[np.uint64], width: int, words: Words) -> Integers:
    """Return how many bits, from the last, are 0, of endlessly many; these have some."""
    _, exponent = np.frexp((bits & (~bits + np.uint64(1))).astype(np.float64))
    result = exponent.astype(np.int64) - 1
    (none,) = np.nonzero(bits == 0)
    if none.size:
        result[none] = width + _zeros(words(none.size), 64, words)
    return result


def _below(u: int, k: int, exponent: Fraction, words: Words) -> bool:
    """Whether u and endlessly many bits after it are below 2^k exp(-exponent)."""
    count = 64
    while True:
        # These digits leave an error far below 1, the unit of the last bit.
        with localcontext(Context(prec=count + 40)):
            bound = (Decimal(-exponent.numerator) / exponent.denominator).exp() * (1 << k + count)
        if u + 1 < bound - 1:
            return True
        if u > bound + 1:
            return False
        u, count = u << 64 | int(words(1)[0]), count + 64


def honest_sites(clients: int, honest: float) -> int:
    """Return how many clients are counted on for noise: that share of them, at least one.

    >>> honest_sites(10, 0.75), honest_sites(100, 0.29)
    (7, 29)
    """
    return max(1, math.floor(round(clients * honest, 9)))


def gap(variance: int, sites: int) -> float:
    """Return g: how far the sum's log-probability of a value may be off; see above.

    >>> gap(1, 3) < 5e-4, gap(16, 1000) < 1e-60
    (True, True)
    """
    # k / (k + 1) is least for k = 1.
    return _log_ratio(_ROUNDING) + (sites - 1) * _log_ratio(variance / 2)


def _log_ratio(variance: float) -> float:
    q = math.exp(-2.0 * math.pi**2 * variance)
    return 2.0 * math.atanh(2.0 * q / (1.0 - q))


def site_variance(std: float, sites: int) -> int:
    """Return the variance of each site's integers, for a sum as private as continuous noise.

    Parameters
    ----------
    std
        Standard deviation of that noise, in steps of the grid, above 0.
    sites
        How many sites add such noise, at least 1; what others add does no harm.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above, or the noise too small for the grid.
    """
    std, sites = parameters.positive(std=std), parameters.integer(1, sites=sites)
    # A float's square might be rounded down.
    variance = math.ceil((Fraction(std) ** 2 + _ROUNDING) / sites)
    if gap(variance, sites) > _LARGEST_GAP:
        text = f"noise of {std:.3g} steps, from {sites} sites, is too small for integers"
        advice = f"take a grid at least {3.5 * math.sqrt(sites) / std:.2g} times as fine"
        raise ValueError(f"{text}: each site's must be above 3.5 steps, {advice}")
    return variance
