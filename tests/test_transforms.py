# SPDX-License-Identifier: Apache-2.0
"""The protocol of transforms: a user's own one runs wherever it has a step."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import SPECIMENS, Specimen, require, specimens

from fedclip import Clipper, NormClip
from fedclip.arrays import NUMPY, backend_of
from fedclip.scopes import resolve
from fedclip.transforms import Gradient, Outcome, Transform, carried, clip_on_device


@dataclass(frozen=True)
class Halving(Transform):
    """Half of every gradient, on the host and on a device."""

    device: bool = True

    def measure(self, gradient: Gradient) -> Any:
        return np.array([np.abs(view).max() for view in gradient.local()])

    def step(self, gradient: Gradient, measured: Any, state: Any) -> Outcome:
        outputs = [0.5 * array for array in gradient.arrays]
        none = np.zeros(len(gradient.groups))
        return Outcome(outputs, state, none, none, none > 0)

    @property
    def runs_on_device(self) -> bool:
        return self.device

    def device_step(self, gradient: Gradient, state: Any, on_nonfinite: str) -> Outcome:
        if not self.device:
            return super().device_step(gradient, state, on_nonfinite)
        xp = gradient.backend
        norms = xp.group_norms(gradient.arrays, gradient.groups.members)
        outputs = [0.5 * array for array in gradient.arrays]
        return Outcome(outputs, state, norms, norms, norms > norms, gradient.finite(norms))


class Half(Clipper, register=False):
    name = "half"
    transform_: Transform = Halving()

    def build(self) -> Transform:
        return self.transform_


def test_it_runs_on_the_host() -> None:
    output = Half().run(NumpyVector({"w": np.array([2.0, 4.0])}))
    np.testing.assert_array_equal(output.coefs["w"], [1.0, 2.0])


def test_it_stays_on_a_device_if_it_has_a_step_for_it() -> None:
    torch = require("torch")
    tensor = torch.ones(3, device="meta")
    output = Half().clip({"w": tensor})["w"]
    # Nothing on the device "meta" can be read.
    assert output.device.type == "meta"
    compiled, _ = clip_on_device(
        Halving(),
        {"w": torch.ones(3)},
        resolve("global", None, ["w"]),
        backend_of(tensor),
        Halving().init(resolve("global", None, ["w"])),
        "skip",
    )
    np.testing.assert_array_equal(compiled["w"].numpy(), [0.5, 0.5, 0.5])


def test_it_says_so_if_it_has_none() -> None:
    gradient = Gradient([np.ones(1)], resolve("global", None, ["w"]), NUMPY)
    with pytest.raises(NotImplementedError, match="works on the host only"):
        Halving(device=False).device_step(gradient, (), "skip")


@specimens([s for s in SPECIMENS if s.kind == "module"])
def test_host_and_device_steps_agree(specimen: Specimen) -> None:
    clipper = specimen.make()
    rng = np.random.default_rng(2)
    for _ in range(6):
        values = {
            "enc.w": 10.0 ** rng.uniform(-2, 1) * rng.standard_normal((4, 3)),
            "enc.bias": rng.standard_normal(3),
            "enc.scale": np.array(rng.standard_normal()),
        }
        clipper.clip(values)
        groups = clipper._groups
        transform = clipper.transform(groups)
        kept = clipper.get_state()["arrays"]
        state = carried(transform, values, groups, NUMPY, clipper._state, kept)
        on_device, _ = clip_on_device(transform, values, groups, NUMPY, state, "propagate")
        on_host = clipper.clip(values)
        for name in values:
            np.testing.assert_allclose(on_device[name], on_host[name], rtol=1e-12)


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
        clip = NormClip(1.0, scope=scope)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(clip.clip, gradients * 4)
            for given, expected, output in zip(gradients * 4, alone * 4, found, strict=True):
                for name, array in output.items():
                    assert array.dtype == given[name].dtype
                    np.testing.assert_array_equal(array, expected[name])


def test_a_later_step_that_can_not_be_clipped_is_refused() -> None:
    clip = NormClip(1.0)
    first = {"a": np.ones(4, np.float32), "b": np.ones(3, np.float32)}
    for dtype in (np.int32, bool, np.complex64, object, np.uint16):
        clip.clip(first)
        with pytest.raises(TypeError, match="'b' is"):
            clip.clip(first | {"b": np.ones(3, dtype)})
    with pytest.raises(TypeError, match="MaskedArray"):
        clip.clip(first | {"b": np.ma.masked_array(np.ones(3, np.float32))})
