# SPDX-License-Identifier: Apache-2.0
"""The rules on the history of norms: their numbers, and what each promises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector

from fedclip import AdaptiveClip, AutoClip, Clipper, EmaClip, GrowthClip, PercentileNormClip
from fedclip.arrays import NUMPY
from fedclip.rules.quantiles import Markers, Quantile


def feed(clipper: Clipper, norms: Iterable[float]) -> list[float]:
    """Return the norms after clipping of gradients with these norms."""
    vectors = (NumpyVector({"w": np.array([norm])}) for norm in norms)
    return [float(clipper.run(vector).coefs["w"][0]) for vector in vectors]


def limits(clipper: Clipper, norms: Iterable[float]) -> list[float]:
    result = []
    for norm in norms:
        feed(clipper, [norm])
        result.extend(clipper.last.limit)
    return result


# -- running quantiles ----------------------------------------------------------------------------
def estimates(quantile: Quantile, norms: Iterable[float]) -> list[float]:
    state, result = quantile.init(1, NUMPY), []
    for norm in norms:
        after = quantile.observe(np.array([norm]), state, NUMPY)
        state = after._replace(count=state.count + 1.0)
        result.append(float(quantile.estimate(state, NUMPY)[0]))
    return result


def lognormal(n: int, seed: int = 0, sigma: float = 0.3) -> list[float]:
    norms: list[float] = np.random.default_rng(seed).lognormal(0.0, sigma, n).tolist()
    return norms


def test_p2_as_in_its_paper() -> None:
    # Jain & Chlamtac, 1985, Table I.
    norms = [0.02, 0.15, 0.74, 3.39, 0.83, 22.37, 10.15, 15.43, 38.62, 15.92]
    norms += [34.60, 10.28, 1.47, 0.40, 0.05, 11.39, 0.27, 0.42, 0.09, 11.37]
    medians = estimates(Markers(0.5), norms)
    assert medians[4] == 0.74
    assert medians[-1] == pytest.approx(4.44, abs=0.005)


# -- protection ---------------------------------------------------------------------------------
ADAPTIVE = [EmaClip, AutoClip, PercentileNormClip, GrowthClip, AdaptiveClip]


@pytest.mark.parametrize("cls", [EmaClip, AutoClip, PercentileNormClip])
def test_a_burst_of_spikes(cls: Any) -> None:
    norms = [0.5 * norm for norm in lognormal(60, sigma=0.05)]
    assert max(feed(cls(), norms + [20.0] * 6)[-6:]) < 2.5 * max(norms)


@pytest.mark.slow
@pytest.mark.parametrize("history", ["window", "stream", "p2"])
def test_a_percentile_follows_norms_that_have_grown_for_good(history: str) -> None:
    config = {"window": 100} if history == "window" else {}
    config |= {"rate": 0.1, "decay": 0.9} if history == "stream" else {}
    clipper = PercentileNormClip(90.0, history=history, **config)
    norms = lognormal(300) + [20.0 * norm for norm in lognormal(600, 1)]
    assert np.mean(limits(clipper, norms)[-100:]) > 20.0


def test_the_statistics_learn_nothing_before_the_fifth_norm() -> None:
    clipper = EmaClip()
    for norms, count in (([1.0, 50.0, 1.0, 2.0], 0), ([1.0], 0), ([1.5], 1)):
        feed(clipper, norms)
        assert clipper.get_state()["groups"]["all"]["count"] == count
    assert clipper.get_state()["groups"]["all"]["mean"] == 1.5


def test_the_median_ignores_norms_of_0() -> None:
    clipper = EmaClip()
    feed(clipper, [1.0, 0.0, 0.0, 1.25])
    held = clipper.get_state()["groups"]["all"]
    assert [held[f"start_{i}"] for i in (3, 4, 5)] == [0.0, 1.0, 1.25]


def test_a_norm_at_the_limit_is_learnt_as_it_is() -> None:
    # A spike would be learnt as the mean.
    clipper = EmaClip(2.0, action="mean", decay=0.5, warmup=1, warmup_factor=None)
    assert feed(clipper, [1.0, 2.0]) == [1.0, 2.0]
    assert clipper.get_state()["groups"]["all"]["mean"] == 1.5


def test_without_feedback_the_warm_up_learns_spikes_too() -> None:
    clipper = AutoClip(feedback="none", window=8)
    feed(clipper, [1.0] * 5 + [9.0] * 5)
    # As 1.1 of what is usual; the sixth to the tenth norm are not ready to be judged.
    assert clipper.get_state()["groups"]["all"]["count"] == 5


# -- each by itself -----------------------------------------------------------------------------


def test_auto_clip_judges_nobody_before_the_fifth_norm() -> None:
    clipper = AutoClip(warmup=0, warmup_factor=None)
    assert feed(clipper, [1.0, 1e3, 1.0, 1.0, 1e4])[1::3] == [1e3, 1e4]
    clipper = AutoClip(warmup=0, warmup_factor=None)
    assert feed(clipper, [1.0] * 5 + [1e4])[-1] == pytest.approx(1.3)


def test_percentile_of_past_norms_only() -> None:
    norms = lognormal(100)
    clipper = PercentileNormClip(90.0, window=20)
    feed(clipper, norms)
    assert limits(clipper, [100.0])[0] == pytest.approx(np.percentile(norms[-20:], 90))


@pytest.mark.slow
def test_fraction_of_unclipped_norms_is_the_quantile() -> None:
    clipper = AdaptiveClip(0.8, rate=0.05)
    norms = lognormal(1500)
    after = feed(clipper, norms)
    unclipped = np.mean([a == n for a, n in zip(after, norms, strict=True)][500:])
    assert unclipped == pytest.approx(0.8, abs=0.02)


def test_a_norm_at_the_limit_is_unclipped() -> None:
    at = limits(AdaptiveClip(start_norm=1.0), [1.0, 5.0])
    assert at == pytest.approx([1.0, np.exp(-0.1)])
    above = limits(AdaptiveClip(start_norm=1.0), [1.001, 5.0])
    assert above == pytest.approx([1.0, np.exp(0.1)])


def test_past_norm_falls_by_max_decay() -> None:
    assert feed(GrowthClip(), [1.0, 1e-3, 9.0]) == pytest.approx([1.0, 1e-3, 0.75])
    assert feed(GrowthClip(max_decay=None), [1.0, 1e-3, 9.0])[-1] == pytest.approx(1.5e-3)


# -- several groups ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*ADAPTIVE, lambda: AutoClip(median="p2")])
def test_zeros_freeze_nothing(cls: Any) -> None:
    after = feed(cls(), [0.0] * 30 + [0.5] * 250)
    assert after[:30] == [0.0] * 30
    assert after[-1] == pytest.approx(0.5)
