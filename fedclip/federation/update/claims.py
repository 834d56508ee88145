# SPDX-License-Identifier: Apache-2.0
"""What voids the guarantee of central noise: one list, for every engine.

Each entry of `VOIDS` has a severity, the part of a configuration that it is about, and a function
that returns a sentence, or "" if the entry does not apply:

=======  =======================================================================================
problem  there is no guarantee, or the run would end before its first round
leak     the run goes on, and something leaves that epsilon does not cover
=======  =======================================================================================

`fedclip check` ends with exit code 1 for either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from fedclip.federation.update.adaptive import AdaptiveBound
from fedclip.federation.update.turns import Due

__all__ = ["VOIDS", "Claim", "Void", "too_large_delta", "too_large_epsilon", "voids_of"]

# Above this epsilon, a guarantee is one in name only. Ponomareva et al. (2023, "How to DP-fy ML")
# draw the line there: even odds may then become 99.995 % certainty.
_MOST = 10.0

Severity: TypeAlias = Literal["problem", "leak"]


class Claim(NamedTuple):
    """What a configuration says of a federation whose averages, or records, have noise."""

    engine: Literal["declearn", "flower", "nvflare"]
    bound: AdaptiveBound | None
    """The bound whose noise makes the claim; None if records are protected, not clients."""
    rounds: int | None = None
    """How many are planned, if known."""
    population: int | None = None
    """The number of all clients, not of those in a round, if known."""
    evaluates: bool = True
    """Whether clients send losses or metrics without noise."""
    keeps_best: bool = True
    """Whether the weights that are kept are chosen by them."""
    stops_early: bool = False
    """Whether the number of rounds is chosen by them."""
    chooses_clients: bool = False
    """Whether clients are sampled by what they have sent."""
    by_turns: bool = True
    """Whether the sampler, if the engine has one, gives clients turns."""


class Void(NamedTuple):
    """One way in which a guarantee is void."""

    severity: Severity
    part: str
    sentence: Callable[[Claim], str]


def voids_of(claim: Claim) -> Iterator[tuple[Severity, str, str]]:
    """Yield severity, part and sentence of each entry of `VOIDS` that applies.

    Examples
    --------
    >>> bound = AdaptiveBound(noise_multiplier=5.0, expected_clients=10, generator="insecure")
    >>> claim = Claim("flower", bound, rounds=3, evaluates=False, keeps_best=False)
    >>> [(severity, part) for severity, part, _ in voids_of(claim)]
    [('problem', 'noise')]
    """
    for severity, part, sentence in VOIDS:
        if text := sentence(claim):
            yield severity, part, text


def too_large_epsilon(spent: float, what: str, command: str) -> str:
    """Return a sentence if an epsilon is a guarantee in name only; "" if it is not."""
    if spent <= _MOST:
        return ""
    return (
        f"epsilon = {spent:.4g} for {what} is a guarantee in name only, as each above {_MOST:g} "
        "is: even odds that somebody took part may become a certainty of "
        f"{1.0 / (1.0 + math.exp(-_MOST)):.3%} at {_MOST:g}; `fedclip privacy {command}` says "
        "which noise would do"
    )


def too_large_delta(delta: float, least: int, what: str, unit: str) -> str:
    """Return a sentence if a delta allows one of at least so many units to be published."""
    if delta * least < 1.0:
        return ""
    return (
        f"delta = {delta:g} is not below 1 / {least:,} {what}: a mechanism that publishes one "
        f"{unit}, drawn at random, would pass; take a hundredth of that or less"
    )


# -- the noise --------------------------------------------------------------------------------
def _insecure(claim: Claim) -> str:
    bound = claim.bound
    if bound is None or bound.generator != "insecure":
        return ""
    known = "" if bound.seed is None else f", and seed = {bound.seed} repeats it"
    return (
        f"the noise comes from a generator that can be predicted{known}, for experiments: there is "
        "no guarantee without generator = 'secure' and without a seed"
    )


def _delta(claim: Claim) -> str:
    bound = claim.bound
    if bound is None or bound.expected_clients is None:
        return ""
    least = (bound.separation - 1) * bound.expected_clients + 1
    least = max(least, bound.expected_clients, claim.population or 0)
    return too_large_delta(bound.delta, least, "clients", "client")


def _unsure_delta(claim: Claim) -> str:
    bound = claim.bound
    if bound is None or claim.population or bound.delta < 1e-3 or _delta(claim):
        return ""
    return (
        f"delta = {bound.delta:g} has to be far below 1 / number of all clients, not of those in "
        "a round: to publish one client, drawn at random, would pass"
    )


def _epsilon(claim: Claim) -> str:
    if claim.bound is None or claim.bound.budget is None:
        return ""
    rounds, most = claim.rounds, claim.bound.max_epsilon
    planned = rounds or 1
    spent, what = claim.bound.budget.cost(planned), f"{planned} round{'s' * (planned > 1)}"
    if most is not None and (spent > most or rounds is None):
        spent, what = most, "max_epsilon"
    return too_large_epsilon(spent, what, "plan")


def _few(claim: Claim) -> str:
    bound = claim.bound
    if bound is None or bound.expected_clients is None or claim.population is None:
        return ""
    due = Due.of(claim.population, bound.expected_clients)
    return due.refusal(bound.separation, bound.expected_clients)


# -- who takes part ---------------------------------------------------------------------------
def _chosen(claim: Claim) -> str:
    if claim.bound is None or not claim.chooses_clients:
        return ""
    return (
        "a criterion chooses clients by what they have sent before, without noise: one client "
        "decides who else takes part, which the noise does not cover; take another strategy"
    )


def _no_turns(claim: Claim) -> str:
    if claim.bound is None or claim.bound.separation == 1 or claim.by_turns:
        return ""
    return (
        "separation charges each client for its own turns, which only the strategy 'round-robin' "
        "gives it, alone or within 'named-clients': with another one, each has to be charged for "
        "every round"
    )


# -- what leaves without noise ----------------------------------------------------------------
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

VOIDS: Sequence[Void] = (
    Void("problem", "noise", _insecure),
    Void("problem", "noise", _delta),
    Void("leak", "noise", _unsure_delta),
    Void("problem", "noise", _epsilon),
    Void("problem", "noise", _few),
    Void("problem", "sampler", _chosen),
    Void("problem", "sampler", _no_turns),
    Void("leak", "evaluate", lambda c: _EVALUATED[c.engine] if c.evaluates else ""),
    Void("leak", "evaluate", lambda c: _BEST if c.evaluates and c.keeps_best else ""),
    Void("leak", "early_stop", lambda c: _STOPPED if c.evaluates and c.stops_early else ""),
)
"""All that voids a guarantee, in the order in which it is reported. Add an entry for more."""
