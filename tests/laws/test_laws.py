# SPDX-License-Identifier: Apache-2.0
"""Laws that hold whatever the gradient, tried on generated ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import Specimen, apply, norm, specimens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedclip import Normalize, NormClip, PercentileClip
from fedclip.testing import SHAPES, to_vector

pytestmark = pytest.mark.slow

Gradient = dict[str, np.ndarray]

laws = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
"""Examples for each of many specimens."""
law = settings(laws, max_examples=50)


def arrays(dtype: str, largest: float = 1e6) -> st.SearchStrategy[Gradient]:
    """Return gradients with the usual names, of any shapes; magnitudes from 1e-6, or 0."""
    elements = st.floats(
        -largest, largest, width=64 if dtype == "float64" else 32, allow_nan=False
    ).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    return st.fixed_dictionaries(
        {name: hnp.arrays(dtype, shapes, elements=elements) for name in SHAPES}
    )


dtypes = st.sampled_from(["float32", "float64"])
gradients = dtypes.flatmap(arrays)


def streams(dtype: str = "float64", largest: float = 1e3) -> st.SearchStrategy[list[Gradient]]:
    """Return four gradients of the same shapes."""
    elements = st.floats(-largest, largest, allow_nan=False).map(
        lambda x: 0.0 if abs(x) < 1e-3 else x
    )
    step = st.fixed_dictionaries(
        {name: hnp.arrays(dtype, shape, elements=elements) for name, shape in SMALL.items()}
    )
    return st.lists(step, min_size=4, max_size=4)


SMALL = {"enc.weight": (2, 2), "enc.bias": (2,), "head.weight": (3,), "head.scale": ()}


def outputs(specimen: Specimen, steps: list[Gradient]) -> list[dict[str, Any]]:
    clipper = specimen.make()
    weights = to_vector({name: np.ones(shape) for name, shape in SMALL.items()})
    return [dict(apply(clipper, to_vector(step), weights).coefs) for step in steps]


@pytest.mark.parametrize("clipper", [Normalize(0.7), PercentileClip(60)], ids=lambda c: c.name)
@laws
@given(gradient=arrays("float64"))
def test_moving_twice_is_moving_once(clipper: Any, gradient: Gradient) -> None:
    once = clipper.run(to_vector(gradient))
    twice = clipper.run(once).coefs
    for name, value in once.coefs.items():
        np.testing.assert_allclose(twice[name], value, rtol=1e-12, atol=1e-300)


@specimens()
@laws
@given(steps=streams(), order=st.permutations(list(SMALL)))
def test_order_of_tensors_does_not_matter(
    specimen: Specimen, steps: list[Gradient], order: list[str]
) -> None:
    turned = [{name: step[name] for name in order} for step in steps]
    for got, wanted in zip(outputs(specimen, turned), outputs(specimen, steps), strict=True):
        for name in wanted:
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-7, atol=1e-9)


@law
@given(gradient=arrays("float64", 1e280), limit=st.floats(1e-10, 1e10))
def test_norm_clip_is_a_projection(gradient: Gradient, limit: float) -> None:
    out = NormClip(limit).run(to_vector(gradient)).coefs
    before, after = norm(gradient), norm(out)
    assert after <= limit
    if before > limit:
        assert after >= limit * (1 - 1e-12)
        for name, value in gradient.items():
            np.testing.assert_allclose(out[name], value * (limit / before), rtol=1e-10, atol=1e-300)
