# SPDX-License-Identifier: Apache-2.0
r"""The Gaussian mechanism without sampling, in closed form (Balle & Wang, 2018; Dong et al., 2022).

T releases with noise multipliers z_i together equal one Gaussian mechanism with

    mu = sqrt(sum of 1 / z_i^2)

which is (epsilon, delta)-private for exactly::

    delta = Q(a) - exp(epsilon) Q(a + mu)        with a = epsilon / mu - mu / 2
          = phi(a) (R(a) - R(a + mu))            as exp(epsilon) = phi(a) / phi(a + mu)

where Q is the upper tail of the standard normal distribution, phi its density and R = Q / phi.
The second form neither overflows nor cancels. All numbers are rounded so that no epsilon is
too low.

Examples
--------
>>> round(epsilon_of(1.0, 1e-5), 3)
4.377
>>> round(mu_of(8.0, 1e-5), 3)
1.666
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["epsilon_of", "mu_of"]

_ROOT_2PI = math.sqrt(2.0 * math.pi)
# More than the rounding error of a tail that is exact to a few units in the last place.
_ROUNDING = 1e-13


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least epsilon for this delta in (0, 1), rounded up; 0 without a release."""
    if mu == 0.0 or _delta(-mu / 2.0, mu) <= delta:
        return 0.0
    # Q(a) is at most exp(-a^2 / 2).
    a = _least(lambda a: _delta(a, mu) <= delta, -mu / 2.0, math.sqrt(-2.0 * math.log(delta)))
    return (mu * a + mu * mu / 2.0) * (1.0 + _ROUNDING)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu for this epsilon > 0 and delta in (0, 1), rounded down."""
    high = 1.0
    while epsilon_of(high, delta) <= epsilon:
        high *= 2.0
    while epsilon_of(high / 2.0, delta) > epsilon:
        high /= 2.0
    return -_least(lambda minus: epsilon_of(-minus, delta) <= epsilon, -high, -high / 2.0)


def _delta(a: float, mu: float) -> float:
    density = math.exp(-a * a / 2.0) / _ROOT_2PI
    if a < 0.0:
        upper = 0.5 * math.erfc(a / math.sqrt(2.0))
        return upper * (1.0 + _ROUNDING) - density * _mills(a + mu) * (1.0 - _ROUNDING)
    larger = _mills(a)
    return density * (larger - _mills(a + mu) + larger * _ROUNDING)


def _mills(x: float) -> float:
    """Return Q(x) / phi(x), for x >= 0."""
    if x < 5.0:
        return 0.5 * math.erfc(x / math.sqrt(2.0)) * _ROOT_2PI * math.exp(x * x / 2.0)
    # Laplace's continued fraction: from here on, its remainder is below the rounding error.
    fraction = x
    for k in range(60, 0, -1):
        fraction = x + k / fraction
    return 1.0 / fraction


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number for which `holds` is true, rounded up; it is true at `high`."""
    for _ in range(100):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
