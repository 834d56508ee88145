# SPDX-License-Identifier: Apache-2.0
"""The rules on the history of norms: their numbers, and what each promises."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector

from fedclip import AdaptiveClip, AutoClip, Clipper, EmaClip, GrowthClip, PercentileNormClip
from fedclip.arrays import NUMPY
from fedclip.rules.quantiles import Markers


def feed(clipper: Clipper, norms: Iterable[float]) -> list[float]:
    """Return the norms after clipping of gradients with these norms."""
    vectors = (NumpyVector({"w": np.array([norm])}) for norm in norms)
    return [float(clipper.run(vector).coefs["w"][0]) for vector in vectors]


def lognormal(n: int, seed: int = 0, sigma: float = 0.3) -> list[float]:
    norms: list[float] = np.random.default_rng(seed).lognormal(0.0, sigma, n).tolist()
    return norms


def test_p2_as_in_its_paper() -> None:
    # Jain & Chlamtac, 1985, Table I.
    norms = [0.02, 0.15, 0.74, 3.39, 0.83, 22.37, 10.15, 15.43, 38.62, 15.92]
    norms += [34.60, 10.28, 1.47, 0.40, 0.05, 11.39, 0.27, 0.42, 0.09, 11.37]
    state, medians = Markers(0.5).init(1, NUMPY), []
    for norm in norms:
        after = Markers(0.5).observe(np.array([norm]), state, NUMPY)
        state = after._replace(count=state.count + 1.0)
        medians.append(float(Markers(0.5).estimate(state, NUMPY)[0]))
    assert medians[4] == 0.74
    assert medians[-1] == pytest.approx(4.44, abs=0.005)


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
    feed(clipper, lognormal(300) + [20.0 * norm for norm in lognormal(600, 1)])
    assert clipper.last.limit[0] > 20.0


UNPROTECTED = {"warmup_factor": None}
SPIKED, UP = [1.0, 50.0, 1.0, 2.0], [1.0, 1e-3, 9.0]
LEARNT: dict[str, tuple[Clipper, list[float], list[float], dict[str, float]]] = {
    # What is fed, what comes out at last, and what is in the state then.
    "nothing before the fifth norm": (EmaClip(), SPIKED, [], {"count": 0}),
    "the fifth is the first": (EmaClip(), [*SPIKED, 1.0, 1.5], [], {"count": 1, "mean": 1.5}),
    "no norm of 0 in the median": (
        *(EmaClip(), [1.0, 0.0, 0.0, 1.25], []),
        {"start_3": 0.0, "start_4": 1.0, "start_5": 1.25},
    ),
    # A spike would be learnt as the mean.
    "a norm at the limit as it is": (
        EmaClip(2.0, action="mean", decay=0.5, warmup=1, **UNPROTECTED),
        *([1.0, 2.0], [1.0, 2.0], {"mean": 1.5}),
    ),
    # As 1.1 of what is usual; the sixth to the tenth norm are not ready to be judged.
    "spikes of a warm-up without feedback": (
        *(AutoClip(feedback="none", window=8), [1.0] * 5 + [9.0] * 5, [], {"count": 5}),
    ),
    "nobody is judged before the fifth": (
        AutoClip(warmup=0, **UNPROTECTED),
        *([1.0, 1e3, 1.0, 1.0, 1e4], [1e3, 1.0, 1.0, 1e4], {}),
    ),
    "and the sixth is": (AutoClip(warmup=0, **UNPROTECTED), [1.0] * 5 + [1e4], [1.3], {}),
    "a past norm falls by max_decay": (GrowthClip(), UP, [1.0, 1e-3, 0.75], {}),
    "or as it does": (GrowthClip(max_decay=None), UP, [1.0, 1e-3, 1.5e-3], {}),
    "a norm at the limit is not clipped": (
        *(AdaptiveClip(start_norm=1.0), [1.0, 5.0], [1.0, np.exp(-0.1)], {}),
    ),
    "a norm above it is": (AdaptiveClip(start_norm=1.0), [1.001, 5.0], [np.exp(0.1)], {}),
}


@pytest.mark.parametrize("what", LEARNT)
def test_what_is_learnt(what: str) -> None:
    clipper, norms, after, state = LEARNT[what]
    assert feed(clipper, norms)[len(norms) - len(after) :] == pytest.approx(after)
    assert state.items() <= clipper.get_state()["groups"]["all"].items()


def test_percentile_of_past_norms_only() -> None:
    norms, clipper = lognormal(100), PercentileNormClip(90.0, window=20)
    feed(clipper, [*norms, 100.0])
    assert clipper.last.limit[0] == pytest.approx(np.percentile(norms[-20:], 90))


@pytest.mark.slow
def test_fraction_of_unclipped_norms_is_the_quantile() -> None:
    norms = lognormal(1500)
    after = feed(AdaptiveClip(0.8, rate=0.05), norms)
    unclipped = np.mean([a == n for a, n in zip(after, norms, strict=True)][500:])
    assert unclipped == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("cls", [*ADAPTIVE, lambda: AutoClip(median="p2")])
def test_zeros_freeze_nothing(cls: Any) -> None:
    after = feed(cls(), [0.0] * 30 + [0.5] * 250)
    assert after[:30] == [0.0] * 30
    assert after[-1] == pytest.approx(0.5)
