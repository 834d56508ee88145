# SPDX-License-Identifier: Apache-2.0
r"""Noise that later rounds take back in part: a banded Toeplitz factorization.

The model is a sum of the rounds' averages, and the noise in it a sum of their noise. With
coefficients ``c_0 = 1, c_1, ...``, of which there are `band`, and independent normals ``z_t``::

    y_t = z_t - (c_1 y_(t-1) + c_2 y_(t-2) + ...)
    released in round t: average + scale * y_t

All releases together are a function of ``C x + scale * z``, where C has the coefficients on its
diagonals: a Gaussian mechanism. A client whose turns are `band` rounds apart, or more, moves its
k columns of C, which do not overlap, so that::

    sensitivity = sqrt(k) * norm(c)
    mu          = sensitivity / scale      (Dong et al., 2022), also if updates depend on releases

The coefficients are those with the least mean squared error of the model over all rounds, at the
same mu. A longer band than the turns are apart gains less than 0.1 % more.

Guarantees
----------
- The stream is in units of the bound: it is multiplied by a round's bound when it is added. A bound
  that moves costs no privacy so; noise kept at the scale of the round in which it was drawn would.
- It holds what was drawn, which whoever knows can subtract. So it is in no state and no file: a
  server that is started again starts another stream, and what it had not taken back stays.

References
----------
Choquette-Choo et al., 2023, "(Amplified) banded matrix factorization", arXiv:2306.08153.
McKenna, 2024, "Scaling up the banded matrix factorization mechanism", arXiv:2405.15913.
Denisov et al., 2022, "Improved differential privacy for SGD via optimal private linear operators on
adaptive streams", arXiv:2202.08312.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from fedclip.core import parameters
from fedclip.privacy.noise import Float64, Normals

# More rounds hardly change the coefficients, and more of these hardly the error.
_ROUNDS, WIDEST = 20_000, 256


@lru_cache(maxsize=64)
def coefficients(rounds: int, band: int, momentum: float = 0.0) -> tuple[float, ...]:
    """Return the coefficients with the least error of the model.

    Parameters
    ----------
    rounds
        Number of rounds that are planned, at least 1.
    band
        Number of coefficients, at least 1: the least number of rounds from one turn of a client to
        its next. There are 256 at most.
    momentum
        That of the server's optimizer, in [0, 1).

    Examples
    --------
    >>> [round(c, 3) for c in coefficients(100, 5)]
    [1.0, 0.678, 0.58, 0.516, 0.454]
    >>> coefficients(100, 1)
    (1.0,)
    """
    rounds, band = parameters.integer(1, rounds=rounds), parameters.integer(1, band=band)
    band = min(band, rounds, WIDEST)
    if band == 1:
        return (1.0,)
    from scipy.optimize import minimize

    rounds = min(rounds, _ROUNDS)
    remaining, sums = _sums(rounds, momentum)
    steps = np.arange(1, band)

    def logarithm(found: Float64) -> tuple[float, Float64]:
        c = np.concatenate([[1.0], found])
        noise = _inverse_times(c, sums)
        weighted = remaining * noise
        squares, length = float(weighted @ noise), float(c @ c)
        # The noise that is lost if a coefficient grows.
        lost = _inverse_times(c, noise)
        slope = [-2.0 * float(weighted[j:] @ lost[: rounds - j]) for j in steps]
        return math.log(squares * length), np.array(slope) / squares + 2.0 * found / length

    # The square root of a sum: the best coefficients for many rounds and a long band.
    start = np.cumprod((2 * steps - 1) / (2 * steps))
    options = {"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-10}
    bounds = [(0.0, 1.0)] * len(start)
    best = minimize(logarithm, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return (1.0, *best.x.tolist())


def error(c: tuple[float, ...], rounds: int, momentum: float = 0.0) -> float:
    """Return the error of the model, as a share of that with independent noise of the same mu.

    It is the root of the mean squared error over all rounds. In rounds that are fewer, or more,
    than the coefficients are made for, it is larger.

    >>> round(error(coefficients(100, 5), 100), 4)
    0.5091
    """
    remaining, sums = _sums(min(rounds, _ROUNDS), momentum)
    noise = _inverse_times(np.array(c), sums)
    return math.hypot(*c) * math.sqrt(float(remaining @ noise**2) / float(remaining @ sums**2))


def grown(c: tuple[float, ...], rounds: int) -> float:
    """Return the deviation of the noise of the last round, in units of what is drawn.

    >>> round(grown(coefficients(100, 5), 100), 3)
    1.308
    """
    if len(c) == 1:
        return 1.0
    once = np.eye(1, min(rounds, _ROUNDS))[0]
    return float(np.linalg.norm(_inverse_times(np.array(c), once)))


def _sums(rounds: int, momentum: float) -> tuple[Float64, Float64]:
    """Return in how many rounds a step is part of the model, and how much of it after each."""
    momentum = parameters.share(momentum=momentum)
    remaining: Float64 = np.arange(rounds, 0, -1.0)
    return remaining, np.cumsum(momentum ** np.arange(rounds))


def _inverse_times(c: Float64, values: Float64) -> Float64:
    """Return the stream of these values: they take the place of the normals."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], c, values), np.float64)


class Stream:
    """The noise of one round after another; keeps what the next rounds take back.

    Parameters
    ----------
    c
        The coefficients. With one, the noise of each round is independent, and nothing is kept;
        else ``band - 1`` rounds of it, in float64.

    Examples
    --------
    >>> ones = lambda size: np.ones(size)
    >>> stream = Stream((1.0, 0.5))
    >>> [float(stream.draw(1, ones)[0]) for _ in range(3)]
    [1.0, 0.5, 0.75]
    """

    def __init__(self, c: tuple[float, ...]) -> None:
        self._c = np.array(c[1:])
        self._past = np.zeros((len(self._c), 0))
        self._drawn = 0

    def draw(self, size: int, normals: Normals) -> Float64:
        """Return the noise of the next round: of every round, whatever is released in it."""
        noise = normals(size)
        width = len(self._c)
        if not width:
            return noise
        if self._past.shape[1] != size:
            self._past = np.zeros((width, size))
        place = self._drawn % width
        # How long ago each row was drawn, from 1.
        ages = (place - np.arange(width) - 1) % width
        noise = noise - self._c[ages] @ self._past
        self._past[place] = noise
        self._drawn += 1
        return noise
