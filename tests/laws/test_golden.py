# SPDX-License-Identifier: Apache-2.0
"""Every recorded number of another package is reproduced, or is a defect that is not shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from recordings import ALL, FOLDER, INDEX, arrays_of

from fedclip import translate
from fedclip.testing import to_numpy, to_vector

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


def build(record: dict[str, Any]) -> OptiModule | Regularizer:
    kind, name, config = translate.translate(record["peer"], record["cls"], record["config"])
    if record.get("first_clip_step") is not None and "warmup" in config:
        # The peer's gate counts observations over all groups, ours counts calls.
        config["warmup"] = record["first_clip_step"] + 1
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, config)


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
        out = (
            clipper.run(grads, weights) if isinstance(clipper, Regularizer) else clipper.run(grads)
        )
        for name, value in to_numpy(out).items():
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
    clipper: Any = build(record)
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
    clipper: Any = build(record)
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
