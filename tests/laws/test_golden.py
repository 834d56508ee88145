# SPDX-License-Identifier: Apache-2.0
"""Every recorded number of another package is reproduced, or is a defect that is not shared."""

from __future__ import annotations

import math
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
    # Not the recorded numbers, by far more than any tolerance (where those clip at all) ...
    apart = max(
        float(np.max(np.abs(got[n] - wanted[n]) / np.maximum(np.abs(wanted[n]), 1e-12)))
        for n in wanted
        if not np.isnan(wanted[n]).all()
    )
    clips = any(not np.array_equal(wanted[n], GRADS[n]) for n in wanted)
    assert apart > 1e-3 or not clips
    # ... and what is right instead.
    RIGHT[defect(record)](record, got, wanted)


def defect(record: dict[str, Any]) -> str:
    """Return the number of the defect, as in the notes of the recordings."""
    config = record["config"]
    if record["cls"] in ("HistClipper", "ParamHistClipper"):
        return "D-2"
    if record["cls"] == "AutoClip":
        return "S-1" if config["mode"] == "percentile" else "S-2"
    if record["cls"] == "AGC":
        return "S-7"
    if record["rule"].endswith("_bug"):
        return "T-1"
    if record["cls"] == "ClipNormGrowth":
        return "T-3"
    return {"var": "T-10", "sum": "T-11", "0": "T-12", "l0": "T-12"}[config["ord"]]


def erased_steps_are_clipped(record: dict[str, Any], got: Any, wanted: Any) -> None:
    for name, values in wanted.items():
        rows = np.reshape(values, (STEPS, -1))
        erased = ~rows.any(axis=1)
        assert erased.any()
        ours = np.reshape(got[name], (STEPS, -1))
        assert (np.abs(ours[erased]).max(axis=1) > 0).all()


def limit_falls(record: dict[str, Any], got: Any, wanted: Any) -> None:
    # With a shorter warm-up, so that the limits are there while the norms fall.
    clipper: Any = build({**record, "first_clip_step": 5})
    limits = []
    for t in range(STEPS):
        clipper.run(to_vector({n: GRADS[n][t] for n in record["kinds"]}, "numpy"))
        limits.append(clipper.last.limit)
    finite = np.array([row for row in limits if np.isfinite(row).all()])
    # The four steps whose gradients are a millionth of the others.
    assert (np.diff(finite, axis=0) < 0).any()
    theirs = [v for key, v in arrays_of(record).items() if key.startswith("aux/threshold")]
    assert all((np.diff(np.nan_to_num(t), axis=0) >= 0).all() for t in theirs)


def limit_is_about_the_median(record: dict[str, Any], got: Any, wanted: Any) -> None:
    clipper: Any = build(record)
    for t in range(STEPS):
        clipper.run(to_vector({n: GRADS[n][t] for n in record["kinds"]}, "numpy"))
        seen: dict[str, list[float]] = {}
        for past in range(t + 1):
            norms: dict[str, float] = {}
            for name in record["kinds"]:
                label = {"global": "all", "per_layer": name.split(".")[0]}.get(
                    record["config"]["scope"], name
                )
                norms[label] = math.hypot(norms.get(label, 0.0), np.linalg.norm(GRADS[name][past]))
            for label, norm in norms.items():
                seen.setdefault(label, []).append(norm)
        for label, limit in zip(clipper.last.groups, clipper.last.limit, strict=True):
            if len(seen[label]) >= 12 and math.isfinite(limit):
                spread = 3 * float(np.std(seen[label], ddof=1))
                low, high = np.quantile(seen[label], [0.2, 0.8])
                assert 0.99 * (low + spread) <= limit <= 1.01 * (high + spread)


def zero_weights_can_grow(record: dict[str, Any], got: Any, wanted: Any) -> None:
    name = "l1.bias"
    assert not WEIGHTS[name].any()
    assert np.linalg.norm(wanted[name], axis=1).max() < 1e-7
    before = np.linalg.norm(GRADS[name], axis=1)
    after = np.linalg.norm(got[name], axis=1)
    assert (after >= np.minimum(before, 0.9e-3 * record["config"]["clipping"])).all()


def tensors_are_independent(record: dict[str, Any], got: Any, wanted: Any) -> None:
    for name in record["kinds"]:
        alone = run({**record, "kinds": {name: "scale"}})
        np.testing.assert_array_equal(alone[name], got[name])


def constant_stream_is_kept(record: dict[str, Any], got: Any, wanted: Any) -> None:
    # Norms before the first spike, at step 9, are below min_norm = 2 and may be there at once.
    for name in record["kinds"]:
        assert (np.abs(wanted[name][1:9]) <= 0.501 * np.abs(GRADS[name][1:9])).all()
        np.testing.assert_array_equal(got[name][:9], GRADS[name][:9])


def variance_is_at_the_limit(record: dict[str, Any], got: Any, wanted: Any) -> None:
    config = record["config"]
    limit = config.get("max_norm", config.get("norm_value"))
    names = [n for n in record["kinds"] if GRADS[n][0].size > 1 or config["dim"] == "global"]
    groups = [names] if config["dim"] == "global" else [[n] for n in names]
    for t in range(STEPS):
        for group in groups:
            before, after = (
                np.var(np.concatenate([np.ravel(values[n][t]) for n in group]), ddof=1)
                for values in (GRADS, got)
            )
            clipped = before > limit or record["cls"] == "Normalize"
            assert after == pytest.approx(limit if clipped else before, rel=1e-6)


def sign_is_kept(record: dict[str, Any], got: Any, wanted: Any) -> None:
    for name in record["kinds"]:
        assert (got[name] * GRADS[name] >= 0).all()


def nothing_is_clipped(record: dict[str, Any], got: Any, wanted: Any) -> None:
    for name in record["kinds"]:
        np.testing.assert_array_equal(got[name], GRADS[name])


RIGHT = {
    "D-2": erased_steps_are_clipped,
    "S-1": limit_falls,
    "S-2": limit_is_about_the_median,
    "S-7": zero_weights_can_grow,
    "T-1": tensors_are_independent,
    "T-3": constant_stream_is_kept,
    "T-10": variance_is_at_the_limit,
    "T-11": sign_is_kept,
    "T-12": nothing_is_clipped,
}
