# SPDX-License-Identifier: Apache-2.0
"""Noise from the sites: who is refused before the first step, and what is said of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from declearn.aggregator import Aggregator
from declearn.dataset import InMemoryDataset
from declearn.main.utils import Checkpointer
from declearn.messaging import Error
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.secagg.utils import IdentityKeys
from federation_helpers import Clients, masked
from personal_runs import client, linear, manager, request, weights
from units.updates import test_site_noise as sites
from units.updates.test_site_noise import CLIPPED, NOISE, D, M, client_module, server_with

import fedclip
from fedclip.cli.privacy import in_words, read_spent
from fedclip.engines.declearn.site import GatedNetwork
from fedclip.privacy.accounting import Release, epsilon
from fedclip.site.gate import Gate, Refused
from fedclip.site.policy import Policy
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client_noise import SiteNoise
from fedclip.updates.server import UpdateServer
from fedclip.updates.store import client_of, server_of

FIXED = {"bits_noise": 0.0}

pytestmark = pytest.mark.usefixtures("no_round_left_open")


@pytest.mark.parametrize(
    ("server", "sent", "table", "text"),
    [
        ({}, {"noise": {}}, NOISE, "adds noise = {.*}, and the server expects {}; nothing is"),
        ({}, {}, None, r"no noise, and the server expects noise = \{'noise_"),
        ({"noise_multiplier": 0.1}, {}, NOISE, ": 2.0, .* expects {'noise_multiplier': 0.1"),
        ({"expected_clients": 2}, {}, NOISE, ": 4, .*, and the server .*'expected_clients': 2"),
        # The squares of such an update's values are 0, and no norm would be known of it.
        ({}, {"bound": 1e-300}, NOISE, r"must be a number from 1e-30 to 1e\+30, got 1e-300"),
        ({}, {"bound": 1.01}, NOISE, "bound, 1.01, is not within max_norm=1"),
        ({"learning_rate": 0.0}, {"bound": 0.5}, NOISE | FIXED, r"0\.5, is not within max_norm=1"),
        ({}, {"private": False}, NOISE, "asks for what this client's noise does not cover"),
        ({}, {"adaptive": False}, NOISE, "asks for what this client's noise does not cover"),
        # The server would see an update with this client's share of the noise alone.
        ({}, {}, NOISE, "noise is for a secure sum, and this client has no"),
    ],
)
def test_a_server_that_expects_other_noise_is_refused(
    server: dict[str, Any], sent: dict[str, Any], table: dict[str, Any] | None, text: str
) -> None:
    aux = server_with(**server).start()
    aux["update-clip"] = replace(aux["update-clip"], **sent)
    with pytest.raises(ValueError, match=text):
        Clients(1, [("update-clip-client", {"noise": table})], CLIPPED).round(0, aux, np.zeros(3))


@pytest.mark.parametrize(
    ("secagg", "peers", "dtype", "text"),
    [
        ({}, 3, "float64", "3 clients are in the secure sum, and noise is for expected_clients"),
        ({"bitsize": 64}, M, "float64", "are not summed exactly"),
        ({"bitsize": 27}, M, "float32", "are not summed exactly"),
        ({"bitsize": 14}, M, "float64", "votes with their noise do not fit"),
        ({"bitsize": 17, "clipval": 20.0}, 20, "float64", "votes with their noise do not fit"),
        ({"bitsize": 32, "clipval": 1e9}, M, "float64", "too coarse for a bound of 1 on 2,000"),
        ({"bitsize": 20, "clipval": 1e3}, M, "float64", "too small for integers"),
        ({}, M, "float16", "'w' is of float16, too coarse"),
    ],
)
def test_a_sum_that_is_none_gets_nothing_and_no_step_is_made(
    secagg: dict[str, Any], peers: int, dtype: str, text: str
) -> None:
    weights = NumpyVector({"w": np.zeros(D, dtype)})
    names = [str(i) for i in range(peers)]
    encrypter = masked(names, **{"bitsize": 48, "clipval": 32.0, **secagg})[0]["0"]
    more = {"noise_multiplier": 0.02} if "small" in text else {}
    server, clients = server_with(**more), sites.clients_with(**more)
    with pytest.raises(ValueError, match=text):
        clients.begin(0, server.start(), weights, encrypter)


@pytest.mark.parametrize(
    ("modules", "aggregator", "text"),
    [
        (["update-clip-client"], "clipped-averaging", "with noise = .* only"),
        ([client_module(noise_multiplier=0.1)], "clipped-averaging", "with noise = .* only"),
        ([client_module()], "averaging", "with noise = .* only"),
        (["scaffold-client", client_module()], "clipped-averaging", "'scaffold-client' would"),
    ],
)
def test_a_site_says_itself_what_noise_it_wants(modules: Any, aggregator: str, text: str) -> None:
    data = InMemoryDataset(np.zeros((2, 1)), target=np.zeros(2))
    netwk = {"protocol": "websockets", "server_uri": "ws://127.0.0.1:1", "name": "a"}
    with pytest.raises(ValueError, match="noise is for a secure sum, and this client has no"):
        fedclip.PersonalFederatedClient(netwk, data, noise=NOISE)
    key = Ed25519PrivateKey.generate()
    keys = {"secagg_type": "masking", "id_keys": IdentityKeys(key, [key.public_key()])}
    site = fedclip.PersonalFederatedClient(netwk, data, noise=NOISE, secagg=keys)
    within, optim = Aggregator.from_config({"name": aggregator}), Optimizer(0.1, modules=modules)
    with pytest.raises(ValueError, match=text):
        site.trainmanager = SimpleNamespace(aggrg=within, optim=optim)
    # Nor does a policy go with it, which would clip its noise.
    gated = GatedNetwork(SimpleNamespace(server_uri="", name="a"), Gate(Policy(max_norm=1.0)))
    with pytest.raises(Refused, match="would clip the noise"):
        gated.check(Aggregator.from_config(CLIPPED), sites.clients_with(1).optimizers[0].modules)


@pytest.mark.parametrize(
    ("aggregator", "text"),
    [
        ({"on_nonfinite": "raise"}, "reveals that client without noise: take 'skip'"),
        ({"exclude": "w"}, "noise cannot be sized on exclude="),
        ({"weights": "steps", "max_steps": 9}, "weights do not go with noise"),
        ({"combine": "arc", "n_hostile": 1}, "combine = 'arc' does not go with noise"),
        ({"name": "averaging"}, "needs the aggregator 'clipped-averaging'"),
    ],
)
def test_what_noise_does_not_cover_is_refused_before_the_first_step(
    aggregator: dict[str, Any], text: str
) -> None:
    """With an answer: declearn's server waits for ever for a client that ends before the rounds."""
    within = Aggregator.from_config({**CLIPPED, **aggregator})
    trained = manager(client(), linear(), within, modules=[client_module()])
    reply = trained.training_round(request(linear(), aux_var=server_with().start()))
    assert isinstance(reply, Error)
    assert text in reply.message
    assert weights(trained.model) == weights(linear())


def test_spent_says_what_it_is_if_clients_tell_their_noise(tmp_path: Path) -> None:
    server, clients = server_with(delta=1e-3), sites.clients_with()
    for _ in range(3):
        sites.secret_round(server, clients, [np.zeros(D)] * M)
    Checkpointer(str(tmp_path)).checkpoint(optimizer=server.optim, first_call=True)
    (spent,) = read_spent(tmp_path)
    cost, noise = spent.cost(), SiteNoise(**NOISE)
    assert spent.mechanism == "discrete Gaussian"
    expected = {c: epsilon([Release(noise.multiplier(c), 3)], 1e-3) for c in range(M)}
    assert cost["silent"] == pytest.approx(expected)
    assert cost["silent"][1] == pytest.approx(cost["epsilons"]["closed form"])
    words = "\n".join(in_words(cost))
    assert f"{cost['silent'][3]:.4g} if 3 clients do" in words
    assert "masks for secure sums use no cryptographic generator" in words


def test_what_training_raises_stays_on_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence of an error may hold what no noise covers."""

    def fails(_: Any) -> None:
        raise FloatingPointError("overflow at record 17")

    within = Aggregator.from_config(CLIPPED)
    trained = manager(client(), linear(), within, modules=[client_module()])
    monkeypatch.setattr(trained, "run_train_step", fails)
    with pytest.raises(RuntimeError) as caught:
        trained.train_under_constraints({"batch_size": 8})
    assert str(caught.value) == "the training failed on this client; its log says why"


def test_a_table_is_one_and_other_engines_have_none() -> None:
    for table, why in ((2.0, "noise must be a table"), ({"honst": 1.0}, "did you mean 'honest'")):
        with pytest.raises(TypeError, match=why):
            Clients(1, [("update-clip-client", {"noise": table})], CLIPPED)
    for make in (server_of, client_of, lambda it: UpdateServer(AdaptiveBound(**it))):
        with pytest.raises(ValueError, match="noise_at='clients' is for federations of declearn"):
            make({"start_norm": 1.0, **NOISE, "noise_at": "clients"})
    (optim,) = sites.clients_with(1).optimizers
    with pytest.raises(ValueError, match="only a PersonalFederatedClient knows"):
        optim.process_aux_var(server_with().start())
