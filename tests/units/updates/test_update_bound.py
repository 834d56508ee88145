# SPDX-License-Identifier: Apache-2.0
"""The bound of updates: how it follows the votes, what they cost, and who is counted."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.bound_speed import Federation
from fedclip import UpdateClipServer
from fedclip.privacy.accounting import Accountant, Release, epsilon
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.noise import Budget, draws_of
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer
from fedclip.updates.votes import BINS, BoundRule, is_vote, one_hot, projected

RULE = BoundRule(0.5, 1e-6, 1e4)
MODEL, NO = {"w": np.zeros(1)}, [0] * BINS
PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "expected_clients": 4}


def counts(**bins: float) -> Any:
    return np.array([bins.get(f"b{k}", 0.0) for k in range(BINS)])


COUNTS = arrays(np.float64, (2, BINS), elements=st.floats(-20, 20))


@given(COUNTS, st.sampled_from([1.0, 4.0, 30.0]), st.booleans())
def test_projected_counts_are_the_nearest_possible_ones(
    rows: Any, total: float, exactly: bool
) -> None:
    """No two are further apart than before, so that a projection before noise costs nothing."""
    first, second = (projected(row, total, exactly=exactly) for row in rows)
    assert np.linalg.norm(first - second) <= np.linalg.norm(rows[0] - rows[1]) + 1e-9
    for row, found in zip(rows, (first, second), strict=True):
        assert found.min() >= 0
        assert found.sum() <= total + 1e-9
        assert not exactly or found.sum() == pytest.approx(total)
        # The nearest: no possible point is on the other side of the plane through it.
        for corner in [*np.eye(BINS) * total, *([] if exactly else [np.zeros(BINS)])]:
            assert (row - found) @ (corner - found) <= 1e-7 * (1 + total)
    # Possible counts stay exactly what they are.
    possible = counts(b3=2.0, b4=5.0, b9=1.0)
    assert projected(possible, 8.0).tolist() == possible.tolist()


@pytest.mark.parametrize(
    ("bins", "octaves", "share"),
    [
        ({"b4": 2.0, "b5": 2.0}, 0.0, 0.5),
        # In the middle of a bin; a quarter of the way through one; beyond the last.
        ({"b5": 4.0}, 0.25, 0.0),
        ({"b0": 1.0, "b7": 4.0 / 3, "b9": 5.0 / 3}, 1.75, 0.25),
        ({"b9": 4.0}, 3.0, 0.0),
        ({"b0": 4.0}, -3.0, 1.0),
        ({}, 0.0, None),
        # An empty bin between both halves: the quantile is where the upper half ends.
        ({"b3": 2.0, "b6": 2.0}, -0.5, 0.5),
    ],
)
def test_a_step_by_hand(bins: dict[str, float], octaves: float, share: float | None) -> None:
    """Without knowledge from before, nearly all of the way; with much, a part of it."""
    row = counts(**bins)
    after = RULE.after(2.0, 1e9, row)
    assert math.log2(after.bound / 2.0) == pytest.approx(octaves, abs=1e-6)
    assert after.share == pytest.approx(share)
    if abs(octaves) == 0.25:
        # P = 0.01 + 0.0225, density 2, R = (1/4) / 4 / 2^2
        gain = 0.0325 / (0.0325 + 0.015625)
        near = RULE.after(2.0, 0.01, row)
        assert math.log2(near.bound / 2.0) == pytest.approx(octaves * gain)
        assert near.variance == pytest.approx((1 - gain) * 0.0325)
    # The bound stays within its limits.
    narrow = BoundRule(0.5, 1.9, 2.1).after(2.0, 1e9, row).bound
    assert narrow == pytest.approx(min(max(2.0 * 2.0**octaves, 1.9), 2.1))


def test_a_quantile_other_than_the_median_and_noise_by_hand() -> None:
    rule = BoundRule(0.7, 1e-6, 1e4)
    row = counts(b2=6.0, b5=2.0, b8=2.0)
    assert math.log2(rule.after(1.0, 1e9, row).bound) == pytest.approx(0.25, abs=1e-6)
    # Of noise 2 and m = 10: R = (0.25 / 10 + 10 / 4 * 0.2^2) / density^2
    noisy = RULE.after(1.0, 1.0, counts(b5=10.0), 10, 2.0)
    gain = 1.0225 / (1.0225 + 0.125 / 4)
    assert math.log2(noisy.bound) == pytest.approx(0.25 * gain)
    # A jump of three octaves counts more than anything from before.
    assert math.log2(RULE.after(1.0, 0.01, counts(b9=10.0), 10, 2.0).bound) > 2.5


@pytest.mark.parametrize(
    ("clients", "z", "ten", "far", "jump", "rms", "falling"),
    [
        (3, 0.0, 2, 4, 2, 0.12, 0.28),
        (100, 0.0, 1, 3, 1, 0.04, 0.2),
        (20, 1.0, 2, 4, 2, 0.1, 0.3),
        pytest.param(100, 1.0, 2, 3, 2, 0.1, 0.4, marks=pytest.mark.soak),
        pytest.param(300, 1.0, 2, 3, 2, 0.1, 0.4, marks=pytest.mark.soak),
        pytest.param(300, 0.0, 1, 3, 1, 0.04, 0.2, marks=pytest.mark.soak),
    ],
)
def test_how_fast_the_bound_follows_and_how_quiet_it_is(
    clients: int, z: float, ten: float, far: float, jump: float, rms: float, falling: float
) -> None:
    """Rounds until within a factor of 1.5 from 10 and 300 times off, and after a jump by 8."""
    told = Federation(clients, z)
    assert told.rounds(math.log2(10), 40)[0] <= ten
    assert told.rounds(math.log2(300), 40)[0] <= far
    assert told.after_jump(plays=40)[0] <= jump
    assert told.steady(40) <= rms
    assert told.falling(40) <= falling


@pytest.mark.parametrize("noise", [{}, PRIVATE], ids=["plain", "noise"])
def test_votes_without_bins_count_as_two_bins_or_not_at_all(noise: Any, caplog: Any) -> None:
    server = UpdateServer(AdaptiveBound(1.0, **noise))
    server.open()
    replies = [Reply(MODEL, votes=1, within=int(i == 0), sender=f"c{i}") for i in range(4)]
    # A vote of no honest client is no vote.
    replies.append(Reply(MODEL, votes=7, within=7, sender="eve"))
    share = server.close(replies, MODEL).record["share"]
    if noise:
        assert caplog.text.count("install the server's version") == 4
        assert "c0: a vote without bins" in caplog.text
        return
    assert share == 0.25
    # A third of the way through the octave above the bound.
    assert 1.0 < server.bound.bound <= 2.0 ** (1 / 3)


@pytest.mark.parametrize("noise", [{}, {**PRIVATE, "noise_multiplier": 1e-9, "bits_noise": 1e-6}])
@pytest.mark.parametrize("bins", [[10**6, *NO[1:]], [*NO[1:], 10**9], [-(10**9)] * 10, [-5, 9] * 5])
def test_a_secure_sum_of_impossible_votes_moves_the_bound_by_three_octaves_at_most(
    noise: dict[str, Any], bins: list[int]
) -> None:
    server = UpdateServer(AdaptiveBound(1.0, **noise))
    for _ in range(3):
        before = server.open().bound
        server.close([Reply(MODEL, votes=3, within=9, clients=3, bins=bins)], MODEL)
        assert abs(math.log2(server.bound.bound / before)) <= 3.0 + 1e-12


@pytest.mark.parametrize(("relation", "apart"), [("add-remove", 1.0), ("replace-one", 2**0.5)])
def test_votes_and_update_together_cost_what_a_round_is_charged(relation: str, apart: Any) -> None:
    """mu^2 of both mechanisms adds up to that of the noise multiplier."""
    budget = Budget(1.0, 40, Accountant(1e-5, relation), draws_of("insecure", 3), bits_noise=0.7)
    of_update = (1.0 if relation == "add-remove" else 2.0) / budget.update_noise
    claimed = 1.0 if relation == "add-remove" else 2.0
    assert math.hypot(of_update, apart / budget.noise_of_bins) == pytest.approx(claimed, rel=1e-12)
    rows = np.array([budget.noised_counts(np.zeros(BINS), i) for i in range(2000)])
    np.testing.assert_allclose(rows.std(axis=0), budget.noise_of_bins, rtol=0.08)
    assert np.abs(np.corrcoef(rows.T)[~np.eye(BINS, dtype=bool)]).max() < 0.1


def test_steps_depend_on_noised_votes_only() -> None:
    """How many replied, and what was impossible, makes no difference: steps cost no privacy."""
    followed, seen = [], []
    for extra, clients in ((0, 4), (0, 9), (1000, 4), (-7, 1)):
        bound = AdaptiveBound(1.0, **PRIVATE)
        noisy = counts(b7=3.0, b2=2.0)
        bound.budget.noised_counts = lambda given, _, n=noisy: seen.append(given.sum()) or n
        rows = []
        for _ in range(6):
            bound.open()
            bound.count(counts(b4=2.0 + extra), clients)
            rows.append((bound.bound, bound.variance))
        followed.append(rows)
    assert all(rows == followed[0] for rows in followed)
    assert seen == [2.0] * 12 + [4.0] * 6 + [0.0] * 6


@pytest.mark.parametrize(("share", "loss"), [(0.0, None), (0.5, 1.0)])
def test_a_first_round_without_a_start_costs_its_votes(share: float, loss: float | None) -> None:
    """And its evaluation, which has a share of its own; the next round is charged as ever."""
    config = {**PRIVATE, "bits_noise": 1.5, "evaluation_share": share, "loss_bound": loss}
    bound = AdaptiveBound(**config)
    both = [Release((3.0**-2 + 2.0**-2) ** -0.5 if share else 3.0), Release(1.0)]
    assert bound.budget.cost(2) == pytest.approx(epsilon(both, 1e-5))
    assert bound.open().only_votes
    bound.count(counts(b9=4.0), 4)
    assert np.all(bound.release({"w": np.ones(2)})["w"] == 0.0)
    assert bound.epsilon == pytest.approx(epsilon(both[:1], 1e-5))
    saved = bound.get_state()
    assert not bound.open().only_votes
    assert bound.epsilon == pytest.approx(epsilon(both, 1e-5))
    # A state after the votes goes on with updates.
    again = AdaptiveBound(**config)
    again.set_state(saved)
    assert not again.open().only_votes
    # With a start, or without noise, the first round is as any.
    assert not AdaptiveBound(1.0, **PRIVATE).open().only_votes
    assert not AdaptiveBound().open().only_votes


def test_the_budget_counts_a_first_round_of_votes() -> None:
    # Votes cost 1 / 1.2^2 of a round, so of 3.5 rounds two are left for updates.
    most = epsilon([Release(3.5**-0.5)], 1e-5)
    bound = AdaptiveBound(**PRIVATE, bits_noise=0.6, max_epsilon=most)
    assert bound.rounds_left() == 3
    for _ in range(3):
        assert not bound.open().stop
        bound.count(np.zeros(BINS), 4)
    assert "the privacy budget is spent" in bound.open().stop


BANDED: dict[str, Any] = {**PRIVATE, "separation": 3, "noise": "banded", "rounds": 12}

EVALUATED: dict[str, Any] = {**PRIVATE, "evaluation_share": 0.4, "loss_bound": 3.0}

AT_CLIENTS: dict[str, Any] = {**PRIVATE, "honest": 0.75, "noise_at": "clients", "max_norm": 1.0}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"start_norm": "serach"}, "start_norm must be"),
        ({"learning_rate": 0.5}, "must be 0, which fixes the bound, or left out"),
        ({"learning_rate": 0}, "fixes the bound: give start_norm a number"),
        ({"start_norm": 3.0, "max_norm": 2.0}, "start_norm must be within"),
        ({"noise_multiplier": 1.0}, "needs expected_clients"),
        ({**PRIVATE, "bits_noise": 0.5}, r"bits_noise > 0\.5, or noise_multiplier < 1"),
        ({"max_epsilon": 3.0}, "max_epsilon goes with noise_multiplier > 0"),
        ({"bits_noise": 3.0}, "bits_noise goes with noise_multiplier > 0"),
        ({**PRIVATE, "max_epsilon": 1.0}, r"one round costs .*take noise_multiplier >= 3\.7"),
        ({"seed": 3}, "seed goes with generator='insecure' only"),
        ({"relation": "replace"}, "did you mean 'replace-one'"),
        ({**BANDED, "separation": 1}, "needs separation > 1"),
        ({**BANDED, "rounds": None}, "and rounds, the planned number"),
        ({**BANDED, "momentum": 1.0}, "momentum must be"),
        ({**BANDED, "noise": "independent"}, "goes with noise='banded'"),
        ({**BANDED, "noise": "bandet"}, "did you mean 'banded'"),
        ({**BANDED, "noise_multiplier": 0.0}, "separation goes with noise_multiplier"),
        ({**EVALUATED, "loss_bound": None}, "go together"),
        ({**EVALUATED, "noise_multiplier": 0.0}, "evaluation_share goes with noise_multiplier > 0"),
        ({**EVALUATED, "separation": 2}, "evaluation_share does not go with"),
        ({**EVALUATED, **AT_CLIENTS}, "goes with evaluation_share=0.0"),
        ({**AT_CLIENTS, "honest": None}, "needs noise_multiplier and honest"),
        ({**AT_CLIENTS, "honest": 1.5}, r"honest must be a number in \(0, 1\]"),
        ({**AT_CLIENTS, "noise_at": "server"}, "honest goes with noise_at='clients'"),
        ({**AT_CLIENTS, "separation": 2}, "goes with separation=1, got 2"),
        ({**AT_CLIENTS, "learning_rate": 0.0, "start_norm": 0.5}, "needs max_norm = start_norm"),
        ({**AT_CLIENTS, "generator": "insecure"}, "goes with generator='secure', got"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        UpdateClipServer(**config)


def test_a_state_of_an_earlier_version_with_a_search_says_nothing_of_a_variance() -> None:
    bound = AdaptiveBound()
    state = {"bound": 0.3, "round": 5, "spent": []}
    bound.set_state({**state, "search": [1.0, 1, False], "evidence": 0.2})
    assert bound.get_state() == {**state, "variance": 9.0}


@pytest.mark.parametrize(
    ("times", "clipped", "place"),
    [
        *((x, False, place) for x, place in ((0.0, 0), (0.12, 0), (0.3, 2), (0.6, 3), (1.0, 4))),
        *((x, True, place) for x, place in ((1.0, 5), (1.5, 6), (3.9, 7), (8.1, 9))),
        (1 + 1e-9, False, 4),
    ],
)
def test_a_vote_is_for_one_bin_on_its_side_of_the_bound(
    times: float, clipped: bool, place: int
) -> None:
    bins = one_hot(times, clipped)
    assert (bins.index(1), sum(bins)) == (place, 1)
    assert is_vote(1, int(not clipped), bins)
    assert not is_vote(1, int(clipped), bins)
    assert not is_vote(0, 1, ())
