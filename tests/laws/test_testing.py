# SPDX-License-Identifier: Apache-2.0
"""The exported checks: what is sound passes, and each kind of fault is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from declearn.model.api import Vector
from declearn.optimizer.modules import OptiModule
from helpers import BACKENDS, SPECIMENS, Specimen, needs, specimens

from fedclip import Clipper, NormClip, testing
from fedclip.errors import StateError
from fedclip.privacy import Context, Guarantee
from fedclip.testing import FRAMEWORKS
from fedclip.transforms import Transform


class Sound(OptiModule):
    """A clipper that a user might write without fedclip's base class: a running maximum."""

    name: ClassVar[str] = "test-sound"

    def __init__(self, max_norm: float = 2.0) -> None:
        self.max_norm = max_norm
        self.largest = 0.0

    def get_config(self) -> dict[str, Any]:
        return {"max_norm": self.max_norm}

    def get_state(self) -> dict[str, Any]:
        return {"largest": self.largest}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or set(state) != {"largest"}:
            raise StateError("a state must be a dict of 'largest'")
        value = state["largest"]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise StateError(f"'largest' must be a finite number, got {value!r}")
        self.largest = float(value)

    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        arrays = testing.to_numpy(gradients)
        norm = math.sqrt(sum(float(np.square(v.astype(float)).sum()) for v in arrays.values()))
        if not math.isfinite(norm):
            return self.bad(gradients)
        self.largest = max(self.largest, norm)
        if norm <= self.max_norm:
            return gradients
        return self.scale(gradients, self.max_norm / norm)

    def bad(self, gradients: Vector[Any]) -> Vector[Any]:
        return gradients * math.nan

    def scale(self, gradients: Vector[Any], factor: float) -> Vector[Any]:
        return type(gradients)(
            {k: np.asarray(v * factor, v.dtype) for k, v in gradients.coefs.items()}
        )


def test_a_sound_clipper_passes() -> None:
    for check in CHECKS:
        check(Sound)
    testing.check_guarantee(Keeps)


class ForgetsItsConfig(Sound, register=False):
    def get_config(self) -> dict[str, Any]:
        return {}


class ChangesInput(Sound, register=False):
    def scale(self, gradients: Vector[Any], factor: float) -> Vector[Any]:
        for value in gradients.coefs.values():
            value *= factor
        return gradients


class AlwaysCopies(Sound, register=False):
    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        return super().run(gradients) * 1.0


class Widens(Sound, register=False):
    def scale(self, gradients: Vector[Any], factor: float) -> Vector[Any]:
        return type(gradients)(
            {k: np.asarray(v * np.float64(factor), "float64") for k, v in gradients.coefs.items()}
        )


class Flattens(Sound, register=False):
    def scale(self, gradients: Vector[Any], factor: float) -> Vector[Any]:
        scaled = super().scale(gradients, factor)
        return type(gradients)({k: np.atleast_1d(v) for k, v in scaled.coefs.items()})


class LearnsFromNaN(Sound, register=False):
    def bad(self, gradients: Vector[Any]) -> Vector[Any]:
        self.max_norm = 0.5
        return super().bad(gradients)


class LosesState(Sound, register=False):
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.largest = 0.0


class ResumesOtherwise(Sound, register=False):
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.max_norm *= 1.001


class AcceptsAnything(Sound, register=False):
    def set_state(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"] if isinstance(state, dict) and state else 0.0


class HalfKeeps(Sound, register=False):
    def set_state(self, state: dict[str, Any]) -> None:
        self.largest = 0.0
        super().set_state(state)


class RaisesAnything(Sound, register=False):
    def set_state(self, state: dict[str, Any]) -> None:
        try:
            super().set_state(state)
        except StateError:
            raise RuntimeError("no such state") from None


class Grows(Sound, register=False):
    def __init__(self, max_norm: float = 2.0) -> None:
        super().__init__(max_norm)
        self.past: list[float] = []

    def get_state(self) -> dict[str, Any]:
        return {"largest": self.largest, "past": list(self.past)}

    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        self.past.append(1.0)
        return super().run(gradients)


class Promises(Sound, register=False):
    """States half of the bound that it keeps."""

    def guarantee(self, context: Context) -> Guarantee:
        return Guarantee(self.name, bound=0.5 * self.max_norm)


class Keeps(Sound, register=False):
    def guarantee(self, context: Context) -> Guarantee:
        return Guarantee(self.name, bound=self.max_norm * (1 + 1e-12))


class SaysNothing(Clipper, register=False):
    name = "says-nothing"

    def build(self) -> Transform:
        return NormClip().build()


CHECKS: list[Callable[[Any], None]] = [
    testing.check_config_round_trip,
    testing.check_identity,
    testing.check_dtype_and_shape,
    testing.check_nonfinite,
    testing.check_state_round_trip,
    testing.check_resume,
    testing.check_state_refusals,
    testing.check_state_size,
]


@pytest.mark.parametrize(
    ("cls", "check", "words"),
    [
        (lambda: ForgetsItsConfig(0.3), testing.check_config_round_trip, "get_config"),
        (ChangesInput, testing.check_identity, "changed in place"),
        (AlwaysCopies, testing.check_identity, "must be the same object"),
        (Widens, testing.check_dtype_and_shape, "the dtype float64, not float16"),
        (Flattens, testing.check_dtype_and_shape, r"the shape \(1,\), not \(\)"),
        (LearnsFromNaN, testing.check_nonfinite, "the steps after one of nan"),
        (LosesState, testing.check_state_round_trip, "gives back another state"),
        (ResumesOtherwise, testing.check_resume, "a run resumed at step 0"),
        (AcceptsAnything, testing.check_state_refusals, "is taken over"),
        (HalfKeeps, testing.check_state_refusals, "half kept"),
        (RaisesAnything, testing.check_state_refusals, "raises RuntimeError"),
        (Grows, testing.check_state_size, "the state grew"),
        (Promises, testing.check_guarantee, "is above the bound that guarantee states"),
        (SaysNothing, testing.check_guarantee, "does not say what it guarantees"),
    ],
)
def test_a_fault_is_found(cls: Any, check: Callable[[Any], None], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check(cls)


def test_a_difference_between_frameworks_is_found() -> None:
    needs("torch")

    class OffOnTorch(Sound, register=False):
        def scale(self, gradients: Vector[Any], factor: float) -> Vector[Any]:
            return gradients * (factor if "Numpy" in type(gradients).__name__ else 1.01 * factor)

    with pytest.raises(AssertionError, match=r"torch: 'enc\.weight' is off by"):
        testing.check_equivalence(OffOnTorch, "torch")


# -- and none in the package ------------------------------------------------------------------
@pytest.mark.slow
@specimens()
def test_all_checks(specimen: Specimen) -> None:
    testing.check_clipper(specimen.make, frameworks=["numpy"])


# Further rows of a clipper are in one framework each.
@pytest.mark.parametrize(
    ("specimen", "framework"),
    [
        (specimen, framework)
        for i, specimen in enumerate(SPECIMENS)
        for j, framework in enumerate(FRAMEWORKS[1:])
        if framework in BACKENDS and (not specimen.label or (i + j) % 3 == 0)
    ],
    ids=str,
)
def test_every_framework_does_the_same(specimen: Specimen, framework: str) -> None:
    needs(framework)
    testing.check_dtype_and_shape(specimen.make, framework)
    testing.check_equivalence(specimen.make, framework)
