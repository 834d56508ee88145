"""An attack on update clipping under noise reaches no more than is claimed, and sees faults."""

import numpy as np
import pytest

from benchmarks.audit import CASES, NOISE, estimate, interval, observe

pytestmark = pytest.mark.slow

CLAIM = 1 / NOISE


@pytest.mark.parametrize("rounds", [400, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", CASES)
def test_a_short_attack_finds_the_faults_and_no_others(name: str, rounds: int) -> None:
    found = estimate(*observe(CASES[name], rounds, seed=1))
    assert (found.low > CLAIM) == CASES[name].succeeds
    assert found.low <= found.mu <= found.high
    if name == "as it is" and rounds > 400:
        # Nor much less: the noise is what it has to be.
        assert 0.9 * CLAIM < found.mu < 1.1 * CLAIM


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_the_estimate_of_a_known_mechanism(mu: float) -> None:
    rng = np.random.default_rng(0)
    absent, present = rng.standard_normal((2, 4000, 2))
    found = estimate(absent, present + mu * np.array([0.6, 0.8]))
    assert found.low < mu < found.high
    assert found.high - found.low < 0.5


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    for share in (0.02, 0.5, 0.9):
        inside = 0
        for successes in rng.binomial(200, share, 1000):
            low, high = interval(int(successes), 200, 0.05)
            inside += low <= share <= high
        assert inside >= 940
    assert interval(0, 10)[0] == 0.0
    assert interval(10, 10)[1] == 1.0
