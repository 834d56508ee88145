# SPDX-License-Identifier: Apache-2.0
"""Evaluations with noise: what leaves the client, what a record moves in it, and what it costs."""

from functools import partial
from pathlib import Path
from typing import Any

import dpsgd_wire as wire
import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from declearn.messaging import Error, EvaluationReply, EvaluationRequest
from declearn.metrics import MetricSet
from declearn.metrics._mean import MeanState
from dpsgd_managers import BOUND, client, data, manager, noised_sums, request, train
from dpsgd_models import MODELS
from report_runs import call

from benchmarks import dpsgd_evaluation as benchmark
from benchmarks.audit import estimate
from fedclip.cli.privacy import in_words, read_spent
from fedclip.dpsgd.calibrate import calibrate, evaluation_noise
from fedclip.dpsgd.persons import Persons
from fedclip.engines.declearn import evaluation as evaluations
from fedclip.engines.declearn.evaluation import Accuracy, Evaluation
from fedclip.engines.declearn.persample import Records
from fedclip.engines.declearn.private_client import PrivateTrainingManager
from fedclip.engines.declearn.sample_clip import SampleClip
from fedclip.privacy.accounting import Release, account, noise_multiplier
from fedclip.privacy.ledger import Ledger, read_entries
from fedclip.privacy.noise import insecure_normals

pytestmark = pytest.mark.slow

pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")

SETTINGS = {"evaluation_share": 0.2, "loss_bound": BOUND}
ASK = EvaluationRequest(1, None, {"batch_size": 30}, None, None)


def evaluation(model: Any, *metrics: Any) -> Evaluation:
    """Return the evaluation of a model, as its training manager sets it up."""
    made = PrivateTrainingManager.__new__(PrivateTrainingManager)
    made.model = model
    return Evaluation(made._prepare_metrics([*metrics]), BOUND)


@pytest.mark.parametrize("backend", MODELS)
def test_values_are_declearns_own_losses_clipped_record_by_record(backend: str) -> None:
    model, x, y = MODELS[backend]()
    made = evaluation(model)
    units = Records(InMemoryDataset(np.asarray(x), target=y))
    found = made.values(model, units, lambda *told: pytest.fail(str(told)))
    true, predicted, _ = model.compute_batch_predictions((x, y, None))
    right = np.asarray(model.loss_function(true, predicted)).reshape(len(y), -1).sum(axis=1)
    assert found.shape == (len(y), 1)
    np.testing.assert_allclose(BOUND * found[:, 0], np.clip(right, 0.0, BOUND), rtol=1e-4)
    lacking = np.array(x)
    lacking[0] = np.nan
    again = made.values(model, Records(InMemoryDataset(lacking, target=y)), lambda *told: None)
    np.testing.assert_allclose(again, [[1.0], *found[1:]], rtol=1e-5)


@pytest.mark.parametrize("row", [1.0, -1e6, 1e30, np.nan, np.inf])
@pytest.mark.parametrize("of_persons", [False, True])
def test_a_unit_moves_the_sums_by_its_bound_at_most(row: float, of_persons: bool) -> None:
    model, x, y = MODELS["sklearn"]()
    made = evaluation(model, Accuracy())
    silent = partial(made.noised, noise_multiplier=1.0, normals=np.zeros)

    def released(many: int) -> Any:
        rows = np.where(np.arange(len(y))[:, None] >= 10, row, x)[:many]
        units: Any = Records(InMemoryDataset(rows, target=y[:many]))
        if of_persons:
            units = Persons(units, [*range(10), *["x"] * 3][:many])
        return noised_sums(made.states(silent(made.values(model, units, lambda *told: None))))

    # One record is added, or one person with three.
    moved = released(13 if of_persons else 11) - released(10)
    assert np.linalg.norm(moved) <= evaluation_noise(1.0, 2) * (1 + 1e-9)
    assert moved[-1] == pytest.approx(0.5)


def test_a_person_is_the_mean_of_its_records_and_what_raises_is_the_worst() -> None:
    model, x, y = MODELS["sklearn"]()
    made = evaluation(model, Accuracy())
    labels = y.astype(object)
    labels[2] = "no class"
    whole = Records(InMemoryDataset(x, target=labels))
    each = made.values(model, Records(InMemoryDataset(x, target=y)), lambda *told: None)
    each[2] = 1.0, 0.0
    told: list[int] = []
    of = ["a", "b", "b", *["c"] * 10]
    found = made.values(model, Persons(whole, of), lambda record, exc: told.append(record))
    right = [each[:1].mean(axis=0), each[1:3].mean(axis=0), each[3:].mean(axis=0)]
    np.testing.assert_allclose(found, right)
    assert told == [2]


@pytest.mark.parametrize("fault", ["", "noise halved", "clip left out"])
def test_an_audit_finds_the_faults_and_no_others(fault: str, monkeypatch: Any) -> None:
    """Whether one record, the worst, was there is guessed from 2,000 evaluations of each kind."""
    z, model = 1.0, MODELS["sklearn"]()[0]
    made = evaluation(model, Accuracy())
    others = np.array([[0.0, 1.0], [1.0, 0.0]] * 20)
    if fault == "clip left out":
        monkeypatch.setattr(evaluations.np, "clip", lambda array, low, high: array)
    if fault == "noise halved":
        less = lambda z, k: evaluation_noise(z, k) / 2  # noqa: E731
        monkeypatch.setattr(evaluations, "evaluation_noise", less)
    worst = made.of_record(model, (np.full((1, 5), 1e3), np.array([0]), None))
    normals = insecure_normals(1)

    def seen(rows: Any) -> Any:
        states = (made.states(made.noised(rows, z, normals)) for _ in range(2000))
        return np.array([*map(noised_sums, states)])

    found = estimate(seen(others), seen(np.vstack([others, worst])))
    assert (found.low > 1 / z) == bool(fault)
    assert found.high > 0.85 / z


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_steps_and_evaluations_together_cost_the_budget(share: float) -> None:
    plan = calibrate(3.0, 1e-5, 400, 64, 60).evaluating(share, 10)
    (evaluated,) = plan.evaluations
    assert account([evaluated], 1e-5).epsilon == pytest.approx(share * 3.0, rel=1e-6)
    assert 2.99 < plan.spent <= 3.0
    assert account([Release(plan.noise_multiplier, 60, plan.rate)], 1e-5).epsilon < 3.0
    half = noise_multiplier(3.0, 1e-5, 10, besides=(Release(noise_multiplier(1.5, 1e-5, 5), 5),))
    assert account([Release(half, 10)], 1e-5).epsilon < 2.9
    with pytest.raises(ValueError, match="no noise is enough"):
        noise_multiplier(3.0, 1e-5, 10, besides=(Release(1.0, 10),))


def test_an_evaluation_is_paid_for_before_the_first_record_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager([SampleClip(**SETTINGS)], path=tmp_path / "spent.json")
    charged: list[Any] = []

    def broken(*args: Any) -> Any:
        charged.extend(r for e in read_entries(tmp_path / "spent.json").values() for r in e.spent)
        raise RuntimeError(wire.SECRET)

    monkeypatch.setattr(Evaluation, "values", broken)
    reply = made.evaluation_round(ASK)
    assert isinstance(reply, Error)
    assert wire.SECRET not in reply.message
    assert charged == [made.calibration.evaluations[0]._replace(steps=1)]


def test_no_more_is_evaluated_than_is_paid_for(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    made = manager([SampleClip(**SETTINGS)], path=path)
    made._normals = insecure_normals(1)
    for _ in range(4):
        made.training_round(train())
        assert made.evaluation_round(ASK).loss != BOUND  # type: ignore[union-attr]
    assert 2.99 < made.get_privacy_spent()[0] <= 3.0
    # What was announced before the run is counted together, and by the tightest accountant.
    assert Ledger(3.0, 1e-5, path).accountant.order_of(made.ledger.accountant.spent) is None
    spent = {"loss": MeanState(BOUND, 1.0)}
    assert made.evaluation_round(ASK) == EvaluationReply(BOUND, 1, 0.0, spent)  # type: ignore[arg-type]
    # The same again on the same records finds no budget, and what it would add is of no plan.
    again = manager([SampleClip(**SETTINGS)], path=path)
    before = path.read_text()
    assert again.evaluation_round(ASK) == EvaluationReply(BOUND, 1, 0.0, spent)  # type: ignore[arg-type]
    assert path.read_text() == before
    history = [*again.ledger.accountant.spent, again.calibration.evaluations[0]]
    assert again.ledger.accountant.order_of(history) is not None


def test_evaluations_before_any_training_begin_the_plan(tmp_path: Path) -> None:
    made = manager([SampleClip(**SETTINGS)], path=tmp_path / "spent.json")
    for _ in range(6):
        made.evaluation_round(ASK)
    first, *_ = [e for e in read_entries(tmp_path / "spent.json").values() if e.spent]
    assert first.order is not None
    assert first.plan == made.calibration.releases
    # More than one a round is none of the plan, whatever is left of the budget.
    assert made.ledger.accountant.spent == [*made.calibration.evaluations]
    made.training_round(train())
    assert made.ledger.accountant.order_of(made.ledger.accountant.spent) is None


def test_what_has_no_bound_or_no_person_is_refused_before_the_first_round() -> None:
    made = manager([SampleClip(**SETTINGS)], private=None)
    made.metrics = made._prepare_metrics(["mse", "accuracy"])
    with pytest.raises(ValueError, match="asks for mse too: leave that out"):
        made.make_private(request())
    made.metrics = made._prepare_metrics(None)
    of = np.arange(60) // 3
    with pytest.raises(ValueError, match="whose the validation records are, by valid_persons; in"):
        made.make_private(request(), records=Persons(Records(data()), of))
    valid = Persons(Records(data(seed=1)), of)
    made.make_private(request(), records=Persons(Records(data()), of), valid=valid)
    assert isinstance(made.evaluation_round(ASK), EvaluationReply)
    with pytest.raises(ValueError, match="valid_persons is of persons"):
        client(valid_persons=of)


def test_accuracy_is_the_share_of_right_classes() -> None:
    metrics = MetricSet(["accuracy"])
    metrics.update(np.array([1, 0, 2]), np.array([[0.0, 1.0, 0.5], [0.0, 1.0, 0.5], [0, 0, 1.0]]))
    assert metrics.get_result()["accuracy"] == pytest.approx(2 / 3)
    one = Accuracy(threshold=0.0)
    one.update(np.array([1, 0]), np.array([[0.2], [-0.2]]))
    assert one.get_result() == {"accuracy": 1.0}
    assert MetricSet.from_config(MetricSet([one]).get_config()).metrics[0].threshold == 0.0  # type: ignore[attr-defined]
    # A label of three columns: one record would count as up to three right ones.
    with pytest.raises(ValueError, match="one class for each record, and labels have shape"):
        one.metric_func(np.array([[0, 0, 1]]), np.ones((1, 3)))


CONFIG = """
network = {{ protocol = "websockets", host = "127.0.0.1", port = 8765 }}
data = {{}}
experiment.metrics = [{metrics}]
[optim]
aggregator = "averaging"
server_opt = 1.0
client_opt = {{ lrate = 1.0, modules = [["sample-clip", {clip}]] }}
[run]
rounds = 4
register = 2
training = {{ batch_size = 15 }}
evaluate = {{ batch_size = 30, frequency = {every} }}
{early}
privacy = {{ budget = [3.0, 1e-5], sclip_norm = 0.5 }}
"""
SHARE = "{evaluation_share = 0.2, loss_bound = 3.0}"


@pytest.mark.parametrize(
    ("clip", "metrics", "every", "said", "unsaid"),
    [
        (SHARE, "'accuracy'", 1, "takes 0.2 of epsilon; losses are clipped to 3", "without noise"),
        (SHARE, "", 1, "noise on evaluations", "chosen by losses"),
        (SHARE, "'accuracy', 'mse'", 1, "asks for mse too: leave that out", "without noise"),
        (SHARE, "", 2, "frequency = 2 saves no budget: noise is for each round", "without noise"),
        ("{}", "'mse'", 2, "chosen by losses or metrics without noise", "noise on evaluations"),
    ],
)
def test_what_is_released_besides_is_what_has_no_noise(
    checked: Any, clip: str, metrics: str, every: int, said: str, unsaid: str
) -> None:
    early = "early_stop = { tolerance = 0.1, patience = 3 }" if every == 1 else ""
    found = checked(CONFIG.format(clip=clip, metrics=metrics, every=every, early=early))
    told = " ".join(finding.message for finding in found.findings)
    assert said in told
    assert unsaid not in told
    assert [finding.where for finding in found.problems] == ["[experiment]"] * ("mse too" in said)


def test_commands_know_the_share() -> None:
    ask = "calibrate --epsilon 3 --records 400 --batch-size 64 --rounds 10 --evaluation-share"
    said = call("privacy", *ask.split(), "0.2").stdout
    assert "all steps and evaluations cost epsilon 3 by" in said
    assert "this includes 10 evaluations at noise multiplier 18.81" in said
    assert '{mode = "automatic", evaluation_share = 0.2, loss_bound = 3.0}' in said
    wrong = call("privacy", *ask.split(), "1")
    assert "evaluation_share must be a number in [0, 1), got 1" in wrong.output


def test_evaluations_are_told_from_steps_on_whole_batches_and_in_later_runs(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    for budget in (1.0, 3.0):
        whole = {"batches": {"batch_size": 60}, "budget": (budget, 1e-5)}
        made = manager([SampleClip(**SETTINGS)], private=request(**whole), path=path)
        made.training_round(train(batches={"batch_size": 60}))
        made.evaluation_round(ASK)
    (spent,) = read_spent(path)
    words = [line for line in in_words(spent.cost()) if "noise multiplier" in line]
    assert [line.split()[:2] for line in words] == [["1", "steps"], ["1", "evaluations"]] * 2
    assert "without sampling" in words[1]


def test_errors_are_those_of_the_table() -> None:
    """Of mean losses of 1,000 records, at a fifth of epsilon 3: the clip, and noise on two sums."""
    text = (Path(__file__).parents[3] / "docs" / "dp-sgd-explained.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| 1,000 |"))
    told = float(row.split("|")[4].split(",")[0])
    assert benchmark.errors(0.2, 1000, draws=400)[0] == pytest.approx(told, rel=0.15)
