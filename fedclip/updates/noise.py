# SPDX-License-Identifier: Apache-2.0
"""The noise of a round, its privacy cost, and when to stop.

Clients are charged by turns: all of them take part in a round; or each has a turn in one of
`separation` rounds, by a schedule that depends on nothing that clients send. Whoever is due is
charged, whether or not a reply comes.

::

    Reserve(round):                     before anything of the round leaves the server
        if it does not follow, in the same schedule, a round that has drawn its noise:
            begin a schedule, and a stream of noise
        if it is the first of `separation` rounds: charge a turn
        write the round, its schedule and the charge to the ledger

A schedule that breaks off has paid for all of its turns, and the next one begins with turns of its
own and new noise. So it does not matter where, or how often, a server dies.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import numpy as np

from fedclip.arrays import Array, Float64
from fedclip.privacy import accounting
from fedclip.privacy.accounting import Accountant, Release, covers
from fedclip.privacy.correlated import Stream
from fedclip.privacy.ledger import Entry, Ledger, read_entries, total
from fedclip.privacy.noise import Normals, add_noise, insecure_normals, noised, secure_normals
from fedclip.updates.protocol import Participation

MANY_ROUNDS = 10**6
UNIT = "the updates of a client"
"""The unit of protection in a server's ledger."""

# Ledgers without a file, by their identity: a state may go on in another object.
_OF_THIS_PROCESS: dict[str, Ledger] = {}

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
    is divided; `bits_noise` is 0 if the clients do not vote (None: the default). A turn costs
    as much as one Gaussian mechanism of multiplier `noise_multiplier`: with coefficients of banded
    noise, that of a round grows by their norm. With `votes_first`, the first round only
    counts votes, and costs no more. `path` is the ledger; without one, what was spent ends with
    this object.

    Notes
    -----
    A client moves the noised sum by at most the bound (a replaced one by twice that), and the
    divisor is fixed. A secure sum is first projected onto norm m C, which moves no two sums apart.
    With votes the update gets z_delta = (z^-2 - (2 bits_noise)^-2)^(-1/2) instead of z, and each
    value of an average over m clients noise of z_delta * C / m.
    So a round is a Gaussian mechanism of mu = 1 / z. Rounds compose to mu = sqrt(T) / z, also if
    they depend on earlier releases (Dong, Roth & Su, 2022), and epsilon is then exact.

    Raises
    ------
    ValueError
        If the settings are impossible; the message says which would do. If the ledger is damaged.
    """

    def __init__(
        self,
        noise_multiplier: float,
        clients: int,
        accountant: Accountant,
        draws: Draws,
        *,
        bits_noise: float | None = None,
        max_epsilon: float | None = None,
        separation: int = 1,
        coefficients: tuple[float, ...] = (1.0,),
        evaluation_share: float = 0.0,
        path: str | None = None,
        votes_first: bool = False,
    ) -> None:
        self.noise_multiplier, self.clients, self._draws = noise_multiplier, clients, draws
        self.max_epsilon, relation = max_epsilon, accountant.relation
        self.path = None if path is None else Path(path).resolve()
        self._ledger: Ledger | None = None
        # What states say was spent, and in which ledger it was: taken over before the next round.
        self._before = accountant
        self._origins: list[str] = []
        self._identity, self._due = uuid4().hex, Participation(1, 0)
        both = accounting.split_evaluation(noise_multiplier, evaluation_share)
        self.update_noise, self.evaluation_noise = both
        # Whether a round was trained, and its evaluation, which is paid for, is not done.
        self.unevaluated = False
        self.separation, self.coefficients = separation, coefficients
        self._begin()
        if bits_noise is None:
            bits_noise = accounting.default_bits_noise(both[0], clients)
        self.bits_noise, self.votes_first = bits_noise, votes_first
        # One vote moves the counts by 1, another vote in its place by sqrt(2), where the update
        # moves by C and by 2 C.
        self.noise_of_bins = bits_noise * (2.0 if relation == "add-remove" else math.sqrt(2.0))
        if bits_noise:
            self.update_noise = accounting.split_noise(self.update_noise, bits_noise)
        self.update_noise *= math.hypot(*coefficients)
        self.accountant.epsilon()  # a ledger that is damaged is refused now
        first, delta = accountant.epsilon(noise_multiplier, 1), accountant.delta
        if max_epsilon is not None and first > max_epsilon:
            enough = accounting.noise_multiplier(max_epsilon, delta, 1, relation=relation)
            advice = f"take noise_multiplier >= {math.ceil(100 * enough) / 100:g}"
            text = f"one round costs epsilon = {first:.4g} at delta={delta!r}"
            raise ValueError(f"{text}, above max_epsilon={max_epsilon!r}: {advice}")

    def _begin(self) -> None:
        """Begin a schedule, and with it a stream of noise."""
        self._rounds, self._stream, self._drawn = 0, Stream(self.coefficients), False

    def _turns(self, rounds: int) -> int:
        """Return how many turns a client has, at most, in the first `rounds` rounds."""
        return -(-rounds // self.separation)

    @property
    def ledger(self) -> Ledger:
        """The ledger, in which nothing but noise of servers is charged."""
        if self._ledger is None:
            of, relation = (self.max_epsilon, self._before.delta, self.path), self._before.relation
            self._ledger = Ledger(*of, data=UNIT, relation=relation)
        return self._ledger

    @property
    def accountant(self) -> Accountant:
        """All that was spent, by the ledger and by states that were taken over; a copy."""
        if self._ledger is not None:
            accountant = self._ledger.accountant
        else:
            lines = read_entries(self.path) if self.path and self.path.exists() else {}
            last = Entry((), self._before.delta, self._before.relation)
            accountant = total([*lines.values(), last])
        for release in [] if covers(accountant.spent, self._before.spent) else self._before.spent:
            accountant.add(*release)
        return accountant

    @property
    def schedule(self) -> str:
        """The identity of the schedule of the last round."""
        return self._due.schedule or self._identity

    @property
    def epsilon(self) -> float:
        """What has been spent so far."""
        return self.accountant.epsilon()

    def cost(self, rounds: int) -> float:
        """Return the epsilon after `rounds` more rounds."""
        rounds = max(rounds - self.votes_first, 0)
        turns = self._turns(self._rounds + rounds) - self._turns(self._rounds)
        return self._after_votes().epsilon(self.noise_multiplier, turns)

    @property
    def _votes_multiplier(self) -> float:
        """The noise multiplier of a round that only counts votes, and its evaluation."""
        votes = min(2.0 * self.bits_noise, sys.float_info.max)
        # 1 / sqrt(votes^-2 + evaluation^-2), without squares that overflow.
        ratio = votes / self.evaluation_noise if self.evaluation_noise > 0.0 else 0.0
        return votes / math.hypot(1.0, ratio)

    def _after_votes(self) -> Accountant:
        """Return what will be spent after a first round that only counts votes."""
        accountant = self.accountant
        if self.votes_first:
            accountant.add(self._votes_multiplier)
        return accountant

    def rounds_left(self, most: int = MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        if self.max_epsilon is None:
            return most
        turns = self._after_votes().affordable(self.noise_multiplier, self.max_epsilon, most)
        paid = self.separation * self._turns(self._rounds) - self._rounds
        return min(self.votes_first + paid + self.separation * turns, most)

    def reserve(self, round_: int, due: Participation | None = None) -> str:
        """Charge a round before anything of it leaves; return why it cannot begin, or ""."""
        due = due or Participation(1, 0)
        if not (self._drawn and due.follows(self._due)):
            self._begin()
        self._due, self._drawn = due, False
        turns = int(self._rounds % self.separation == 0)
        only_votes, self.votes_first = self.votes_first, False
        try:
            if why := self._take_over():
                return why
            z, name = self.noise_multiplier, self.schedule
            if only_votes:
                z, turns = self._votes_multiplier, 1
            if self.ledger.reserve(z, 1.0, turns, schedule=name, round_=round_) < turns:
                return self.refusal() or "the privacy budget is spent"
        except (OSError, ValueError) as exc:
            return str(exc)
        # The first round with an update begins a schedule.
        self._rounds += not only_votes
        return ""

    def identity(self) -> str:
        """Return the identity of the ledger, for a state; "" if it cannot be used."""
        try:
            identity = self.ledger.identity
        except (OSError, ValueError):
            return ""
        if self.path is None:
            _OF_THIS_PROCESS[identity] = self.ledger
        return identity

    def resume(self, spent: list[Release], state: Mapping[str, object]) -> None:
        """Remember what a state says was spent, and in which ledger; begin another schedule."""
        self._before.set_state(spent)
        # No ledger has the second name: a state without a ledger goes nowhere.
        self._origins.append(str(state.get("ledger") or "no ledger"))
        self._begin()

    def _take_over(self) -> str:
        """Charge what the ledger lacks of states that were taken over; or say why it cannot."""
        for origin in self._origins:
            if self.path is None and origin in _OF_THIS_PROCESS:
                self.ledger.join(_OF_THIS_PROCESS[origin])
            known = self.ledger.knows(origin)
            if not known or not covers(self.ledger.accountant.spent, self._before.spent):
                ledger = f"the ledger {self.path} lacks" if self.path else "there is no ledger of"
                text = f"this state comes from a server with noise, and {ledger} what it spent"
                return f"{text}: set ledger of update-clip-server to the file that it wrote"
        self._before, self._origins = Accountant(self._before.delta, self._before.relation), []
        return ""

    def refusal(self) -> str:
        """Return why there can be no further round; "" if there can."""
        if self.max_epsilon is None or (after := self.cost(1)) <= self.max_epsilon:
            return ""
        what = "rounds" if self.separation == 1 else "turns of each client"
        spent = f"epsilon is {self.epsilon:.4g} after {self.accountant.rounds} {what}"
        more = f"one more would make it {after:.4g}, above max_epsilon = {self.max_epsilon:g}"
        return f"the privacy budget is spent; {spent}, and {more}"

    def noised_counts(self, counts: Float64, round_: int) -> Float64:
        """Return the counts of the votes of a round with noise."""
        return noised(counts, self.noise_of_bins, self._draws(round_, 0))

    def evaluated(self, rows: Float64, round_: int) -> Float64 | None:
        """Return the means of the clients' numbers with noise; None if it is not paid for.

        `rows` has a row for each client that has sent some, all in [0, 1]. One that sent none
        counts as 1/2. A client more or less moves the sums by half the root of their number.
        """
        if not self.unevaluated:
            return None
        self.unevaluated = False
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
        std, normals = self.update_noise * bound / self.clients, self.next_noise(average, round_)
        # What a round takes back must be of the same values, whatever their order.
        result = add_noise({name: average[name] for name in sorted(average)}, std, normals, exact)
        return {name: result[name] for name in average}

    def next_noise(self, average: Mapping[str, Array], round_: int) -> Normals:
        """Return a function that hands out the noise of a round, piece by piece."""
        self._drawn = True
        normals = self._draws(round_, 1)
        if len(self.coefficients) == 1:
            return normals
        noise = self._stream.draw(sum(math.prod(x.shape) for x in average.values()), normals)

        def piece(size: int) -> Float64:
            nonlocal noise
            drawn, noise = noise[:size], noise[size:]
            return drawn

        return piece
