"""Weights of `clipped-averaging`: shares by steps or by a public table, with a cap."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from engines.declearn.test_secagg import KINDS, sent_through
from federation_helpers import Clients, Server, norm, sent

from fedclip.engines.declearn.messages import ClippedUpdates
from fedclip.engines.declearn.samplers import NamedClients, note_senders
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Reply, RoundResult
from fedclip.updates.server import UpdateServer
from fedclip.updates.store import server_of
from fedclip.updates.weights import Shares, shares_of

NAMES = ["a", "b", "c", "d"]
TABLE = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 40.0}
STEPS = [3, 10, 20, 400]
KINDS_OF_WEIGHTS: list[dict[str, Any]] = [
    {},
    {"weights": TABLE},
    {"weights": TABLE, "max_share": 0.4},
    {"weights": "steps"},
    {"weights": "steps", "max_steps": 50},
    {"weights": "steps", "max_share": 0.5},
]
SECURE = [w for w in KINDS_OF_WEIGHTS if not Shares(**w).unfit(True)]

pytestmark = pytest.mark.usefixtures("no_round_left_open")


def updates(seed: int = 0) -> list[dict[str, np.ndarray]]:
    rows = np.random.default_rng(seed).normal(size=(4, 12)) * [[0.2], [1.0], [3.0], [0.4]]
    return [{"w": row[:8].reshape(2, 4), "v": row[8:].astype("f4")} for row in rows]


def averaging(**config: Any) -> Any:
    return Aggregator.from_config({"name": "clipped-averaging", "max_norm": 1.0, **config})


def flat(coefs: Any) -> np.ndarray:
    return np.concatenate([np.asarray(coefs[n], float).ravel() for n in ("w", "v")])


def clipped(update: dict[str, np.ndarray], bound: float) -> np.ndarray:
    whole = flat(update)
    return np.asarray(whole * min(1.0, bound / float(np.linalg.norm(whole))))


def test_shares_are_in_proportion_below_the_cap_and_never_above_it() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        n = int(rng.integers(1, 9))
        weights = (rng.lognormal(0, 2, size=n) * (rng.random(n) < 0.9)).tolist()
        most = float(rng.uniform(0.05, 1.0))
        shares = shares_of(weights, most)
        positive = sum(w > 0 for w in weights)
        assert max(shares) <= most
        assert sum(shares) == pytest.approx(min(1.0, positive * most))
        free = [(s, w) for s, w in zip(shares, weights, strict=True) if 0 < s < most]
        for share, weight in free:
            assert share / weight == pytest.approx(free[0][0] / free[0][1])
            # Whoever is at the cap has no smaller weight.
            assert all(w >= weight for s, w in zip(shares, weights, strict=True) if s == most)
        assert [s == 0 for s in shares] == [w == 0 for w in weights]
    assert shares_of([]) == []
    assert shares_of([0.0, 0.0], 0.5) == [0.0, 0.0]
    # At the ends of float64.
    assert shares_of([1.7e308] * 4) == [0.25] * 4
    assert shares_of([5e-324, 5e-324]) == [0.5, 0.5]
    assert shares_of([1e308, 1e-308]) == [1.0, 0.0]


ARC: dict[str, Any] = {"combine": "arc", "n_hostile": 1}


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"max_norm": 0}, ValueError, "max_norm must be a finite number > 0"),
        ({"max_nrom": 1.0}, TypeError, "did you mean 'max_norm'"),
        ({"max_norm": None, "scope": {"a": 1.0}}, ValueError, "the table scope=.* in proportion"),
        ({"zeroing_factor": 1.0}, ValueError, "zeroing_factor must be a finite number > 1"),
        ({"on_nonfinite": "propagate"}, ValueError, "on_nonfinite"),
        ({"weights": "samples"}, ValueError, "weights must be one of"),
        ({"weights": {}}, ValueError, "at least one client"),
        ({"weights": {"a": 0.0}}, ValueError, r"weights\['a'\] must be a finite number > 0"),
        ({"weights": {"a": True}}, TypeError, r"weights\['a'\] must be"),
        ({"weights": {3: 1.0}}, TypeError, "weights must be"),
        ({"weights": "steps", "max_steps": 0}, ValueError, "max_steps must be"),
        ({"weights": TABLE, "max_steps": 9}, ValueError, "max_steps goes with weights='steps'"),
        ({"weights": "steps", "max_share": 1.5}, ValueError, "a number > 0 and <= 1"),
        ({"max_share": 0.5}, ValueError, "max_share goes with weights"),
        ({"weights": TABLE, "max_share": 0.2}, ValueError, "at least 1 / 4"),
        ({**ARC, "combine": "median"}, ValueError, "combine must be one of"),
        ({"combine": "arc"}, ValueError, "go with n_hostile"),
        ({"n_hostile": 1}, ValueError, "go with n_hostile"),
        ({**ARC, "n_hostile": 0}, ValueError, "n_hostile must be an int >= 1, got 0"),
        ({**ARC, "n_hostile": 1.0}, TypeError, "n_hostile must be an int >= 1"),
        ({**ARC, "weights": "steps"}, ValueError, "does not go with weights: n_hostile counts"),
        ({**ARC, "weights": {"a": 1.0}, "max_share": 1.0}, ValueError, "does not go with weights"),
    ],
)
def test_parameters(config: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        averaging(**config)


@pytest.mark.parametrize("weights", KINDS_OF_WEIGHTS)
def test_an_average_and_a_bound_by_hand(weights: dict[str, Any]) -> None:
    """What the plug-ins give, too: see `test_update_core`. Votes count alike in all of them."""

    def closed(weights: dict[str, Any]) -> RoundResult:
        server = UpdateServer(AdaptiveBound(0.5), shares=Shares(**weights))
        opened = server.open()
        replies = [
            replace(UpdateClient().clip(update, opened, steps=steps), sender=name)
            for name, update, steps in zip(NAMES, updates(), STEPS, strict=True)
        ]
        return server.close(replies, like=updates()[0])

    kind, most = weights.get("weights", "equal"), weights.get("max_share")
    steps = [min(n, weights.get("max_steps", n)) for n in STEPS]
    counted = {"equal": [1] * 4, "steps": steps}.get(str(kind), [*TABLE.values()])
    shares = [n / sum(counted) for n in counted]
    if most is not None:
        # Only the last client is above the cap.
        shares = [*((1 - most) * n / sum(counted[:3]) for n in counted[:3]), most]
    found, rows = closed(weights), [clipped(update, 0.5) for update in updates()]
    right = sum(s * row for s, row in zip(shares, rows, strict=True))
    np.testing.assert_allclose(flat(found.average), right, atol=1e-6)
    assert found.record["next_bound"] == closed({}).record["next_bound"]


def test_clients_send_their_steps_only_if_these_are_the_weights() -> None:
    update = NumpyVector({"w": np.ones(1)})
    for weights, told in (("equal", None), (TABLE, None), ("steps", 7)):
        opened = UpdateServer(AdaptiveBound(1.0), shares=Shares(weights)).open()
        assert UpdateClient().clip({"w": np.ones(1)}, opened, steps=7).steps == told
        shared = averaging(weights=weights).prepare_for_sharing(updates=update, n_steps=7)
        assert shared.weights == (told or 1)


CLAIMS = [10**9, 2**63 - 1, math.nan, math.inf, 0, -1, -(10**9), True, None, "9", 3.0]


@pytest.mark.parametrize("claim", CLAIMS, ids=repr)
@pytest.mark.parametrize("weights", [w for w in KINDS_OF_WEIGHTS if w.get("weights") == "steps"])
def test_no_claim_moves_the_average_by_more_than_its_share(weights: Any, claim: Any) -> None:
    """Against what the average is of the others alone, and of zeros in its place."""
    aggregator = averaging(**weights)
    rows = [NumpyVector({"w": np.array(row)}) for row in ([1.0, 0.0], [0.8, 0.0], [0.0, -9.0])]
    fields = [aggregator.prepare_for_sharing(updates=row, n_steps=10).to_dict() for row in rows]
    fields[2]["weights"] = claim
    shared: list[Any] = [ClippedUpdates.from_dict(field) for field in fields]
    moved = aggregator.finalize_updates(sum(shared)).coefs["w"]
    counted = claim if type(claim) is int and claim > 0 else 0
    share = Shares(**weights).of([Reply({}, steps=n) for n in (10, 10, counted)])[2].factor
    assert abs(moved[1]) == pytest.approx(share, abs=1e-5)
    # The honest ones have what is left, or more of it if nothing is left over.
    assert norm(NumpyVector({"w": moved})) <= 1.0
    most = min(counted, weights.get("max_steps", counted))
    assert share <= (weights.get("max_share") or most / (most + 20)) + 1e-12


@pytest.mark.parametrize("weights", SECURE)
@pytest.mark.parametrize("kind", KINDS)
def test_secure_sums_equal_cleartext(kind: str, weights: dict[str, Any]) -> None:
    """Of all clients, and of all but the first."""
    server = averaging(**weights)
    model = SklearnSGDModel.from_parameters(kind="regressor")
    for names in (NAMES, NAMES[1:]):
        replies = {}
        for name in names:
            i = NAMES.index(name)
            client: Any = Aggregator.from_config(server.addressed(name).get_config())
            update = NumpyVector({k: array.astype("f8") for k, array in updates()[i].items()})
            shared = client.prepare_for_sharing(updates=update, n_steps=STEPS[i])
            replies[name] = TrainReply(1, STEPS[i], 0.0, updates=shared, aux_var={})
        total: Any = sent_through(kind, list(replies.values()))
        clear = {name: sent(reply) for name, reply in replies.items()}
        note_senders(clear)
        plain = flat(server.finalize_updates(sum(reply.updates for reply in clear.values())).coefs)
        sampler = NamedClients()
        sampler.init_clients(set(NAMES))
        sampler.update(dict.fromkeys(names, total), model)
        secure = flat(server.finalize_updates(total.updates).coefs)
        if "max_share" in weights and names != NAMES:
            # The cap is that of the whole table: nobody has more, and the step is shorter.
            assert np.linalg.norm(secure) < np.linalg.norm(plain)
        else:
            # The stated rounding of 64 bits, times what the sum is divided by at least.
            np.testing.assert_allclose(secure, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("weights", [{"weights": "steps"}, {"weights": TABLE}])
def test_a_client_that_can_not_weigh_its_update_sends_zeros_and_says_why(
    weights: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    update = NumpyVector({"w": np.ones(2)})
    shared = averaging(**weights).prepare_for_sharing(updates=update, n_steps=3)
    content, _ = shared.prepare_for_secagg()
    assert content["updates"].coefs["w"].tolist() == [0.0, 0.0]
    assert (content["n_clipped"], content["n_zeroed"]) == (0, 1)
    assert "a client weighs its own update" in caplog.text


NOISE: dict[str, Any] = {"start_norm": 1.0, "noise_multiplier": 1.0, "expected_clients": 2}


def test_a_table_needs_to_know_who_is_in_a_sum_and_who_sends_what() -> None:
    """A share goes by the name that the engine sets."""
    shares = Shares(TABLE)
    for senders, clients in (((), 3), (("a", "b", "eve"), 3), (("a", "a"), 2), (NAMES, 3)):
        (share,) = shares.of([Reply({}, clients=clients, senders=senders)])
        assert share == (0.0, 0.0, "weights does not name the clients of the secure sum")
    for sender in ("eve", ""):
        (share,) = shares.of([Reply({}, steps=10**9, sender=sender)])
        assert share == (0.0, 0.0, "weights does not name its sender")
    for steps in (-1, 201, 10**9, 2**64, 1.5, math.nan):
        (share,) = Shares("steps", max_steps=50).of([Reply({}, steps=steps, clients=4)])
        assert share.factor == 0.0
        assert "there are 200 at most" in share.fault
    aggregator, update = averaging(weights=TABLE), NumpyVector({"w": np.ones(1)})
    shared = [aggregator.prepare_for_sharing(updates=update, n_steps=1) for _ in range(2)]
    with pytest.raises(ValueError, match="does not know who has sent which reply"):
        aggregator.finalize_updates(sum(shared))
    assert "does not name 'eve'" in shares.strangers({"a", "b", "eve"})


@pytest.mark.parametrize("more", [{"weights": "steps"}, ARC, {**ARC, "combine": "trimmed"}])
def test_noise_is_refused(more: dict[str, Any]) -> None:
    config = {"name": "clipped-averaging", **more}
    text = f"{'combine = ' if 'combine' in more else 'weights '}.*do.* not go with noise"
    with pytest.raises(ValueError, match=text):
        server_of({**NOISE, **more})
    server = Server([("update-clip-server", NOISE)], config)
    with pytest.raises(ValueError, match=text):
        Clients(2, ["update-clip-client"], config).round(0, server.start(), np.ones(2))
    # Clients of another version that reply all the same.
    equal = Clients(2, ["update-clip-client"], {"name": "clipped-averaging"})
    aux = server.start()
    assert norm(server.finish([equal.round(i, aux, np.ones(2)) for i in range(2)])) == 0.0
    assert "not go with noise" in server.start()["update-clip"].stop
