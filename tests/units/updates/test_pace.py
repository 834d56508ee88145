# SPDX-License-Identifier: Apache-2.0
"""How fast the bound of update clipping follows, and how quiet it is where it belongs."""

from __future__ import annotations

import json
import math
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedclip.errors import StateError
from fedclip.updates.adaptive import AdaptiveBound
from fedclip.updates.bound import BoundRule, share_within
from fedclip.updates.pace import paced, spread

RULE = BoundRule(0.5, 0.2, 1e-6, 1e6)
FIVE, TWENTY, HUNDRED, MANY = 5, 20, 100, 1000


class Federation(NamedTuple):
    """Clients whose update norms are lognormal, with median 1."""

    clients: int
    z: float = 0.0
    """Noise multiplier."""
    absent: float = 0.0
    """Probability with which a client does not reply."""
    liars: float = 0.0
    """Share of the clients that do not say what they have."""
    lie: int = 0
    """What they say."""
    sigma: float = 0.3
    """Standard deviation of the logarithms of the norms."""

    @property
    def noise(self) -> float:
        """That of the votes, as `update-clip-server` takes it by default."""
        return max(self.clients / 20, self.z) if self.z else 0.0

    @property
    def target(self) -> float:
        """Where half of the votes say that they are within, as a logarithm."""
        honest = (0.5 - self.liars * self.lie) / (1 - self.liars)
        return self.sigma * NormalDist().inv_cdf(honest)

    def bounds(
        self, start: float, rounds: int, plays: int, fall: float = 0.0, forget: bool = False
    ) -> Any:
        """Return the logarithms of the bounds of each round and play, relative to the target.

        `fall` is what the norms lose in a round. With `forget`, each round is the first one.
        """
        rng, phi = np.random.default_rng(5), NormalDist(0.0, self.sigma).cdf
        logs = np.full(plays, self.target + start)
        evidence, lying = [0.0] * plays, round(self.liars * self.clients)
        told = [logs]
        for _ in range(rounds):
            p = np.array([phi(x) for x in logs])
            honest = rng.binomial(self.clients - lying, 1 - self.absent, size=plays)
            within, liars = rng.binomial(honest, p), rng.binomial(lying, 1 - self.absent, plays)
            draws = self.noise * rng.normal(size=plays)
            following = []
            for i in range(plays):
                votes = int(honest[i] + liars[i])
                says = int(within[i] + self.lie * liars[i])
                known = self.clients if self.z else None
                share = share_within(votes, says, known, draws[i])
                bound = math.exp(logs[i])
                if share is not None:
                    wide = spread(0.5, known or votes, self.noise)
                    before = 0.0 if forget else evidence[i]
                    bound, _, _, evidence[i] = RULE.after(bound, share, None, before, wide)
                following.append(math.log(bound) + fall)
            logs = np.array(following)
            told.append(logs)
        return np.array(told) - self.target


def rounds_for_ten(told: Federation, quantile: float) -> int:
    """Return after how many rounds so many plays have got from 10 times off to 1.5 times."""
    worst = 0
    for side in (1, -1):
        far = side * told._replace(lie=int(side < 0)).bounds(side * math.log(10), 60, 100)
        there = far <= math.log(1.5)
        first = np.where(there.any(axis=0), there.argmax(axis=0), 99)
        worst = max(worst, int(np.quantile(first, quantile, method="higher")))
    return worst


HARD: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "noise": {"z": 1.0},
    "drop-out": {"absent": 0.3},
    "noise, drop-out": {"z": 1.0, "absent": 0.3},
    "liars": {"liars": 0.2},
    "noise, liars": {"z": 1.0, "liars": 0.2},
    "drop-out, liars": {"absent": 0.3, "liars": 0.2},
    "noise, drop-out, liars": {"z": 1.0, "absent": 0.3, "liars": 0.2},
}
ALL = "noise, drop-out, liars"
# Where half of the plays take more than eight rounds: a vote of few clients says little then.
LATE = {
    (FIVE, "noise, drop-out"): 11,
    (FIVE, "noise, liars"): 13,
    (FIVE, "drop-out, liars"): 11,
    (FIVE, ALL): 23,
    (TWENTY, ALL): 10,
}


SIZES = (FIVE, TWENTY, HUNDRED, MANY)
# Each difficulty with few clients and with many; all of them with each number.
HOW_MANY = [(what, SIZES[(i + k) % 4]) for i, what in enumerate(HARD) for k in (0, 2)]
HOW_MANY += [(ALL, clients) for clients in SIZES if (ALL, clients) not in HOW_MANY]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "clients"), HOW_MANY)
def test_a_factor_of_ten_within_eight_rounds(what: str, clients: int) -> None:
    """In half of the plays, from the side that takes longer; with 20 clients in 95 %."""
    told = Federation(clients, **HARD[what])
    assert rounds_for_ten(told, 0.5) <= LATE.get((clients, what), 8)
    if clients > FIVE:
        assert rounds_for_ten(told, 0.95) <= (8 if what != ALL else 12)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [FIVE, TWENTY, HUNDRED])
@pytest.mark.parametrize("what", ["nothing else", "noise, drop-out", ALL])
def test_no_more_unrest_at_the_target(what: str, clients: int) -> None:
    """Than without evidence, which is the rule of Andrew et al."""
    for sigma in (0.3, 1.0):
        told = Federation(clients, **HARD[what], sigma=sigma)
        here, plain = (told.bounds(0.0, 300, 20, forget=forget)[50:] for forget in (False, True))
        now, before = float(here.std()), float(plain.std())
        assert abs(here.mean()) < 0.1
        # Five votes may all be on one side where norms are that far apart.
        assert now <= before * (1.2 if clients == FIVE and sigma == 1.0 else 1.08)
        if sigma == 0.3:
            assert now <= {FIVE: 0.1, TWENTY: 0.05, HUNDRED: 0.03}[clients]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, FIVE, MANY])
def test_a_bound_that_has_passed_its_target_does_not_swing(clients: int) -> None:
    """If updates are all alike, each vote is for a full step."""
    told = Federation(clients, sigma=1e-3)
    for start in (-math.log(10), math.log(10)):
        assert np.abs(told.bounds(start, 60, 20)[20:]).max() <= 0.25


@pytest.mark.slow
@pytest.mark.parametrize("z", [0.0, 1.0])
def test_norms_that_fall_are_followed(z: float) -> None:
    """By a tenth a round, which is as fast as the bound can fall without evidence."""
    told = Federation(TWENTY, z=z)
    now, before = (told.bounds(0.0, 40, 20, fall=0.1, forget=f)[10:] for f in (False, True))
    assert np.abs(now).mean() < 0.25
    assert np.abs(before).mean() > 0.5


def steps_of(shares: list[float], wide: float = 0.0, **config: float) -> list[float]:
    """Return the steps from no evidence on."""
    evidence, steps = 0.0, []
    for share in shares:
        step, evidence = paced(
            share, evidence, **{"quantile": 0.5, "learning_rate": 0.2, **config}, spread=wide
        )
        steps.append(step)
    return steps


def test_steps_by_hand() -> None:
    log2 = math.log(2.0)
    # Twice as fast each round, up to a factor of 2; as ever after a turn.
    assert steps_of([1.0] * 6 + [0.0] * 3) == pytest.approx(
        [-0.1, -0.2, -0.4, -log2, -log2, -log2, 0.1, 0.1, 0.2]
    )
    assert steps_of([0.0] * 4) == pytest.approx([0.1, 0.2, 0.4, log2])
    # Evidence of 0.4 a round, which has to be more than two deviations.
    assert steps_of([1.0] * 5, 0.2) == pytest.approx([-0.1, -0.1, -0.2, -0.4, -log2])
    # Shares beside the quantile are no evidence, for as long as it may be.
    assert steps_of([0.5 + 1 / 12] * 99) == pytest.approx([-0.2 / 12] * 99)
    # Both ends are one whole step from any quantile, and evidence comes from what votes can say.
    low, high = steps_of([0.0] * 9, quantile=0.9), steps_of([1.0] * 9, quantile=0.9)
    assert (low[0], high[0]) == pytest.approx((0.18, -0.02))
    assert low[-1] == pytest.approx(0.18 + (math.log(4.0) - 0.2) / 2)
    assert high[-1] == pytest.approx(-0.02 - (math.log(4.0) - 0.2) / 2)
    # A rate that is above all this stays as it is.
    assert steps_of([1.0] * 9, learning_rate=2.0) == pytest.approx([-1.0] * 9)


PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "expected_clients": 4}


def test_steps_depend_on_noised_votes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they cost no privacy: who voted, how, and how many replied makes no difference."""
    followed = []
    # Each row is a federation whose votes and noise come to a share of 3/4, and then of 1/4.
    for high, low in (
        ((4, 3, 4, 0.0), (4, 1, 4, 0.0)),
        ((2, 2, 3, 0.0), (0, 0, 0, -1.0)),
        ((0, 0, 9, 1.0), (2, 0, 9, 0.0)),
        ((1000, 1000, 1000, -1.0), (1000, 0, 2000, 1.0)),
    ):
        bound = AdaptiveBound(1.0, **PRIVATE)
        seen = []
        for votes, within, clients, noise in [high] * 9 + [low] * 4 + [high] * 2:
            monkeypatch.setattr(bound.budget, "noise_on_votes", lambda round_, n=noise: n)
            bound.open()
            bound.count(votes, within, clients)
            seen.append((bound.bound, bound.evidence))
        followed.append(seen)
    assert all(seen == followed[0] for seen in followed)
    assert min(b for b, _ in followed[0]) < 0.7


def go(bound: AdaptiveBound, rounds: int) -> list[float]:
    followed = []
    for _ in range(rounds):
        bound.open()
        bound.count(4, 4 * (bound.bound > 0.05), 4)
        followed.append(bound.bound)
    return followed


@pytest.mark.parametrize(
    "config", [{}, {**PRIVATE, "generator": "insecure", "seed": 1}], ids=["plain", "noise"]
)
def test_a_restart_mid_run_makes_no_difference(config: dict[str, Any]) -> None:
    whole = go(AdaptiveBound(1.0, **config), 20)
    for cut in range(1, 20):
        first, second = AdaptiveBound(1.0, **config), AdaptiveBound(1.0, **config)
        start = go(first, cut)
        second.set_state(json.loads(json.dumps(first.get_state())))
        assert start + go(second, 20 - cut) == whole


@pytest.mark.parametrize("evidence", ["0", math.nan, True])
def test_evidence_that_can_not_be(evidence: Any) -> None:
    bound = AdaptiveBound(1.0)
    before = bound.get_state()
    with pytest.raises(StateError, match="evidence must be a finite number"):
        bound.set_state({**before, "evidence": evidence})
    assert bound.get_state() == before


def main() -> None:
    """Print the table of docs/update-clipping.md, and how norms that fall are followed."""
    for what in HARD:
        found = (
            [rounds_for_ten(Federation(clients, **HARD[what]), q) for q in (0.5, 0.95)]
            for clients in (FIVE, TWENTY, HUNDRED, MANY)
        )
        print("|", what, "|", " | ".join(f"{half}, {most}" for half, most in found), "|")
    for forget in (True, False):
        logs = Federation(TWENTY).bounds(0.0, 40, 20, fall=0.1, forget=forget)[10:]
        print(f"norms fall by a tenth a round: {math.exp(np.abs(logs).mean()):.2f} times off")


if __name__ == "__main__":
    main()
