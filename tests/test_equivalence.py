# SPDX-License-Identifier: Apache-2.0
"""The four frameworks do the same; a state saved on one continues on another."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import MODULES, Specimen, each_framework, needs, run, specimens

from fedclip.testing import check_equivalence, gradient_stream


@each_framework(oracle=False)
@specimens()
def test_same_as_numpy(specimen: Specimen, framework: str) -> None:
    needs(framework)
    check_equivalence(specimen.make, framework)


@pytest.mark.parametrize(
    ("first", "second"), [("torch", "jax"), ("jax", "tensorflow"), ("tensorflow", "torch")]
)
@specimens(MODULES, stateful=True)
def test_state_moves_between_frameworks(specimen: Specimen, first: str, second: str) -> None:
    needs(first)
    needs(second)
    stream = gradient_stream(14)
    wanted = run(specimen.make(), stream)
    before, after = specimen.make(), specimen.make()
    run(before, stream[:7], first)
    after.set_state(before.get_state())
    for got, expected in zip(run(after, stream[7:], second), wanted[7:], strict=True):
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, atol=1e-15)
