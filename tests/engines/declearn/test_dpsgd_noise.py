# SPDX-License-Identifier: Apache-2.0
"""DP-SGD in declearn's training: noise, division and bounds of the three modes."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from dpsgd_managers import (
    N,
    Silent,
    coefs,
    manager,
    request,
)

import fedclip
from fedclip.engines.declearn.sample_clip import SampleClip

pytestmark = pytest.mark.slow

pytest.importorskip("opacus")

# Of 100,000 draws: six of its standard deviations and more, wrong once in a billion.
CLOSE = 0.014


@pytest.mark.parametrize(("size", "actual"), [(1, 2), (64, 0), (128, 2)])
def test_noise_on_the_weights_is_what_the_budget_says(size: int, actual: int) -> None:
    # 128 records of zeros: all that moves the weights, but for the intercept, is noise.
    wide = 100_000
    dataset = InMemoryDataset(np.zeros((128, wide)), target=np.arange(128) % 2, expose_classes=True)
    made = manager(
        dataset=dataset,
        private=request(batches={"batch_size": size}, n_epoch=None, n_steps=2, sclip_norm=0.3),
        lrate=0.7,
    )
    made.run_train_step(made.records.take(np.arange(min(actual * size, 128))))
    noise = made.model.get_weights().coefs["coef"].ravel()
    right = made.calibration.noise_multiplier * 0.3 * 0.7 / size
    assert noise.std() == pytest.approx(right, rel=CLOSE)
    assert abs(noise.mean()) < 6 * right / math.sqrt(noise.size)


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
    sizes: list[int] = []

    def note(batches: Any) -> None:
        sizes.append(sum(len(batch[0]) for batch in batches))

    made.run_train_step = note  # type: ignore[method-assign]
    made.ledger.epsilon = math.inf
    for _ in range(60):
        made.train_under_constraints({"batch_size": 15, "poisson": False}, n_epoch=1)
    assert len(sizes) == 240
    assert len(set(sizes)) > 3
    assert abs(np.mean(sizes) - 15) < 6 * math.sqrt(60 * 0.25 * 0.75 / 240)


# -- modes -------------------------------------------------------------------------------------


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
    ((sums, _),) = silent.seen
    assert max(np.abs(a).max() for a in sums.values()) <= 15e-3 * (1 + 1e-9)
    assert np.linalg.norm(coefs(made)) == pytest.approx(1e-6, rel=1e-5)
    assert [m.name for m in made.optim.modules] == ["value-clip", "sample-clip", "norm-clip"]
