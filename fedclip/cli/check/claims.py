# SPDX-License-Identifier: Apache-2.0
"""What voids the guarantee of central noise: one list, for every engine.

Each entry of `voids_of` has a severity, the part of a configuration that it is about, and a
sentence:

=======  =======================================================================================
problem  there is no guarantee, or the run would end before its first round
leak     the run goes on, and something leaves that epsilon does not cover
=======  =======================================================================================

`fedclip check` ends with exit code 1 for either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import Participation

# Above this epsilon, a guarantee is one in name only. Ponomareva et al. (2023, "How to DP-fy ML")
# draw the line there: even odds may then become 99.995 % certainty.
_MOST = 10.0

Void = tuple[Literal["problem", "leak"], str, str]
"""Severity, part and sentence."""


class Claim(NamedTuple):
    """The settings of a federation whose averages, or records, have noise.

    Attributes
    ----------
    bound
        The bound whose noise makes the claim; None if records are protected, not clients.
    rounds
        How many are planned, if known.
    population
        The number of all clients, not of those in a round, if known.
    evaluates
        Whether clients send losses or metrics without noise.
    keeps_best, stops_early
        Whether the weights that are kept, and the number of rounds, are chosen by them.
    chooses_clients
        Whether clients are sampled by what they have sent.
    by_turns
        Whether the sampler, if the engine has one, gives clients turns.
    """

    engine: Literal["declearn", "flower", "nvflare"]
    bound: AdaptiveBound | None
    rounds: int | None = None
    population: int | None = None
    evaluates: bool = True
    keeps_best: bool = True
    stops_early: bool = False
    chooses_clients: bool = False
    by_turns: bool = True


def voids_of(claim: Claim) -> Iterator[Void]:
    """Yield all that voids a guarantee, in the order in which it is reported.

    Examples
    --------
    >>> bound = AdaptiveBound(noise_multiplier=5.0, expected_clients=10, generator="insecure")
    >>> claim = Claim("flower", bound, rounds=3, evaluates=False, keeps_best=False)
    >>> [(severity, part) for severity, part, _ in voids_of(claim)]
    [('problem', 'noise')]
    """
    if claim.bound is not None:
        yield from _of_noise(claim, claim.bound)
    if claim.evaluates:
        yield "leak", "evaluate", _EVALUATED[claim.engine]
        if claim.keeps_best:
            yield "leak", "evaluate", _BEST
        if claim.stops_early:
            yield "leak", "early_stop", _STOPPED


def _of_noise(claim: Claim, bound: AdaptiveBound) -> Iterator[Void]:
    per_round, separation = bound.expected_clients or 1, bound.separation
    if bound.generator == "insecure":
        known = "" if bound.seed is None else f", and seed = {bound.seed} repeats it"
        text = (
            f"the noise comes from a generator that can be predicted{known}, for experiments: "
            "there is no guarantee without generator = 'secure' and without a seed"
        )
        yield "problem", "noise", text
    least = max((separation - 1) * per_round + 1, per_round, claim.population or 0)
    if text := too_large_delta(bound.delta, least, "clients", "client"):
        yield "problem", "noise", text
    elif not claim.population and bound.delta >= 1e-3:
        text = (
            f"delta = {bound.delta:g} has to be far below 1 / number of all clients, not of those "
            "in a round: to publish one client, drawn at random, would pass"
        )
        yield "leak", "noise", text
    if bound.budget is not None:
        planned, most = claim.rounds or 1, bound.max_epsilon
        spent, what = bound.budget.cost(planned), f"{planned} round{'s' * (planned > 1)}"
        if most is not None and (spent > most or claim.rounds is None):
            spent, what = most, "max_epsilon"
        if text := too_large_epsilon(spent, what, "plan"):
            yield "problem", "noise", text
    if claim.population is not None:
        due = Participation.of(claim.population, per_round)
        if text := due.refusal(separation, per_round):
            yield "problem", "noise", text
    if claim.chooses_clients:
        text = (
            "a criterion chooses clients by what they have sent before, without noise: one client "
            "decides who else takes part, which the noise does not cover; take another strategy"
        )
        yield "problem", "sampler", text
    if separation > 1 and not claim.by_turns:
        text = (
            "separation charges each client for its own turns, which only the strategy "
            "'round-robin' gives it, alone or within 'named-clients'"
        )
        yield "problem", "sampler", text


def too_large_epsilon(spent: float, what: str, command: str) -> str:
    """Return a sentence if an epsilon is a guarantee in name only; "" if it is not."""
    if spent <= _MOST:
        return ""
    return (
        f"epsilon = {spent:.4g} for {what} is a guarantee in name only: at {_MOST:g}, even odds "
        f"may become a certainty of {1.0 / (1.0 + math.exp(-_MOST)):.3%}; `fedclip privacy "
        f"{command}` says which noise would do"
    )


def too_large_delta(delta: float, least: int, what: str, unit: str) -> str:
    """Return a sentence if a delta allows one of at least `least` units to be published."""
    if delta * least < 1.0:
        return ""
    return (
        f"delta = {delta:g} is not below 1 / {least:,} {what}: a mechanism that publishes one "
        f"{unit}, drawn at random, would pass; take a hundredth of that or less"
    )


# What leaves without noise, by engine.
_EVALUATED = {
    "declearn": "declearn sends each client's evaluation loss and metrics, its number of steps and "
    "of samples, without noise: epsilon does not cover them; set evaluation_share and loss_bound, "
    "or without checkpoints a frequency above the number of rounds",
    "flower": "Flower sends each client's evaluation loss and metrics without noise: epsilon does "
    "not cover them; write fraction-evaluate = 0.0 here, and give the strategy this number",
    "nvflare": "NVFlare sends each client's metrics without noise: epsilon does not cover them; "
    "give the recipe key_metric = '', and let the script return no metrics",
}
_BEST = (
    "the weights that are kept in the end are chosen by losses or metrics without noise; take the "
    "weights of the last round"
)
_STOPPED = (
    "losses without noise decide when training stops, and the number of rounds reveals them; what "
    "is stated afterwards has to be the epsilon of all planned rounds"
)
