# SPDX-License-Identifier: Apache-2.0
"""The exported checks: what is sound passes, and each kind of fault is found."""

import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from declearn.model.api import Vector
from declearn.optimizer.modules import OptiModule
from helpers import BACKENDS, SPECIMENS, Specimen, needs, specimens

from fedclip import Clipper, NormClip, testing
from fedclip.errors import StateError
from fedclip.privacy import Guarantee
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

    def scale(self, given: Vector[Any], factor: float) -> Vector[Any]:
        return type(given)({k: np.asarray(v * factor, v.dtype) for k, v in given.coefs.items()})


def test_a_sound_clipper_passes() -> None:
    for check in CHECKS.split():
        getattr(testing, f"check_{check}")(Sound)
    testing.check_guarantee(states(1 + 1e-12))


def broken(**methods: Any) -> Any:
    """Return `Sound` with other methods."""
    return type("Broken", (Sound,), methods, register=False)


def changes_input(self: Sound, gradients: Vector[Any], factor: float) -> Vector[Any]:
    for value in gradients.coefs.values():
        value *= factor
    return gradients


def then(change: Any) -> Any:
    """Return a `scale` that changes each tensor that it returns."""
    return lambda self, gradients, factor: type(gradients)(
        {k: change(v) for k, v in Sound.scale(self, gradients, factor).coefs.items()}
    )


def learns_from_nan(self: Sound, gradients: Vector[Any]) -> Vector[Any]:
    self.max_norm = 0.5
    return Sound.bad(self, gradients)


def sets(before: dict[str, float], after: dict[str, float]) -> Any:
    """Return a `set_state` that sets attributes too, before and after what it does."""

    def set_state(self: Sound, state: dict[str, Any]) -> None:
        vars(self).update(before)
        Sound.set_state(self, state)
        vars(self).update(after)

    return set_state


def accepts_anything(self: Sound, state: dict[str, Any]) -> None:
    self.largest = state["largest"] if isinstance(state, dict) and state else 0.0


def raises_anything(self: Sound, state: dict[str, Any]) -> None:
    try:
        Sound.set_state(self, state)
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


def states(share: float) -> Any:
    """Return `Sound` that states so much of the bound that it keeps."""
    return broken(guarantee=lambda self, context: Guarantee(self.name, bound=share * self.max_norm))


class SaysNothing(Clipper, register=False):
    name = "says-nothing"

    def build(self) -> Transform:
        return NormClip().build()


CHECKS = "config_round_trip identity dtype_and_shape nonfinite state_round_trip resume"
CHECKS += " state_refusals state_size"
FAULTS: list[tuple[str, Any, str]] = [
    ("config_round_trip", partial(broken(get_config=lambda self: {}), 0.3), "get_config"),
    ("identity", broken(scale=changes_input), "changed in place"),
    ("identity", broken(run=lambda self, g: Sound.run(self, g) * 1.0), "must be the same object"),
    ("dtype_and_shape", broken(scale=then(np.float64)), "the dtype float64, not float16"),
    ("dtype_and_shape", broken(scale=then(np.atleast_1d)), r"the shape \(1,\), not \(\)"),
    ("nonfinite", broken(bad=learns_from_nan), "the steps after one of nan"),
    ("state_round_trip", broken(set_state=sets({}, {"largest": 0.0})), "gives back another state"),
    ("resume", broken(set_state=sets({}, {"max_norm": 2.002})), "a run resumed at step 0"),
    ("state_refusals", broken(set_state=accepts_anything), "is taken over"),
    ("state_refusals", broken(set_state=sets({"largest": 0.0}, {})), "half kept"),
    ("state_refusals", broken(set_state=raises_anything), "raises RuntimeError"),
    ("state_size", Grows, "the state grew"),
    ("guarantee", states(0.5), "is above the bound that guarantee states"),
    ("guarantee", SaysNothing, "does not say what it guarantees"),
]


@pytest.mark.parametrize(("check", "cls", "words"), FAULTS)
def test_a_fault_is_found(check: str, cls: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        getattr(testing, f"check_{check}")(cls)


def test_a_difference_between_frameworks_is_found() -> None:
    needs("torch")

    def off_on_torch(self: Sound, gradients: Vector[Any], factor: float) -> Vector[Any]:
        return gradients * (factor if "Numpy" in type(gradients).__name__ else 1.01 * factor)

    with pytest.raises(AssertionError, match=r"torch: 'enc\.weight' is off by"):
        testing.check_equivalence(broken(scale=off_on_torch), "torch")


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
    testing.check_dtype_and_shape(specimen.make, framework)
    testing.check_equivalence(specimen.make, framework)
