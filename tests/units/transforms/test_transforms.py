# SPDX-License-Identifier: Apache-2.0
"""The protocol of transforms: a user's own one runs wherever it has a step."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers import each_framework, require

from fedclip import Clipper, NoOp, NormClip
from fedclip.arrays import backend_of
from fedclip.core.scopes import resolve
from fedclip.rules import NoState
from fedclip.testing import to_numpy, to_vector
from fedclip.transforms import Gradient, Outcome, Transform, clip_on_device


@dataclass(frozen=True)
class Halving(Transform):
    """Half of every gradient."""

    runs_on_device: bool = True

    def step(self, gradient: Gradient, state: Any) -> Outcome:
        arrays, xp = gradient.arrays, gradient.xp
        norms = gradient.finite_norms(xp.group_norms(arrays, gradient.groups.members))
        half = xp.pieces(0.0 * norms + 0.5, [()] * len(norms))[0]
        return Outcome(xp.scale(arrays, [half] * len(arrays)), state, norms, norms, norms < 0)


class Half(Clipper, register=False):
    name = "half"
    device = True

    def build(self) -> Transform:
        return Halving(self.device)


class HalfOnHost(Half, register=False):
    device = False


def test_it_stays_on_a_device_unless_it_says_otherwise() -> None:
    torch = require("torch")
    tensor = torch.ones(3, device="meta")
    # Nothing on the device "meta" can be read.
    assert Half().clip({"w": tensor})["w"].device.type == "meta"
    settings = resolve("global", None, ["w"]), backend_of(tensor), NoState(), "skip"
    compiled, _ = clip_on_device(Halving(), {"w": torch.ones(3)}, *settings)
    np.testing.assert_array_equal(compiled["w"].numpy(), [0.5, 0.5, 0.5])
    with pytest.raises(NotImplementedError, match="meta"):
        HalfOnHost().clip({"w": tensor})


@each_framework(oracle=False)
def test_bfloat16_is_fetched_from_a_device_and_what_changes_nothing_returns_the_same_object(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"w": np.array([1.5, -2.0])}
    narrow, wide = (to_vector(values, framework, dtype) for dtype in ("bfloat16", "float32"))
    backend = type(backend_of(wide.coefs["w"]))
    # As of an array on a device.
    monkeypatch.setattr(backend, "views", lambda self, arrays: [None] * len(arrays))
    monkeypatch.setattr(backend, "dense_views", lambda self, arrays: None)
    np.testing.assert_array_equal(to_numpy(HalfOnHost().run(narrow))["w"], [0.75, -1.0])
    assert NoOp().clip(wide.coefs) is wide.coefs


def test_gradients_of_other_forms_in_turn_are_clipped_as_the_first_are() -> None:
    rng = np.random.default_rng(0)
    shapes = [[(3,), (2000,)], [(2000,), (3,)], [(600,), (1025,)], [(), (0,)], [(30, 40), (7,)]]
    dtypes = ["float32", "float64", "float16", ">f4", "float32"]
    gradients = [
        {str(i): np.asarray(9 * rng.standard_normal(s), dtype) for i, s in enumerate(some)}
        for some, dtype in itertools.product(shapes, dtypes)
    ]
    # Several threads clip gradients of as many tensors, each of another dtype and size.
    for scope in ("global", "tensor"):
        alone = [NormClip(1.0, scope=scope).clip(g) for g in gradients]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(NormClip(1.0, scope=scope).clip, gradients * 4)
            for given, expected, output in zip(gradients * 4, alone * 4, found, strict=True):
                for name, array in output.items():
                    assert array.dtype == given[name].dtype
                    np.testing.assert_array_equal(array, expected[name])
