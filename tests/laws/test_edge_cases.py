# SPDX-License-Identifier: Apache-2.0
"""What becomes of awkward inputs, next to what other packages make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import needs

from fedclip import NormClip, translate
from fedclip.testing import FRAMEWORKS, apply, to_vector

CASES = json.loads((Path(__file__).parents[1] / "golden" / "edge_cases.json").read_text())
OPERATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "drytorch.GradNormClipper(1)": ("drytorch", "GradNormClipper", {}),
    "drytorch.GradValueClipper(1)": ("drytorch", "GradValueClipper", {}),
    "drytorch.GradParamNormalizer": ("drytorch", "GradParamNormalizer", {}),
    "drytorch.GradZScoreNormalizer": ("drytorch", "GradZScoreNormalizer", {}),
    "torchzero.ClipNorm(1) per tensor": ("torchzero", "ClipNorm", {"max_norm": 1}),
    "torchzero.ClipNorm(1,global)": ("torchzero", "ClipNorm", {"max_norm": 1, "dim": "global"}),
    "torchzero.Normalize(1) per tensor": ("torchzero", "Normalize", {"norm_value": 1}),
    "torchzero.Normalize(1,global)": ("torchzero", "Normalize", {"dim": "global"}),
    "torchzero.Centralize per tensor": ("torchzero", "Centralize", {}),
    "torchzero.Centralize(global)": ("torchzero", "Centralize", {"dim": "global"}),
    "torchzero.ClipValue(1)": ("torchzero", "ClipValue", {"value": 1}),
    "declearn.L2Clipping(1)": ("declearn", "L2Clipping", {}),
    "declearn.L2GlobalClipping(1)": ("declearn", "L2GlobalClipping", {}),
    "optax.clip(1)": ("optax", "clip", {"max_delta": 1}),
    "optax.clip_by_global_norm(1)": ("optax", "clip_by_global_norm", {"max_norm": 1}),
    "optax.clip_by_block_rms(1)": ("optax", "clip_by_block_rms", {"threshold": 1}),
    "optax.adaptive_grad_clip(.1) w=1": ("optax", "adaptive_grad_clip", {"clipping": 0.1}),
    "optax.adaptive_grad_clip(.1) w=0": ("optax", "adaptive_grad_clip", {"clipping": 0.1}),
    "tf.clip_by_norm(1)": ("tensorflow", "clip_by_norm", {"clip_norm": 1}),
    "tf.clip_by_global_norm(1)": ("tensorflow", "clip_by_global_norm", {"clip_norm": 1}),
    "tf.clip_by_value(-1,1)": (
        "tensorflow",
        "clip_by_value",
        {"clip_value_min": -1, "clip_value_max": 1},
    ),
}
UNIT = {"a": [0.6, 0.8], "b": [0.0]}
HALF = 0.5**0.5
# Where a peer's answer is not ours, and none of those is right.
OURS: dict[tuple[str, str], dict[str, list[float]]] = {
    # Squares overflow in the peer, which returns zeros or NaN.
    **{
        (name, "huge"): UNIT
        for name in OPERATIONS
        if "Norm" in name or "norm" in name or "L2" in name
    },
    ("drytorch.GradZScoreNormalizer", "huge"): {"a": [-HALF, HALF], "b": [0.0]},
    ("optax.clip_by_block_rms(1)", "huge"): {"a": [0.6 * 2**0.5, 0.8 * 2**0.5], "b": [0.0]},
    ("optax.adaptive_grad_clip(.1) w=1", "huge"): {"a": [0.06 * 2**0.5, 0.08 * 2**0.5], "b": [0.0]},
    ("optax.adaptive_grad_clip(.1) w=0", "huge"): {"a": [6e-5, 8e-5], "b": [0.0]},
    # Norms of 1e-12 and less are not taken for 1, and a zero gradient has no direction.
    ("torchzero.Normalize(1) per tensor", "tiny"): UNIT,
    ("torchzero.Normalize(1,global)", "tiny"): UNIT,
    ("torchzero.Normalize(1,global)", "zero"): {"a": [0.0, 0.0], "b": [0.0]},
}


def arrays(name: str) -> dict[str, np.ndarray]:
    return {
        key: np.array([float(x) for x in row["v"]]).reshape(row["shape"])
        for key, row in CASES["inputs"][name].items()
    }


def make(operation: str) -> Any:
    kind, name, config = translate.translate(*OPERATIONS[operation])
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, config)


def test_every_operation_is_here() -> None:
    assert set(OPERATIONS) == set(CASES["results"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_finite_input(operation: str) -> None:
    for name in CASES["inputs"].keys() - {"nan", "inf", "nodict"}:
        given = arrays(name)
        weights = {k: np.full(v.shape, float("w=0" not in operation)) for k, v in given.items()}
        out = apply(make(operation), to_vector(given), to_vector(weights)).coefs
        for (key, value), row in zip(given.items(), CASES["results"][operation][name], strict=True):
            wanted = np.array([float(x) for x in row["v"]]).reshape(row["shape"])
            if (operation, name) in OURS:
                wanted = np.array(OURS[operation, name][key]).reshape(value.shape)
            elif operation == "drytorch.GradZScoreNormalizer" and value.size == 1:
                # The deviation of one element is unknown: it is left alone; the peer has NaN.
                assert np.isnan(wanted).all()
                wanted = value
            np.testing.assert_allclose(out[key], wanted, rtol=1e-9, atol=1e-300, err_msg=name)
            assert out[key].shape == value.shape


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_arrays_of_two_frameworks_are_refused(framework: str) -> None:
    needs(framework)
    (alien,) = to_vector({"b": np.ones(3)}, framework).coefs.values()
    own = np.ones(3)
    clipper = NormClip()
    clipper.clip({"a": own, "b": own})
    for arrays in ({"a": own, "b": alien}, {"a": alien, "b": own}):
        with pytest.raises(TypeError, match=r"one framework: 'a' is of [a-z]+, 'b'"):
            clipper.clip(arrays)
