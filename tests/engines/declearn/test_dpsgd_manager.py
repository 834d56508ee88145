# SPDX-License-Identifier: Apache-2.0
"""DP-SGD in declearn's training: noise on the weights, the budget, and what is refused."""

import asyncio
import logging
import math
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.messaging import Error, SerializedMessage, TrainReply
from declearn.model.sklearn import NumpyVector
from declearn.training.dp import DPTrainingManager
from dpsgd_managers import N, Silent, client, coefs, manager, request, train

import fedclip
from fedclip.engines.declearn.sample_clip import SampleClip
from fedclip.privacy import accounting
from fedclip.privacy.accounting import Release, epsilon
from fedclip.privacy.ledger import Ledger

pytestmark = pytest.mark.slow

pytest.importorskip("opacus")


def rounds(made: Any, many: int, **asked: Any) -> list[Any]:
    return [made.training_round(train(round_i=i, **asked)) for i in range(many)]


def test_epsilon_is_of_the_steps_taken_and_accounted_once(monkeypatch: Any, caplog: Any) -> None:
    made = manager(private=request(budget=(2.9, 1e-5)))
    assert made.get_privacy_spent() == (0.0, 1e-5)
    pld = mock.Mock(side_effect=accounting._pld)
    monkeypatch.setattr(accounting, "_pld", pld)
    accounting._epsilon.cache_clear()
    with caplog.at_level(logging.INFO):
        rounds(made, 4)
    assert pld.call_count == 1
    spent, delta = made.get_privacy_spent()
    assert f"Privacy spent: epsilon {spent:.4g} at delta 1e-05" in caplog.text
    right = epsilon([Release(made.calibration.noise_multiplier, 16, 0.25)], 1e-5)
    assert (spent, delta) == (pytest.approx(right), 1e-5)
    assert 2.89 < spent <= 2.9


def test_a_spent_budget_sends_zeros_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = manager(private=request(rounds=1))
    first, second = (reply.updates for reply in rounds(made, 2))
    assert np.abs(first.updates.coefs["coef"]).min() > 0
    assert not any(a.any() for a in second.updates.coefs.values())
    # An average over such clients alone is zero, too, and not NaN.
    mean: Any = AveragingAggregator().finalize_updates(second)
    assert not mean.coefs["coef"].any()
    assert "sends an update of zero" in caplog.text
    assert made.get_privacy_spent()[0] <= 3.0


def test_a_budget_that_ends_in_a_round_ends_its_steps(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "privacy_spent.json"
    z = manager().calibration.noise_multiplier
    # Of the 16 steps that there is noise for, 14 are spent, and 2 of a round of 4 are left.
    Ledger(9.0, 1e-5, path).reserve(z, 0.25, 14)
    made = manager(path=path)
    steps = mock.Mock(side_effect=made.run_train_step)
    made.run_train_step = steps  # type: ignore[method-assign]
    (reply,) = rounds(made, 1)
    assert steps.call_count == reply.n_steps == 2
    assert "allows 2 of the 4 steps" in caplog.text
    assert made.get_privacy_spent()[0] <= 3.0
    rounds(made, 1)
    assert steps.call_count == 2


def test_a_restart_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    path = tmp_path / "privacy_spent.json"
    made = manager(path=path)
    rounds(made, 3)
    again = manager(path=path)
    assert again.get_privacy_spent() == made.get_privacy_spent()
    rounds(again, 3)
    assert again.ledger.accountant.rounds == 16
    assert again.get_privacy_spent()[0] <= 3.0


def test_a_round_that_breaks_off_is_paid_for(tmp_path: Path) -> None:
    path = tmp_path / "privacy_spent.json"
    made = manager(path=path)
    made.optim.apply_gradients = None  # type: ignore[method-assign, assignment]
    sent = made.training_round(train())
    assert isinstance(sent, Error)
    assert sent.message == "RuntimeError('a private step failed on this client; its log says why')"
    assert Ledger(3.0, 1e-5, path).accountant.rounds == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"batches": {"batch_size": 30}}, "30 is not what was announced before the run, 15"),
        ({"timeout": 60}, "timeout tells how long single records take"),
    ],
)
def test_other_batches_than_announced_are_refused(asked: Any, said: str) -> None:
    made = manager()
    sent = made.training_round(train(**asked))
    assert isinstance(sent, Error)
    assert said in sent.message
    assert made.ledger.accountant.rounds == 0


@pytest.mark.parametrize(
    ("modules", "changes", "words"),
    [
        *(
            ([module, SampleClip()], {}, "cannot stand before sample-clip")
            for module in ("adam", "momentum", "zscore-clip", ("gaussian-noise", {"std": 1.0}))
        ),
        ([], {"accountant": "gdp"}, "is no upper bound on epsilon"),
        ([SampleClip(1.0)], {}, "the server's sclip_norm is 0.5"),
        ([SampleClip(), SampleClip()], {}, "more than once"),
        ([SampleClip(mode=["nothing.*"])], {}, "matches no tensor"),
        ([], {"n_epoch": None}, "set n_epoch or n_steps"),
        ([], {"budget": (3.0, 0.0)}, "delta must be"),
        ([], {"sclip_norm": -1.0}, "sclip_norm must be"),
    ],
)
def test_what_would_not_be_private_is_refused(modules: Any, changes: Any, words: str) -> None:
    made = manager(modules, private=False)
    with pytest.raises((TypeError, ValueError), match=words):
        made.make_private(request(**changes))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mode": "flta"}, "did you mean 'flat'"),
        ({"mode": {"a": 1.0}}, "list of name patterns"),
        ({"mode": []}, "scope"),
        ({"gamma": -1}, "gamma must be"),
        ({"max_nrm": 1}, "did you mean 'max_norm'"),
        ({"evaluation_share": 0.2}, "go together"),
        ({"loss_bound": 2.0}, "go together"),
        ({"evaluation_share": 1.0, "loss_bound": 2.0}, r"must be a number in \[0, 1\)"),
        ({"evaluation_share": 0.1, "loss_bound": 0.0}, "loss_bound must be"),
        # Beyond what a server takes for a loss.
        ({"evaluation_share": 0.1, "loss_bound": 1e101}, "loss_bound must be"),
        # A client took minutes to find its noise.
        ({"evaluation_share": 1e-4, "loss_bound": 2.0}, "must be 0, or 0.001 and more"),
    ],
)
def test_sample_clip_refuses(config: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        SampleClip(**config)
    # Alone, it never looks private.
    with pytest.raises(RuntimeError, match=r"Use fedclip\.PrivateFederatedClient"):
        SampleClip().run(NumpyVector({"w": np.ones(3)}))


def test_a_client_refuses_rounds_that_are_not_private() -> None:
    made = client()
    public = manager(private=False)
    names = ("model", "optim", "aggrg", "train_data", "valid_data")
    made.trainmanager = DPTrainingManager(**{name: getattr(public, name) for name in names})
    asyncio.run(made.training_round(train()))
    (sent,) = made.netwk.messages
    assert isinstance(sent, Error)
    assert "would not be private" in sent.message
    with pytest.raises(RuntimeError, match="fairness"):
        asyncio.run(made._initialize_fairness())


def test_a_client_becomes_private_and_enforces_its_own_budget(tmp_path: Path) -> None:
    made = client(max_budget=(0.5, 1e-6), checkpoint=str(tmp_path / "kept"))
    assert made.spent is None
    made.trainmanager = manager(private=False)
    made.make_private(request())
    for i in range(5):
        asyncio.run(made.training_round(train(round_i=i)))
    assert all(isinstance(m, TrainReply) for m in made.netwk.messages)
    spent, delta = made.spent
    assert 0.49 < spent <= 0.5
    assert delta == 1e-6
    assert (tmp_path / "kept" / "privacy_spent.json").is_file()


def test_a_server_can_not_ask_for_other_privacy_between_rounds() -> None:
    made = client()
    made.trainmanager = manager(private=False)
    made.make_private(request())
    before = made.trainmanager
    again = SerializedMessage.from_bin_message(request(budget=(99.0, 1e-2)).serialize())
    with pytest.raises(ValueError, match="Unexpected message type"):
        asyncio.run(made.handle_message(again))
    assert made.trainmanager is before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_budget": 3.0}, r"max_budget must be \(epsilon, delta\)"),
        ({"max_budget": (0, 1e-5)}, "epsilon of max_budget must be"),
        ({"max_budget": (1.0, 1.0)}, "delta of max_budget must be"),
        ({"require_privacy": 1}, "require_privacy must be"),
        ({"valid_data": None}, "give valid_data"),
        ({"ledger": None}, "neither ledger nor checkpoint is given.* or a checkpoint folder"),
    ],
)
def test_a_client_refuses_settings(settings: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        client(**settings)


def test_a_client_that_forgets_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    client(require_privacy=False)
    client(checkpoint=str(tmp_path))
    assert not caplog.text
    client(require_privacy=False, ledger=None)
    assert "each start has the whole budget again" in caplog.text


def test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip() -> None:
    # Unweighted, all four would pull the same way.
    x, y = np.array([[100.0], [100.0], [100.0], [-100.0]]), np.array([0, 0, 0, 1])
    weights = np.array([1.0, 1e6, 0.0, np.nan])
    dataset = InMemoryDataset(x, target=y, s_wght=weights, expose_classes=True)
    made = manager(dataset=dataset, private=request(batches={"batch_size": 2}))
    made.noise = silent = Silent()
    start = coefs(made)
    made.run_train_step(made.records.take(np.arange(4)))
    ((sums, std),) = silent.seen
    total = np.sqrt(sum((a**2).sum() for a in sums.values()))
    # Two records of weights 1 and 1e6 add 0.5 each; those of 0 and NaN nothing.
    assert total == pytest.approx(2 * 0.5, rel=1e-9)
    assert std == pytest.approx(made.calibration.noise_multiplier * 0.5)
    assert np.linalg.norm(coefs(made) - start) == pytest.approx(total / 2, rel=1e-9)


def test_an_empty_batch_is_a_step_that_adds_noise_and_costs() -> None:
    made = manager()
    start = coefs(made)
    made.run_train_step([])
    assert (coefs(made) != start).all()
    assert made.ledger.accountant.rounds == 1


def test_the_servers_seed_is_ignored() -> None:
    one, other = manager(), manager()
    for made in (one, other):
        made.run_train_step([])
    assert (coefs(one) != coefs(other)).all()


def test_batches_are_poisson_samples_whatever_the_server_says() -> None:
    made = manager(private=request(batches={"batch_size": 15, "shuffle": True}))
    step = mock.Mock()
    made.run_train_step = step  # type: ignore[method-assign]
    made.ledger.epsilon = math.inf
    for _ in range(60):
        made.train_under_constraints({"batch_size": 15, "poisson": False}, n_epoch=1)
    sizes = [sum(len(batch[0]) for batch in call.args[0]) for call in step.call_args_list]
    assert len(sizes) == 240
    assert len(set(sizes)) > 3
    assert abs(np.mean(sizes) - 15) < 6 * math.sqrt(60 * 0.25 * 0.75 / 240)


def test_noise_is_for_the_bound_that_records_were_clipped_to() -> None:
    clip = SampleClip(mode="adaptive", rate=1.0)
    made = manager([clip], private=request(sclip_norm=1e-3))
    made._normals = np.zeros
    made.noise = silent = Silent()
    made.run_train_step(made.records.take(np.arange(N)))
    (sums, std), z = silent.seen[0], made.calibration.noise_multiplier
    share = clip.clipping.noise_multiplier(z, 15.0)
    assert share > z
    assert std == pytest.approx(share * 1e-3)
    assert np.sqrt(sum((a**2).sum() for a in sums.values())) <= N * 1e-3 * (1 + 1e-9)
    # All are above the bound, and their bits say so as loudly as they can.
    assert clip.bound == pytest.approx(1e-3 * math.exp(0.5))
    made.run_train_step([])
    assert silent.seen[1][1] == pytest.approx(std * math.exp(0.5))


def test_the_adaptive_bound_is_in_the_state() -> None:
    clip = SampleClip(mode="adaptive")
    made = manager([clip])
    made.run_train_step([])
    other = manager([SampleClip(mode="adaptive")])
    other.optim.set_state(made.optim.get_state())
    assert cast(Any, other.optim.modules[0]).bound == clip.bound != 0.5
    with pytest.raises(KeyError, match="lacks 'bound'"):
        clip.set_state({})
    with pytest.raises(ValueError, match="bound must be"):
        clip.set_state({"bound": -1.0})


def test_what_stands_before_is_applied_to_records_and_what_is_after_to_the_update() -> None:
    made = manager([fedclip.ValueClip(max_value=1e-3), SampleClip(), fedclip.NormClip(1e-6)])
    made.noise = silent = Silent()
    made.run_train_step(made.records.take(np.arange(15)))
    assert max(np.abs(a).max() for a in silent.seen[0][0].values()) <= 15e-3 * (1 + 1e-9)
    assert np.linalg.norm(coefs(made)) == pytest.approx(1e-6, rel=1e-5)
