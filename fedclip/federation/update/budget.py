# SPDX-License-Identifier: Apache-2.0
"""The noise of a round, its privacy cost, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fedclip.arrays import Array
from fedclip.errors import StateError
from fedclip.measures import Float64
from fedclip.privacy.accounting import Accountant, Release, split_noise
from fedclip.privacy.accounting import noise_multiplier as least_noise
from fedclip.privacy.noise import Normals, add_noise, insecure_normals, noised, secure_normals

MANY_ROUNDS = 10**6


Draws = Callable[[int, int], Normals]
"""The generator for a round, and for one use of it: 0 for the votes, 1 for the average."""


def draws_of(generator: str, seed: int | None) -> Draws:
    """Return the draws of a secure generator, or of an insecure one, from a seed or without."""
    if generator == "secure":
        return lambda round_, use: secure_normals
    # Seed each round separately, so that a resumed run gives the same noise.
    return lambda round_, use: insecure_normals(*(() if seed is None else (seed, round_, use)))


class Budget:
    """Noise on the average and on the votes of each round, within a budget.

    The parameters are those of `update-clip-server`. `clients` is the number by which the average
    is divided; `bits_noise` is 0 if the clients do not vote, which costs privacy too.

    Raises
    ------
    ValueError
        If the settings are impossible; the message says which would do.
    """

    def __init__(
        self,
        noise_multiplier: float,
        clients: int,
        accountant: Accountant,
        draws: Draws,
        *,
        bits_noise: float,
        max_epsilon: float | None,
    ) -> None:
        self.noise_multiplier, self.clients = noise_multiplier, clients
        self.accountant, self.max_epsilon, self._draws = accountant, max_epsilon, draws
        self.update_noise, self.bits_noise = noise_multiplier, bits_noise
        if bits_noise:
            self.update_noise = split_noise(noise_multiplier, bits_noise)
        if max_epsilon is None:
            return
        first = accountant.epsilon(noise_multiplier, 1)
        if first > max_epsilon:
            delta = accountant.delta
            enough = least_noise(max_epsilon, delta, 1, relation=accountant.relation)
            raise ValueError(
                f"one round with noise_multiplier={noise_multiplier!r} costs epsilon = "
                f"{first:.4g} at delta={delta!r}, above max_epsilon={max_epsilon!r}: take "
                f"noise_multiplier >= {math.ceil(100 * enough) / 100:g}"
            )

    @property
    def epsilon(self) -> float:
        """What has been spent so far."""
        return self.accountant.epsilon()

    def cost(self, rounds: int) -> float:
        """Return the epsilon after `rounds` more rounds."""
        return self.accountant.epsilon(self.noise_multiplier, rounds)

    def rounds_left(self, most: int = MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        if self.max_epsilon is None:
            return most
        return self.accountant.affordable(self.noise_multiplier, self.max_epsilon, most)

    def spend(self) -> None:
        """Count one round, before anything of it is released."""
        self.accountant.add(self.noise_multiplier)

    def refusal(self) -> str:
        """Return why there can be no further round; "" if there can."""
        if self.max_epsilon is None:
            return ""
        after = self.cost(1)
        if after <= self.max_epsilon:
            return ""
        return (
            f"the privacy budget is spent; epsilon is {self.epsilon:.4g} after "
            f"{self.accountant.rounds} rounds, and one more would make it {after:.4g}, above "
            f"max_epsilon = {self.max_epsilon:g}"
        )

    def noise_on_votes(self, round_: int) -> float:
        """Return the noise on the sum of the votes of a round."""
        # A sum of votes lies on the grid of its noise, so the noise can be drawn by itself.
        return float(noised(np.zeros(1), self.bits_noise, self._draws(round_, 0))[0])

    def noised(
        self,
        average: Mapping[str, Array],
        bound: float,
        round_: int,
        exact: Mapping[str, Float64] | None = None,
    ) -> dict[str, Array]:
        """Return the average of a round with noise, scaled to the bound that was sent.

        `exact` is the average before it was rounded to the dtypes of the model.
        """
        std = self.update_noise * bound / self.clients
        return dict(add_noise(average, std, self._draws(round_, 1), exact))

    @staticmethod
    def check_state(spent: object, budget: Budget | None, called: str) -> list[Release]:
        """Return the releases in a state, if a budget can continue from them.

        Raises
        ------
        StateError
            If it is not well formed, or nothing can be spent here.
        """
        found = Accountant.check_state(spent)
        if found and budget is None:
            raise StateError(
                f"the state has spent a privacy budget, and this {called} adds no noise: its "
                "averages would void the guarantee; set the noise_multiplier of that state"
            )
        return found
