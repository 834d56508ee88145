# SPDX-License-Identifier: Apache-2.0
"""What the defaults of adaptive clippers promise: no scale, spikes limited, rises followed."""

import itertools
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import OptiModule
from helpers import each_framework, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclip import translate
from fedclip.arrays import backend_named
from fedclip.clippers import by_name
from fedclip.rules import state_of, updated
from fedclip.rules.warmup import WarmupGuard
from fedclip.translate import PRESETS

# Those whose limit follows the norms, and promises something of it.
ON_NORMS = ["zscore-clip", "auto-clip", "ema-clip", "adaptive-clip", "mad-clip"]
ON_NORMS += ["percentile-norm-clip"]
SCALED = ["growth-clip", "growth-value-clip", "ema-norm-clip", "ema-normalize", "ema-value-clip"]
SCALED += [*ON_NORMS, "percentile-clip", "centralize", "no-op"]
START = 20
"""Number of steps within which the laws expect spikes."""


def make(name: str, **config: Any) -> Any:
    return OptiModule.from_specs(name, config)


def run(clipper: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and limits of streams of norms, a tensor for each column."""
    names = [f"s{i:03}" for i in range(rows.shape[1])]
    outputs, limits = [], []
    for row in rows:
        out = clipper.run(NumpyVector({n: np.array([x]) for n, x in zip(names, row, strict=True)}))
        outputs.append([float(out.coefs[n][0]) for n in names])
        limits.append(clipper.last.limit)
    return np.array(outputs), np.array(limits)


@pairwise(name=ON_NORMS, sigma=[0.0, 0.1, 0.3], number=[0, 1, 2, 3], first=[False, True])
@pytest.mark.slow
def test_spikes_among_the_first_steps(name: str, sigma: float, number: int, first: bool) -> None:
    """The first norm passes; a later spike of 50 is limited to 10, and no limit stays high."""
    # Three of the first norms may be spikes: the first and two more.
    number = max(min(number, 2), 1) if first else number
    norms = np.random.default_rng(10 + number).lognormal(0.0, sigma, (60, 100))
    spikes, rng = np.zeros(norms.shape, bool), np.random.default_rng(7)
    # Of spikes only at the very beginning nobody could tell that they are spikes.
    low = 2 if first else 1
    for stream in range(norms.shape[1]):
        spikes[low + rng.choice(START - low, number - first, replace=False), stream] = True
    spikes[0] = first
    norms[spikes] = 50.0
    outputs, limits = run(make(name, scope="tensor"), norms)
    np.testing.assert_array_equal(outputs[0], norms[0])
    later = spikes.copy()
    later[0] = False
    assert (outputs[later] <= 10.0).all()
    assert (limits[5:] <= 5.0).all()
    assert (limits[START:] < 3.0).all()


@pairwise(name=ON_NORMS, sigma=[0.0, 0.1, 0.3], start=[3, 12, 30, 200])
@pytest.mark.slow
def test_a_lasting_rise_is_followed(name: str, sigma: float, start: int) -> None:
    norms = np.random.default_rng(start).lognormal(0.0, sigma, (start + 100, 20))
    norms[start:] *= 10.0
    _, limits = run(make(name, scope="tensor"), norms)
    assert (limits[start:].max(axis=0) >= 5.0).all()


def gradients(seed: int) -> list[dict[str, np.ndarray]]:
    """Return gradients with spikes, a rise, a zero step and a tensor that is often zero."""
    rng, steps = np.random.default_rng(seed), []
    for t in range(45):
        size = rng.lognormal(0.0, 0.3) * (40.0 if rng.random() < 0.1 else 1.0)
        size *= 0.0 if t == 20 else 8.0 if t > 35 else 1.0
        some = 1.0 if rng.random() < 0.7 else 0.0
        steps.append({"w": size * rng.normal(size=(4, 3)), "b": some * size * rng.normal(size=3)})
    return steps


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("scope", "dtype"), [("global", "float32"), ("tensor", "float64")])
@settings(deadline=None, max_examples=15)
@given(exponent=st.floats(-6.0, 6.0), seed=st.integers(0, 10**6))
@pytest.mark.slow
def test_scaled_gradients_give_scaled_outputs(
    name: str, scope: str, dtype: str, exponent: float, seed: int
) -> None:
    scale = 10.0**exponent
    plain, scaled = make(name, scope=scope), make(name, scope=scope)
    for grads in gradients(seed):
        # Rounded first, so that the scaled gradient is that of the same numbers.
        grads = {n: g.astype(dtype) for n, g in grads.items()}
        got = scaled.run(NumpyVector({n: (scale * g).astype(dtype) for n, g in grads.items()}))
        for n, wanted in plain.run(NumpyVector(grads)).coefs.items():
            # What is subtracted, or shared by all tensors, may be larger than what is left.
            size = max(np.abs(g).max() for g in grads.values())
            ours = got.coefs[n].astype(float) / scale
            np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6 * size)


WITH_PRESETS = [(clipper, name) for clipper, known in PRESETS.items() for name in known]


@pytest.mark.parametrize(("clipper", "name"), WITH_PRESETS)
def test_a_preset_is_what_translate_prints(clipper: str, name: str) -> None:
    kind, registered, config = translate.translate(*PRESETS[clipper][name])
    cls: Any = by_name()[clipper]
    assert (kind, registered) == ("regularizer" if clipper == "agc" else "module", clipper)
    assert cls.preset(name).get_config() == cls(**config).get_config()
    assert cls.preset(name, on_nonfinite="raise").on_nonfinite == "raise"


@each_framework()
def test_the_first_norms_are_judged_by_their_lower_median(framework: str) -> None:
    orders = [*itertools.permutations([1.0, 2.0, 3.0, 4.0, 5.0])]
    xp, protection = backend_named(framework), WarmupGuard(2.0)
    state = state_of(protection.init(len(orders), xp))
    assert np.isinf(np.asarray(protection.median(state, xp))).all()
    for held in range(1, 6):
        norms = xp.asarray([order[held - 1] for order in orders])
        state = updated(state, [protection.learn(norms, state)], xp)
        lower = [sorted(order[:held])[(held - 1) // 2] for order in orders]
        assert np.asarray(protection.median(state, xp)).tolist() == lower
