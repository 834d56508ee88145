# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity: one policy for all, and no statistic ever sees them."""

import warnings
from typing import Any

import helpers
import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from helpers import MODULES, SPECIMENS, Specimen, pairwise, run, specimens, specimens_by_framework

from fedclip import FedclipWarning, NonFiniteError, NormClip
from fedclip.testing import FRAMEWORKS, apply, check_nonfinite, gradient_stream, to_numpy, to_vector


def poisoned(step: int, value: float) -> dict[str, np.ndarray]:
    arrays = gradient_stream(step + 1)[step]
    arrays["enc.bias"][0] = value
    return arrays


@specimens()
def test_statistics_never_see_what_is_passed_on(specimen: Specimen) -> None:
    check_nonfinite(lambda: specimen.make(on_nonfinite="propagate"))


def apply_to_sound_weights(clipper: Any, arrays: dict[str, np.ndarray], framework: str) -> Any:
    """Return the output for a gradient; the weights of regularizers hold neither NaN nor inf."""
    return apply(clipper, to_vector(arrays, framework), to_vector(poisoned(3, 1.0), framework))


@pairwise(specimen=SPECIMENS, framework=FRAMEWORKS, value=[np.nan, np.inf, -np.inf])
def test_skip_gives_zero(specimen: Specimen, value: float, framework: str) -> None:
    if specimen.name == "no-op":
        return
    clipper = specimen.make(on_nonfinite="skip")
    words = "NaN or infinity in 'enc.bias'; the gradient is set to zero"
    with pytest.warns(FedclipWarning, match=words):
        out = apply_to_sound_weights(clipper, poisoned(3, value), framework)
    for name, array in to_numpy(out).items():
        assert not array.any(), name
    assert clipper.last.nonfinite == ("enc.bias",)


@specimens_by_framework()
def test_raise_names_the_tensors_and_propagate_makes_the_group_nan(
    specimen: Specimen, framework: str
) -> None:
    clipper = specimen.make(on_nonfinite="raise")
    run(clipper, gradient_stream(3), framework)
    before = repr(clipper.get_state()) if specimen.kind == "module" else None
    with pytest.raises(NonFiniteError, match=f"{specimen.name}: NaN or infinity in 'enc.bias'"):
        apply_to_sound_weights(clipper, poisoned(3, np.nan), framework)
    assert before is None or repr(clipper.get_state()) == before
    if specimen.name == "no-op":
        return
    clipper = specimen.make(on_nonfinite="propagate")
    with pytest.warns(FedclipWarning, match="passed on"):
        out = apply_to_sound_weights(clipper, poisoned(3, np.inf), framework)
    values = to_numpy(out)
    assert np.isnan(values["enc.bias"]).all()
    if specimen.config.get("scope") == "tensor":
        assert np.isfinite(values["enc.weight"]).all()


@specimens(MODULES)
def test_one_warning_a_round(specimen: Specimen) -> None:
    clipper = specimen.make()
    for round_ in (1, 2):
        clipper.on_round_start()
        with pytest.warns(FedclipWarning, match=f"round {round_}") as caught:
            run(clipper, [poisoned(3, np.nan), poisoned(4, np.inf), poisoned(3, np.nan)])
        assert len(caught) == 1


def test_a_nonfinite_first_step_leaves_no_trace() -> None:
    for specimen in MODULES:
        one, other = specimen.make(), specimen.make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            run(one, [poisoned(0, np.nan)])
        np.testing.assert_equal(run(one, gradient_stream(8)), run(other, gradient_stream(8)))


LEFT_ALONE: list[tuple[str, dict[str, Any]]] = [
    ("norm-clip", {"exclude": "b"}),
    ("norm-clip", {"exclude": ["w", "b"]}),
    ("zscore-clip", {"exclude": "b"}),
    ("percentile-clip", {"exclude": "b"}),
    ("standardize", {"exclude": "b"}),
    ("norm-clip", {"dims": 1}),
    ("normalize", {"scope": "tensor", "min_size": 3}),
    ("centralize", {"dims": 1}),
]


@pairwise(case=LEFT_ALONE, framework=FRAMEWORKS, value=[np.nan, np.inf])
def test_nan_in_what_is_left_alone_is_nan_in_the_gradient(
    case: tuple[str, dict[str, Any]], framework: str, value: float
) -> None:
    name, config = case
    step = {"w": np.full((2, 2), 3.0), "b": np.array([1.0, value])}
    clipper = OptiModule.from_specs(name, config)
    with pytest.warns(FedclipWarning, match="NaN or infinity in 'b'; the gradient is set to zero"):
        output = to_numpy(clipper.run(to_vector(step, framework)))
    assert not any(array.any() for array in output.values())
    assert (clipper.rounds[0].steps, clipper.rounds[0].nonfinite) == (1, 1)
    assert clipper.last.nonfinite == ("b",)
    loud = OptiModule.from_specs(name, {**config, "on_nonfinite": "raise"})
    with pytest.raises(NonFiniteError, match="'b'"):
        loud.run(to_vector(step, framework))


def test_a_warning_points_to_the_caller_and_tells_a_norm_beyond_float64() -> None:
    for values, words in (
        (np.array([np.nan]), "NaN or infinity in 'w'"),
        (np.full(9, 1.7e308), "norm-clip: a norm beyond float64; the gradient is set"),
    ):
        with pytest.warns(FedclipWarning, match=words) as caught:
            NormClip(1.0).run(to_vector({"w": values}))
        assert caught[0].filename == __file__


@helpers.each_framework()
def test_numbers_that_are_excluded_may_be_large_or_complex_but_not_nan(framework: str) -> None:
    large = {"w": np.full(2, 3.0), "b": np.array([1e300]), "n": np.array([2**62])}
    found = NormClip(1.0, exclude=["b", "n"]).clip(large)
    assert found["b"] is large["b"]
    assert found["n"] is large["n"]
    step = {"w": np.array([3.0, 4.0], np.float32), "c": np.array([1, np.nan * 1j], np.complex64)}
    with pytest.warns(FedclipWarning, match="NaN or infinity in 'c'; the gradient is set to zero"):
        output = to_numpy(NormClip(1.0, exclude="c").run(to_vector(step, framework)))
    assert not any(array.any() for array in output.values())
    assert output["c"].dtype == np.complex64
    step["c"] = np.array([3e38 + 3e38j, 0], np.complex64)
    output = to_numpy(NormClip(1.0, exclude="c").run(to_vector(step, framework)))
    np.testing.assert_allclose(output["w"], [0.6, 0.8], rtol=2e-6)
