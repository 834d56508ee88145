# SPDX-License-Identifier: Apache-2.0
"""A site's policy under attack by declearn servers: what is looked at are the bytes on the wire.

Written from the docs and the protocol alone: the server is a hostile one, on a real socket.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
import shutil
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import federation_liars
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from declearn.aggregator import (
    AveragingAggregator,
    GradientMaskedAveraging,
    ModelUpdates,
    SumAggregator,
)
from declearn.communication.api import NetworkClient
from declearn.communication.api.backend.actions import Ping
from declearn.dataset import InMemoryDataset
from declearn.fairness.core import FairnessInMemoryDataset
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.messaging import (
    Error,
    EvaluationReply,
    EvaluationRequest,
    FairnessSetupQuery,
    GenericMessage,
    InitReply,
    MetadataQuery,
    MetadataReply,
    PrivacyReply,
    PrivacyRequest,
    TrainReply,
)
from declearn.model.sklearn import NumpyVector
from declearn.secagg.utils import IdentityKeys
from helpers import PATIENCE, free_port, require
from hostile_server import SECRET, WORD, D, Wire, attack, data, init, model, train

import fedclip
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipBound, UpdateClipVotes
from fedclip.engines.declearn.site import GatedNetwork
from fedclip.privacy import ledger as ledgers
from fedclip.privacy.ledger import Ledger
from fedclip.site.gate import REFUSED, Gate
from fedclip.site.policy import Policy

pytest.importorskip("websockets")
C = 0.5
EVALUATE = EvaluationRequest(1, None, {"batch_size": 8}, None, None)


def policy(folder: Path, **settings: Any) -> Path:
    lines = [f"{name} = {value!r}" for name, value in {"max_norm": C, **settings}.items()]
    path = folder / "site.toml"
    path.write_text("[update]\n" + "\n".join(lines))
    path.chmod(0o600)
    return path


def leaks(wire: Wire) -> Iterator[str]:
    """Yield what has left that a policy with nothing but a norm does not let out."""
    for kind in ("<d", "<f"):
        if wire.holds(struct.pack(kind, SECRET)):
            yield "a value of the data"
    if wire.holds(WORD.encode()):
        yield "a word of the data"
    for message in wire.messages:
        if isinstance(message, TrainReply):
            vector, told = message.updates.updates, vars(message).copy()
            if type(message.updates) not in (ModelUpdates, ClippedUpdates):
                yield f"an update as {type(message.updates).__name__}"
            if message.updates.weights != 1:
                yield "a weight"
            if (
                not np.linalg.norm(
                    np.concatenate(
                        [np.ravel(a).astype(float) for a in vector.coefs.values()] or [[0.0]]
                    )
                )
                <= C
            ):
                yield "an update beyond the bound"
            if set(message.aux_var) - {"update-clip"}:
                yield f"auxiliary variables: {set(message.aux_var)}"
            told.pop("updates"), told.pop("aux_var")
        elif isinstance(message, Error):
            told = {}
            if message != Error(REFUSED):
                yield f"an error's own words: {message.message}"
        else:
            told = vars(message).copy()
            if told.get("n_steps") == 1 and math.isnan(told["loss"]):
                told = {}
        if any(told.values()):
            yield f"{type(message).__name__} says {told}"


def broken() -> InMemoryDataset:
    """Return a data set whose errors quote it, as many do."""

    def generate_batches(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"could not convert string to float: {WORD!r} ({SECRET})")

    made: Any = InMemoryDataset(np.ones((9, D)), target=np.ones(9))
    made.generate_batches = generate_batches
    return made


def groups() -> FairnessInMemoryDataset:
    """Return a data set that tells which groups its people are of."""
    x, y = np.ones((9, D)), np.ones(9)
    return FairnessInMemoryDataset(
        x, s_attr=np.array([[WORD]] * 9), target=y, sensitive_target=False
    )


class Stranger(AveragingAggregator):
    """An aggregator that takes the name of another, and shares the weights themselves."""

    name = "stranger"

    def prepare_for_sharing(self, updates: Any, n_steps: int) -> Any:
        return ModelUpdates(NumpyVector({"all": np.full(9, SECRET)}), 1)


FAIRNESS = {"f_type": "accuracy_parity", "f_args": {}}
CLIPPED = fedclip.ClippedAveraging()
BOUND = {"update-clip": UpdateClipBound(1e9)}
ATTACKS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a huge learning rate": ([init(lrate=1e9), train(), train(2)], {}, ""),
    "weights of its choosing": (
        [init(lrate=1e-9), train(weights=model().get_weights() + 1e6)],
        {},
        "",
    ),
    "a bound of its choosing": (
        [init(["update-clip-client"], CLIPPED, lrate=9.0), train(aux=BOUND)],
        {},
        "",
    ),
    "evaluation": ([init(), EVALUATE], {}, ""),
    "metrics of arrays": ([init(metrics=["r2", "mae"]), EVALUATE], {}, ""),
    "weights by steps": ([init(aggregator=AveragingAggregator()), train()], {}, "no weights"),
    "a sum": ([init(aggregator=SumAggregator()), train()], {}, "not SumAggregator"),
    "masked gradients": ([init(aggregator=GradientMaskedAveraging()), train()], {}, "not Gradient"),
    "an aggregator of its own": ([init(aggregator=Stranger(False)), train()], {}, "not Stranger"),
    "auxiliary variables": ([init(["scaffold-client"]), train()], {}, "'scaffold-client' shares"),
    "shared statistics": (
        [init([("zscore-clip", {"shared": True})]), train()],
        {},
        "'zscore-clip' shares",
    ),
    "errors in training": ([init(), train()], {"train_data": broken()}, ""),
    "errors in evaluation": ([init(), EVALUATE], {"train_data": broken()}, ""),
    "questions about the data": (
        [MetadataQuery(["n_samples", "features_shape"]), init()],
        {},
        "does not tell",
    ),
    "fairness": (
        [init(fairness=True), FairnessSetupQuery("fairgrad", FAIRNESS)],
        {"train_data": groups()},
        "FairnessGroups",
    ),
    "secure aggregation": ([init(secagg="masking")], {}, ""),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_leaves_is_within_the_policy(name: str, tmp_path: Path, caplog: Any) -> None:
    script, settings, why = ATTACKS[name]
    wire = attack(script, policy(tmp_path), **settings)
    assert wire.messages
    # Errors are all alike, whatever the reason; that is in the site's log.
    assert not [*leaks(wire)]
    assert why in caplog.text
    assert not why or wire.of(Error)
    # Without the policy, the same attack takes something along.
    assert [*leaks(attack(script, None, **settings))]


def test_another_version_gets_nothing(tmp_path: Path) -> None:
    asked = init(aggregator=fedclip.ClippedAveraging())
    asked.aggrg.get_config = lambda: {"name": "clipped-averaging", "leak": 1, "fedclip": "9.9"}
    wire = attack([asked, train()], policy(tmp_path))
    assert not wire.updates
    assert not [*leaks(wire)]


@pytest.mark.parametrize(("bound", "norm", "within"), [(0.1, 0.1, 0), (1e9, C, 1)])
def test_the_smallest_bound_wins_and_the_vote_is_about_the_servers(
    bound: float, norm: float, within: int, tmp_path: Path
) -> None:
    script = [
        init(["update-clip-client"], CLIPPED, lrate=1e-3),
        train(aux={"update-clip": UpdateClipBound(bound)}),
    ]
    wire = attack(script, policy(tmp_path))
    assert wire.norms == pytest.approx([norm], rel=1e-6)
    (reply,) = wire.of(TrainReply)
    votes = reply.aux_var["update-clip"]
    assert (votes.n_votes, votes.n_within, reply.updates.n_clipped) == (1, within, 1 - within)


def test_numbers_leave_by_name(tmp_path: Path) -> None:
    named = ["loss", "n_steps", "mae", "n_samples", "features_shape"]
    script = [
        MetadataQuery(["n_samples", "features_shape"]),
        init(metrics=["mae"]),
        train(),
        EVALUATE,
    ]
    wire = attack(script, policy(tmp_path, allow_metrics=named))
    assert wire.of(MetadataReply)[0].data_info == {"n_samples": 32, "features_shape": [D]}
    assert vars(wire.of(TrainReply)[0])["n_steps"] == 4
    reply = wire.of(EvaluationReply)[0]
    # The loss, too, is a metric, and all of them are named.
    assert reply.loss > 0.0
    assert reply.n_steps == 4
    assert reply.t_spent == 0.0
    assert {*reply.metrics} == {"mae", "loss"}


class Notes(NetworkClient, register=False):
    """A network client that keeps what it would send."""

    def __init__(self, wire: Wire) -> None:
        super().__init__("ws://nowhere", "site-1")
        self.wire = wire

    @staticmethod
    def _setup_ssl_context(certificate: str | None = None) -> None:
        """None is needed."""

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    async def _send_message(self, bin_msg: bytes) -> bytes:
        self.wire.frames.append(bin_msg)
        return Ping().serialize()


class Unknown(PrivacyReply, register=False):
    """A message of a kind that is known, with more in it."""

    def __init__(self) -> None:
        self.more = WORD


@pytest.mark.parametrize("rounds", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning", "ignore::RuntimeWarning")
def test_whatever_a_client_would_send_the_policy_holds(rounds: int, tmp_path: Path) -> None:
    rng, wire = random.Random(1), Wire()
    network = GatedNetwork(Notes(wire), Gate(Policy.read(policy(tmp_path))))
    any_ = partial(federation_liars.anything, rng)
    kinds: list[Any] = [
        lambda: TrainReply(any_(), any_(), any_(), federation_liars.vector(rng), any_()),
        lambda: TrainReply(1, 1, 1.0, ModelUpdates(federation_liars.vector(rng), 1), {}),
        lambda: TrainReply(
            *(9, 9, 9.0, ClippedUpdates(federation_liars.vector(rng), 1, any_(), any_(), any_())),
            {"update-clip": UpdateClipVotes(any_(), any_(), any_())},
        ),
        lambda: EvaluationReply(any_(), any_(), any_(), any_()),
        lambda: MetadataReply({"n_samples": any_()}),
        lambda: Error(rng.choice([WORD, any_()])),
        lambda: GenericMessage(WORD, {"data": any_()}),
        Unknown,
    ]

    async def send() -> None:
        for i in range(rounds):
            await network.send_message(kinds[i % len(kinds)]())

    asyncio.run(send())
    assert len(wire.frames) == rounds
    assert not [*leaks(wire)]
    # Not all of them are refused.
    assert len(wire.updates) > rounds / 50


# -- the site's own noise and budget -----------------------------------------------------------
def budget(folder: Path) -> Path:
    """Return a policy with a budget for four updates."""
    ledger = str(folder / "spent.json")
    return policy(folder, noise_multiplier=2.0, max_epsilon=10.0, delta=1e-5, ledger=ledger)


ROUNDS = [init(), *(train(i) for i in range(1, 8))]


def test_a_budget_holds_over_jobs_and_restarts(tmp_path: Path, caplog: Any) -> None:
    file = budget(tmp_path)
    first = attack([init(), train(), train(2), train(3)], file)
    assert len(first.updates) == 3
    # The noise is the site's own: an update of (almost) zeros has its standard deviation.
    second = attack([init(lrate=1e-15), train(), train(2)], file)
    assert len(second.updates) == 1
    assert second.of(Error) == [Error(REFUSED)]
    (values,) = second.updates
    squares = np.square(np.concatenate([np.ravel(a) for a in values.coefs.values()]) / (2.0 * C))
    # Of 201 squares, the mean is 1, and off by .6 (six of its standard deviations) in none of 10^7.
    assert abs(squares.mean() - 1.0) < 0.6
    third = attack(ROUNDS, file)
    assert not third.updates
    assert third.of(Error) == [Error(REFUSED)] * 7
    assert "one more update would make epsilon 11.48, above max_epsilon = 10" in caplog.text


def test_beyond_max_replies_the_client_leaves(tmp_path: Path) -> None:
    wire = attack(ROUNDS, policy(tmp_path, max_replies_per_run=3))
    assert [type(message) for message in wire.messages] == [InitReply, TrainReply, TrainReply]


def test_a_ledger_that_is_put_back_gives_a_running_process_nothing(tmp_path: Path) -> None:
    file, ledger, kept = budget(tmp_path), tmp_path / "spent.json", tmp_path / "backup"
    attack([init()], file)
    shutil.copy(ledger, kept)

    def put_back() -> None:
        shutil.copy(kept, ledger)

    script = [init(), train(), train(2), put_back, train(3), ledger.unlink, train(4), train(5)]
    wire = attack(script, file)
    assert len(wire.updates) == 4
    assert wire.of(Error) == [Error(REFUSED)]


def job(file: Path, started: Any, counts: Any) -> None:
    counts.put(len(attack([init(), lambda: started.wait(60.0), *ROUNDS[1:]], file).updates))


@pytest.mark.slow
def test_two_jobs_at_once_share_one_budget(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    file, started, counts = budget(tmp_path), context.Barrier(2), context.Queue()
    jobs = [context.Process(target=job, args=(file, started, counts)) for _ in range(2)]
    for process in jobs:
        process.start()
    try:
        assert sum(counts.get(timeout=PATIENCE) for _ in jobs) == 4
    finally:
        for process in jobs:
            process.kill()
            process.join()


def test_own_noise_goes_with_plain_averages_and_votes_of_it_do_not_leave(
    tmp_path: Path, caplog: Any
) -> None:
    file = budget(tmp_path)
    asked = [init(["update-clip-client"], CLIPPED), train(aux=BOUND)]
    wire = attack(asked, file)
    assert not wire.updates
    assert wire.of(Error) == [Error(REFUSED)]
    assert "noise takes updates beyond the bound" in caplog.text
    asked[0] = init(["update-clip-client"])
    # declearn's own average, with the module that votes beside it, is refused by that module.
    assert not attack(asked, file).updates


def test_a_ledger_of_records_is_none_of_a_site(tmp_path: Path) -> None:
    Ledger(9.0, 1e-5, tmp_path / "spent.json", data="9 records")
    with pytest.raises(ValueError, match="is a ledger of records"):
        fedclip.PersonalFederatedClient(OFFLINE, data(), policy=budget(tmp_path))


OFFLINE = {"protocol": "websockets", "server_uri": "ws://127.0.0.1:1", "name": "c"}


def test_secure_aggregation_is_refused(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    keys = {"secagg_type": "masking", "id_keys": IdentityKeys(key, [key.public_key()])}
    with pytest.raises(ValueError, match="secagg hides what leaves"):
        fedclip.PersonalFederatedClient(OFFLINE, data(), secagg=keys, policy=policy(tmp_path))


# -- with others that do what they should ------------------------------------------------------
@pytest.mark.slow
def test_dp_sgd_goes_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    ask = PrivacyRequest((9.0, 1e-5), 1.0, "rdp", True, None, 1, {"batch_size": 8}, 1, None)
    script = [init(["sample-clip"], dpsgd=True), ask, train()]
    ledger = tmp_path / "records.json"
    settings = {"kind": fedclip.PrivateFederatedClient, "valid_data": data(), "ledger": ledger}
    wire = attack(script, policy(tmp_path), **settings)
    assert [type(m) for m in wire.messages] == [InitReply, PrivacyReply, TrainReply]
    assert not [*leaks(wire)]
    assert ledger.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Argument 'logger' is deprecated")
def test_a_federation_runs_with_a_site_that_has_a_policy(tmp_path: Path) -> None:
    port = free_port()
    server = FederatedServer(
        model(),
        {"protocol": "websockets", "host": "127.0.0.1", "port": port},
        FLOptimConfig.from_params(
            aggregator={"name": "averaging", "steps_weighted": False},
            client_opt=1e-3,
            server_opt=1.0,
        ),
    )
    address = {"protocol": "websockets", "server_uri": f"ws://127.0.0.1:{port}"}
    clients = [
        fedclip.PersonalFederatedClient(
            {**address, "name": f"site-{i}"}, data(), policy=file, verbose=False
        )
        for i, file in enumerate([policy(tmp_path), None])
    ]
    settings = FLRunConfig.from_params(
        rounds=2,
        register={"min_clients": 2, "max_clients": 2, "timeout": 60},
        training={"batch_size": 8},
        evaluate={"batch_size": 8},
    )

    async def run() -> None:
        nodes = [server.async_run(settings), *(c.async_run() for c in clients)]
        await asyncio.wait_for(asyncio.gather(*nodes), PATIENCE)

    before = server.model.get_weights()
    asyncio.run(run())
    assert server.model.get_weights() != before


# -- what it can not force, as the docs say ----------------------------------------------------
@pytest.mark.filterwarnings("ignore:PyTorch JSON serialization relies on pickle")
def test_a_model_that_is_unpickled_runs_code_beside_the_gate(tmp_path: Path) -> None:
    torch: Any = require("torch")
    from declearn.model.torch import TorchModel

    asked = init()
    module = torch.nn.Linear(D, 1)
    module.touch = _Touch(tmp_path / "here")
    asked.model = TorchModel(module, torch.nn.MSELoss())
    attack([asked], policy(tmp_path))
    assert (tmp_path / "here").exists()


class _Touch:
    """What calls a function when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
def test_a_ledger_put_back_between_two_processes_is_not_seen(tmp_path: Path) -> None:
    file, ledger, kept = budget(tmp_path), tmp_path / "spent.json", tmp_path / "backup"
    attack([init()], file)
    shutil.copy(ledger, kept)
    assert len(attack(ROUNDS, file).updates) == 4
    shutil.copy(kept, ledger)
    ledgers._OF_THIS_PROCESS.clear()
    assert len(attack(ROUNDS, file).updates) == 4
