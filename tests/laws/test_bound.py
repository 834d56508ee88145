# SPDX-License-Identifier: Apache-2.0
"""The bound holds: no output is above it, and what is clipped is not far below."""

from __future__ import annotations

import numpy as np
from helpers import each_framework, needs, norm

from fedclip import NormClip, ValueClip
from fedclip.arrays.blocks import exact_norm
from fedclip.testing import apply, gradient_stream, to_numpy, to_vector

DTYPES = ("float16", "bfloat16", "float32", "float64")


def dtypes_of(framework: str) -> list[str]:
    return [d for d in DTYPES if framework != "numpy" or d != "bfloat16"]


@each_framework()
def test_no_element_above_the_bound(framework: str) -> None:
    needs(framework)
    for dtype in dtypes_of(framework):
        clipper = ValueClip(0.2)
        for step in gradient_stream(14):
            out = to_numpy(apply(clipper, to_vector(step, framework, dtype)))
            # The limit itself is rounded to the dtype of the gradient.
            limit = float(np.asarray(0.2, _narrow(dtype)))
            assert max(np.abs(v).max(initial=0.0) for v in out.values()) <= limit


def _narrow(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def test_float32_never_above_the_limit() -> None:
    # About half of all float32 clips exceed the limit where the factor is only rounded.
    rng = np.random.default_rng(0)
    for _ in range(500):
        arrays = {"w": rng.normal(size=rng.integers(1, 3000)).astype("float32")}
        if norm(arrays) > 0.5:
            out = NormClip(0.5).run(to_vector(arrays)).coefs
            assert 0.5 * (1 - 2e-6) <= norm(out) <= 0.5


def test_norm_equal_to_the_limit_is_not_clipped() -> None:
    for dtype in ("float32", "float64"):
        vector = to_vector({"w": np.array([0.6, 0.8]), "b": np.array(0.0)}, dtype=dtype)
        clip = NormClip(max_norm=norm(vector.coefs))
        assert clip.run(vector) is vector
        assert clip.last.clipped == (False,)


def test_a_long_array_at_its_very_limit_is_not_clipped() -> None:
    """Its norm is measured again near the limit, as the fast one may be a little above."""
    for seed in range(10):
        array = np.random.default_rng(seed).standard_normal(100_003).astype("float32")
        vector = to_vector({"w": array}, dtype="float32")
        assert NormClip(exact_norm([array])).run(vector) is vector
