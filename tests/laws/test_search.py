# SPDX-License-Identifier: Apache-2.0
"""The search for a gradient that breaks a promise: it finds what is wrong, and nothing is."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BACKENDS, needs

from fedclip import Centralize, EmaNormClip, EmaValueClip, FedclipWarning, NormClip, Standardize

# The benchmarks are no part of the package.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.search import trials as search
from benchmarks.search.gradients import Tensor, held
from benchmarks.search.promises import Trial, size


def report(gradients: int, seed: int, frameworks: list[str], *, device: bool = False) -> str:
    counts, first = search.search(gradients, seed, frameworks, device=device)
    return "\n".join(f"{counts[kind]} times: {search.shown(first[kind])}" for kind in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "gradients", "device"),
    [
        ("numpy", 1000, False),
        ("torch", 500, False),
        ("tensorflow", 250, False),
        ("jax", 250, False),
        ("torch", 800, True),
        ("tensorflow", 250, True),
        # It compiles each operation for each shape: 20 gradients take four seconds.
        ("jax", 20, True),
        pytest.param("jax", 1000, True, marks=pytest.mark.soak),
    ],
)
def test_a_sample_keeps_every_promise(framework: str, gradients: int, device: bool) -> None:
    needs(framework)
    assert not report(gradients, 1, [framework], device=device)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_hundred_thousand_keep_every_promise(seed: int) -> None:
    assert not report(100_000, seed, BACKENDS)


def in_place(given: Any, out: Any) -> Any:
    given[...] = out
    return given


@pytest.mark.parametrize(
    ("fault", "values", "promises"),
    [
        (lambda given, out: out * (1 + 1e-5), (3.0, 4.0), {"limit", "stated bound"}),
        (lambda given, out: out.copy(), (0.3, 0.4), {"same object"}),
        (in_place, (3.0, 4.0), {"input untouched"}),
        (lambda given, out: out.astype(np.float64), (3.0, 4.0), {"same dtype"}),
        (lambda given, out: given, (np.nan, 4.0), {"NaN is skipped"}),
        (lambda given, out: out / 2, (3.0, 4.0), {"not far below"}),
    ],
)
def test_what_breaks_a_promise_is_found(fault: Any, values: Any, promises: set[str]) -> None:
    class Faulty(NormClip, register=False):
        def clip(self, arrays: Any, *, backend: Any = None) -> Any:
            return {"w": fault(arrays["w"], super().clip(arrays, backend=backend)["w"])}

    gradient = {"w": Tensor(held(np.array(values), "float32"), "float32")}
    for clipper, expected in ((Faulty(1.0), promises), (NormClip(1.0), set[str]())):
        trial = Trial("norm-clip", {"max_norm": 1.0}, "numpy", clipper)
        found = {promise for promise, _ in trial.step(gradient)}
        assert found >= expected
        assert bool(found) == bool(expected)


# -- what it has found -------------------------------------------------------------------------


@pytest.mark.parametrize("norms", [(1.7e307, 1.7e307), (1e-309, 0.0), (0.0, 0.0)])
def test_a_record_of_extreme_norms_needs_no_warning(norms: tuple[float, float]) -> None:
    clip = NormClip(1.0, scope="tensor")
    clip.clip({"w": np.array([norms[0]]), "v": np.array([norms[1]])})
    assert clip.rounds[0].norm_max == pytest.approx(min(norms[0] * 2**0.5, np.finfo(float).max))


def test_the_largest_numbers_have_a_mean_and_a_slice_of_them_keeps_its_limit() -> None:
    column = np.array([[-8.5e307], [-9.5e307], [1.48e308], [-9.8e307], [-8e307]])
    for moving in (Standardize(), Centralize(dims=0)):
        output = moving.clip({"w": column})["w"]
        assert np.isfinite(output).all()
        assert output[0] < 0 < output[2]
    clip = NormClip(7e-5, scope="tensor", dims=0)
    output = clip.clip({"w": np.array([-9.3e307, 1e308])})
    assert size([output["w"]]) <= 7e-5
    assert clip.clip(output)["w"] is output["w"]


def test_an_excluded_tensor_may_have_another_byte_order_and_nan_is_seen_in_it() -> None:
    clip = NormClip(1.0, exclude="v")
    given = {"w": np.array([3.0, 4.0]), "v": np.array([7.0]).astype(">f2")}
    assert clip.clip(given)["v"] is given["v"]
    with pytest.warns(FedclipWarning, match="NaN or infinity in 'v'"):
        output = clip.clip({"w": np.zeros(0), "v": np.array([np.nan])})
    assert output["v"].tolist() == [0.0]


def test_empty_tensors_and_those_of_no_dimensions_have_a_record_and_a_state() -> None:
    given = {"w": np.array([1.5e-5]), "empty": np.zeros((0, 1), np.float16)}
    clip = NormClip(8e-6)
    assert 8e-6 * (1 - 1e-12) <= size([clip.clip(given)["w"]]) <= 8e-6
    clip.clip({"w": np.zeros(0)})
    assert clip.last.norm_before == ()
    first, then = EmaNormClip(), EmaNormClip()
    first.clip({"w": np.zeros(0)})
    then.set_state(first.get_state())
    assert then.clip({"w": np.zeros(0)})["w"].size == 0
    pasts = EmaValueClip()
    for value in (np.array(1e300), np.array(2.0, np.float32)):
        pasts.clip({"s": value})
    assert isinstance(pasts.get_state()["arrays"]["s"]["past"], np.ndarray)
