# SPDX-License-Identifier: Apache-2.0
r"""What a round of noise costs: the split between update and bits, and the accountant.

With z the noise multiplier that the accountant is told, and ``sigma_b`` the standard deviation
of the noise on the sum of the bits, each recentred to ±1/2 (Andrew et al., 2021, theorem 1)::

    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)

is the multiplier of the noise on the update: both releases together cost what one Gaussian
mechanism of multiplier z does. It exists for ``z < 2 sigma_b`` only.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fedclip import parameters
from fedclip.errors import StateError

__all__ = ["Accountant", "default_bits_noise", "split_noise"]

# Opacus' own stop at 63, which is not the best where the budget is small.
_ORDERS = (
    [1.01, 1.03]
    + [1 + x / 10 for x in range(1, 100)]
    + list(range(11, 64))
    + [2**k for k in range(6, 13)]
)


def default_bits_noise(noise_multiplier: float, clients: int) -> float:
    """Return the standard deviation of the noise on the sum of the bits, if none is chosen.

    A twentieth of the clients, as in the paper, is less than ``z / 2`` for few of them, and
    impossible; z itself leaves the update with ``sqrt(4 / 3)`` = 1.155 times the noise.
    """
    return max(clients / 20, noise_multiplier)


def split_noise(noise_multiplier: float, bits_noise: float) -> float:
    """Return z_delta: the noise multiplier of the update, the bits' noise being paid for.

    Raises
    ------
    ValueError
        If the bits' noise alone is too little; the message says which values would do.
    """
    z, sigma = noise_multiplier, bits_noise
    if z == 0:
        return 0.0
    if not z < 2 * sigma:
        raise ValueError(
            f"noise_multiplier must be below twice bits_noise, got {z!r} and {sigma!r}: take "
            f"bits_noise > {z / 2:.4g} ({z:.4g} costs 15 % more noise on the update, {2 * z:.4g} "
            f"costs 3 %), or noise_multiplier < {2 * sigma:.4g}"
        )
    # 1 / sqrt(z^-2 - (2 sigma)^-2), with nothing squared that could overflow.
    return z / math.sqrt((1 - z / (2 * sigma)) * (1 + z / (2 * sigma)))


class Accountant:
    """Adds up rounds, all clients taking part, and asks Opacus for their epsilon (Rényi).

    Sampling of clients is not credited: declearn's samplers are not Poisson samplers, which is
    what the accountant's amplification is for. The epsilon is thus that of a client who is
    sampled every time, an upper bound for everybody.

    Parameters
    ----------
    delta
        Probability with which the guarantee may fail, in (0, 1).
    relation
        "add-remove" of one client, or "replace-one", under which every noise counts half.
    """

    def __init__(self, delta: float, relation: str = "add-remove") -> None:
        if importlib.util.find_spec("opacus") is None:
            raise ModuleNotFoundError(
                "a noise_multiplier needs Opacus, to account for it: pip install 'fedclip[dp]'"
            )
        self.delta, self.relation = delta, relation
        self.spent: list[tuple[float, int]] = []

    def add(self, noise_multiplier: float) -> None:
        """Count one round."""
        self.spent = self._with(noise_multiplier, 1)

    @property
    def rounds(self) -> int:
        """Rounds counted so far."""
        return sum(rounds for _, rounds in self.spent)

    def epsilon(self, noise_multiplier: float = 0.0, more: int = 0) -> float:
        """Return the epsilon of what was spent, and of so many `more` rounds."""
        history = self._with(noise_multiplier, more)
        if not history:
            return 0.0
        from opacus.accountants import RDPAccountant

        factor = 0.5 if self.relation == "replace-one" else 1.0
        accountant = RDPAccountant()
        accountant.history = [(z * factor, 1.0, rounds) for z, rounds in history]
        with warnings.catch_warnings():
            # Where an order beyond these would be a little better: this is an upper bound, too.
            warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)
            return float(accountant.get_epsilon(delta=self.delta, alphas=_ORDERS))

    def affordable(self, noise_multiplier: float, budget: float, most: int) -> int:
        """Return how many more rounds stay within an epsilon of `budget`, up to `most`."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.epsilon(noise_multiplier, middle) <= budget:
                low = middle
            else:
                high = middle
        return low

    def _with(self, noise_multiplier: float, more: int) -> list[tuple[float, int]]:
        if not more:
            return self.spent
        if self.spent and self.spent[-1][0] == noise_multiplier:
            return [*self.spent[:-1], (noise_multiplier, self.spent[-1][1] + more)]
        return [*self.spent, (noise_multiplier, more)]

    def get_state(self) -> list[list[float]]:
        """Return what was spent: noise multipliers, and the number of rounds with each."""
        return [[z, rounds] for z, rounds in self.spent]

    def set_state(self, spent: Any) -> None:
        """Take over what `get_state` returned."""
        self.spent = self.check_state(spent)

    @staticmethod
    def check_state(spent: Any) -> list[tuple[float, int]]:
        """Return what was spent if it is well formed.

        Raises
        ------
        StateError
            If it is not.
        """
        if isinstance(spent, (str, bytes, Mapping)) or not isinstance(spent, Sequence):
            raise StateError(f"'spent' must be a list of [noise, rounds], got {spent!r:.200}")
        result = []
        for entry in spent:
            try:
                z, rounds = entry
                result.append((parameters.positive(noise=z), parameters.integer(1, rounds=rounds)))
            except (TypeError, ValueError) as exc:
                raise StateError(
                    f"'spent' must be a list of [noise, rounds], got {entry!r:.100} in it"
                ) from exc
        return result
