# SPDX-License-Identifier: Apache-2.0
"""Recorded numbers of other packages are ours, or defects: docs/developers/peers-tests.md."""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import require

from fedclip import FedclipWarning, translate
from fedclip.testing import apply, to_numpy, to_vector

FOLDER = Path(__file__).parents[1] / "golden"
ALL: list[dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())["files"]
# The source archive leaves the recorded numbers out.
INDEX = [record for record in ALL if (FOLDER / f"{record['peer']}.npz").exists()]
# The one without gradients holds counts and bounds: see test_adaptive_bound.
GRADIENTS = [r for r in INDEX if r["kinds"]]
BOUNDS = [r for r in INDEX if not r["kinds"]]
STEPS = 40

with np.load(FOLDER / "inputs.npz") as _inputs:
    GRADS = {key[2:]: _inputs[key] for key in _inputs if key.startswith("g/")}
    WEIGHTS = {key[2:]: _inputs[key] for key in _inputs if key.startswith("w/")}


def arrays_of(record: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a record of the index, by name."""
    prefix = record["file"].removesuffix(".npz") + "/"
    with np.load(FOLDER / f"{record['peer']}.npz") as archive:
        return {key.removeprefix(prefix): archive[key] for key in archive if key.startswith(prefix)}


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


def translated(peer: str, cls: str, first: int | None = None, **config: Any) -> Any:
    kind, name, ours = translate.translate(peer, cls, config)
    if first is not None and "warmup" in ours:
        # The peer's gate counts observations over all groups, ours counts calls.
        ours["warmup"] = first + 1
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, ours)


def build(record: dict[str, Any]) -> Any:
    first = record.get("first_clip_step")
    return translated(record["peer"], record["cls"], first, **record["config"])


def expected(record: dict[str, Any]) -> dict[str, np.ndarray]:
    data = arrays_of(record)
    return {
        name: data[f"scale/{name}"] * GRADS[name].astype(record["dtype"]).astype(float)
        if kind == "scale"
        else data[f"out/{name}"].astype(float)
        for name, kind in record["kinds"].items()
    }


def run(record: dict[str, Any]) -> dict[str, np.ndarray]:
    clipper, dtype = build(record), record["dtype"]
    weights = to_vector({n: WEIGHTS[n].astype(dtype) for n in record["kinds"]})
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in record["kinds"]}
    for t in range(STEPS):
        grads = to_vector({n: GRADS[n][t].astype(dtype) for n in record["kinds"]})
        for name, value in to_numpy(apply(clipper, grads, weights)).items():
            assert value.dtype == dtype
            assert value.shape == GRADS[name][t].shape
            outputs[name].append(value.astype(float))
    return {name: np.array(values) for name, values in outputs.items()}


@each(match=True)
def test_reproduced(record: dict[str, Any]) -> None:
    got, rtol = run(record), record["rtol"]
    for name, values in expected(record).items():
        # Where the reference fails on a tensor (the notes say so), ours must not.
        failed = np.isnan(values).all()
        assert np.isfinite(got[name]).all() or not failed
        wanted = got[name] if failed else values
        np.testing.assert_allclose(got[name], wanted, rtol=rtol, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("record", BOUNDS, ids=lambda record: record["file"])
def test_adaptive_bound(record: dict[str, Any]) -> None:
    clipper, data = build(record), arrays_of(record)
    bound = record["config"]["initial"]
    for count, after in zip(data["unclipped"], data["bound"], strict=True):
        for sample in range(record["config"]["sample_size"]):
            clipper.run(to_vector({"w": np.array([bound * (0.5 if sample < count else 2.0)])}))
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
    assert apart > 1e-3 or all(np.array_equal(wanted[n], GRADS[n]) for n in wanted)


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
    **{(name, "huge"): UNIT for name in OPERATIONS if re.search("[Nn]orm|L2", name)},
    ("drytorch.GradZScoreNormalizer", "huge"): {"a": [-HALF, HALF], "b": [0.0]},
    ("optax.clip_by_block_rms(1)", "huge"): {"a": [0.6 * 2**0.5, 0.8 * 2**0.5], "b": [0.0]},
    ("optax.adaptive_grad_clip(.1) w=1", "huge"): {"a": [0.06 * 2**0.5, 0.08 * 2**0.5], "b": [0.0]},
    ("optax.adaptive_grad_clip(.1) w=0", "huge"): {"a": [6e-5, 8e-5], "b": [0.0]},
    # Norms of 1e-12 and less are not taken for 1, and a zero gradient has no direction.
    ("torchzero.Normalize(1) per tensor", "tiny"): UNIT,
    ("torchzero.Normalize(1,global)", "tiny"): UNIT,
    ("torchzero.Normalize(1,global)", "zero"): {"a": [0.0, 0.0], "b": [0.0]},
}


def array_of(row: Any) -> np.ndarray:
    return np.array([float(x) for x in row["v"]]).reshape(row["shape"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_finite_input(operation: str) -> None:
    peer, cls = re.split(r"[(. ]", operation.replace("tf.", "tensorflow."))[:2]
    whole = {"dim": "global"} if "global)" in operation else {}
    config = {**PARAMETERS.get(f"{peer}.{cls}", {}), **whole}
    for name in CASES["inputs"].keys() - {"nan", "inf", "nodict"}:
        given = {key: array_of(row) for key, row in CASES["inputs"][name].items()}
        weights = {k: np.full(v.shape, float("w=0" not in operation)) for k, v in given.items()}
        clipper = translated(peer, cls, **config)
        out = apply(clipper, to_vector(given), to_vector(weights)).coefs
        for (key, value), row in zip(given.items(), CASES["results"][operation][name], strict=True):
            wanted = array_of(row)
            if (operation, name) in OURS:
                wanted = np.array(OURS[operation, name][key]).reshape(value.shape)
            elif operation == "drytorch.GradZScoreNormalizer" and value.size == 1:
                # The deviation of one element is unknown: it is left alone; the peer has NaN.
                assert np.isnan(wanted).all()
                wanted = value
            np.testing.assert_allclose(out[key], wanted, rtol=1e-9, atol=1e-300, err_msg=name)
            assert out[key].shape == value.shape


# -- live -----------------------------------------------------------------------------------------
LIVE: dict[tuple[str, str], dict[str, Any]] = {
    ("drytorch", "NoOp"): {},
    ("drytorch", "ZStatCriterion"): {"alpha": 0.9, "z_thresh": 1.5},
    ("drytorch", "EMACriterion"): {"alpha": 0.8, "r_thresh": 1.2},
    ("torchzero", "clip_grad_value_"): {"value": 0.5},
    ("torchzero", "normalize_grads_"): {"norm_value": 0.7, "ord": 1, "dim": 0, "min_size": 2},
}


def compare(theirs: Callable[[Any], Any], ours: Callable[[Any], Mapping[str, Any]]) -> None:
    """Compare the gradients of parameters after each step with what a clipper makes of them."""
    torch, rng = require("torch"), np.random.default_rng(0)
    for _ in range(30):
        step = {name: rng.lognormal(0, 1) * rng.normal(0, 1, (3, 2)) for name in "ab"}
        parameters = [torch.nn.Parameter(torch.tensor(value)) for value in step.values()]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        theirs(parameters)
        for parameter, value in zip(parameters, ours(step).values(), strict=True):
            np.testing.assert_allclose(value, parameter.grad.numpy(), rtol=1e-9)


@pytest.mark.parametrize(("peer", "cls"), LIVE)
def test_same_numbers(peer: str, cls: str) -> None:
    package = {"drytorch": "drytorch.lib.gradient_ops", "torchzero": "torchzero.modules"}[peer]
    ops, config = pytest.importorskip(package), LIVE[peer, cls]
    there = getattr(ops, cls)
    theirs = partial(there, **config) if cls.endswith("_") else there(**config)
    if cls.endswith("Criterion"):
        theirs = ops.HistClipper(theirs, ops.NoOp(), 0)
    compare(theirs, translated(peer, cls, **config).clip)


def test_every_class_is_here_or_recorded() -> None:
    recorded = {(record["peer"], record["cls"]) for record in ALL}
    for peer in ("drytorch", "smartclip", "torchzero"):
        assert {(peer, cls) for cls in translate.known()[peer]} <= recorded | set(LIVE)


@pytest.mark.parametrize("warmup", ["GradValueClipper", "GradParamNormalizer", "NoOp"])
def test_drytorch_warm_up_by_any_operation(warmup: str) -> None:
    # As docs/coming-from.md shows it.
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    measure, other = translated("drytorch", "NoOp"), translated("drytorch", warmup)
    learns = {"criterion": "EMACriterion(0.9, 1.2)", "warmup_clip_strategy": "NoOp()"}
    ours = translated("drytorch", "HistClipper", **learns, n_warmup_steps=4)

    def clip(step: Any) -> Any:
        if ours.statistics().get("ready"):
            return ours.clip(step)
        measure.clip(step)
        ours.observe(measure.last.norm)
        return other.clip(step)

    compare(ops.HistClipper(ops.EMACriterion(0.9, 1.2), getattr(ops, warmup)(), 4), clip)


def test_smartclip_keys_gates_and_state() -> None:
    gates = {"warmup_steps": 0, "min_history": 0, "scope": "per_param"}
    clip = translated("smartclip", "ZScoreClip", ema_decay=0.8, **gates)
    only = translated("smartclip", "ZScoreClip", **gates)
    assert only.statistics()["threshold"] == math.inf
    for norms in ({"a.w": 1.0}, {"b.w": 0.0}, {"b.w": 2.0}, {"a.w": 1.0}):
        clip.observe(norms)
    a, b = clip.statistics("a.w"), clip.statistics("b.w")
    assert a["threshold"] != b["threshold"]
    # Where there are several keys, no threshold stands for all: smartclip answers eps.
    assert clip.statistics() == {}
    for _ in range(2):
        only.observe({"a.w": 1.0})
    assert only.statistics()["threshold"] == only.statistics("a.w")["threshold"] == 1.0
    again = translated("smartclip", "ZScoreClip", ema_decay=0.8, **gates)
    again.set_state(clip.get_state())
    assert (again.statistics("a.w"), again.statistics("b.w")) == (a, b)
    gated = translated("smartclip", "ZScoreClip", warmup_steps=2, min_history=2)
    with pytest.warns(FedclipWarning):
        gated.observe(math.nan)
    assert gated.statistics()["count"] == 0
    for ready in (False, True):
        gated.observe(1.0)
        assert gated.statistics()["ready"] is ready
