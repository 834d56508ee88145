# SPDX-License-Identifier: Apache-2.0
"""Evaluations with central noise: what a client moves in them, what is written, what it costs."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.communication import NetworkServerConfig
from declearn.messaging import Error, EvaluationReply, Message
from declearn.metrics import Metric, MetricSet
from declearn.metrics._mean import MeanState
from federation_runs import ADAPTIVE, N, complete

from benchmarks.audit import estimate
from fedclip import UpdateClipServer
from fedclip.engines.declearn.context import change
from fedclip.engines.declearn.evaluation import Accuracy, Evaluations
from fedclip.engines.declearn.messages import UpdateClipVotes
from fedclip.privacy.accounting import Release, epsilon
from fedclip.privacy.planning import plan
from fedclip.updates import noise as budgets
from fedclip.updates.server import UpdateServer
from fedclip.updates.store import server_of

pytestmark = [
    pytest.mark.usefixtures("no_round_left_open"),
    pytest.mark.filterwarnings("ignore:Argument 'logger'"),
]

BOUND, CLIENTS, SHARE, Z = 3.0, 10, 0.4, 2.0
NOISE = {"start_norm": 0.2, "noise_multiplier": Z, "expected_clients": CLIENTS}
SETTINGS: dict[str, Any] = {**NOISE, "evaluation_share": SHARE, "loss_bound": BOUND}


def module(**settings: Any) -> UpdateClipServer:
    return UpdateClipServer(**{**SETTINGS, **settings})


def listening(server: Any, clients: int = CLIENTS, secure: bool = False, more: Any = ()) -> Any:
    """Return a network that has begun a run, and the module's answer to its first round."""
    change(server=None)
    network: Any = NetworkServerConfig("fedclip-websockets", "127.0.0.1", 8765).build_server()
    metrics = MetricSet([Accuracy(), *map(Metric.from_specs, more)])
    network._evaluated = Evaluations(metrics, clients, secure)
    change(evaluations=network._evaluated)
    return network, server.collect_aux_var()


def reply(loss: float, accuracy: float = 0.5, samples: float = 20.0) -> EvaluationReply:
    states = {"loss": loss, "accuracy": accuracy}
    told = {name: MeanState(value * samples, samples) for name, value in states.items()}
    return EvaluationReply(loss, 7, 12.5, {**told})


def told(server: UpdateClipServer, network: Any, replies: list[Message]) -> EvaluationReply:
    """Return what declearn's server gets of the evaluations of a new round."""
    # Have the round paid for.
    server.collect_aux_var()
    server.process_aux_var(UpdateClipVotes(n_clients=CLIENTS, n_votes=CLIENTS, n_within=5))
    found = network._evaluations({f"client {i}": one for i, one in enumerate(replies)})
    assert list(found) == ["all clients"]
    return found["all clients"]


OTHERS = [reply(1.0, 0.9) for _ in range(CLIENTS - 1)]


@pytest.mark.parametrize(
    "sent",
    [
        *(reply(loss, share) for loss in (0.0, 2.9, 1e90, -1e90) for share in (0.0, 1.0, 1e50)),
        reply(3.0, 0.0, samples=1e90),
        EvaluationReply(1e99, 1, 0.0, {}),
        EvaluationReply(1.0, 1, 0.0, {"loss": MeanState(1, 1), "accuracy": MeanState(0, 0)}),
        reply(math.nan),
        reply(math.inf),
        Error("no evaluation"),
    ],
)
def test_one_client_moves_the_sums_by_its_bound_at_most(quiet: Any, sent: Any) -> None:
    server = module()
    network, _ = listening(server)
    without, among = (told(server, network, [*OTHERS, *more]) for more in ([], [sent]))
    # The means of ten clients, the last of which is silent: in the middle of each range.
    assert without.loss == pytest.approx(0.9 * 1.0 + 0.1 * BOUND / 2)
    assert without.metrics["accuracy"].num_sum == pytest.approx(0.9 * 0.9 + 0.1 * 0.5)
    moved = [
        (among.metrics[name].num_sum - without.metrics[name].num_sum) * CLIENTS / bound
        for name, bound in (("loss", BOUND), ("accuracy", 1.0))
    ]
    assert np.linalg.norm(moved) <= math.sqrt(2) / 2 + 1e-9
    # Noise on both numbers, of each of the two evaluations, is for that.
    assert quiet[-1] == pytest.approx(Z / SHARE * math.sqrt(2) / 2)
    # What is handed on does not say how many there were, how long they took, or on what.
    for one in (without, among):
        assert (one.n_steps, one.t_spent, one.metrics.keys()) == (1, 0.0, {"loss", "accuracy"})
        assert {state.divisor for state in one.metrics.values()} == {1.0}


def test_each_round_pays_for_one_evaluation() -> None:
    server = module()
    network, _ = listening(server)
    replies = {"a": reply(1.0)}
    assert network._evaluations(replies)["all clients"].loss == math.inf
    assert 0.0 <= told(server, network, [*replies.values()]).loss <= BOUND
    assert network._evaluations(replies)["all clients"].loss == math.inf
    # Nor has a server that was started again one to tell, until it has trained.
    again = module()
    network, _ = listening(again)
    again.set_state(server.get_state())
    assert again.epsilon >= server.epsilon > 0
    assert network._evaluations(replies)["all clients"].loss == math.inf


@pytest.mark.parametrize("settings", [{}, {"learning_rate": 0.0}, {"bits_noise": 30.0}])
def test_update_votes_and_evaluation_together_cost_a_round(settings: dict[str, Any]) -> None:
    budget = module(**settings).budget
    parts = [budget.update_noise, budget.evaluation_noise]
    parts += [2.0 * budget.bits_noise] if budget.bits_noise else []
    assert sum(z**-2.0 for z in parts) == pytest.approx(Z**-2.0)
    found = plan(8.0, 1e-5, 100, CLIENTS, evaluation_share=SHARE)
    assert epsilon([Release(found.noise_multiplier, 100)], 1e-5) <= 8.0
    assert UpdateClipServer(**found.config).budget.update_noise == found.update_noise


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["", "noise halved", "clip left out"])
def test_an_audit_finds_the_faults_and_no_others(fault: str, monkeypatch: Any) -> None:
    """Evaluations with and without a client whose model is as bad as can be."""
    server = module(generator="insecure", seed=3)
    network, _ = listening(server)
    if fault == "noise halved":
        server.budget.evaluation_noise /= 2
    if fault == "clip left out":
        monkeypatch.setattr(np, "clip", lambda array, low, high: array)

    def seen(replies: list[Message]) -> Any:
        found = [told(server, network, replies).metrics for _ in range(2000)]
        return np.array([[one["loss"].num_sum / BOUND, one["accuracy"].num_sum] for one in found])

    # Numbers in the middle, so that few means are clamped.
    others: list[Message] = [reply(1.5, 0.5) for _ in range(CLIENTS - 1)]
    found = estimate(seen(others), seen([*others, reply(100.0 * BOUND, 0.0)]))
    claimed = SHARE / Z
    assert (found.low > claimed) == bool(fault)
    assert found.high > 0.7 * claimed


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Leave the noise out; return the standard deviations that it would have had."""
    seen: list[float] = []
    monkeypatch.setattr(budgets, "noised", lambda values, std, normals: seen.append(std) or values)
    return seen


def test_what_can_have_no_noise_ends_the_run_at_its_first_round() -> None:
    change(evaluations=None)
    assert "needs the server's protocol 'fedclip-websockets'" in module().collect_aux_var().stop
    for clients, secure, more, said in (
        (CLIENTS + 1, False, [], "evaluations ask all 11 clients"),
        (CLIENTS, True, [], "secure aggregation hides the evaluations"),
        (CLIENTS, False, ["binary-classif"], "asks for binary-classif too: leave that out"),
        (CLIENTS, False, [], ""),
    ):
        stop = listening(module(), clients, secure, more)[1].stop
        assert said in stop
        assert bool(said) == bool(stop)
    # Other engines refuse it before that.
    for make in (lambda: server_of(SETTINGS), lambda: UpdateServer(module())):
        with pytest.raises(ValueError, match="fedclip-websockets: leave it out"):
            make()


@pytest.mark.slow
def test_a_server_writes_means_with_noise_alone(tmp_path: Path) -> None:
    modules = [["update-clip-server", {**SETTINGS, "expected_clients": N}]]
    run = complete(
        tmp_path,
        optim={**ADAPTIVE, "server_opt": {"lrate": 1.0, "modules": modules}},
        protocol="fedclip-websockets",
        metrics=["accuracy"],
        checkpoint="saved",
        run={"evaluate": {"batch_size": 60}},
    )

    def measured(folder: str) -> Any:
        rows = (tmp_path / folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
        return np.array([[float(r["loss"]), float(r["accuracy"])] for r in csv.DictReader(rows)])

    assert not [*(tmp_path / "saved").glob("metrics_*")]
    found = measured("saved")
    assert found.shape == (4, 2)
    assert np.all((found >= 0.0) & (found <= [BOUND, 1.0]))
    # An evaluation costs nothing besides its round.
    assert run.state()["spent"] == [[Z, 4]]
    # What a client has measured is in its own folder, and in no file of the server's.
    losses = np.array([measured(f"saved_client_{i}")[:, 0] for i in range(N)])
    files = [tmp_path / "server.txt", *(tmp_path / "saved").iterdir()]
    written = b"".join(file.read_bytes() for file in files)
    assert b"Averaged loss is" in written
    for loss in [*losses.ravel(), *losses.mean(axis=0)]:
        assert str(loss)[:8].encode() not in written
        assert np.float64(loss).tobytes() not in written
