"""How fast any bound could follow the votes of few clients: ``python -m benchmarks.bound_speed``.

Five clients whose bound is ten times too low or too high, as in `tests/units/updates/test_pace.py`,
and beside `update-clip-server` a rule that nobody can have: it knows how far the norms of the
updates differ, how many clients do not reply, how many lie and what they say, and how often the
norms change. From all votes so far it has the probability of each place of the target (Bayes' rule
on a grid), and puts the bound to its mean. How often norms change, and by how much a round, are
what makes this rule fastest among those that are as quiet at the target as the constant speed.

`--blind` lets the same rule take it that the logarithms of the norms differ by 0.5, that 15 % do
not reply and that nobody lies, whatever is the case.
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "units" / "updates"))

from scipy.special import ndtr
from test_pace import FIVE, HARD, Federation, rounds_for_ten

GRID = 0.05
REACH = round(3.5 / GRID)
PLACES = np.arange(-REACH, REACH + 1)
OFF = np.arange(-3 * REACH, 3 * REACH + 1)
"""Where the target may be, and how far a bound may be from it, in steps of the grid."""

CHANGES = (0.001, 0.002, 0.004, 0.008)
DRIFTS = (0.01, 0.02, 0.05)
PLAYS, QUIET, LONGEST = 100, 150, 60


def chances(told: Federation) -> np.ndarray:
    """Return the probability of (votes, within) for each distance of the bound."""
    n, liars, there = told.clients, round(told.liars * told.clients), 1 - told.absent
    p = ndtr((OFF * GRID + told.target) / told.sigma)
    found = np.zeros((len(OFF), n + 1, n + 1))
    found[:, 0, 0] = 1.0
    for within in [p] * (n - liars) + [np.full(len(OFF), float(told.lie))] * liars:
        more = found * told.absent
        more[:, 1:, :] += found[:, :-1, :] * (there * (1 - within))[:, None, None]
        more[:, 1:, 1:] += found[:, :-1, :-1] * (there * within)[:, None, None]
        found = more
    return found


def seen(told: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of what the server sees, and the votes' centred sums.

    Without noise that is how many voted, and how many were within; with noise, the sum.
    """
    votes, within = np.indices((told.clients + 1,) * 2)
    found, sums = chances(told).reshape(len(OFF), -1), (within - votes / 2).ravel()
    if not told.z:
        return found, sums
    kinds = np.arange(-told.clients, told.clients + 1) / 2
    return np.stack([found[:, sums == kind].sum(axis=1) for kind in kinds], axis=1), kinds


def play(told: Federation, thought: Federation, change: float, drift: float) -> tuple[Any, float]:
    """Return the rounds of each play, and how far the logarithm of the bound varies before."""
    rng = np.random.default_rng(0)
    law, sums = seen(told)
    assumed, _ = seen(thought)
    drawn = law.cumsum(axis=1)
    kernel = np.exp(-0.5 * (np.arange(-4, 5) * GRID / drift) ** 2)
    kernel /= kernel.sum()
    belief = np.tile(np.exp(-0.5 * (PLACES * GRID / 0.15) ** 2), (PLAYS, 1))
    bound, target = np.zeros(PLAYS, int), 0
    unrest, first = [], np.full(PLAYS, LONGEST)
    side = 1 if not told.lie else -1
    for round_ in range(1 - QUIET, LONGEST + 1):
        if round_ == 1:
            target = -side * round(math.log(10) / GRID)
        off = np.clip(bound - target, OFF[0], OFF[-1]) - OFF[0]
        draw = (drawn[off] < rng.random(PLAYS)[:, None]).sum(axis=1)
        draw = np.minimum(draw, len(sums) - 1)
        if told.z:
            noised = sums[draw] + told.noise * rng.normal(size=PLAYS)
            weight = np.exp(-0.5 * ((noised[:, None] - sums) / told.noise) ** 2)
            likely = weight @ assumed.T
        else:
            likely = assumed.T[draw]
        belief *= np.take_along_axis(likely, bound[:, None] - PLACES - OFF[0], axis=1) + 1e-300
        belief = np.stack([np.convolve(row, kernel, "same") for row in belief])
        belief *= (1 - change) / belief.sum(axis=1, keepdims=True)
        belief += change / len(PLACES)
        bound = np.round(belief @ PLACES).astype(int)
        if -QUIET + 50 < round_ < 1:
            unrest.append(bound * GRID)
        if round_ > 0:
            there = side * (bound - target) * GRID <= math.log(1.5)
            first = np.where(there & (first == LONGEST), round_, first)
    return first, float(np.sqrt(np.mean(np.square(unrest))))


def fastest(told: Federation, blind: bool) -> tuple[int, int]:
    """Return the rounds of half and of 95 % of the plays, from the side that takes longer."""
    quiet = 1.08 * float(told.bounds(0.0, 300, 20, forget=True)[50:].std())
    best = (LONGEST, LONGEST)
    for change, drift in product(CHANGES, DRIFTS):
        rounds = [0, 0]
        unrest = 0.0
        for lie in (0, 1):
            real = told._replace(lie=lie)
            thought = real._replace(sigma=0.5, absent=0.15, liars=0.0) if blind else real
            first, varies = play(real, thought, change, drift)
            unrest = max(unrest, varies)
            for i, level in enumerate((0.5, 0.95)):
                rounds[i] = max(rounds[i], int(np.quantile(first, level, method="higher")))
        if unrest <= quiet:
            best = min(best, (rounds[0], rounds[1]))
    return best


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blind", action="store_true")
    options = parser.parse_args()
    for what, config in HARD.items():
        told = Federation(FIVE, **config)
        if options.blind and not told.z:
            continue
        half, most = (rounds_for_ten(told, level) for level in (0.5, 0.95))
        one, other = fastest(told, options.blind)
        print(f"| {what} | {half}, {most} | {one}, {other} |", flush=True)


if __name__ == "__main__":
    main()
