"""`clipped-averaging`, `update-clip-client` and `update-clip-server`, without a network."""

import logging
import math
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.model.api import Vector
from declearn.model.sklearn import NumpyVector
from federation_helpers import Clients, Server, norm
from helpers import BACKENDS, needs, require, to_numpy, to_vector

import fedclip
from benchmarks.audit import CASES, NOISE, estimate, interval, observe
from fedclip.engines.declearn.context import ROUND
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipBound, UpdateClipVotes
from fedclip.errors import StateError
from fedclip.privacy.accounting import Accountant, Release, epsilon, split_noise
from fedclip.privacy.noise import insecure_normals
from fedclip.updates.aggregation import averaged
from fedclip.updates.client import UpdateClient
from fedclip.updates.noise import Budget, draws_of
from fedclip.updates.votes import BINS, FIRST_VARIANCE, BoundRule, one_hot

CLIPPED = {"name": "clipped-averaging"}
ADAPTIVE: list[Any] = ["update-clip-client"]
RULE = BoundRule(0.5, 1e-6, 1e4)

pytestmark = pytest.mark.usefixtures("no_round_left_open")


def vector(*norms: float, dtype: str = "float64") -> NumpyVector:
    """Return tensors layer0.w, layer1.w, ... of these norms, along random directions."""
    rng, tensors = np.random.default_rng(len(norms)), {}
    for i, size in enumerate(norms):
        direction = rng.normal(size=(3, 4))
        tensors[f"layer{i}.w"] = (size * direction / np.linalg.norm(direction)).astype(dtype)
    return NumpyVector(tensors)


def pair(n: int, **config: Any) -> tuple[Server, Clients]:
    """Return a server whose bound starts at 1, unless config says otherwise, and n clients."""
    server = Server([("update-clip-server", {"start_norm": 1.0, **config})], CLIPPED)
    return server, Clients(n, ADAPTIVE, CLIPPED)


def share(config: dict[str, Any], update: Vector, n_steps: int = 3) -> ClippedUpdates:
    aggregator = Aggregator.from_config({**CLIPPED, **config})
    # declearn calls it with keywords.
    result = aggregator.prepare_for_sharing(updates=update, n_steps=n_steps)
    assert isinstance(result, ClippedUpdates)
    return result


def vote(times: float, clipped: bool) -> UpdateClipVotes:
    return UpdateClipVotes(1, 1, int(not clipped), n_bins=list(one_hot(times, clipped)))


@pytest.mark.parametrize(
    ("framework", "dtype", "size"),
    [
        ("numpy", "float64", 1.001),
        ("numpy", "float16", 3e4),
        *((f, "float32", 40.0) for f in BACKENDS),
    ],
)
def test_shared_norm_never_exceeds_the_bound(framework: str, dtype: str, size: float) -> None:
    needs(framework)
    update = to_vector(vector(size, size / 2).coefs, framework, dtype)
    shared = share({"max_norm": 1.0}, update)
    found = NumpyVector(to_numpy(shared.updates))
    assert 0.99 < norm(found) <= 1.0
    assert (shared.weights, shared.n_clients, shared.n_clipped, shared.n_zeroed) == (1, 1, 1, 0)
    average = to_numpy(Aggregator.from_config(CLIPPED).finalize_updates(shared))
    assert norm(NumpyVector(average)) == pytest.approx(norm(found))
    assert {v.dtype for v in [*found.coefs.values(), *average.values()]} == {np.dtype(dtype)}
    within = vector(0.6, 0.8, dtype=dtype)
    assert share({"max_norm": 1.01}, within).updates is within


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"scope": "global"}, [1.0 * 3 / 5, 1.0 * 4 / 5]),
        ({"scope": "layer"}, [1.0, 1.0]),
        ({"scope": ["layer0.*"]}, [1.0, 1.0]),
        ({"scope": {"layer0.*": 0.25}}, [0.25, 1.0]),
        ({"exclude": "layer1.*"}, [1.0, 4.0]),
    ],
)
def test_scopes(config: dict[str, Any], expected: list[float]) -> None:
    shared = share({"max_norm": 1.0, **config}, vector(3.0, 4.0))
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
def test_groups_of_a_bound_from_the_server_stay_within_it_together(scope: Any, parts: Any) -> None:
    clients = Clients(1, ADAPTIVE, {**CLIPPED, "scope": scope})
    reply = clients.round(0, {"update-clip": UpdateClipBound(1.0)}, vector(3.0, 4.0))
    norms = [float(np.linalg.norm(v)) for v in reply.updates.updates.coefs.values()]
    assert norms == pytest.approx(parts)
    assert norm(reply.updates.updates) <= 1.0


@pytest.mark.parametrize(
    ("norms", "within", "need"),
    [
        ((0.5, 1.0, 0.25, 0.1), 1, 2.0),
        ((0.5, 3.0, 1.0, 0.1), 0, 6.0),
        ((9.0,) * 4, 0, 18.0),
        # A norm equal to the bound is within it.
        ((2.0,), 1, 2.0),
        ((math.nextafter(2.0, 3.0),), 0, math.nextafter(2.0, 3.0)),
        ((1.996,), 1, 1.996),
    ],
)
def test_the_vote_on_groups_is_about_the_longest_of_them(
    norms: tuple[float, ...], within: int, need: float
) -> None:
    """Each of four groups gets half of a bound of 2; the record holds the bound that they need."""
    one, other = (Clients(1, ADAPTIVE, {**CLIPPED, "scope": "tensor"}) for _ in range(2))
    update = NumpyVector({f"{i}": np.array([x, 0.0]) for i, x in enumerate(norms)})
    aux = {"update-clip": UpdateClipBound(2.0)}
    reply, unmoved = (one.round(0, aux, update, steps) for steps in (1, 0))
    sent, abstained = (found.aux_var["update-clip"] for found in (reply, unmoved))
    assert sent == vote(need / 2.0, not within)
    # A client without a step sends no vote, and the same fields: a secure sum takes no less.
    assert sum(abstained.n_bins) == abstained.n_votes == 0
    assert abstained.to_dict().keys() == sent.to_dict().keys()
    assert reply.updates.n_clipped == 1 - within
    module: Any = one.optimizers[0].modules[0]
    record = module.rounds[0]
    assert (record.round, record.norm_max, record.limit) == (1, need, 2.0)
    assert record.clipped == 1 - within
    other.optimizers[0].set_state(one.optimizers[0].get_state())
    assert other.optimizers[0].modules[0].rounds == module.rounds
    with pytest.raises(StateError):
        module.set_state({"rounds": []})


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 1e-9, "expected_clients": 2}])
def test_fixed_bound_from_the_server_asks_for_no_votes(noise: dict[str, Any], caplog: Any) -> None:
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
    assert fedclip.UpdateClipServer(**config).budget.update_noise == 1.0
    assert server.module.bound == 2.0


def test_defaults_work_for_three_clients_as_for_a_thousand() -> None:
    def budget(z: float, m: int, **config: Any) -> Budget:
        return fedclip.UpdateClipServer(noise_multiplier=z, expected_clients=m, **config).budget

    for m, sigma in ((3, 1.0), (20, 1.0), (1000, 50.0)):
        noise = budget(1.0, m).update_noise
        assert noise == pytest.approx(split_noise(1.0, sigma), rel=1e-12)
        assert noise < 1.1548
    assert budget(4.0, 9, relation="replace-one").cost(10) == budget(2.0, 9).cost(10)


@pytest.mark.parametrize(("dtype", "spaced"), [("bfloat16", 128), ("float16", 1024)])
def test_one_client_moves_the_noised_average_by_its_share_at_most(dtype: str, spaced: int) -> None:
    """Sums of so many are spaced by the bound: one more makes a tie go the other way."""
    framework = "torch" if dtype == "bfloat16" else "numpy"
    needs(framework)
    sizes = [1.0] * spaced + [0.5]

    def play(sizes: list[float]) -> float:
        server, _ = pair(0, noise_multiplier=1e-9, expected_clients=1, learning_rate=0.0)
        server.start()
        server.module.process_aux_var(UpdateClipVotes(len(sizes)))
        parts = [to_vector({"w": np.array([x])}, framework, dtype) for x in sizes]
        server.aggregator.finalize_updates(sum(ClippedUpdates(part, 1) for part in parts))
        return float(ROUND.get().server.exact["w"][0])

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
        replies = [clients.round(i, aux, x) for i, x in zip(replying, sent, strict=True)]
        # Under noise, nothing else is counted.
        assert {(r.updates.n_clipped, r.updates.n_zeroed) for r in replies} == {(0, 0)}
        out = server.finish(replies).coefs["w"]
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


def budget_of(relation: str = "add-remove", noise_multiplier: float = 1.0, **config: Any) -> Budget:
    given = {"bits_noise": 0.6, "max_epsilon": None, **config}
    return Budget(noise_multiplier, 4, Accountant(1e-5, relation), draws_of("insecure", 3), **given)


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


def test_sparse_updates_are_clipped_and_averaged() -> None:
    torch, rng = require("torch"), np.random.default_rng(0)
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
    np.testing.assert_allclose(averaged([shared, shared], 2, [1.0, 1.0])["emb"], exact, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("as it is", 400),
        ("half the noise", 400),
        *(pytest.param(name, 10_000, marks=pytest.mark.soak) for name in CASES),
    ],
)
def test_a_short_attack_finds_the_faults_and_no_others(name: str, rounds: int) -> None:
    found = estimate(*observe(CASES[name], rounds, seed=1))
    assert (found.low > 1 / NOISE) == CASES[name].succeeds
    assert found.low <= found.mu <= found.high
    if name == "as it is" and rounds > 400:
        # Nor much less: the noise is what it has to be.
        assert 0.9 / NOISE < found.mu < 1.1 / NOISE


@pytest.mark.slow
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
