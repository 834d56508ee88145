"""Noise from the sites: integers that are summed exactly, who is refused, and real federations."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.secagg.messaging import SecaggTrainReply, aggregate_secagg_messages
from declearn.secagg.utils import Quantizer
from federation_helpers import Clients, Server, joye_libert, masked, sent
from federation_runs import NODE, N, complete
from helpers import each_framework, to_numpy, to_vector

from benchmarks.audit import estimate
from fedclip.engines.declearn.messages import UpdateClipBound, UpdateClipVotes
from fedclip.privacy.discrete import draws
from fedclip.updates import client_noise as site_noise
from fedclip.updates.client_noise import SiteNoise
from fedclip.updates.votes import BINS

pytestmark = pytest.mark.usefixtures("no_round_left_open")

M = 4
ONE_VOTE = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
NAMES = [str(i) for i in range(M)]
SECURE = {"masking": masked, "joye-libert": joye_libert}
CLIPPED = {"name": "clipped-averaging"}
NOISE: Any = {"noise_multiplier": 2.0, "expected_clients": M, "honest": 0.75, "max_norm": 1.0}
D = 2000


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw from a seed in this process, so that no outcome rests on chance."""
    rng = np.random.default_rng(0)
    words = lambda size: rng.integers(2**64, size=size, dtype=np.uint64)  # noqa: E731
    monkeypatch.setattr(site_noise, "draws", lambda v, size: draws(v, size, words))


def server_with(**more: Any) -> Server:
    config = {**NOISE, "noise_at": "clients", "start_norm": 1.0, **more}
    return Server([("update-clip-server", config)], CLIPPED)


def client_module(**more: Any) -> tuple[str, dict[str, Any]]:
    return "update-clip-client", {"noise": {**NOISE, **more}}


def clients_with(m: int = M, **more: Any) -> Clients:
    return Clients(m, [client_module(**more)], CLIPPED)


def secret_sum(clients: Clients, told: list[UpdateClipBound], updates: Any, wire: Any) -> Any:
    """Return what a server gets of clients, each of which is told something."""
    encrypters, decrypter = wire
    secret = {}
    for i, (name, one) in enumerate(encrypters.items()):
        reply = clients.round(i, {"update-clip": told[i]}, updates[i], encrypter=one)
        secret[name] = SecaggTrainReply.from_cleartext_message(reply, one)
    return aggregate_secagg_messages(secret, decrypter)


def secret_round(
    server: Server, clients: Clients, updates: list[Any], kind: str = "masking", **forged: Any
) -> NumpyVector:
    """Return what a round comes to of which the server sees the secure sum only."""
    told, wire = [server.start()["update-clip"]] * M, SECURE[kind](NAMES, bitsize=48, clipval=32.0)
    total = secret_sum(clients, told, updates, wire)
    vars(total.updates).update(forged)
    return server.finish([total])


@pytest.mark.parametrize("kind", SECURE)
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float64", 16), ("float64", 32), ("float64", 48), ("float32", 16), ("float32", 24)],
)
def test_secure_sums_are_those_of_the_integers_that_were_drawn(
    kind: str, dtype: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of one client: masking takes two more for the sum of four."""
    bitsize = bits + 2 * (kind == "masking")
    encrypters, decrypter = SECURE[kind](NAMES, bitsize=bitsize, clipval=32.0)
    noise, meant = SiteNoise(**NOISE), []
    drawn = lambda *args: meant.append(integers(*args)) or meant[-1]  # noqa: E731
    monkeypatch.setattr(SiteNoise, "integers", drawn)
    rng, secret = np.random.default_rng(1), []
    for encrypter in encrypters.values():
        update = rng.normal(size=300)
        update = {"w": (update / np.linalg.norm(update)).astype(dtype)}
        step = noise.step(update, 1.0, encrypter)
        shared = NumpyVector(noise.shared(update, 1.0, step, encrypter))
        assert shared.coefs["w"].dtype == dtype
        secret.append(encrypter.encrypt_vector(shared)[0])
    found = [
        decrypter.decrypt_uint(decrypter.sum_encrypted([*column])) - M * 2 ** (bits - 1)
        for column in zip(*secret, strict=True)
    ]
    assert found == sum(k["w"] for k in meant).tolist()


integers = SiteNoise.integers


@pytest.mark.parametrize("kind", SECURE)
@pytest.mark.parametrize(
    ("dtype", "bits", "clipval", "text"),
    [
        ("float64", 50, 32.0, "integers of 50 bits for each client are not summed exactly"),
        ("float64", 62, 32.0, "integers of 62 bits for each client are not summed exactly"),
        ("float32", 25, 32.0, "integers of 25 bits for each client are not summed exactly"),
        ("float32", 32, 32.0, "as the model's dtypes hold 24: lower bitsize"),
        ("float16", 14, 32.0, "'w' is of float16, too coarse"),
        ("float64", 32, 16.0, r"set clipval to 17 or more, or max_norm to 0\.9412 or less"),
        ("float64", 32, 1e9, "steps of 0.466 are too coarse for a bound of 1 on 9 values"),
    ],
)
def test_what_is_not_exact_is_refused(
    kind: str, dtype: str, bits: int, clipval: float, text: str
) -> None:
    bitsize = bits + 2 * (kind == "masking")
    encrypters, _ = SECURE[kind](NAMES, bitsize=bitsize, clipval=clipval)
    update = {"w": np.ones(9, dtype) / 3}
    # A third of 16 / 9 is the variance of one client.
    noise = SiteNoise(**{**NOISE, "noise_multiplier": 4 / math.sqrt(3)}, bits_noise=0.0)
    with pytest.raises(ValueError, match=text):
        noise.step(update, 1.0, encrypters["0"])
    if clipval < 1e9 and dtype != "float16":
        # The server's check before the set-up says the same.
        assert noise.unsafe({"secagg_type": kind, "bitsize": bitsize, "clipval": clipval}, update)


def test_rounding_may_take_half_of_the_bound_and_no_more() -> None:
    noise = SiteNoise(**NOISE)
    # 100 values are rounded by 5 steps together.
    assert noise._room(100, 1.0, 1 / 10.1) == pytest.approx(5.1)
    with pytest.raises(ValueError, match="too coarse for a bound of 1 on 100 values"):
        noise._room(100, 1.0, 1 / 9.9)


def test_rounding_never_takes_an_update_beyond_its_bound() -> None:
    noise, rng = SiteNoise(**NOISE), np.random.default_rng(2)
    for size in (1, 9, 30_000):
        for step in (1 / 200, 1 / 3000):
            # Each value is just above the middle between two integers.
            value = (math.floor(200 / math.sqrt(size)) + 0.501) / 200
            update = rng.choice([-value, value], size=size)
            update /= max(1.0, np.linalg.norm(update))
            assert 0.5 < np.linalg.norm(without_noise(noise, update, step)) * step <= 1.0


def without_noise(noise: SiteNoise, update: Any, step: float) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_noise, "draws", lambda variance, size: np.zeros(size, np.int64))
        return noise.integers({"w": update}, 1.0, step)["w"]


@each_framework()
def test_the_noise_in_every_framework(framework: str) -> None:
    vector = to_vector({"w": np.full((40, 50), 0.01, np.float32)}, framework)
    noise = SiteNoise(**NOISE)
    encrypter = masked(NAMES, bitsize=26, clipval=32.0)[0]["0"]
    step = noise.step(vector.coefs, 1.0, encrypter)
    found = to_numpy(type(vector)(noise.shared(vector.coefs, 1.0, step, encrypter)))["w"]
    assert found.dtype == np.float32
    assert found.shape == (40, 50)
    assert found.std() == pytest.approx(noise.std(1.0), rel=0.1)


@pytest.mark.parametrize("kind", ["masking", pytest.param("joye-libert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("silent", [0, 1, 3])
def test_the_sum_has_the_noise_that_is_charged(kind: str, silent: int) -> None:
    """Of m clients, m - c are counted on; each other that sends none takes its share away."""
    server, clients = server_with(), clients_with()
    for optimizer in clients.optimizers[:silent]:
        optimizer.modules[0].site._spread = 1e-9
    updates = [np.full(D, 0.5 / math.sqrt(D))] * M
    noise = secret_round(server, clients, updates, kind).coefs["w"] - updates[0]
    budget = server.module.budget
    # Votes and update together cost what z alone does.
    assert budget.update_noise == pytest.approx(2.0 * math.sqrt(4 / 3))
    share = math.sqrt((M - silent) / 3)
    assert noise.std() == pytest.approx(budget.update_noise * share / M, rel=0.1)
    assert SiteNoise(**NOISE).multiplier(silent) == pytest.approx(2.0 * share)
    assert server.module.get_state()["spent"] == [[2.0, 1]]
    assert server.module.stop == ""


@pytest.mark.slow
@pytest.mark.parametrize("secret", [False, True])
def test_votes_move_the_bound_and_have_noise_of_their_own(secret: bool) -> None:
    """A thousand rounds of votes: their mean is the share, and their spread the noise."""
    noise, rounds = SiteNoise(**NOISE), 1000
    sums = []
    for _ in range(rounds):
        each = [noise.vote(ONE_VOTE), noise.vote(ONE_VOTE), noise.vote([0] * BINS)]
        each.append(noise.vote([*ONE_VOTE[1:], 0]))
        sums.append(noise.counts([np.sum(each, axis=0).tolist()] if secret else each, M))
    expected = 2 * np.array(ONE_VOTE) + [*ONE_VOTE[1:], 0]
    # Twice bits_noise, which is 2.0, for three of the four.
    std = 4.0 * math.sqrt(4 / 3)
    np.testing.assert_allclose(np.mean(sums, axis=0), expected, atol=6 * std / math.sqrt(rounds))
    np.testing.assert_allclose(np.std(sums, axis=0), std, rtol=0.15)


def test_one_liar_in_cleartext_has_one_vote_with_noise() -> None:
    noise = SiteNoise(**NOISE)
    honest = [noise.vote(ONE_VOTE) for _ in range(3)]
    assert np.abs(noise.counts([[10**400] * BINS], 1)).max() < 99
    far = noise.counts([*honest, [10**30] * BINS], M) - noise.counts(honest, 3)
    assert far == pytest.approx([1 + 16 * 2 * 2.0 / math.sqrt(3)] * BINS, rel=0.05)
    message = {"n_clients": 1, "n_votes": 0, "n_within": 0}
    for odd in ("9", 9, [9] * (BINS - 1), [9.0] * BINS):
        assert UpdateClipVotes.from_dict({**message, "n_noised": odd}).n_faults == 1
    both = {**message, "n_votes": 1, "n_within": 1, "n_noised": [9] * BINS}
    assert UpdateClipVotes.from_dict(both).n_faults == 1


def test_what_a_client_sends_says_nothing_without_noise() -> None:
    """What is encrypted: whole counts, a vote with noise, an update with noise."""
    encrypter = masked(NAMES, bitsize=48, clipval=32.0)[0]["0"]
    aux = server_with().start()
    reply = sent(clients_with().round(0, aux, np.full(D, 9.0), encrypter=encrypter))
    votes: Any = reply.aux_var["update-clip"]
    assert (votes.n_votes, votes.n_within) == (0, 0)
    assert len(votes.n_noised) == BINS
    assert min(votes.n_noised) > 1000
    updates: Any = reply.updates
    assert (updates.n_clipped, updates.n_zeroed) == (0, 0)
    assert np.linalg.norm(updates.updates.coefs["w"]) > 10


def spread(clients: Clients, told: list[UpdateClipBound], wire: Any) -> float:
    """Return the spread of a secure sum of zeros, if each client is told something else."""
    total = secret_sum(clients, told, [np.zeros(D)] * M, wire)
    return float(total.updates.updates.coefs["w"].std())


@pytest.mark.parametrize("other", ["", "bound", "noise", "range"])
def test_clients_that_were_told_different_things_make_no_sum(other: str) -> None:
    """Else the others' noise would be less than one client counts on: 0.7 in all, not 2.3."""
    wire, clients = masked(NAMES, bitsize=48, clipval=32.0), clients_with()
    message = server_with().start()["update-clip"]
    told = [replace(message) for _ in NAMES]
    for i in range(1, M):
        if other == "bound":
            told[i].bound = 1e-3
        if other == "noise":
            table = {**NOISE, "noise_multiplier": 0.1}
            told[i].noise = SiteNoise(**table).get_config()
            clients.optimizers[i] = Clients(1, [client_module(**table)], CLIPPED).optimizers[0]
        if other == "range":
            wire[0][NAMES[i]].quantizer = Quantizer(3200.0, 2**46 - 1)
    # Numbers from all of the range, which is that of four clients.
    anything = 4 * 64.0 / math.sqrt(12)
    expected = anything if other else SiteNoise(**NOISE).std(1.0) * 2
    assert spread(clients, told, wire) == pytest.approx(expected, rel=0.1)
    if other == "bound":
        # Nor where the others are told later what one was told before, and it what they were.
        for bounds in ([1e-3, 1.0], [1.0, 1.0]):
            told = [replace(message, bound=bounds[i > 0]) for i in range(M)]
            assert spread(clients, told, wire) == pytest.approx(anything, rel=0.1)


@pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning")
@pytest.mark.parametrize("kind", SECURE)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 0.0])
def test_what_is_no_update_is_zeros_with_noise(kind: str, value: float) -> None:
    """Of all clients: what one sends alone is not seen in a secure sum."""
    server, clients, updates = server_with(), clients_with(), [np.full(D, value)] * M
    for aggregator in clients.aggregators:
        aggregator.zeroing_norm = 1e9
    found = secret_round(server, clients, updates, kind).coefs["w"]
    assert found.std() == pytest.approx(SiteNoise(**NOISE).std(1.0) / math.sqrt(M), rel=0.1)
    assert abs(found.mean()) < 0.1


def test_an_update_of_a_coarser_dtype_than_the_model_is_not_rounded_after_the_noise() -> None:
    noise, encrypter = SiteNoise(**NOISE), masked(NAMES, bitsize=48, clipval=32.0)[0]["0"]
    step = noise.step({"w": np.zeros(D)}, 1.0, encrypter)
    with pytest.raises(ValueError, match="'w' would arrive as other integers"):
        noise.shared({"w": np.zeros(D, np.float32)}, 1.0, step, encrypter)


def test_a_sum_whose_masks_do_not_cancel_is_not_released() -> None:
    """All of its numbers are garbage, such as counts that clients with noise do not send."""
    server, noise = server_with(), SiteNoise(**NOISE)
    found = secret_round(server, clients_with(), [np.zeros(D)] * M, n_clipped=2**47)
    assert not found.coefs["w"].any()
    assert "masks do not cancel" in server.module.stop
    assert noise.void(2, False) == "noise has come from 2 clients, and 3 were to be sure of it"
    assert noise.void(3, False) == ""


@pytest.mark.slow
def test_a_run_by_masks_has_the_noise_of_those_that_add_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the three adds none. Two are counted on: the noise is that of the multiplier."""
    table = {"noise_multiplier": 40.0, "expected_clients": N, "honest": 0.75, "max_norm": 1.0}
    server = {**table, "noise_at": "clients", "start_norm": 1.0, "learning_rate": 0.0}
    client = {"noise": {**table, "bits_noise": 0.0}}
    optim = {
        "aggregator": "clipped-averaging",
        "client_opt": {"lrate": 0.001, "modules": [["update-clip-client", client]]},
        "server_opt": {"lrate": 1.0, "modules": [["update-clip-server", server]]},
    }

    def drawn(variance: Any, size: int) -> Any:
        return np.zeros(size, np.int64) if NODE.get() == "client_1" else draws(variance, size)

    monkeypatch.setattr(site_noise, "draws", drawn)
    secagg = {"secagg": "masking", "secagg_settings": {"bitsize": 32, "clipval": 512.0}}
    settings = {"kind": "PersonalFederatedClient", "columns": 2000, "run": {"rounds": 1}}
    run = complete(tmp_path, optim=optim, **settings, **secagg)
    weights = np.concatenate([*run.result()["weights"].values()])
    assert weights.std() == pytest.approx(40.0 / N, rel=0.1)
    assert run.state()["spent"] == [[40.0, 1]]


def halved(patch: pytest.MonkeyPatch) -> None:
    std = SiteNoise.std
    patch.setattr(SiteNoise, "std", lambda self, bound: std(self, bound) / 2)


def unclipped(patch: pytest.MonkeyPatch) -> None:
    """The update goes past the clip to the bound, and past that for rounding."""
    patch.setattr(np, "vdot", lambda a, b: 0.0)


@pytest.mark.parametrize(
    ("fault", "length", "silent"),
    [(None, 1.0, 0), (None, 1.0, 1), (halved, 1.0, 0), (unclipped, 2.0, 0)],
)
def test_an_audit_of_updates_with_their_votes_where_all_clients_are_counted_on(
    fault: Any, length: float, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two clients, one is there or not: without the noise of either, it is above the claim."""
    rounds, step, z = 3000, 1e-6, 2.0
    if fault is not None:
        fault(monkeypatch)
    noise = SiteNoise(noise_multiplier=z, expected_clients=2, honest=1.0, max_norm=1.0)
    canary = without_noise(noise, np.array([length]), step)

    def releases(votes: int, update: Any) -> Any:
        adding = range(2 - silent)
        sums = sum(noise.integers({"w": np.zeros(rounds)}, 1.0, step)["w"] for _ in adding)
        nobody = [0] * BINS
        voted = [
            np.sum([noise.vote(ONE_VOTE if votes and i == 0 else nobody) for i in adding], axis=0)
            for _ in range(rounds)
        ]
        # Noise of the other bins says nothing of this client.
        return np.column_stack([sums + update, np.array(voted)[:, ONE_VOTE.index(1)]])

    found = estimate(releases(0, 0), releases(1, canary))
    assert (found.low > 1 / z) == (fault is not None or silent > 0)
    # Nor is the noise more than it has to be.
    assert fault or found.mu == pytest.approx(math.sqrt(2 / (2 - silent)) / z, rel=0.15)
