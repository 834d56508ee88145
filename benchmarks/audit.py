"""Attack update clipping under noise: ``python -m benchmarks.audit [ROUNDS]``.

The worst client there can be takes part in a round, or does not, and whoever sees the noised
average and the next bound guesses which. What the guesses are worth is stated as the mu of a
Gaussian mechanism: with a threshold chosen on a fifth of the rounds, the rates of both errors on
the others give::

    mu = Q^-1(false alarms) - Q^-1(1 - misses)          Q: upper tail of the normal distribution

with an interval of 95 % from those of Clopper and Pearson for the two rates (Nasr et al., 2023,
"Tight auditing of differentially private machine learning"). A round claims mu = 1 / z.

Each round is fedclip's own code from the server's first message to the noised average. Cases that
have a fault built in must come out above the claim, or the audit would not see faults.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from declearn.model.sklearn import NumpyVector
from scipy import stats

from fedclip import ClippedAveraging, UpdateClipClient, UpdateClipServer
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipVotes
from fedclip.updates import bound as bounds
from fedclip.updates.limits import Limits

NOISE = 1.0
"""The noise multiplier z."""
CLIENTS = 10
"""How many clients a round expects, m."""
BOUND = 0.5
DIRECTION = np.array([0.6, -0.8, 0.0])


class Estimate(NamedTuple):
    """What an attack has reached: mu, and an interval of 95 %."""

    mu: float
    low: float
    high: float


# -- one round --------------------------------------------------------------------------------
def reply(update: np.ndarray[Any, Any], sent: Any) -> tuple[ClippedUpdates, UpdateClipVotes]:
    """Return what an honest client replies."""

    def run() -> tuple[ClippedUpdates, UpdateClipVotes]:
        module = UpdateClipClient()
        module.process_aux_var(sent)
        shared = ClippedAveraging().prepare_for_sharing(NumpyVector({"w": update}), n_steps=1)
        votes = module.collect_aux_var()
        assert votes is not None
        return shared, votes

    # In a context of its own, as on a machine of its own.
    return copy_context().run(run)


class Round:
    """Rounds of the same honest clients, with or without the worst one.

    Parameters
    ----------
    voters, silent
        How many honest clients vote to be within the bound, and reply without a vote.
    against
        How many honest clients vote not to be within it.
    worst
        The update of the worst client, relative to the bound.
    honest
        Whether the worst client clips; if not, it sends its update as it is.
    seed
        For noise that can be repeated; None for the secure noise.
    """

    def __init__(
        self,
        voters: int = CLIENTS // 2,
        against: int = CLIENTS // 2 - 1,
        silent: int = 0,
        worst: float = 10.0,
        honest: bool = True,
        seed: int | None = None,
    ) -> None:
        self.server = UpdateClipServer(
            start_norm=BOUND,
            noise_multiplier=NOISE,
            expected_clients=CLIENTS,
            generator="secure" if seed is None else "insecure",
            seed=seed,
        )
        self.aggregator = ClippedAveraging()
        sent = self.server.collect_aux_var()
        zero, long = np.zeros(3), 3.0 * BOUND * np.array([0.8, 0.6, 0.0])
        # Of clients that are against, one pulls this way and the next one that way.
        self.others = [reply(zero, sent) for _ in range(voters)]
        self.others += [reply(long * (-1) ** i, sent) for i in range(against)]
        self.others += [(reply(zero, sent)[0], UpdateClipVotes()) for _ in range(silent)]
        self.worst = reply(worst * BOUND * DIRECTION, sent)
        if not honest:
            raw = ClippedUpdates(NumpyVector({"w": worst * BOUND * DIRECTION}), 1)
            self.worst = (raw, self.worst[1])

    def play(self, present: bool) -> list[float]:
        """Return what is seen: the sum along the worst client's direction, and all counts."""
        server, replies = self.server, [*self.others, *([self.worst] if present else [])]
        budget, counts = server.budget, list[float]()
        assert budget is not None

        def seen(possible: Any, round_: int) -> Any:
            noisy = type(budget).noised_counts(budget, possible, round_)
            counts.extend(noisy)
            return noisy

        server.bound = BOUND
        server.collect_aux_var()
        with mock.patch.object(budget, "noised_counts", seen):
            server.process_aux_var(sum(votes for _, votes in replies))
        average = self.aggregator.finalize_updates(sum(update for update, _ in replies))
        out = server.run(average).coefs["w"]
        return [float(out @ DIRECTION) * CLIENTS / BOUND, *counts]


# -- faults -----------------------------------------------------------------------------------
def half_the_noise(rounds: Round) -> contextlib.AbstractContextManager[Any]:
    budget = rounds.server.budget
    assert budget is not None
    halves = {"update_noise": budget.update_noise / 2, "noise_of_bins": budget.noise_of_bins / 2}
    return mock.patch.multiple(budget, **halves)


def votes_thrown_away(rounds: Round) -> contextlib.AbstractContextManager[Any]:
    def discard(counts: Any, total: float, *, exactly: bool = False) -> Any:
        if not exactly and counts.sum() > total:
            counts = 0.0 * counts
        return project(counts, total, exactly=exactly)

    project = bounds.projected
    return mock.patch.object(bounds, "projected", discard)


def nothing_measured(rounds: Round) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Limits, "excess", return_value="")


def none(rounds: Round) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


class Case(NamedTuple):
    """Rounds to attack, a fault to build in, and whether the attack must then succeed."""

    setting: dict[str, Any]
    fault: Callable[[Round], contextlib.AbstractContextManager[Any]] = none
    succeeds: bool = False


# Twice as many reply as are expected; as many as are expected vote, all of them to be within.
CROWD = {"voters": CLIENTS, "against": 0, "silent": CLIENTS}
CASES = {
    "as it is": Case({}),
    "twice as many clients reply": Case(CROWD),
    "a client does not clip": Case({"honest": False}),
    "half the noise": Case({}, half_the_noise, True),
    "votes of a crowd are thrown away, not projected": Case(CROWD, votes_thrown_away, True),
    "ten times the bound gets through": Case({"honest": False}, nothing_measured, True),
}


# -- the attack -------------------------------------------------------------------------------
def observe(
    case: Case, rounds: int, seed: int | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return what is seen in so many rounds without the worst client, and with it."""
    playing = Round(**case.setting, seed=seed)
    with quiet(), case.fault(playing):
        seen = [np.array([playing.play(p) for _ in range(rounds)]) for p in (False, True)]
    return seen[0], seen[1]


def estimate(absent: np.ndarray[Any, Any], present: np.ndarray[Any, Any]) -> Estimate:
    """Return what the best linear guess is worth."""
    pilot = len(absent) // 5
    shift = present[:pilot].mean(0) - absent[:pilot].mean(0)
    spread = np.cov(
        np.vstack(
            [absent[:pilot] - absent[:pilot].mean(0), present[:pilot] - present[:pilot].mean(0)]
        ).T
    )
    weights = np.linalg.solve(spread + 1e-9 * np.eye(len(shift)), shift)
    middle = (np.median(absent[:pilot] @ weights) + np.median(present[:pilot] @ weights)) / 2
    alarms = int((absent[pilot:] @ weights > middle).sum())
    hits = int((present[pilot:] @ weights > middle).sum())
    count = len(absent) - pilot
    # Each rate is outside of its interval in 2.5 % of all audits.
    (hits_low, hits_high), (alarms_low, alarms_high) = (
        interval(hits, count),
        interval(alarms, count),
    )
    ppf = stats.norm.ppf
    mu = ppf((hits + 0.5) / (count + 1)) - ppf((alarms + 0.5) / (count + 1))
    return Estimate(
        float(mu),
        float(ppf(hits_low) - ppf(alarms_high)),
        float(ppf(hits_high) - ppf(alarms_low)),
    )


def interval(successes: int, count: int, miss: float = 0.025) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson."""
    low = stats.beta.ppf(miss / 2, successes, count - successes + 1) if successes else 0.0
    high = stats.beta.ppf(1 - miss / 2, successes + 1, count - successes)
    return float(low), float(high) if successes < count else 1.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the server from logging each round."""
    logger = logging.getLogger("declearn")
    before, logger.disabled = logger.disabled, True
    children = [logging.getLogger(f"declearn.{side}.fedclip") for side in ("server", "client")]
    states = [(child, child.disabled) for child in children]
    for child in children:
        child.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
        for child, state in states:
            child.disabled = state


def main(arguments: Sequence[str]) -> int:
    rounds = int(arguments[0]) if arguments else 10_000
    claim, failed = 1 / NOISE, 0
    print(f"A round claims mu = {claim:g}; {rounds} rounds with and without the worst client.")
    for name, case in CASES.items():
        found = estimate(*observe(case, rounds))
        right = (found.low > claim) == case.succeeds
        failed += not right
        print(
            f"{name:48} mu = {found.mu:6.3f}, 95 %: {found.low:6.3f} to {found.high:6.3f}, "
            f"{'above' if found.low > claim else 'not above'} the claim{'' if right else '  WRONG'}"
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
