# SPDX-License-Identifier: Apache-2.0
"""The noise of a round, its privacy cost, and when to stop.

Clients are charged by turns: all of them take part in a round; or each has a turn in one of
`separation` rounds, by a schedule that depends on nothing that clients send. Whoever is due is
charged, whether or not a reply comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fedclip.arrays import Array
from fedclip.errors import StateError
from fedclip.measures import Float64
from fedclip.privacy.accounting import Accountant, Release, split_evaluation, split_noise
from fedclip.privacy.accounting import noise_multiplier as least_noise
from fedclip.privacy.banded import Stream
from fedclip.privacy.noise import Normals, add_noise, insecure_normals, noised, secure_normals

MANY_ROUNDS = 10**6


Draws = Callable[[int, int], Normals]
"""The generator for a round, and for one use of it: 0 for the votes, 1 for the average, 2 for the
evaluation."""


def draws_of(generator: str, seed: int | None) -> Draws:
    """Return the draws of a secure generator, or of an insecure one, from a seed or without."""
    if generator == "secure":
        return lambda round_, use: secure_normals
    # Seed each round separately, so that a resumed run gives the same noise.
    return lambda round_, use: insecure_normals(*(() if seed is None else (seed, round_, use)))


class Budget:
    """Noise on the average, the votes and the evaluation of each round, within a budget.

    The parameters are those of `update-clip-server`. `clients` is the number by which the average
    is divided; `bits_noise` is 0 if the clients do not vote, which costs privacy too. A turn costs
    as much as one Gaussian mechanism of multiplier `noise_multiplier`: with coefficients of banded
    noise, that of a round grows by their norm.

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
        separation: int = 1,
        coefficients: tuple[float, ...] = (1.0,),
        evaluation_share: float = 0.0,
    ) -> None:
        self.noise_multiplier, self.clients = noise_multiplier, clients
        self.accountant, self.max_epsilon, self._draws = accountant, max_epsilon, draws
        self.bits_noise = bits_noise
        self.update_noise, self.evaluation_noise = split_evaluation(
            noise_multiplier, evaluation_share
        )
        # Whether there is an evaluation that was paid for with its round, and has not been told.
        self._unevaluated = False
        self.separation, self.coefficients = separation, coefficients
        self._begin()
        if bits_noise:
            self.update_noise = split_noise(self.update_noise, bits_noise)
        self.update_noise *= math.hypot(*coefficients)
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

    def _begin(self) -> None:
        """Begin a schedule, and with it a stream of noise."""
        self._rounds, self._stream = 0, Stream(self.coefficients)
        # Turns to pay for besides those of the schedule, in its first round.
        self._owed = 0

    def _turns(self, rounds: int) -> int:
        """Return how many turns a client has, at most, from the first of so many rounds on."""
        return -(-rounds // self.separation)

    @property
    def epsilon(self) -> float:
        """What has been spent so far."""
        return self.accountant.epsilon()

    def cost(self, rounds: int) -> float:
        """Return the epsilon after `rounds` more rounds."""
        turns = self._turns(self._rounds + rounds) - self._turns(self._rounds)
        return self.accountant.epsilon(self.noise_multiplier, turns + self._owed)

    def rounds_left(self, most: int = MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        if self.max_epsilon is None:
            return most
        turns = self.accountant.affordable(self.noise_multiplier, self.max_epsilon, most)
        paid = self.separation * self._turns(self._rounds) - self._rounds
        return min(paid + self.separation * max(turns - self._owed, 0), most)

    def spend(self) -> None:
        """Count one round, before anything of it is released; its turns, if these begin."""
        if self._rounds % self.separation == 0:
            self.accountant.add(self.noise_multiplier, 1 + self._owed)
            self._owed = 0
        self._rounds += 1
        self._unevaluated = True

    def resume(self, spent: list[Release]) -> None:
        """Take over what was spent, and begin another schedule.

        A server that was killed may have released rounds that its last checkpoint does not know:
        each client had at most one turn in as many rounds as a schedule has.
        """
        self.accountant.set_state(spent)
        self._begin()
        self._owed = int(bool(spent) and self.separation > 1)

    def refusal(self) -> str:
        """Return why there can be no further round; "" if there can."""
        if self.max_epsilon is None:
            return ""
        after = self.cost(1)
        if after <= self.max_epsilon:
            return ""
        what = "rounds" if self.separation == 1 else "turns of each client"
        return (
            f"the privacy budget is spent; epsilon is {self.epsilon:.4g} after "
            f"{self.accountant.rounds} {what}, and one more would make it {after:.4g}, above "
            f"max_epsilon = {self.max_epsilon:g}"
        )

    def noise_on_votes(self, round_: int) -> float:
        """Return the noise on the sum of the votes of a round."""
        # A sum of votes lies on the grid of its noise, so the noise can be drawn by itself.
        return float(noised(np.zeros(1), self.bits_noise, self._draws(round_, 0))[0])

    def evaluated(self, rows: Float64, round_: int) -> Float64 | None:
        """Return the means of the clients' numbers with noise; None if it is not paid for.

        `rows` has a row for each client that has sent some, all in [0, 1]. One that sent none
        counts as 1/2. A client more or less moves the sums by half the root of their number.
        """
        if not self._unevaluated:
            return None
        self._unevaluated = False
        std = self.evaluation_noise * math.sqrt(rows.shape[1]) / 2.0
        sums = noised((rows - 0.5).sum(axis=0), std, self._draws(round_, 2))
        return np.asarray(np.clip(0.5 + sums / self.clients, 0.0, 1.0))

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
        # What a round takes back must be of the same values, whatever their order.
        names = sorted(average)
        normals = self._next(average, round_)
        found = add_noise({name: average[name] for name in names}, std, normals, exact)
        return {name: found[name] for name in average}

    def skip(self, average: Mapping[str, Array], round_: int) -> None:
        """Draw the noise of a round that is not released: later rounds count it as one."""
        self._next(average, round_)

    def _next(self, average: Mapping[str, Array], round_: int) -> Normals:
        """Return a function that hands out the noise of a round, piece by piece."""
        normals = self._draws(round_, 1)
        if len(self.coefficients) == 1:
            return normals
        noise = self._stream.draw(sum(math.prod(x.shape) for x in average.values()), normals)

        def piece(size: int) -> Float64:
            nonlocal noise
            found, noise = noise[:size], noise[size:]
            return found

        return piece

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
