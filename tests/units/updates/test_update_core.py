"""Update clipping for any engine, beside declearn's plug-ins on the same data."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from federation_helpers import Clients, Server
from federation_helpers import sent as arrived

from fedclip import UpdateClipServer
from fedclip.engines.declearn.messages import UpdateClipVotes
from fedclip.engines.declearn.samplers import note_senders
from fedclip.engines.declearn.statistics_server import ZScoreClipServer
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Reply, SentBound
from fedclip.updates.server import UpdateServer
from fedclip.updates.store import client_of, server_of

NOISE = {"noise_multiplier": 1.0, "generator": "insecure", "seed": 7}

pytestmark = pytest.mark.usefixtures("no_round_left_open")


def updates() -> list[list[dict[str, np.ndarray]]]:
    """Return eight rounds of five clients: lengths differ; one is not finite, one is far off."""
    rng, rounds = np.random.default_rng(3), []
    for round_ in range(8):
        lengths = rng.lognormal(0.0, 0.5, size=5)
        lengths[round_ % 5] *= 1e6 if round_ in (2, 5) else 1.0
        rows = rng.normal(size=(5, 12)) * lengths[:, None]
        if round_ in (1, 5):
            rows[0, 3] = math.nan
        rounds.append([{"a": row[:4].reshape(2, 2), "b": row[4:].astype("f4")} for row in rows])
    return rounds


NAMES, STEPS = "abcde", [3, 10, 20, 400, 7]


def by_the_core(bound: dict[str, Any], client: dict[str, Any], more: dict[str, Any]) -> list[Any]:
    settings = {**bound, **client, **more}
    server, seen = server_of(settings), list[Any]()
    clients = [client_of(settings) for _ in NAMES]
    for round_, given in enumerate(updates()):
        if round_ == 4:
            state, server = server.get_state(), server_of(settings)
            server.set_state(state)
        sent = server.open()
        replies = [
            replace(c.clip(update, sent, steps=steps), sender=name)
            for c, update, steps, name in zip(clients, given, STEPS, NAMES, strict=True)
        ]
        # Each third round, the last client is silent.
        closed = server.close(replies[: 4 if round_ % 3 == 2 else 5], like=given[0])
        seen.append((closed.record["next_bound"], closed.average))
    return [*seen, server.get_state()]


def by_the_plugins(bound: dict[str, Any], client: dict[str, Any], more: dict[str, Any]) -> Any:
    aggregator = {"name": "clipped-averaging", **client, **more}
    server = Server([("update-clip-server", bound)], aggregator)
    clients, seen = Clients(5, ["update-clip-client"], aggregator), []
    for round_, given in enumerate(updates()):
        if round_ == 4:
            state = server.optim.get_state()
            server = Server([("update-clip-server", bound)], aggregator)
            server.optim.set_state(state)
        aux = server.start()
        kept = zip(NAMES, given[: 4 if round_ % 3 == 2 else 5], STEPS, strict=False)
        replies = {
            name: arrived(clients.round(i, aux, NumpyVector(dict(update)), steps))
            for i, (name, update, steps) in enumerate(kept)
        }
        note_senders(replies)
        average = server.finish([*replies.values()])
        seen.append((server.module.bound, average.coefs))
    return [*seen, server.module.get_state()]


TABLE = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 40.0, "e": 3.0}


@pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning")
@pytest.mark.parametrize(
    ("bound", "client", "more"),
    [
        ({"start_norm": 0.3}, {}, {}),
        ({}, {"zeroing_factor": 50.0}, {}),
        ({"start_norm": 0.3, "quantile": 0.8}, {"scope": "tensor", "zeroing_norm": 100.0}, {}),
        ({"start_norm": 0.5, "expected_clients": 5, **NOISE}, {"zeroing_norm": 1e3}, {}),
        ({"expected_clients": 6, "relation": "replace-one", **NOISE}, {"scope": ["a"]}, {}),
        ({"start_norm": 2.0, "learning_rate": 0.0}, {"zeroing_norm": 9.0, "zeroing_ord": 2}, {}),
        ({"expected_clients": 5, **NOISE}, {"scope": {"a": 1.0, "*": 3.0}}, {}),
        ({"start_norm": 0.5}, {}, {"weights": TABLE}),
        ({"start_norm": 0.5}, {}, {"weights": TABLE, "max_share": 0.4}),
        ({"start_norm": 0.5}, {}, {"weights": "steps", "max_steps": 50}),
        ({"start_norm": 0.5}, {}, {"weights": "steps", "max_share": 0.5}),
        ({"start_norm": 0.5}, {}, {"combine": "arc", "n_hostile": 1}),
        ({"start_norm": 0.5}, {}, {"combine": "trimmed", "n_hostile": 2}),
    ],
)
def test_the_core_and_the_plugins_give_the_same(bound: Any, client: Any, more: Any) -> None:
    """Over rounds with NaN, an outlier and a silent client; both go on from a state in between."""
    ours, theirs = by_the_core(bound, client, more), by_the_plugins(bound, client, more)
    # Each has a ledger of its own.
    assert {**ours[-1], "ledger": ""} == {**theirs[-1], "ledger": ""}
    for (bound_, average), (expected, same) in zip(ours[:-1], theirs[:-1], strict=True):
        assert bound_ == expected
        for name in same:
            assert average[name].dtype == same[name].dtype
            np.testing.assert_array_equal(average[name], same[name])


def test_a_client_refuses_what_is_not_for_it() -> None:
    for sent, error, text in (
        (SentBound(1.0, stop="enough"), RuntimeError, "the server stops the training: enough"),
        (SentBound(math.nan), ValueError, "bound must be a finite number > 0"),
        (SentBound(1.0, scope="tensor"), ValueError, "scope='tensor', and this client has 'glob"),
    ):
        with pytest.raises(error, match=text):
            UpdateClient().clip({"w": np.ones(1)}, sent)
    # All zeros abstain where steps are not known.
    client, sent = UpdateClient(), SentBound(1.0)
    for size, steps, votes in ((0.0, None, 0), (0.5, None, 1), (0.0, 3, 1), (0.5, 0, 0)):
        assert client.clip({"w": np.array([size])}, sent, steps=steps).votes == votes


ONES, ZEROS, KERNEL = np.ones(4), np.zeros(4), np.ones((4, 4))
COUNT = np.array(3)


def nameless(*arrays: Any) -> dict[str, Any]:
    return {str(i): array for i, array in enumerate(arrays)}


HELD = {
    "torch, cast": {"bn.weight": ONES, "bn.running_mean": ZEROS, "bn.num_batches_tracked": ONES[0]},
    "keras": {"bn/gamma:0": ONES, "bn/moving_mean:0": ZEROS, "bn/moving_variance:0": ONES},
    "nvflare's keras": {f"bn=={i}": x for i, x in enumerate([ONES, ZEROS, ZEROS, ONES])},
    "haiku": {"bn/~/var_ema/average": ONES, "bn/~/var_ema/hidden": ONES, "bn/scale": ONES},
    "flax": {"batch_stats/BatchNorm_0/var": ONES, "params/Dense_0/kernel": KERNEL},
    "a pair": {"bn.mean": ZEROS, "bn.var": ONES, "bn.scale": ONES},
    "a counter": {"norm.count": COUNT, "norm.mu": ZEROS, "norm.sigma": ONES},
    "a list": nameless(KERNEL, ONES, ZEROS, ZEROS, ONES, KERNEL),
    "a list without scale": nameless(KERNEL, ZEROS, ZEROS, ONES),
    "a list with counters": nameless(KERNEL, ZEROS, ONES, COUNT),
}
FREE = {
    "biases and scales": {"fc.weight": KERNEL, "fc.bias": ZEROS, "ln.beta": ONES, "gamma": ZEROS},
    "heads": {"mean.weight": KERNEL, "var/kernel": KERNEL, "mean": ONES, "avg_pool.weight": ONES},
    "layer norms": nameless(KERNEL, ZEROS, ONES, ZEROS, ONES, ZEROS, KERNEL),
    "layer scale": nameless(KERNEL, ZEROS, ONES / 9, ONES, ZEROS, KERNEL),
    "scikit-learn": {"coef": KERNEL, "intercept": ZEROS},
}
SAME = {"expected_clients": 2, "start_norm": 1.0}


@pytest.mark.parametrize("name", HELD)
def test_noise_on_running_statistics_is_refused_by_name_at_each_end(name: str) -> None:
    """The law: server and client, in any loop, before anything with noise comes about."""
    model = {key: np.asarray(array) for key, array in HELD[name].items()}
    server = UpdateServer(AdaptiveBound(noise_multiplier=1.0, **SAME))
    sent = server.open()
    for refuse in (
        lambda: server.check_model(model),
        lambda: server.close([], model),
        lambda: UpdateClient().clip(model, sent),
    ):
        with pytest.raises(ValueError, match=r"statistics \('.*keep them at the clients.*use G"):
            refuse()
    assert server.bound.round == 0


@pytest.mark.parametrize("name", [*HELD, *FREE])
def test_what_is_free_may_have_noise_and_all_may_be_clipped_without(name: str) -> None:
    noise = 1.0 if name in FREE else 0.0
    server = UpdateServer(AdaptiveBound(noise_multiplier=noise, **SAME if noise else {}))
    server.check_model((HELD | FREE)[name])


def test_noise_ends_if_no_reply_of_the_first_round_can_be_used() -> None:
    server, model = UpdateServer(AdaptiveBound(noise_multiplier=1.0, **SAME)), {"w": ZEROS}
    far = Reply({"w": 9 * ONES})
    server.open()
    with pytest.raises(RuntimeError, match="none of the 2 replies of the round can be used"):
        server.close([far, far], model)
    assert server.bound.round == 0
    server = UpdateServer(AdaptiveBound(noise_multiplier=1.0, **SAME))
    for replies in ([far, UpdateClient().clip({"w": ONES}, server.open())], [far, far], []):
        # Later, whether a client replies is not to be seen.
        server.open()
        assert np.any(server.close(replies, model).average["w"])


def test_a_server_refuses_them_before_its_first_message() -> None:
    """One client's norm of 40 would give all others a mean of 14."""
    config = {"noise_multiplier": 1.0, "expected_clients": 3}

    def sent(**more: Any) -> Any:
        modules = [UpdateClipServer(**more), ZScoreClipServer()]
        return Optimizer(lrate=1.0, modules=modules).collect_aux_var()

    aux = sent(**config)
    assert "zscore-clip-server sends statistics" in aux["update-clip"].stop
    # What a server learnt in another life does not go out, either.
    assert (aux["zscore-clip-shared"].labels, aux["zscore-clip-shared"].state) == ([], {})
    client = Optimizer(lrate=1.0, modules=["update-clip-client"])
    with pytest.raises(RuntimeError, match="zscore-clip-server sends statistics"):
        client.process_aux_var({"update-clip": aux["update-clip"]})
    # It is allowed by name, and nothing is refused without noise.
    for more, refused in ((["zscore-clip-server"], False), (["other"], True)):
        stop = sent(**config, unnoised=more)["update-clip"].stop
        assert ("zscore-clip-server" in stop) == refused
    assert not sent()["update-clip"].stop
    noise, shared = UpdateClipServer(**config), ZScoreClipServer()
    Optimizer(lrate=1.0, modules=[shared, noise]).collect_aux_var()
    noise.process_aux_var(UpdateClipVotes(n_clients=3, n_votes=3, n_within=3))
    with pytest.raises(ValueError, match="stands before the noise: put update-clip-server first"):
        shared.run(NumpyVector({"w": np.ones(2)}))
    noise.run(NumpyVector({"w": np.ones(2)}))
