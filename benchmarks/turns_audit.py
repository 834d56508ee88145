"""Attack the accounting by turns, with banded noise: ``python -m benchmarks.turns_audit [RUNS]``.

The worst client there can be takes its turns in a whole run, with an update of the bound's length
in one direction, or it sends zeros. Whoever sees all bounds and releases undoes the server's
arithmetic as far as it can: of ``r_t = x_t + s y_t``, in units of each round's bound, it forms
``C r``, whose noise is independent, and guesses by the sum along what the client would have added.
What the guesses are worth is the mu of a Gaussian mechanism, which a run claims to be 1: the
distance of the two means over the standard deviation, with an interval of 95 %.

Cases that have a fault built in must come out above the claim, or the audit would not see faults.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from fedclip.privacy.correlated import Stream
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.noise import Budget
from fedclip.updates.protocol import Participation, Reply
from fedclip.updates.server import UpdateServer
from fedclip.updates.votes import one_hot

ROUNDS, SEPARATION, CLIENTS = 12, 3, 4
TURNS = ROUNDS // SEPARATION
WIDE = 400
"""How many values an update has: the same run many times, as each has noise of its own."""

Array = np.ndarray[Any, Any]


BOUNDS: dict[str, dict[str, Any]] = {
    "fixed": {"start_norm": 0.5, "learning_rate": 0.0},
    # A bound that was begun far too high.
    "falling": {"start_norm": 1e3, "learning_rate": 0.0},
    "unknown": {},
}


def server(noise: str, bound: str) -> UpdateServer:
    """Return a server that claims mu = 1 for all rounds."""
    banded: dict[str, Any] = {"noise": "banded", "rounds": ROUNDS} if noise == "banded" else {}
    made = AdaptiveBound(
        **BOUNDS[bound],
        **banded,
        noise_multiplier=math.sqrt(TURNS),
        expected_clients=CLIENTS,
        separation=SEPARATION,
        delta=1e-3,
    )
    return UpdateServer(made)


def play(case: Case, there: bool) -> Array:
    """Return what the attacker makes of a run, once for each value."""
    made = server(case.noise, case.bound)
    budget = made.bound.budget
    assert budget is not None
    released, sent_bounds, taken = [], [], []
    with case.fault():
        for round_ in range(ROUNDS):
            if case.bound == "falling":
                made.bound.bound /= 4.0
            bound = made.open(Participation(SEPARATION, SEPARATION * CLIENTS)).bound
            due = there and round_ % case.every == 0
            # Each value is a client's whole update in a run of its own, within the bound.
            mine = np.full(WIDE, bound if due else 0.0)
            closed = clipless(made, mine)
            taken.append(not closed.withheld)
            sent_bounds.append(bound)
            released.append(np.asarray(closed.average["w"]))
    return guess(np.array(released), np.array(sent_bounds), np.array(taken), budget, case)


def clipless(made: UpdateServer, update: Array) -> Any:
    """Close a round, in which each value alone has the bound's length; half of the clients vote."""
    bins = one_hot(2.0, clipped=True), one_hot(0.5, clipped=False)
    replies = [
        Reply({"w": np.zeros(WIDE)}, votes=1, within=i % 2, bins=bins[i % 2])
        for i in range(CLIENTS - 1)
    ]
    with mock.patch("fedclip.updates.limits.Limits.excess", return_value=""):
        return made.close([*replies, Reply({"w": update})], like={"w": np.zeros(WIDE)})


def guess(released: Array, bounds: Array, taken: Array, budget: Budget, case: Case) -> Array:
    """Return the sum along what the client would have added, in units of its noise."""
    scale = budget.update_noise / CLIENTS
    c = np.array(budget.coefficients)
    due = np.array([t % case.every == 0 for t in range(ROUNDS)]) / CLIENTS
    if case.absolute:
        signal, noise = due * bounds, scale * bounds
        seen = released
    else:
        signal, noise = due, np.full(ROUNDS, scale)
        seen = released / bounds[:, None]
    # Rounds that were withheld tell nothing, and what follows up to a band later is left out.
    usable = np.convolve(~taken, np.ones(len(c)))[:ROUNDS] == 0
    mixed = np.array([np.convolve(column, c)[:ROUNDS] for column in seen.T]).T
    expected = np.convolve(signal, c)[:ROUNDS]
    weights = np.where(usable, expected / noise**2, 0.0)
    length = math.sqrt(float((weights * noise) @ (weights * noise)))
    # A run in which all rounds were withheld tells nothing.
    return np.asarray(weights @ mixed / (length or 1.0))


# -- faults -----------------------------------------------------------------------------------
def half_the_noise() -> AbstractContextManager[Any]:
    draw = Stream.draw
    return mock.patch.object(Stream, "draw", lambda self, *args: draw(self, *args) / 2)


@contextmanager
def noise_is_kept_at_the_scale_of_its_round() -> Iterator[None]:
    """What is taken back has the size that it had when it was drawn."""
    noised, draw = Budget.noised, Stream.draw
    now = [1.0]

    def of_round(self: Budget, average: Any, bound: float, *rest: Any) -> Any:
        now[0] = bound
        return noised(self, average, bound, *rest)

    def absolute(self: Stream, size: int, normals: Any) -> Array:
        return draw(self, size, lambda count: now[0] * normals(count)) / now[0]

    with (
        mock.patch.object(Budget, "noised", of_round),
        mock.patch.object(Stream, "draw", absolute),
    ):
        yield


class Case(NamedTuple):
    """A design, perhaps with a fault built in, and whether the audit must find it."""

    noise: str = "banded"
    bound: str = "fixed"
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext
    found: bool = False
    every: int = SEPARATION
    """The rounds from one turn of the client to its next."""
    absolute: bool = False
    """Whether the attacker takes the noise to be kept at the scale of its round."""


CASES = {
    "turns": Case("independent"),
    "turns, banded noise": Case(),
    "turns, banded noise, a bound that falls": Case(bound="falling"),
    "turns, banded noise, a first bound that is not known": Case(bound="unknown"),
    "half the noise": Case(fault=half_the_noise, found=True),
    "noise is kept at the scale of its round": Case(
        bound="falling", fault=noise_is_kept_at_the_scale_of_its_round, found=True, absolute=True
    ),
    "a turn comes a round early": Case(every=SEPARATION - 1, found=True),
}


class Estimate(NamedTuple):
    """The mu of a run, and an interval of 95 %."""

    mu: float
    low: float
    high: float


def audit(case: Case, runs: int = 5) -> Estimate:
    """Return what the guesses are worth, from so many runs with the client and without it."""
    with_it = np.concatenate([play(case, True) for _ in range(runs)])
    without = np.concatenate([play(case, False) for _ in range(runs)])
    mu = float(with_it.mean() - without.mean()) / math.sqrt((with_it.var() + without.var()) / 2)
    spread = 1.96 * math.sqrt((2.0 + mu * mu / 4.0) / len(with_it))
    return Estimate(mu, mu - spread, mu + spread)


def main(arguments: list[str]) -> int:
    """Print a table; exit code 1 if a case comes out on the wrong side of the claim."""
    logging.disable(logging.WARNING)
    runs, wrong = int(arguments[0]) if arguments else 25, 0
    print(
        f"| case ({runs * WIDE:,} runs of {ROUNDS} rounds) | mu, claimed 1 | 95 % |\n|---|---|---|"
    )
    for name, case in CASES.items():
        found = audit(case, runs)
        print(f"| {name} | {found.mu:.2f} | {found.low:.2f} to {found.high:.2f} |", flush=True)
        wrong += (found.low > 1.0) != case.found
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
