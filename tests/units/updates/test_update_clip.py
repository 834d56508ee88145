"""`clipped-averaging`, `update-clip-client` and `update-clip-server`, without a network."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from federation_helpers import Clients, Server, norm, sent
from helpers import each_framework, require, to_numpy, to_vector
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedclip
from fedclip.engines.declearn.context import ROUND
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipBound, UpdateClipVotes
from fedclip.errors import NonFiniteError, StateError
from fedclip.privacy.accounting import Accountant, Release, epsilon, split_noise
from fedclip.privacy.noise import insecure_normals
from fedclip.updates.aggregation import averaged
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.noise import Budget, draws_of
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer
from fedclip.updates.votes import BINS, FIRST_VARIANCE, BoundRule, one_hot

CLIPPED = {"name": "clipped-averaging"}
ADAPTIVE: list[Any] = ["update-clip-client"]
RULE = BoundRule(0.5, 1e-6, 1e4)


pytestmark = pytest.mark.usefixtures("no_round_left_open")


def vector(*norms: float, dtype: str = "float64") -> NumpyVector:
    """Return tensors layer0.w, layer1.w, ... of these norms, along random directions."""
    rng = np.random.default_rng(len(norms))
    tensors = {}
    for i, size in enumerate(norms):
        direction = rng.normal(size=(3, 4))
        tensors[f"layer{i}.w"] = (size * direction / np.linalg.norm(direction)).astype(dtype)
    return NumpyVector(tensors)


def pair(n: int, **config: Any) -> tuple[Server, Clients]:
    """Return a server whose bound starts at 1, unless config says otherwise, and n clients."""
    server = Server([("update-clip-server", {"start_norm": 1.0, **config})], CLIPPED)
    return server, Clients(n, ADAPTIVE, CLIPPED)


def share(config: dict[str, Any], update: NumpyVector, n_steps: int = 3) -> ClippedUpdates:
    aggregator = Aggregator.from_config({**CLIPPED, **config})
    # declearn calls it with keywords.
    result = aggregator.prepare_for_sharing(updates=update, n_steps=n_steps)
    assert isinstance(result, ClippedUpdates)
    return result


def vote(times: float, clipped: bool) -> UpdateClipVotes:
    return UpdateClipVotes(1, 1, int(not clipped), n_bins=list(one_hot(times, clipped)))


# -- the aggregator alone ---------------------------------------------------------------------


def test_update_within_the_bound_is_the_same_object() -> None:
    update = vector(0.6, 0.8)
    shared = share({"max_norm": 1.0001}, update)
    assert shared.updates is update
    assert (shared.weights, shared.n_clients, shared.n_clipped, shared.n_zeroed) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float64", 1.001), ("float32", 40.0), ("float16", 3e4)]
)
def test_shared_norm_never_exceeds_the_bound(dtype: str, size: float) -> None:
    shared = share({"max_norm": 1.0}, vector(size, size / 2, dtype=dtype))
    assert 0.99 < norm(shared.updates) <= 1.0
    assert shared.n_clipped == 1
    assert all(v.dtype == dtype for v in shared.updates.coefs.values())


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("global", [1.0 * 3 / 5, 1.0 * 4 / 5]),
        ("layer", [1.0, 1.0]),
        (["layer0.*"], [1.0, 1.0]),
        ({"layer0.*": 0.25}, [0.25, 1.0]),
    ],
)
def test_scopes(scope: Any, expected: list[float]) -> None:
    shared = share({"max_norm": 1.0, "scope": scope}, vector(3.0, 4.0))
    norms = [float(np.linalg.norm(v)) for v in shared.updates.coefs.values()]
    assert norms == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("scope", "parts"),
    [
        ("tensor", [0.5**0.5, 0.5**0.5]),
        (["layer0.*"], [0.5**0.5, 0.5**0.5]),
        ({"layer0.*": 3.0, "*": 4.0}, [0.6, 0.8]),
        ({"layer0.*": 3.0, "layer1.*": 4.0, "*": 12.0}, [0.6, 0.8]),
    ],
)
def test_groups_of_a_bound_from_the_server_stay_within_it_together(
    scope: Any, parts: list[float]
) -> None:
    clients = Clients(1, ADAPTIVE, {**CLIPPED, "scope": scope})
    reply = clients.round(0, {"update-clip": UpdateClipBound(1.0)}, vector(3.0, 4.0))
    norms = [float(np.linalg.norm(v)) for v in reply.updates.updates.coefs.values()]
    assert norms == pytest.approx(parts)
    assert norm(reply.updates.updates) <= 1.0


@pytest.mark.parametrize("scope", ["global", "tensor", {"layer0.*": 0.3, "*": 0.4}])
def test_the_noise_of_a_released_sum_is_scaled_to_what_one_client_adds(scope: Any) -> None:
    """Its groups' limits together are the bound; with learning_rate = 0, those of the table."""
    m, bound, config = 4, 0.5, {**CLIPPED, "scope": scope}
    noise = {"noise_multiplier": 2.0, "expected_clients": m, "learning_rate": 0.0}
    # The last one would move both tensors as far as it may; the others, by anything.
    lengths = [*np.random.default_rng(1).lognormal(0, 3, (m - 1, 2)), (1e5, 1e5)]

    def released(clients: int, draw: float) -> Any:
        server = Server([("update-clip-server", {"start_norm": bound, **noise})], config)
        module: Any = server.optim.modules[0]
        module.budget._draws = lambda *_: lambda size: np.full(size, draw)
        site, aux = Clients(m, ADAPTIVE, config), server.start()
        return server.finish([site.round(i, aux, vector(*lengths[i])) for i in range(clients)])

    moved = m * norm(released(m, 0.0) - released(m - 1, 0.0))
    # What is released lies on a grid, which the noise is wide enough for.
    assert moved == pytest.approx(bound, rel=1e-6)
    if isinstance(scope, dict):
        parts = (released(m, 0.0) - released(m - 1, 0.0)).coefs.values()
        assert [m * np.linalg.norm(part) for part in parts] == pytest.approx([0.3, 0.4])
    std = (released(m, 1.0) - released(m, 0.0)).coefs["layer0.w"]
    np.testing.assert_allclose(std, 2.0 * bound / m, rtol=1e-6)


@pytest.mark.parametrize(
    ("norms", "within", "need"),
    [((0.5, 1.0, 0.25, 0.1), 1, 2.0), ((0.5, 3.0, 1.0, 0.1), 0, 6.0), ((9.0,) * 4, 0, 18.0)],
)
def test_the_vote_on_groups_is_about_the_longest_of_them(
    norms: tuple[float, ...], within: int, need: float
) -> None:
    """Each of four groups gets half of a bound of 2; the record holds the bound that they need."""
    clients = Clients(1, ADAPTIVE, {**CLIPPED, "scope": "tensor"})
    update = NumpyVector({f"{i}": np.array([x, 0.0]) for i, x in enumerate(norms)})
    reply = clients.round(0, {"update-clip": UpdateClipBound(2.0)}, update)
    ratio = max(norms)  # the limit of each group is 1
    assert reply.aux_var["update-clip"] == vote(ratio, not within)
    assert reply.updates.n_clipped == 1 - within
    (record,) = clients.optimizers[0].modules[0].rounds  # type: ignore[attr-defined]
    assert (record.norm_max, record.limit, record.clipped) == (need, 2.0, 1 - within)


def test_excluded_tensors_are_shared_as_they_are() -> None:
    shared = share({"max_norm": 1.0, "exclude": "layer1.*"}, vector(3.0, 4.0))
    norms = [float(np.linalg.norm(v)) for v in shared.updates.coefs.values()]
    assert norms == pytest.approx([1.0, 4.0])


@pytest.mark.parametrize(("value", "exclude"), [(math.nan, "layer1.*"), (-math.inf, None)])
def test_update_that_is_not_finite_is_zeroed_and_counted(value: float, exclude: Any) -> None:
    update = vector(3.0, 4.0)
    update.coefs["layer1.w"][0, 0] = value
    with pytest.warns(fedclip.FedclipWarning, match=r"NaN or infinity in 'layer1\.w'"):
        shared = share({"max_norm": 1.0, "exclude": exclude}, update)
    assert norm(shared.updates) == 0
    assert (shared.n_clipped, shared.n_zeroed) == (0, 1)
    with pytest.raises(NonFiniteError, match=r"layer1\.w"):
        share({"max_norm": 1.0, "on_nonfinite": "raise", "exclude": exclude}, update)


@pytest.mark.parametrize(
    ("config", "zeroed"),
    [
        # The largest value; with others, the norm. Above it, and not at it.
        ({"zeroing_norm": 15.9}, 1),
        ({"zeroing_norm": 16.0}, 0),
        ({"zeroing_norm": 19.9, "zeroing_ord": 2}, 1),
        ({"zeroing_norm": 29.0, "zeroing_ord": 1}, 0),
        ({"zeroing_factor": 20.0}, 0),
        # Either of the two is enough.
        ({"zeroing_norm": 100.0, "zeroing_factor": 19.9}, 1),
        ({"zeroing_norm": 10.0, "zeroing_factor": 20.1}, 1),
    ],
)
def test_far_out_of_range_is_zeroed(config: dict[str, Any], zeroed: int) -> None:
    update = NumpyVector({"w": np.array([12.0, -16.0]), "b": np.zeros(())})
    shared = share({"max_norm": 1.0, **config}, update)
    assert (shared.n_clipped, shared.n_zeroed) == (1 - zeroed, zeroed)
    assert norm(shared.updates) == (0.0 if zeroed else pytest.approx(1.0))


def test_no_reply_at_all_is_a_sentence() -> None:
    server = Aggregator.from_config({**CLIPPED, "max_norm": 1.0})
    with pytest.raises(TypeError, match="give clients clipped-averaging"):
        server.finalize_updates(sum([]))


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"max_norm": 0}, ValueError, "max_norm must be a finite number > 0"),
        ({"max_nrom": 1.0}, TypeError, "did you mean 'max_norm'"),
        ({"scope": {"a": 1.0}}, ValueError, "the table scope=.* in proportion to"),
        ({"zeroing_factor": 1.0}, ValueError, "zeroing_factor must be a finite number > 1"),
        ({"on_nonfinite": "propagate"}, ValueError, "on_nonfinite"),
    ],
)
def test_parameters_of_the_aggregator(
    config: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fedclip.ClippedAveraging(**config)


# -- the bound ----------------------------------------------------------------------------------


def test_norm_equal_to_the_bound_is_within_it() -> None:
    clients = Clients(1, ADAPTIVE, CLIPPED)
    for value, within in ((0.5, 1), (math.nextafter(0.5, 1.0), 0), (0.499, 1)):
        aux = {"update-clip": UpdateClipBound(0.5)}
        reply = clients.round(0, aux, np.array([value]))
        assert reply.aux_var["update-clip"] == vote(value / 0.5, not within)


def test_bounds_on_the_bound() -> None:
    server, clients = pair(3, min_norm=0.9, max_norm=1.2)
    seen = []
    for size in [50.0] * 4 + [1e-3] * 8:
        server.round(clients, [np.array([size])] * 3)
        seen.append(server.module.bound)
    assert max(seen) == 1.2
    assert min(seen) == 0.9


def test_client_without_a_step_abstains() -> None:
    server, clients = pair(3)
    for steps, moved in (((0, 0, 0), False), ((0, 0, 5), True)):
        aux = server.start()
        replies = [
            clients.round(i, aux, np.array([9.0 if n else 0.0]), n) for i, n in enumerate(steps)
        ]
        votes = [reply.aux_var["update-clip"].to_dict() for reply in replies]
        # The same fields, whatever happened: a secure sum takes no less.
        fields = {"n_clients", "n_votes", "n_within", "n_faults", "n_bins"}
        assert all(found.keys() == fields for found in votes)
        assert [sum(found["n_bins"]) for found in votes] == [int(n > 0) for n in steps]
        average = server.finish(replies)
        assert (server.module.bound > 2.0) == moved
        assert moved or server.module.bound == 1.0
    assert norm(average) == pytest.approx(1 / 3)


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 1e-9, "expected_clients": 2}])
def test_fixed_bound_from_the_server_asks_for_no_votes(
    noise: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = {"start_norm": 2.0, "learning_rate": 0, **noise}
    server, clients = pair(2, **config)
    aux = server.start()
    replies = [clients.round(i, aux, np.array([9.0])) for i in range(2)]
    assert [r.aux_var["update-clip"] for r in replies] == [UpdateClipVotes()] * 2
    # A vote that comes all the same has no noise to hide in, and is not looked at.
    replies[0].aux_var["update-clip"] = UpdateClipVotes(1, 1, 1)
    with caplog.at_level(logging.INFO):
        assert norm(server.finish(replies)) == pytest.approx(2.0)
    assert "within it" not in caplog.text
    # Nor is there noise for votes: all that a round is charged is for the updates.
    config |= {"noise_multiplier": 1.0, "expected_clients": 2}
    assert fedclip.UpdateClipServer(**config).budget.update_noise == 1.0  # type: ignore[arg-type]
    assert server.module.bound == 2.0


# -- noise --------------------------------------------------------------------------------------


def test_defaults_work_for_three_clients_as_for_a_thousand() -> None:
    for m, sigma in ((3, 1.0), (20, 1.0), (1000, 50.0)):
        module = fedclip.UpdateClipServer(noise_multiplier=1.0, expected_clients=m)
        assert module.budget.update_noise == pytest.approx(split_noise(1.0, sigma), rel=1e-12)
        assert module.budget.update_noise < 1.1548


def test_noise_is_sized_on_the_bound_that_was_sent() -> None:
    m, size = 4, 40_000
    noise = {"noise_multiplier": 1.5, "bits_noise": 3.0, "expected_clients": m}
    server, clients = pair(m, **noise)
    module = server.module
    for _ in range(4):
        before = module.bound
        out = server.round(clients, [np.zeros(size)] * m)
        assert module.bound != before
        assert np.std(out.coefs["w"]) == pytest.approx(
            module.budget.update_noise * before / m, rel=0.03
        )


HALF = [
    ("torch", "bfloat16", 128),
    pytest.param("torch", "float16", 1024, marks=pytest.mark.slow),
    ("numpy", "float16", 1024),
]


def small_floats(framework: str, dtype: str, value: float) -> Any:
    if framework == "numpy":
        return NumpyVector({"w": np.array([value], dtype)})
    torch = require("torch")
    from declearn.model.torch import TorchVector

    return TorchVector({"w": torch.tensor([value]).to(getattr(torch, dtype))})


@pytest.mark.parametrize(("framework", "dtype", "spaced"), HALF)
def test_one_client_moves_the_noised_average_by_its_share_at_most(
    framework: str, dtype: str, spaced: int
) -> None:
    """Sums of so many are spaced by the bound: one more makes a tie go the other way."""
    sizes = [1.0] * spaced + [0.5]

    def play(sizes: list[float]) -> float:
        server, _ = pair(0, noise_multiplier=1e-9, expected_clients=1, learning_rate=0.0)
        server.start()
        server.module.process_aux_var(UpdateClipVotes(len(sizes)))
        updates = sum(ClippedUpdates(small_floats(framework, dtype, x), 1) for x in sizes)
        server.aggregator.finalize_updates(updates)
        return float(ROUND.get().server.exact["w"][0])  # type: ignore[union-attr]

    assert play([1.0, *sizes]) - play(sizes) == 1.0


def test_noise_is_added_before_the_average_is_rounded() -> None:
    """One average, held in two dtypes, gives the same draws the same sums."""
    outs = []
    noise = {"noise_multiplier": 1e-3, "expected_clients": 1, "generator": "insecure", "seed": 1}
    for dtype in ("float64", "float16"):
        server, _ = pair(0, **noise, learning_rate=0.0)
        server.start()
        server.module.process_aux_var(UpdateClipVotes(2))
        parts = [NumpyVector({"w": np.full(64, x, dtype)}) for x in (0.0625, 2.0**-15)]
        average = server.aggregator.finalize_updates(sum(ClippedUpdates(x, 1) for x in parts))
        outs.append(server.module.run(average).coefs["w"])
    np.testing.assert_array_equal(outs[0].astype(np.float16), outs[1])


def test_a_noised_average_of_whoever_replies_is_the_sum_by_hand() -> None:
    """Round by round: sum, noise, bound and cost are those of the clients that were expected."""
    m, size = 4, 500
    noise = {"noise_multiplier": 0.8, "bits_noise": 0.6, "expected_clients": m, "seed": 3}
    server, clients = pair(m, start_norm=0.5, generator="insecure", **noise)
    module = server.module
    rng, bound, variance, ratios = np.random.default_rng(0), 0.5, FIRST_VARIANCE, []
    for round_, replying in enumerate(([0, 1, 2, 3], [0, 2], [3], [1, 2, 3], [2]), start=1):
        aux = server.start()
        sent = [rng.normal(size=size) * 10.0 ** rng.uniform(-3, 1) for _ in replying]
        out = server.finish(
            [clients.round(i, aux, x) for i, x in zip(replying, sent, strict=True)]
        ).coefs["w"]
        norms = [float(np.linalg.norm(x)) for x in sent]
        total = sum(x * min(1.0, bound / n) for x, n in zip(sent, norms, strict=True))
        owed = module.budget.update_noise * bound
        draws = insecure_normals(3, round_, 1)(size)
        np.testing.assert_allclose(out, (total + owed * draws) / m, rtol=1e-6, atol=1e-9)
        ratios.append(float(np.std(out * m - total)) / owed)
        # The noise of a client that is silent is added, too.
        bins = sum(np.array(one_hot(n / bound, n > bound)) for n in norms)
        noisy = bins + 1.2 * insecure_normals(3, round_, 0)(BINS)
        bound, variance, _ = RULE.after(bound, variance, noisy, m, 1.2)
        assert module.bound == pytest.approx(bound)
    # Each of five is within four of its standard deviations.
    assert ratios == pytest.approx([1.0] * 5, abs=4 / math.sqrt(2 * size))
    assert module.budget.accountant.spent == [Release(0.8, steps=5)]


def test_under_noise_nothing_else_is_counted() -> None:
    server, clients = pair(1, noise_multiplier=1.0, expected_clients=2)
    reply = clients.round(0, server.start(), np.array([50.0]))
    assert (reply.updates.n_clipped, reply.updates.n_zeroed) == (0, 0)


def test_insecure_noise_can_be_repeated_and_resumed() -> None:
    noise = {"noise_multiplier": 1.0, "expected_clients": 2, "generator": "insecure", "seed": 7}
    clients = Clients(2, ADAPTIVE, CLIPPED)

    def play(server: Server, rounds: int) -> list[float]:
        averages = [server.round(clients, [np.array([3.0])] * 2) for _ in range(rounds)]
        return [float(average.coefs["w"][0]) for average in averages]

    (whole, _), (first, _), (second, _) = (pair(0, **noise) for _ in range(3))
    expected, got = play(whole, 6), play(first, 3)
    second.optim.set_state(first.optim.get_state())
    assert got + play(second, 3) == expected
    assert second.module.epsilon == whole.module.epsilon
    of_second, of_whole = (s.module.get_state() | {"ledger": ""} for s in (second, whole))
    assert of_second == of_whole
    # No two rounds have the same noise: it would be gone from their difference.
    fixed, _ = pair(0, **noise, learning_rate=0.0)
    assert len(set(play(fixed, 6))) == 6


def budget_of(relation: str = "add-remove", noise_multiplier: float = 1.0, **config: Any) -> Budget:
    given = {"bits_noise": 0.6, "max_epsilon": None, **config}
    accountant = Accountant(1e-5, relation)
    return Budget(noise_multiplier, 4, accountant, draws_of("insecure", 3), **given)


@pytest.mark.slow
def test_votes_and_average_have_noise_of_their_own() -> None:
    """If one could be told from the other, both together would cost more than is accounted."""
    budget, rounds, bound = budget_of(), 4000, 0.5
    # Of add-remove, twice bits_noise; the first of the bins stands for all.
    votes = np.array([budget.noised_counts(np.zeros(1), i)[0] for i in range(rounds)]) / 1.2
    noised = [budget.noised({"w": np.zeros(1)}, bound, i)["w"][0] for i in range(rounds)]
    # z_delta = (1 - 1 / 1.2^2)^(-1/2)
    sums = np.array(noised) * 4 / bound / 1.8091
    assert (votes.std(), sums.std()) == pytest.approx((1.0, 1.0), rel=0.05)
    for one, other in ((votes, sums), (votes[1:], votes[:-1]), (sums[1:], sums[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.08


@pytest.mark.parametrize(("rounds", "relation"), [(1, "add-remove"), (3, "replace-one")])
def test_a_budget_is_spent_to_its_very_end(rounds: int, relation: str) -> None:
    """Of z, which covers update and votes together; and what is at the budget is within it."""
    enough = epsilon([Release(1.0, rounds)], 1e-5, relation)
    budget = budget_of(max_epsilon=enough, relation=relation)
    for i in range(rounds):
        assert budget.rounds_left() == rounds - i
        assert budget.rounds_left(1) == 1
        assert budget.cost(rounds - i) == enough
        assert not budget.refusal()
        assert not budget.reserve(i + 1)
    assert budget.accountant.spent == [Release(1.0, rounds)]
    assert budget.epsilon == enough
    assert budget.rounds_left() == 0
    assert f"after {rounds} rounds, and one more would make it" in budget.reserve(rounds + 1)
    with pytest.raises(ValueError, match="take noise_multiplier >= ") as told:
        budget_of(max_epsilon=enough * 0.5, relation=relation, noise_multiplier=0.5)
    least = float(str(told.value).rpartition(">= ")[2])
    half: dict[str, Any] = {"max_epsilon": enough * 0.5, "relation": relation, "bits_noise": 1.0}
    budget_of(noise_multiplier=least, **half)
    with pytest.raises(ValueError, match="one round costs"):
        budget_of(noise_multiplier=least - 0.02, **half)


def test_the_budget_ends_the_training_before_it_is_passed(caplog: pytest.LogCaptureFixture) -> None:
    noise = {"noise_multiplier": 2.0, "expected_clients": 2}
    server, clients = pair(2, **noise, max_epsilon=5.0)
    module = server.module
    left = module.rounds_left()
    assert 2 < left < 20
    for i in range(left):
        assert module.rounds_left() == left - i
        server.round(clients, [np.array([1.0])] * 2)
        assert module.epsilon <= 5.0
    spent = module.epsilon
    with caplog.at_level(logging.ERROR):
        aux = server.start()
    assert "the privacy budget is spent" in caplog.text
    with pytest.raises(RuntimeError, match=f"budget is spent; epsilon is {spent:.4g}"):
        clients.round(0, aux, np.array([1.0]))
    assert module.epsilon == spent
    # An older state of this server gives nothing back.
    module.set_state({"bound": 1.0, "round": 1, "spent": [[2.0, 1]]})
    assert module.epsilon == spent
    # A server that is restarted with more to spend goes on from there.
    richer, _ = pair(0, **noise, max_epsilon=9.0)
    richer.optim.set_state(server.optim.get_state())
    assert richer.module.epsilon == spent
    assert 0 < richer.module.rounds_left() < 20


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"noise_multiplier": 1.0}, "needs expected_clients"),
        (
            {"noise_multiplier": 1.0, "expected_clients": 9, "bits_noise": 0.5},
            r"bits_noise > 0\.5, or noise_multiplier < 1",
        ),
        ({"max_epsilon": 3.0}, "max_epsilon goes with noise_multiplier > 0"),
        ({"bits_noise": 3.0}, "bits_noise goes with noise_multiplier > 0"),
        (
            {"noise_multiplier": 1.0, "expected_clients": 9, "max_epsilon": 1.0},
            r"one round costs epsilon = 4\.3.*take noise_multiplier >= 3\.7",
        ),
        ({"seed": 3}, "seed goes with generator='insecure' only"),
        ({"start_norm": 3.0, "max_norm": 2.0}, "start_norm must be within"),
        ({"relation": "replace"}, "did you mean 'replace-one'"),
    ],
)
def test_parameters_of_the_server(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fedclip.UpdateClipServer(**config)


def test_replace_one_costs_what_half_the_noise_costs() -> None:
    def cost(**config: Any) -> float:
        module = fedclip.UpdateClipServer(expected_clients=9, **config)
        assert module.budget is not None
        return module.budget.cost(10)

    assert cost(noise_multiplier=4.0, relation="replace-one") == cost(noise_multiplier=2.0)


# -- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"bound": math.nan, "round": 3, "spent": []},
        {"bound": 1.0, "round": True, "spent": []},
        {"bound": 1.0, "round": 3, "spent": [], "variance": 0.0},
        {"bound": 1.0, "round": 3, "spent": [[1.0, -2]]},
        {"bound": 1.0, "round": 3, "spent": [[1.0, 2]]},  # spent, but here without noise
    ],
)
def test_state_that_can_not_be(state: dict[str, Any]) -> None:
    optim = Optimizer(lrate=1.0, modules=[("update-clip-server", {"start_norm": 3.0})])
    before = optim.get_state()
    broken = {**before, "modules": [("update-clip-server", state)]}
    with pytest.raises(StateError):
        optim.set_state(broken)
    assert optim.get_state() == before


# -- mistakes end in a sentence -----------------------------------------------------------------
SENT = UpdateClipBound(1.0)


@pytest.mark.parametrize(
    ("modules", "aggregator", "sent", "error", "text"),
    [
        (ADAPTIVE, CLIPPED, None, RuntimeError, "put update-clip-server into server_opt"),
        (ADAPTIVE * 2, CLIPPED, SENT, RuntimeError, "once each"),
        (ADAPTIVE, {"name": "averaging"}, SENT, RuntimeError, "set aggregator = 'clipped-avera"),
        (ADAPTIVE, {**CLIPPED, "max_norm": 1.0}, SENT, ValueError, "sends another bound"),
        ([], CLIPPED, None, ValueError, "has no bound"),
        (ADAPTIVE, CLIPPED, UpdateClipBound(0.0), ValueError, "bound must be a finite number"),
    ],
)
def test_a_client_that_can_not_clip_says_why(
    modules: Any, aggregator: Any, sent: Any, error: type[Exception], text: str
) -> None:
    clients = Clients(1, modules, aggregator)
    with pytest.raises(error, match=text):
        clients.round(0, {} if sent is None else {"update-clip": sent}, np.array([1.0]))


def test_a_client_goes_by_the_bound_of_its_round_only() -> None:
    """Not by an older one, and not another aggregator of the same thread."""
    clients = Clients(1, ADAPTIVE, CLIPPED)
    for message, error in (
        (UpdateClipBound(2.0, stop="the budget is spent"), RuntimeError),
        (UpdateClipBound(-1.0), ValueError),
        (None, None),
    ):
        aux = {"update-clip": UpdateClipBound(0.5)}
        assert norm(clients.round(0, aux, np.ones(1)).updates.updates) == pytest.approx(0.5)
        if message is not None:
            clients.optimizers[0].process_aux_var(aux)
            with pytest.raises(error):
                clients.optimizers[0].process_aux_var({"update-clip": message})
        assert norm(share({"max_norm": 2.0}, NumpyVector({"w": np.ones(1)})).updates) == 1.0
        with pytest.raises(RuntimeError, match="has received no bound"):
            clients.optimizers[0].start_round()


NOISY = ("update-clip-server", {"noise_multiplier": 1.0, "expected_clients": 1, "start_norm": 1.0})


@pytest.mark.parametrize(
    ("modules", "aggregator", "text"),
    [
        (["momentum", NOISY], CLIPPED, "put update-clip-server first"),
        ([NOISY], {**CLIPPED, "exclude": "w"}, "exclude="),
        # As when declearn's fairness puts an aggregator of its own in its place.
        (["update-clip-server"], {"name": "averaging"}, "not averaged by 'clipped-averaging'"),
        ([NOISY, "update-clip-server"], CLIPPED, "two update-clip-server"),
    ],
)
def test_server_voids_a_round_whose_bound_does_not_hold(
    modules: list[Any], aggregator: dict[str, Any], text: str
) -> None:
    """Zeros at once, and a sentence at the start of the next round, on clients and server."""
    server = Server(modules, aggregator)
    clients = Clients(1, ADAPTIVE, CLIPPED)
    aux = server.start()
    if not aux["update-clip"].stop:
        assert norm(server.finish([clients.round(0, aux, np.array([5.0]))])) == 0
        aux = server.start()
    with pytest.raises(RuntimeError, match=text):
        clients.round(0, aux, np.array([5.0]))


def test_what_stops_a_run_is_told_until_another_state_is_loaded() -> None:
    server, clients = pair(1)
    module = server.module
    good, update = module.get_state(), NumpyVector({"w": np.ones(2)})
    for _ in range(2):
        server.round(clients, [np.ones(2)])
        # A round without votes, after one with them, is void; and so is one without a bound.
        server.start()
        assert norm(module.run(update)) == 0
        assert norm(module.run(update)) == 0
        # The first reason is the one that is told.
        assert server.start()["update-clip"].stop == (
            "no votes have come: put update-clip-client into client_opt, as last module"
        )
        module.set_state(good)
    assert not server.start()["update-clip"].stop
    module = fedclip.UpdateClipServer(start_norm=1.0, max_norm=2.0)
    module.process_aux_var(UpdateClipVotes())
    assert "no bound was sent" in module.collect_aux_var().stop
    module.set_state({**good, "bound": 5.0})
    assert module.bound == 2.0


def test_a_round_ends_with_its_update() -> None:
    """Another aggregator of the same thread does not go by the bound of a round that is over."""
    server, clients = pair(1, start_norm=0.5)
    server.round(clients, [np.ones(1)])
    alone = Aggregator.from_config({**CLIPPED, "max_norm": 1.0})
    shared = alone.prepare_for_sharing(updates=vector(0.9), n_steps=1)
    assert norm(alone.finalize_updates(shared)) == pytest.approx(0.9)


# -- hostile and broken clients -----------------------------------------------------------------


def forged(reply: TrainReply, **fields: Any) -> TrainReply:
    for key, value in fields.items():
        target = reply.updates if hasattr(reply.updates, key) else reply.aux_var["update-clip"]
        setattr(target, key, value)
    return reply


HOSTILE: dict[str, dict[str, Any]] = {
    "nan": {"updates": NumpyVector({"w": np.array([math.nan, 0.0])})},
    "slightly above": {"updates": NumpyVector({"w": np.array([1.001, 0.0])})},
    "shape": {"updates": NumpyVector({"w": np.zeros(3)})},
    "complex": {"updates": NumpyVector({"w": np.zeros(2, dtype=np.complex128)})},
    "text in it": {"updates": NumpyVector({"w": "text"})},  # type: ignore[dict-item]
    "nothing": {"updates": None},
    "negative count": {"n_zeroed": -5},
    "enormous count": {"n_clients": 10**12},
    "both counts": {"n_clipped": 1, "n_zeroed": 1},
}


@pytest.mark.parametrize(("place", "kind"), [(2 * (i % 3), k) for i, k in enumerate(HOSTILE)])
def test_hostile_update(kind: str, place: int, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as a zeroed one, and the server's log says so."""
    server, clients = pair(5)
    aux = server.start()
    replies = [clients.round(i, aux, np.array([5.0, 0.0])) for i in range(5)]
    replies[place] = forged(replies[place], **HOSTILE[kind])
    with caplog.at_level(logging.INFO):
        out = server.finish([sent(r) for r in replies])
    np.testing.assert_allclose(out.coefs["w"], [0.8, 0.0], rtol=1e-9)
    # All votes count: 5 times the bound.
    assert 4.0 < server.module.bound < 8.0
    assert "1 refused" in caplog.text
    assert "the update of one of the replies counts as zero" in caplog.text
    assert server.start()["update-clip"].stop == ""


@pytest.mark.parametrize("scope", ["tensor", ["0"]])
def test_groups_that_reach_the_bound_each_by_itself_are_refused(scope: Any) -> None:
    """Together they are longer than the bound, on which noise is sized."""
    config = {**CLIPPED, "scope": scope}
    server = Server([("update-clip-server", {"start_norm": 1.0})], config)
    clients = Clients(2, ADAPTIVE, config)
    aux = server.start()
    update = NumpyVector({"0": np.array([5.0]), "1": np.array([5.0])})
    replies = [clients.round(i, aux, update) for i in range(2)]
    forged(replies[1], updates=NumpyVector({"0": np.array([0.9]), "1": np.array([0.9])}))
    average = server.finish([sent(r) for r in replies])
    assert norm(average) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "votes",
    [
        {"n_votes": -1},
        {"n_votes": 1, "n_within": 2},
        {"n_votes": 0, "n_within": 1},
        {"n_within": None},
        {"n_votes": True},
        {"n_clients": 0},
        {"n_bins": [0] * 10},
        {"n_bins": [1] + [0] * 9},
        {"n_bins": [0] * 8 + [2, -1]},
        {"n_bins": [0] * 8 + [1]},
        {"n_bins": 8},
        {"n_bins": []},
        "other type",
    ],
    ids=str,
)
def test_hostile_votes(votes: Any, caplog: pytest.LogCaptureFixture) -> None:
    server, clients = pair(3)
    aux = server.start()
    replies = [clients.round(i, aux, np.array([5.0])) for i in range(3)]
    if votes == "other type":
        replies[0].aux_var["update-clip"] = UpdateClipBound(1e9)
    else:
        for field, value in votes.items():
            setattr(replies[0].aux_var["update-clip"], field, value)
    with caplog.at_level(logging.WARNING):
        server.finish([sent(r) for r in replies])
    # The two honest ones were 5 times above it.
    assert 4.0 < server.module.bound < 8.0
    assert "no proper vote in 1 of 3 replies" in caplog.text


@given(
    arrays(np.float64, (2, 6), elements=st.floats(-10, 10)),
    st.sampled_from(["global", "tensor", {"a": 3.0, "*": 4.0}]),
    st.sampled_from([0.1, 1.0, 1e4]),
    st.sampled_from(["<f8", "<f4"]),
)
def test_no_two_secure_sums_are_further_apart_afterwards(
    sums: np.ndarray, scope: Any, scale: float, dtype: str
) -> None:
    """Of which none is refused, however many clients do not clip; by the core and by the plug-in.

    At the ends of the dtype, too, where sums overflow.
    """
    rows = (sums * scale).astype(dtype)
    if scale > 1 and dtype == "<f4":
        rows[:, 5] = [np.finfo(dtype).max, np.inf]
    found = []
    for row in rows:
        like = {"a": row[:2], "b": row[2:]}
        core = UpdateServer(AdaptiveBound(1.0), scope=scope)
        core.open()
        average = core.close([Reply(like, clients=3)], like).average
        plug_in = Aggregator.from_config({**CLIPPED, "max_norm": 1.0, "scope": "global"})
        total = ClippedUpdates(NumpyVector(like), 3, 3, 1, 0)
        found.append(
            [
                np.concatenate([v[n].astype("f8") for n in "ab"])
                for v in (average, plug_in.finalize_updates(total).coefs)
            ]
        )
        assert all(np.linalg.norm(v) <= 1 + 1e-6 for v in found[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        apart = float(np.linalg.norm(rows[0].astype("f8") - rows[1].astype("f8")))
    for one, other in zip(*found, strict=True):
        assert 3 * np.linalg.norm(one - other) <= apart * (1 + 1e-6) + 1e-6


def test_a_secure_sum_within_its_bound_stays_and_a_longer_one_is_shortened() -> None:
    server = Aggregator.from_config({**CLIPPED, "max_norm": 1.0})
    for length, left in ((2.5, 2.5), (3.01, 3.0), (1e5, 3.0)):
        total = ClippedUpdates(NumpyVector({"w": np.array([length, 0.0])}), 3, 3, 1, 0)
        assert norm(server.finalize_updates(total)) == pytest.approx(left / 3)


# -- found before the run -----------------------------------------------------------------------


PAIR = """
aggregator = "clipped-averaging"
[client_opt]
lrate = 0.1
modules = ["update-clip-client"]
[server_opt]
lrate = 1.0
modules = ["update-clip-server"]
[run]
rounds = 40
register = 1
training = {batch_size = 8}
"""
NOISE = "['update-clip-server', {noise_multiplier = 2.0, expected_clients = 50%s}]"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('aggregator = "clipped-averaging"', "", "needs aggregator = 'clipped-averaging'"),
        ('"clipped-averaging"', '"averaging"', "which clips nothing"),
        ('["update-clip-server"]', "[]", "needs 'update-clip-server' in"),
        (
            'aggregator = "clipped-averaging"',
            'aggregator = {name = "clipped-averaging", max_norm = 1.0}',
            "another bound",
        ),
        (
            'aggregator = "clipped-averaging"',
            'aggregator = {name = "clipped-averaging", secagg_range = 8.0}',
            r"norms up to 10000, above the range ±8",
        ),
        ('"update-clip-server"', f'"momentum", {NOISE % ""}', "must be the first module"),
        ('"update-clip-server"', NOISE % ", max_epsilon = 5", "allows 5 of 40 planned rounds"),
        ("[run]\nrounds = 40", "[secagg]\nclipval = 10.0", "above the range ±10"),
    ],
)
def test_check_finds_it_before_the_run(checked: Any, old: str, new: str, text: str) -> None:
    messages = [f.message for f in checked(PAIR.replace(old, new)).problems]
    assert any(re.search(text, message) for message in messages), messages


def test_check_is_content_with_both_and_finds_a_bound_that_nobody_sends(checked: Any) -> None:
    assert checked(PAIR).problems == []
    found = checked('aggregator = "clipped-averaging"\nclient_opt = 0.1\n')
    assert ["has no bound" in f.message for f in found.problems] == [True]
    bound = 'aggregator = {name = "clipped-averaging", max_norm = 1.0}\nclient_opt = 0.1\n'
    assert checked(bound).ok


@pytest.mark.parametrize("name", ["optim.toml", "private.toml", "sites.toml"])
def test_configurations_of_the_example(name: str) -> None:
    from fedclip.cli.check.configuration import check_config

    folder = Path(__file__).parents[3] / "examples" / "update_clipping"
    assert check_config(folder / name).problems == []


# -- frameworks, records ------------------------------------------------------------------------


@each_framework()
@pytest.mark.slow
def test_updates_of_every_framework(framework: str) -> None:
    server, clients = pair(2, noise_multiplier=1e-6, expected_clients=2)
    aux = server.start()
    replies = []
    for i in range(2):
        arrays = {"a.w": np.full((3, 4), 5.0, np.float32), "b": np.array([1.0], np.float32)}
        replies.append(clients.round(i, aux, to_vector(arrays, framework)))
        assert norm(NumpyVector(to_numpy(replies[-1].updates.updates))) <= 1.0
    out = server.finish(replies)
    found = to_numpy(out)
    assert norm(NumpyVector(found)) == pytest.approx(1.0, rel=1e-4)
    assert {v.dtype for v in found.values()} == {np.dtype(np.float32)}


def test_client_keeps_a_record_of_its_updates() -> None:
    clients = Clients(1, ADAPTIVE, CLIPPED)
    for size in (0.5, 8.0):
        clients.round(0, {"update-clip": UpdateClipBound(1.0)}, np.array([size]))
    module: Any = clients.optimizers[0].modules[0]
    assert [(r.round, r.clipped, r.limit) for r in module.rounds] == [(1, 0, 1.0), (2, 1, 1.0)]
    assert module.rounds[1].norm_max == pytest.approx(8.0)
    other: Any = Clients(1, ADAPTIVE, CLIPPED).optimizers[0]
    other.set_state(clients.optimizers[0].get_state())
    assert other.modules[0].rounds == module.rounds
    with pytest.raises(StateError):
        module.set_state({"rounds": []})


# -- updates that are not plain arrays of the machine -------------------------------------------


def test_sparse_updates_are_clipped_and_averaged() -> None:
    torch = require("torch")
    rng = np.random.default_rng(0)
    # Rows repeat, and much of them cancels, so that the rounding of single rows would count.
    values = rng.standard_normal((64, 2)) * 10.0 ** rng.uniform(0, 2, (64, 1))
    rows = torch.tensor(rng.integers(0, 3, 64))[None]
    half = torch.tensor(values).half()
    update = {"emb": torch.sparse_coo_tensor(rows, half, (5, 2), check_invariants=True)}
    clipping = UpdateClient()
    shared = clipping.outcome(update, 0.1, steps=1).arrays
    assert shared is not update
    # Added up in float64, as nobody rounds.
    exact = shared["emb"].double().to_dense()
    assert torch.linalg.vector_norm(exact) <= 0.1 * (1 + 1e-12)
    assert not clipping.limits.excess(shared, 0.1)
    average = averaged([shared, shared], 2, [1.0, 1.0])["emb"]
    np.testing.assert_allclose(average, exact, rtol=2e-3)


def test_bound_that_has_everything_zeroed_finds_its_way_up() -> None:
    config = {**CLIPPED, "zeroing_factor": 5.0}
    server = Server([("update-clip-server", {"start_norm": 0.1})], config)
    clients = Clients(3, ADAPTIVE, config)
    for i in range(4):
        aux = server.start()
        replies = [clients.round(j, aux, np.array([1.0 + j])) for j in range(3)]
        if i == 0:
            assert [r.updates.n_zeroed for r in replies] == [1, 1, 1]
        server.finish(replies)
    assert 1.5 < server.module.bound < 3.0


def test_the_average_is_of_the_kind_of_the_sound_updates() -> None:
    """A vector of another framework's type, if it comes first, is not what the model gets."""

    class Other(NumpyVector):
        """Another type of vector."""

    server = Aggregator.from_config({**CLIPPED, "max_norm": 1.0})
    honest = NumpyVector({"w": np.array([0.5])})
    shared = [server.prepare_for_sharing(updates=honest, n_steps=1) for _ in range(3)]
    shared[0] = ClippedUpdates(Other({"w": np.array([math.nan])}), 1)
    out = server.finalize_updates(sum(shared))
    assert type(out) is NumpyVector
    assert float(out.coefs["w"][0]) == pytest.approx(1 / 3)
