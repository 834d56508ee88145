# SPDX-License-Identifier: Apache-2.0
"""Each tensor comes back in its own framework, dtype and shape."""

from __future__ import annotations

import numpy as np
from helpers import Specimen, each_framework, needs, specimens

from fedclip.testing import apply, check_dtype_and_shape, to_vector


@each_framework()
@specimens()
def test_dtype_and_shape(specimen: Specimen, framework: str) -> None:
    needs(framework)
    check_dtype_and_shape(specimen.make, framework)


@each_framework()
@specimens()
def test_mixed_dtypes(specimen: Specimen, framework: str) -> None:
    needs(framework)
    rng = np.random.default_rng(0)
    shapes = {"enc.a": (4, 3), "enc.b": (2,), "head.c": (), "head.scale": (5,)}
    dtypes = ("float16", "float32", "float64", "float32")
    clipper = specimen.make()
    for _ in range(6):
        arrays = {
            name: np.asarray(rng.normal(0, 3, shape)).astype(dtype)
            for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
        }
        vector = to_vector(arrays, framework)
        out = apply(clipper, vector)
        for name, value in vector.coefs.items():
            assert out.coefs[name].dtype == value.dtype
            assert tuple(out.coefs[name].shape) == shapes[name]


@each_framework()
@specimens()
def test_empty_tensor_and_zero_dimensions(specimen: Specimen, framework: str) -> None:
    needs(framework)
    arrays = {
        "enc.empty": np.zeros((0, 3)),
        "enc.w": np.full((2, 2), 7.0),
        "head.scale": np.array(9.0),
    }
    clipper = specimen.make()
    for _ in range(3):
        out = apply(clipper, to_vector(arrays, framework))
        for name, value in arrays.items():
            assert tuple(out.coefs[name].shape) == value.shape


@specimens()
def test_nothing_to_clip(specimen: Specimen) -> None:
    if isinstance(specimen.config.get("scope"), dict):
        return
    clipper = specimen.make()
    for arrays in ({}, {"w": np.zeros((0,))}):
        vector = to_vector(arrays)
        assert apply(clipper, vector) is vector
    # Nothing was observed: a first norm of 0 would be in the statistics.
    if specimen.stateful:
        assert not any(s.get("count") for s in clipper.get_state()["groups"].values())
