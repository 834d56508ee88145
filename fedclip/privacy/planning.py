# SPDX-License-Identifier: Apache-2.0
r"""The noise of each round for a privacy budget, and the effect of that noise on the model.

For T rounds of m clients, a model of d values, and mu, the largest one that the budget allows
(`fedclip.privacy.accounting.mu_of`), halved under "replace-one"::

    z        = sqrt(T) / mu                            noise_multiplier of a round
    z_delta  = (z^-2 - (2 bits_noise)^-2)^(-1/2)       on the update, after the cost of the votes
    noise    = z_delta / m                             on each value of the average, relative to C
    z_delta   with z / sqrt(1 - s^2) instead of z, if evaluations have a share s
    length   = noise sqrt(d)                           of a round's noise, relative to C
    drift    = length / sqrt(T)                        of the noise of all rounds together, relative
                                                       to T C, the farthest that T updates can go

Where clients take turns, by a schedule that has each of them in one of b rounds, T stands for the
turns of a client, ``ceil(T / b)``. "banded" noise (`fedclip.privacy.correlated`) then has less in
the model for the same turns; it is drawn `norm(c)` times as large.

The average of updates clipped to C has a length of at most C, and far less if clients differ. The
drift hardly depends on T (the votes cost 15 % at most): more rounds need more noise each, but also
average it out.

`TrustModels` compares this noise with that which clients add. Of m clients,
n = floor(honest * m) are counted on to add their noise, z_delta C / sqrt(n) each, so that their sum
is what the server would have added::

    trusted       a client adds          on the average         relative to the server's noise
    the server    nothing                z_delta C / m          1
    n clients     z_delta C / sqrt(n)    the same sqrt(m / n)   sqrt(m / n)
    nobody        z_delta C              the same sqrt(m)       sqrt(m)

The second row takes secure sums, of integers (`fedclip.privacy.discrete`): nobody sees a reply. In
cleartext a client has only its own noise to hide behind, which is n = 1. The noise on the votes
grows alike. If c clients tell the server their noise, or send none, a round has the multiplier
``z sqrt((m - c) / n)``.

Examples
--------
>>> found = plan(8.0, 1e-5, rounds=100, clients=100, values=10_000)
>>> found.noise_multiplier, round(found.noise, 4), round(found.length, 2), round(found.drift, 2)
(6.003, 0.0693, 6.93, 0.69)
>>> models = TrustModels(found, honest=0.75)
>>> [round(row.times, 3) for row in models.rows], models.epsilon(silent=25)
([1.0, 1.155, 10.0], 7.998...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.privacy.accounting import (
    Release,
    default_bits_noise,
    epsilon,
    noise_multiplier,
    split_evaluation,
    split_noise,
)
from fedclip.privacy.correlated import coefficients, error, grown
from fedclip.privacy.discrete import honest_sites

ASK_VALUES = "give --values, the number of values of the model, to see the effect of the noise"


@dataclass(frozen=True)
class Plan:
    """The noise for a budget; made by `plan`.

    Attributes
    ----------
    epsilon, delta, rounds, clients, relation, values, momentum, evaluation_share
        The arguments of `plan`; `clients` are those in a round.
    all_clients
        The number of all clients; None if all of them are in each round.
    separation
        Number of rounds from one turn of a client to its next.
    noise_multiplier
        Noise multiplier of each round, rounded up to four digits.
    spent
        The epsilon of all rounds, at most the budget's.
    bits_noise, update_noise
        Standard deviations of the noise on the sum of the votes, and on the sum of the updates
        relative to the bound.
    noise
        Standard deviation on each value of the average, relative to the bound.
    """

    epsilon: float
    delta: float
    rounds: int
    clients: int
    relation: str
    values: int | None
    noise_multiplier: float
    spent: float
    bits_noise: float
    update_noise: float
    all_clients: int | None = None
    separation: int = 1
    momentum: float = 0.0
    evaluation_share: float = 0.0

    @property
    def turns(self) -> int:
        """How many rounds each client is charged for."""
        return -(-self.rounds // self.separation)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients of the noise."""
        return coefficients(self.rounds, self.separation, self.momentum)

    @property
    def share(self) -> float:
        """The noise in the model, as a share of that of independent noise of the same cost."""
        return error(self.coefficients, self.rounds, self.momentum) if self.separation > 1 else 1.0

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on each value of the average, relative to the bound."""
        return self.update_noise * grown(self.coefficients, self.rounds) / self.clients

    @property
    def length(self) -> float | None:
        """Length of a round's noise, relative to the bound; None without the model's size."""
        return None if self.values is None else self.noise * math.sqrt(self.values)

    @property
    def drift(self) -> float | None:
        """Length of all rounds' noise, relative to the farthest that all updates can go."""
        if self.values is None:
            return None
        independent = self.update_noise / math.hypot(*self.coefficients) / self.clients
        return self.share * independent * math.sqrt(self.values / self.rounds)

    @property
    def config(self) -> dict[str, float | int | str]:
        """The parameters of `update-clip-server` that differ from its defaults."""
        settings: dict[str, float | int | str] = {
            "noise_multiplier": self.noise_multiplier,
            "expected_clients": self.clients,
            "delta": self.delta,
            "max_epsilon": self.epsilon,
        }
        if self.relation != "add-remove":
            settings["relation"] = self.relation
        if self.separation > 1:
            settings |= {"separation": self.separation, "noise": "banded", "rounds": self.rounds}
        if self.evaluation_share:
            settings |= {"evaluation_share": self.evaluation_share, "loss_bound": 3.0}
        return settings | ({"momentum": self.momentum} if self.momentum else {})

    def __str__(self) -> str:
        of = "" if self.all_clients is None else f"of {self.all_clients:,} "
        lines = [
            f"epsilon {self.epsilon:g} at delta {self.delta:g}, {self.rounds} rounds of "
            f"{self.clients} {of}clients, {self.relation}:",
            *self._turns_in_words(),
            f"  noise_multiplier {self.noise_multiplier:g}; all rounds together cost "
            f"{in_words(self.spent)}",
            "  standard deviation of the noise, where C is the bound on an update:",
            f"    sum of the updates: {self.update_noise:.4g} C on each value",
            f"    sum of the votes: {self.bits_noise:.4g}",
            f"    average: {self.noise:.3g} C on each value; the average has norm at most C",
        ]
        if self.evaluation_share:
            _, z = split_evaluation(self.noise_multiplier, self.evaluation_share)
            text = f"    mean loss of an evaluation: {z / 2 / self.clients:.3g} loss_bound; with"
            lines.append(f"{text} accuracy, √2 times that on both; the budget covers it")
        if self.delta * self.clients >= 1:
            most = f"1 / clients = {1 / self.clients:.3g}"
            lines.append(f"  delta must be below {most}: use a hundredth of it")
        if self.length is None or self.drift is None:
            return "\n".join([*lines, f"  {ASK_VALUES}"])
        lines += [
            f"  with {self.values:,} values, the noise of a round has norm {self.length:.3g} C; "
            f"the total noise is {100 * self.drift:.3g} % of the largest possible change of the "
            "model",
            f"  {verdict(self.drift, self.clients, 'clients')}",
            "  measured cost of noise, participation and correlated noise: docs/study.md",
        ]
        return "\n".join(lines)

    def _turns_in_words(self) -> list[str]:
        """Return what a schedule saves, if clients take part in some rounds only."""
        if self.all_clients is None:
            return []
        if self.separation == 1:
            return ["  all clients take part in every round, so a schedule saves nothing"]
        every = noise_multiplier(self.epsilon, self.delta, self.rounds, relation=self.relation)
        always = _rounded_up(every)
        less = math.sqrt(self.turns / self.rounds)
        lines = [
            f"  each client takes part once in {self.separation} rounds (client sampler "
            f"'round-robin'), and pays for {self.turns} instead of {self.rounds} rounds:",
            f"    the noise in the model is {less:.3g} times that of noise_multiplier {always:g} "
            "in every round,",
            f'    and {less * self.share:.3g} times with noise = "banded", which is correlated '
            f"over {len(self.coefficients)} rounds",
        ]
        if self.values is not None:
            megabytes = 8e-6 * (len(self.coefficients) - 1) * self.values
            lines.append(f"    the server stores {megabytes:.3g} MB of noise in memory")
        return lines


def plan(
    epsilon_: float,
    delta: float,
    rounds: int,
    clients: int,
    *,
    relation: str = "add-remove",
    values: int | None = None,
    per_round: int | None = None,
    momentum: float = 0.0,
    evaluation_share: float = 0.0,
) -> Plan:
    """Return the noise of each round that a budget allows.

    Parameters
    ----------
    epsilon_, delta
        The budget of all rounds: epsilon above 0, delta in (0, 1).
    rounds, clients
        Number of rounds, and of clients in each.
    relation : {"add-remove", "replace-one"}, default="add-remove"
        Which federations are neighbours.
    values : int or None, default=None
        Number of values in the model.
    per_round : int or None, default=None
        Number of clients in each round; `clients` are then all of them, and take turns.
    momentum : float, default=0.0
        That of the server's optimizer, in [0, 1), for which noise is made if they take turns.
    evaluation_share : float, default=0.0
        Share of each round's noise for an evaluation after it, in [0, 1).

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above.
    """
    budget = parameters.positive(epsilon=epsilon_)
    rounds = parameters.integer(1, rounds=rounds)
    clients = parameters.integer(1, clients=clients)
    values = parameters.optional(parameters.integer, 1, values=values)
    per_round = parameters.optional(parameters.integer, 1, per_round=per_round)
    everybody, separation = None, 1
    if per_round is not None:
        everybody, clients = clients, min(per_round, clients)
        separation = min(-(-everybody // clients), rounds)
    turns = -(-rounds // separation)
    # If clients take part once in some rounds, the first round, which only counts votes, is
    # charged in addition. Its multiplier is at least 2 z, so it costs at most a quarter of a turn.
    votes = separation > 1
    for_turns = noise_multiplier(budget, delta, turns, relation=relation)
    z = _rounded_up(for_turns * math.sqrt(1.0 + votes / (4.0 * turns)))
    without, _ = split_evaluation(z, parameters.share(evaluation_share=evaluation_share))
    if evaluation_share and separation > 1:
        raise ValueError("evaluations ask all clients: give either evaluation_share or per_round")
    bits = default_bits_noise(without, clients)
    releases = [Release(z, turns), *([Release(2.0 * bits, 1)] if votes else [])]
    spent = epsilon(releases, delta, relation)
    momentum = momentum if separation > 1 else 0.0
    update = split_noise(without, bits) * math.hypot(*coefficients(rounds, separation, momentum))
    return Plan(
        *(budget, delta, rounds, clients, relation, values, z, spent, bits, update),
        *(everybody, separation, momentum, evaluation_share),
    )


def in_words(spent: float) -> str:
    """Return the spent epsilon; with a very small budget, delta alone may cover the run.

    >>> in_words(7.999), in_words(0.0)
    ('epsilon 7.999', 'epsilon 0: delta covers it')
    """
    return f"epsilon {spent:.4g}" if spent else "epsilon 0: delta covers it"


def verdict(drift: float, takers: int, kind: str) -> str:
    """Return what to expect of noise, given its share of the largest possible change.

    >>> verdict(0.5, 100, "clients")[:44]
    'the noise is large: 500 clients would reduce'
    """
    if drift <= 0.1:
        return "the noise is small: expect about the accuracy of clipping without noise"
    much = "larger than the updates" if drift > 1 else "large"
    # An upper bound: the votes of many clients cost less.
    enough = math.ceil(10 * drift * takers)
    text = f"the noise is {much}: {enough:,} {kind} would reduce the total to 10 %"
    return f"{text}. Training fewer values, or a larger epsilon, also helps"


def _rounded_up(value: float) -> float:
    """Return a number rounded up to four digits.

    >>> _rounded_up(6.00234), _rounded_up(0.5)
    (6.003, 0.5)
    """
    power = 3 - math.floor(math.log10(value))
    return float(f"{math.ceil(round(value * 10.0**power, 6)) / 10.0**power:.4g}")


# -- who adds the noise --------------------------------------------------------------------------
class TrustModel(NamedTuple):
    """The noise if somebody is trusted to add it.

    Attributes
    ----------
    trusted
        Who is.
    each, noise
        Standard deviation of what each client adds to each value, and of the noise on each value
        of the average, relative to the bound.
    times
        The latter, relative to the server's own noise.
    """

    trusted: str
    each: float
    noise: float
    times: float

    def __str__(self) -> str:
        each = f"{self.each:.3g} C" if self.each else "nothing"
        noise = f"{self.noise:.3g} C"
        return f"    {self.trusted:34}{each:>13}{noise:>18}   {self.times:.3g} times"


@dataclass(frozen=True)
class TrustModels:
    """A plan without turns, by whom you trust to add the noise.

    Parameters
    ----------
    plan
        The plan.
    honest
        The share of the clients that surely add their noise, in (0, 1].

    Raises
    ------
    TypeError, ValueError
        If `honest` is not as above.
    """

    plan: Plan
    honest: float = 0.75

    def __post_init__(self) -> None:
        parameters.fraction(honest=self.honest)

    @property
    def sites(self) -> int:
        """How many clients surely add their noise."""
        return honest_sites(self.plan.clients, self.honest)

    @property
    def rows(self) -> list[TrustModel]:
        """The server trusted with the noise, the sites, nobody."""
        clients, each, noise = self.plan.clients, self.plan.update_noise, self.plan.noise
        table = [TrustModel("the server", 0.0, noise, 1.0)]
        secure = f"{self.sites} of {clients} clients, secure sums"
        for trusted, sites in ((secure, self.sites), ("nobody, without secure sums", 1)):
            times = math.sqrt(clients / sites)
            table.append(TrustModel(trusted, each / math.sqrt(sites), noise * times, times))
        return table

    @property
    def configs(self) -> tuple[Config, Config]:
        """The parameters of `update-clip-client` and `update-clip-server`, with a `max_norm`."""
        server = {**self.plan.config, "noise_at": "clients", "honest": self.honest, "max_norm": 1.0}
        agreed = ("noise_multiplier", "expected_clients", "honest", "max_norm")
        return {"noise": {name: server[name] for name in agreed}}, server

    def epsilon(self, silent: int) -> float:
        """Return the epsilon of secure sums if `silent` clients tell the server their noise."""
        z = self.plan.noise_multiplier * math.sqrt((self.plan.clients - silent) / self.sites)
        return epsilon([Release(z, self.plan.rounds)], self.plan.delta, self.plan.relation)

    def __str__(self) -> str:
        lines = [
            '  the same epsilon if clients add the noise (noise_at = "clients"), by whom you '
            "trust:",
            f"    {'trusted to add noise':34}{'a client adds':>13}{'in the average':>18}",
            *map(str, self.rows),
            silent_in_words(by_silent(self.epsilon, self.plan.clients, self.sites)),
        ]
        return "\n".join(lines)


def by_silent(epsilon: Callable[[int], float], clients: int, sites: int) -> dict[int, float | None]:
    """Return epsilon by how many clients tell their noise: none, all that may, half, all others.

    None stands for an infinite one.
    """
    epsilons = {c: epsilon(c) for c in sorted({0, clients - sites, clients // 2, clients - 1})}
    return {c: e if math.isfinite(e) else None for c, e in epsilons.items()}


def silent_in_words(costs: Mapping[int, float | None]) -> str:
    """Return the result of `by_silent`, and its assumption, in two lines."""
    texts = {c: "infinite" if e is None else f"{e:.4g}" for c, e in costs.items()}
    cases = ", ".join(f"{text} if {c or 'no'} clients do" for c, text in texts.items())
    return (
        "  epsilon with secure sums, by the number of clients that reveal their noise to the "
        f"server: {cases}. Without secure sums, epsilon is the last number\n"
        "  declearn's masks for secure sums use no cryptographic generator: see "
        "docs/secure-aggregation.md"
    )
