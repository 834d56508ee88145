# SPDX-License-Identifier: Apache-2.0
"""Nothing that one client sends ends a round, costs another its reply, or moves the rest far.

Replies are serialised messages with anything in any field; a round is what declearn's server
does with them, in its order.
"""

import copy
import dataclasses
import logging
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
from declearn.main import FederatedServer
from declearn.messaging import EvaluationReply, SerializedMessage, TrainReply
from declearn.metrics import MetricSet
from declearn.metrics._mean import MeanState
from declearn.model.sklearn import NumpyVector
from federation_helpers import Clients, Server, model_of
from federation_liars import anything, forge

import fedclip
from fedclip.engines.declearn.evaluation import counted
from fedclip.updates.votes import BINS, FIRST_VARIANCE, BoundRule, counts_of, one_hot

N = 4
CLIPPED = {"name": "clipped-averaging"}
CLIENT_MODULES: list[Any] = [
    ("zscore-clip", {"max_norm": None, "shared": True}),
    ("percentile-norm-clip", {"shared": True}),
    "update-clip-client",
]
SERVER_MODULES: list[Any] = [
    ("update-clip-server", {"start_norm": 1.0}),
    ("zscore-clip-server", {}),
    "percentile-norm-clip-server",
]


def update(size: float) -> NumpyVector:
    return NumpyVector({"w": np.array([size, 0.0]), "b": np.zeros(())})


class Table:
    """One server, its honest clients' replies as bytes, and what comes of them alone."""

    def __init__(self) -> None:
        self.server = Server(SERVER_MODULES, CLIPPED)
        clients = Clients(N, CLIENT_MODULES, CLIPPED)
        self.sizes = [0.5, 5.0, 0.9, 20.0]
        self.start = self.server.optim.get_state()
        aux = self.server.start()
        self.honest = []
        for i, size in enumerate(self.sizes):
            for module in clients.optimizers[i].modules:
                module.process_aux_var(aux[module.aux_name or ""])  # type: ignore[arg-type]
            for step in (1.0, 2.0, 3.0):
                clients.optimizers[i].modules[0].run(update(step * size))
                clients.optimizers[i].modules[1].run(update(step * size))
            self.honest.append(clients.round(i, aux, update(size)).serialize())
        self.counted = []
        for place in range(N):
            self.round([reply for i, reply in enumerate(self.honest) if i != place])
            self.counted.append(self.counts())

    def round(self, replies: list[bytes]) -> NumpyVector:
        """Do what declearn's server does with these replies; the update of the model."""
        self.server.optim.set_state(self.start)
        sampler = fedclip.NamedClients()
        # As after a first round, in which everybody replied.
        keys = {"update-clip", "zscore-clip-shared", "percentile-norm-clip-shared"}
        sampler._known = {"updates", *keys}
        self.server.start()
        arrived: dict[str, TrainReply] = {
            f"client_{i}": SerializedMessage.from_bin_message(reply).deserialize()
            for i, reply in enumerate(replies)
        }
        sampler.update(arrived, model_of(w=np.zeros(2), b=np.zeros(())))
        return self.server.finish(list(arrived.values()))

    def counts(self) -> tuple[int, int]:
        state = self.state()
        history = state["percentile-norm-clip-server"]["history"]["all"]
        buckets = [count for _, counts in history for count in counts]
        return state["zscore-clip-server"]["groups"]["all"]["count"], sum(buckets)

    def state(self) -> dict[str, Any]:
        return dict(self.server.optim.get_state()["modules"])


@pytest.fixture(scope="module")
def table() -> Table:
    return Table()


@pytest.fixture(autouse=True)
def _quiet(no_round_left_open: None) -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def clipped(sizes: list[float]) -> float:
    return sum(min(1.0, size) for size in sizes)


def play(table: Table, seed: int) -> None:
    """One round with one liar at a random place, which must not matter to the others."""
    rng = random.Random(seed)
    place = rng.randrange(N)
    replies = list(table.honest)
    honest: Any = SerializedMessage.from_bin_message(replies[place]).deserialize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replies[place] = forge(rng, honest)
        alone = table.round([replies[place]])
        assert table.server.start()["update-clip"].stop == ""
        out = table.round(replies)
    assert float(np.linalg.norm(alone.coefs["w"])) <= 1.0 + 1e-4
    others = [size for i, size in enumerate(table.sizes) if i != place]
    # Whatever the liar's update is, it is within the bound.
    rest = N * np.array([*np.ravel(out.coefs["w"]), float(out.coefs["b"])])
    rest -= np.array([clipped(others), 0.0, 0.0])
    assert out.coefs["w"].dtype == np.float64
    assert out.coefs["w"].shape == (2,)
    assert math.sqrt(float(np.square(rest).sum())) <= 1.0 + 1e-4
    # The votes of the others are all there, and the liar's is one of them, or none.
    state = table.state()
    votes = sum(np.array(one_hot(size, size > 1.0), float) for size in others)
    lies = [np.zeros(BINS), *np.eye(BINS), counts_of((1, 0, ())), counts_of((1, 1, ()))]
    rule = BoundRule(0.5, 1e-6, 1e4)
    bounds = [rule.after(1.0, FIRST_VARIANCE, votes + lie).bound for lie in lies]
    assert min(abs(state["update-clip-server"]["bound"] - b) for b in bounds) < 1e-12
    # So are their counts; the liar may claim no more than a client can have seen.
    for found, honest_ones in zip(table.counts(), table.counted[place], strict=True):
        assert honest_ones > 0
        assert honest_ones <= found <= honest_ones + 10_000
    assert table.server.start()["update-clip"].stop == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [300, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_one_liar_among_four(table: Table, seeds: int) -> None:
    for seed in range(seeds):
        try:
            play(table, seed)
        except Exception as exc:
            raise AssertionError(f"seed {seed}") from exc


METRICS: list[Any] = [
    "binary-classif",
    ["multi-classif", {"labels": [0, 1, 2]}],
    ["binary-roc", {"scale": 0.1}],
    "mse",
    "r2",
]


def evaluation(rng: np.random.Generator) -> EvaluationReply:
    """Return what an honest client sends."""
    client = MetricSet.from_specs([*METRICS])
    truth, scores = rng.integers(0, 2, 20), rng.random(20)
    for metric in client.metrics:
        shown = rng.random((20, 3)) if metric.name == "multi-classif" else scores
        metric.update(truth, shown)
    states = {**client.get_states(), "loss": MeanState(10.0, 20.0)}
    return EvaluationReply(0.5, 2, 0.1, states)


def forge_evaluation(rng: random.Random, honest: EvaluationReply) -> EvaluationReply:
    """Return an evaluation with anything in one place, sometimes in two."""
    reply = copy.deepcopy(honest)
    numbers = [0, -1, 0.0, 1e99, -1e99, 5e-324, 2**70, -1.0]
    for _ in range(rng.choice([1, 1, 2])):
        value = rng.choice(numbers) if rng.random() < 0.4 else anything(rng)
        what = rng.randrange(6)
        if what == 0:
            setattr(reply, rng.choice(["loss", "n_steps", "metrics"]), value)
        elif isinstance(reply.metrics, dict) and reply.metrics:
            name = rng.choice(sorted(reply.metrics, key=str))
            state: Any = reply.metrics[name]
            if what == 1:
                reply.metrics[name] = value
            elif what == 2:
                del reply.metrics[name]
            elif what == 3:
                reply.metrics[rng.choice(["other", "mae"])] = value
            elif dataclasses.is_dataclass(state):
                field = rng.choice(dataclasses.fields(state)).name
                old = getattr(state, field)
                if isinstance(old, np.ndarray) and rng.random() < 0.6:
                    value = rng.choice([old[::-1], -old, old[:1], old * 1e99, old.astype("i2")])
                setattr(state, field, value)
    return reply


@pytest.mark.slow
def test_no_evaluation_ends_a_run() -> None:
    """The others' evaluations count, with whatever of the liars' can be added to them."""
    metrics = MetricSet.from_specs([*METRICS])
    server: Any = FederatedServer.__new__(FederatedServer)
    server.logger = logging.getLogger("declearn.server")
    honest = [evaluation(np.random.default_rng(i)) for i in range(3)]
    for seed in range(200):
        rng = random.Random(seed)
        replies = {str(i): copy.deepcopy(reply) for i, reply in enumerate(honest)}
        replies |= {f"liar {i}": forge_evaluation(rng, honest[0]) for i in range(2)}
        items = list(replies.items())
        rng.shuffle(items)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sound, faults = counted(dict(items), metrics)
            assert sound.keys() | faults.keys() == replies.keys(), seed
            assert not {"0", "1", "2"} & faults.keys(), (seed, faults)
            server.metrics = MetricSet.from_specs([*METRICS])
            loss, results = server._aggregate_evaluation_results(sound)
        assert math.isfinite(loss), seed
        for value in results.values():
            assert np.asarray(value, dtype=float).size, seed
