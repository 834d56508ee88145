# SPDX-License-Identifier: Apache-2.0
"""Every recorded number of another package is reproduced, or is a defect that is not shared."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from recordings import ALL, FOLDER, INDEX, arrays_of

from fedclip import translate
from fedclip.testing import apply, to_numpy, to_vector

# The one without gradients holds counts and bounds: see test_adaptive_bound.
GRADIENTS = [r for r in INDEX if r["kinds"]]
BOUNDS = [r for r in INDEX if not r["kinds"]]
STEPS = 40

with np.load(FOLDER / "inputs.npz") as _inputs:
    GRADS = {key[2:]: _inputs[key] for key in _inputs if key.startswith("g/")}
    WEIGHTS = {key[2:]: _inputs[key] for key in _inputs if key.startswith("w/")}


@pytest.mark.skipif(not (FOLDER.parents[1] / ".git").exists(), reason="a source archive")
def test_a_checkout_has_all_records() -> None:
    assert len(INDEX) == len(ALL)


def each(*, match: bool) -> Any:
    """Return the decorator that runs a test for each record; quickly, for one of a peer's class."""
    seen, rows = set(), []
    for record in GRADIENTS:
        if record["match"] == match:
            kind = (record["peer"], record["cls"])
            marks = [pytest.mark.slow] if kind in seen else []
            rows.append(pytest.param(record, id=record["file"].removesuffix(".npz"), marks=marks))
            seen.add(kind)
    return pytest.mark.parametrize("record", rows)


def translated(peer: str, cls: str, config: dict[str, Any], first: int | None = None) -> Any:
    kind, name, ours = translate.translate(peer, cls, config)
    if first is not None and "warmup" in ours:
        # The peer's gate counts observations over all groups, ours counts calls.
        ours["warmup"] = first + 1
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, ours)


def build(record: dict[str, Any]) -> Any:
    first = record.get("first_clip_step")
    return translated(record["peer"], record["cls"], record["config"], first)


def expected(record: dict[str, Any]) -> dict[str, np.ndarray]:
    data = arrays_of(record)
    return {
        name: data[f"scale/{name}"] * GRADS[name].astype(record["dtype"]).astype(float)
        if kind == "scale"
        else data[f"out/{name}"].astype(float)
        for name, kind in record["kinds"].items()
    }


def run(record: dict[str, Any], framework: str = "numpy") -> dict[str, np.ndarray]:
    clipper, dtype = build(record), record["dtype"]
    weights = to_vector({n: WEIGHTS[n].astype(dtype) for n in record["kinds"]}, framework)
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in record["kinds"]}
    for t in range(STEPS):
        grads = to_vector({n: GRADS[n][t].astype(dtype) for n in record["kinds"]}, framework)
        for name, value in to_numpy(apply(clipper, grads, weights)).items():
            assert value.dtype == dtype
            assert value.shape == GRADS[name][t].shape
            outputs[name].append(value.astype(float))
    return {name: np.array(values) for name, values in outputs.items()}


def assert_close(
    got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float, atol: float = 1e-15
) -> None:
    for name, values in wanted.items():
        if np.isnan(values).all():
            # The reference fails on this tensor (the notes say so); ours must not.
            assert np.isfinite(got[name]).all()
            continue
        np.testing.assert_allclose(got[name], values, rtol=rtol, atol=atol, err_msg=name)


@each(match=True)
def test_reproduced(record: dict[str, Any]) -> None:
    assert_close(run(record), expected(record), record["rtol"])


@pytest.mark.parametrize("record", BOUNDS, ids=lambda record: record["file"])
def test_adaptive_bound(record: dict[str, Any]) -> None:
    clipper = build(record)
    size = record["config"]["sample_size"]
    data = arrays_of(record)
    bound = record["config"]["initial"]
    for count, after in zip(data["unclipped"], data["bound"], strict=True):
        for sample in range(size):
            norm = bound * (0.5 if sample < count else 2.0)
            clipper.run(to_vector({"w": np.array([norm])}))
            assert clipper.last.limit == pytest.approx((bound,), rel=1e-9)
        bound = after


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_gamma_of_adagc(scope: str) -> None:
    record = next((r for r in INDEX if r["file"] == f"adagc_{scope}_w10.npz"), None)
    if record is None:
        pytest.skip("a source archive")
    gamma = arrays_of(record)["aux/gamma"].reshape(STEPS, -1)
    clipper = build(record)
    for t in range(STEPS):
        clipper.run(to_vector({n: GRADS[n][t] for n in record["kinds"]}))
        means = [group["mean"] for group in clipper.get_state()["groups"].values()]
        np.testing.assert_allclose(means, gamma[t], rtol=1e-12)


@each(match=False)
def test_defect_not_shared(record: dict[str, Any]) -> None:
    assert translate.notes(record["peer"], record["cls"], record["config"]), "no note says so"
    wanted, got = expected(record), run(record)
    assert all(np.isfinite(values).all() for values in got.values())
    # By far more than any tolerance, where the recorded numbers clip at all.
    apart = max(
        float(np.max(np.abs(got[n] - wanted[n]) / np.maximum(np.abs(wanted[n]), 1e-12)))
        for n in wanted
        if not np.isnan(wanted[n]).all()
    )
    clips = any(not np.array_equal(wanted[n], GRADS[n]) for n in wanted)
    assert apart > 1e-3 or not clips


# -- awkward inputs -----------------------------------------------------------------------------
CASES = json.loads((FOLDER / "edge_cases.json").read_text())
OPERATIONS = [*CASES["results"]]
PARAMETERS: dict[str, dict[str, Any]] = {
    "torchzero.ClipNorm": {"max_norm": 1},
    "torchzero.Normalize": {"norm_value": 1},
    "torchzero.ClipValue": {"value": 1},
    "optax.clip": {"max_delta": 1},
    "optax.clip_by_global_norm": {"max_norm": 1},
    "optax.clip_by_block_rms": {"threshold": 1},
    "optax.adaptive_grad_clip": {"clipping": 0.1},
    "tensorflow.clip_by_norm": {"clip_norm": 1},
    "tensorflow.clip_by_global_norm": {"clip_norm": 1},
    "tensorflow.clip_by_value": {"clip_value_min": -1, "clip_value_max": 1},
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_finite_input(operation: str) -> None:
    peer, cls = re.split(r"[(. ]", operation.replace("tf.", "tensorflow."))[:2]
    whole = {"dim": "global"} if "global)" in operation else {}
    config = {**PARAMETERS.get(f"{peer}.{cls}", {}), **whole}
    for name in CASES["inputs"].keys() - {"nan", "inf", "nodict"}:
        given = arrays(name)
        weights = {k: np.full(v.shape, float("w=0" not in operation)) for k, v in given.items()}
        clipper = translated(peer, cls, config)
        out = apply(clipper, to_vector(given), to_vector(weights)).coefs
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
