# SPDX-License-Identifier: Apache-2.0
"""A site's policy under attack by declearn servers: what is looked at are the bytes on the wire.

Written from the docs and the protocol alone.
"""

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import federation_liars
import numpy as np
import pytest
from declearn import aggregator, messaging
from declearn.aggregator import AveragingAggregator, ModelUpdates
from declearn.dataset import InMemoryDataset
from declearn.fairness.core import FairnessInMemoryDataset
from declearn.messaging import Error, EvaluationReply, MetadataQuery, MetadataReply, TrainReply
from declearn.model.sklearn import NumpyVector
from helpers import policy
from hostile_server import SECRET, WORD, C, D, Wire, attack, init, leaks, model, train

import fedclip
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipBound, UpdateClipVotes
from fedclip.engines.declearn.site import GatedNetwork
from fedclip.site.gate import Gate
from fedclip.site.policy import Policy

EVALUATE = messaging.EvaluationRequest(1, None, {"batch_size": 8}, None, None)


def broken() -> InMemoryDataset:
    """Return a data set whose errors quote it, as many do."""

    def generate_batches(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"could not convert string to float: {WORD!r} ({SECRET})")

    made: Any = InMemoryDataset(np.ones((9, D)), target=np.ones(9))
    made.generate_batches = generate_batches
    return made


def groups() -> FairnessInMemoryDataset:
    of: Any = {"s_attr": np.array([[WORD]] * 9), "target": np.ones(9), "sensitive_target": False}
    return FairnessInMemoryDataset(np.ones((9, D)), **of)


class Stranger(AveragingAggregator):
    """An aggregator that takes the name of another, and shares the weights themselves."""

    name = "stranger"

    def prepare_for_sharing(self, updates: Any, n_steps: int) -> Any:
        return ModelUpdates(NumpyVector({"all": np.full(9, SECRET)}), 1)


FAIRNESS = {"f_type": "accuracy_parity", "f_args": {}}
CLIPPED, MASKED = fedclip.ClippedAveraging(), aggregator.GradientMaskedAveraging()
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
    "a sum": ([init(aggregator=aggregator.SumAggregator()), train()], {}, "not SumAggregator"),
    "masked gradients": ([init(aggregator=MASKED), train()], {}, "not Gradient"),
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
        "does not name",
    ),
    "fairness": (
        [init(fairness=True), messaging.FairnessSetupQuery("fairgrad", FAIRNESS)],
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
    asked = train(aux={"update-clip": UpdateClipBound(bound)})
    wire = attack([init(["update-clip-client"], CLIPPED, lrate=1e-3), asked], policy(tmp_path))
    assert wire.norms == pytest.approx([norm], rel=1e-6)
    (reply,) = wire.of(TrainReply)
    votes = reply.aux_var["update-clip"]
    assert (votes.n_votes, votes.n_within, reply.updates.n_clipped) == (1, within, 1 - within)


def test_numbers_leave_by_name(tmp_path: Path) -> None:
    named = ["loss", "n_steps", "mae", "n_samples", "features_shape"]
    script = [MetadataQuery(named[3:]), init(metrics=["mae"]), train(), EVALUATE]
    wire = attack(script, policy(tmp_path, allow_metrics=named))
    assert wire.of(MetadataReply)[0].data_info == {"n_samples": 32, "features_shape": [D]}
    assert vars(wire.of(TrainReply)[0])["n_steps"] == 4
    reply = wire.of(EvaluationReply)[0]
    # The loss, too, is a metric, and all of them are named.
    assert reply.loss > 0.0
    assert reply.n_steps == 4
    assert reply.t_spent == 0.0
    assert {*reply.metrics} == {"mae", "loss"}


class Unknown(messaging.PrivacyReply, register=False):
    def __init__(self) -> None:
        self.more = WORD


@pytest.mark.parametrize("rounds", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning", "ignore::RuntimeWarning")
def test_whatever_a_client_would_send_the_policy_holds(rounds: int, tmp_path: Path) -> None:
    rng, wire = random.Random(1), Wire()
    network = GatedNetwork(wire, Gate(Policy.read(policy(tmp_path))))
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
        lambda: messaging.GenericMessage(WORD, {"data": any_()}),
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
