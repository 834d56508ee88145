# SPDX-License-Identifier: Apache-2.0
"""The one sketch that records and shared statistics count in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedclip.measures.sketch import Sketch, holder


@pytest.mark.parametrize("sketch", [Sketch(0.01), Sketch(0.03, lowest=1e-8)])
def test_what_a_bucket_stands_for_is_within_the_error(sketch: Sketch) -> None:
    numbers = np.exp(np.random.default_rng(0).uniform(-40, 40, size=10_000))
    for number, bucket in zip(numbers, sketch.bucket(numbers).tolist(), strict=True):
        upper = sketch.lowest * sketch.gamma**bucket
        assert upper / sketch.gamma <= number * (1 + 1e-9)
        assert number <= upper * (1 + 1e-9)
        assert abs(sketch.middle(upper) - number) <= sketch.error * number * (1 + 1e-9)


def test_edges_are_those_of_the_buckets() -> None:
    sketch = Sketch(0.03, lowest=1e-8)
    edges = sketch.edges(100)
    assert edges[0] == 1e-8
    np.testing.assert_array_equal(sketch.bucket(edges * (1 - 1e-9)), np.arange(100))


@pytest.mark.parametrize("counts", [[1], [0, 3, 0, 2], [5, 0, 0, 1]])
def test_who_holds_a_rank(counts: list[int]) -> None:
    ordered = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    for rank in np.arange(0, len(ordered), 0.25):
        assert holder(counts, rank) == ordered[math.floor(rank)]
    assert holder(counts, len(ordered)) == len(counts)
