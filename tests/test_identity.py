# SPDX-License-Identifier: Apache-2.0
"""What is not clipped is the same object; inputs are never changed."""

from __future__ import annotations

import numpy as np
from helpers import Specimen, each_framework, gradient, needs, specimens

from fedclip import NormClip
from fedclip.testing import apply, check_identity, gradient_stream, to_numpy, to_vector


@specimens()
def test_identity(specimen: Specimen) -> None:
    check_identity(specimen.make)


@each_framework()
@specimens(moves=False)
def test_far_below_the_limit_the_same_object(specimen: Specimen, framework: str) -> None:
    needs(framework)
    clipper = specimen.make()
    for step in gradient_stream(8):
        apply(clipper, to_vector(step, framework))
    small = to_vector(gradient(1, 1e-6), framework)
    weights = to_vector(gradient(2, 1.0), framework)
    output = apply(clipper, small, weights)
    assert output is small
    assert all(output.coefs[name] is small.coefs[name] for name in small.coefs)


@each_framework()
@specimens()
def test_input_untouched(specimen: Specimen, framework: str) -> None:
    needs(framework)
    clipper = specimen.make()
    for step in gradient_stream(8):
        vector = to_vector(step, framework)
        objects = dict(vector.coefs)
        apply(clipper, vector)
        assert all(vector.coefs[name] is objects[name] for name in objects)
        for name, value in to_numpy(vector).items():
            np.testing.assert_array_equal(value, step[name])


def test_unclipped_tensors_are_the_same_objects() -> None:
    vector = to_vector({"small": np.array([0.1]), "large": np.array([5.0])})
    out = NormClip(1.0, scope="tensor").run(vector)
    assert out.coefs["small"] is vector.coefs["small"]
    assert out.coefs["large"] is not vector.coefs["large"]
