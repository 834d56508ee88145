"""Bounds by hand: no gradient exceeds them, some reach them, and where there is none one shows."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import list_optim_modules, list_optim_regularizers
from helpers import norm
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclip import Clipper, analyse
from fedclip.privacy import GUARANTEES
from fedclip.testing import apply

Array = np.ndarray[Any, np.dtype[Any]]
Spec = Any

SHAPES = {"enc.w": (3, 2), "enc.b": (2,), "head.w": (2, 2)}
SIZES = [6, 2, 4]
D = sum(SIZES)
WEIGHTS = {n: np.random.default_rng(5).normal(size=s) for n, s in SHAPES.items()}
SLACK = 1.0 + 1e-9
"""Slack for distances, which are stated in exact arithmetic."""
PLUGINS = {**list_optim_regularizers(), **list_optim_modules()}


def as_list(spec: Spec) -> list[Any]:
    """Return the specs of a pipeline that is one spec, or a list of them."""
    single = isinstance(spec, str) or (len(spec) == 2 and isinstance(spec[1], dict))
    return [spec] if single else list(spec)


def run(spec: Spec, inputs: Iterable[Array]) -> list[Array]:
    """Return the outputs of a fresh pipeline for some steps."""
    pairs = [(s, {}) if isinstance(s, str) else s for s in as_list(spec)]
    plugins = [PLUGINS[name].from_config(dict(config)) for name, config in pairs]
    outputs = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for x in inputs:
            parts = zip(SHAPES.items(), np.split(x, np.cumsum(SIZES)[:-1]), strict=True)
            values = NumpyVector({name: part.reshape(shape) for (name, shape), part in parts})
            for plugin in plugins:
                values = apply(plugin, values, NumpyVector(WEIGHTS))
            outputs.append(np.concatenate([np.ravel(v) for v in values.coefs.values()]))
    return outputs


def once(spec: Spec, x: Array) -> Array:
    """Return what a fresh pipeline makes of its first gradient."""
    return run(spec, [x])[0]


def starts(rng: np.random.Generator) -> list[Array]:
    """Return inputs of all kinds: random, of equal elements, of one element; short and long."""
    kinds = [rng.normal(size=D), np.sign(rng.normal(size=D)), np.ones(D), -np.ones(D)]
    kinds += [np.eye(D)[rng.integers(D)], rng.standard_cauchy(D)]
    # The first element of each tensor.
    kinds += [np.isin(np.arange(D), [0, 6, 8]).astype(float)]
    return [scale * kind for kind in kinds for scale in (1e-4, 0.3, 1.0, 30.0, 1e4)]


@dataclass(frozen=True)
class Bounded:
    """A pipeline that has a bound, which is worked out by hand."""

    spec: Spec
    bound: float
    # The share of the bound that the search has to reach.
    reach: float = 0.999
    # By how much it stretches distances; None: without limit.
    slope: float | None = 1.0


OWN = {"enc.*": 0.3, "head.w": 0.4}

BOUNDED = [
    Bounded(("norm-clip", {"max_norm": 0.5}), 0.5),
    Bounded(("norm-clip", {"max_norm": 0.5, "scope": "layer"}), 0.5 * 2**0.5),
    Bounded(("norm-clip", {"scope": OWN}), 0.5),
    Bounded(("norm-clip", {"max_norm": 0.5, "dims": -1}), 0.5 * (3 + 1 + 2) ** 0.5),
    Bounded(("norm-clip", {"max_norm": 0.5, "dims": 0, "ord": "inf"}), 0.5 * D**0.5, slope=3**0.5),
    Bounded(("norm-clip", {"max_norm": 0.5, "ord": 0.5}), 0.5, slope=None),
    Bounded(("norm-clip", {"max_norm": 0.5, "ord": "rms", "scope": "tensor"}), 0.5 * D**0.5),
    Bounded(
        ("norm-clip", {"max_norm": 0.5, "ord": "mad", "scope": "tensor"}),
        0.5 * sum(d**2 for d in SIZES) ** 0.5,
        slope=6**0.5,
    ),
    Bounded(("norm-clip", {"max_norm": 0.5, "min_norm": 0.1}), 0.5, slope=None),
    Bounded(("value-clip", {"scope": OWN}), (0.3**2 * 8 + 0.4**2 * 4) ** 0.5),
    Bounded(("normalize", {"norm": 0.5, "eps": 0.1}), 0.5, slope=5.0),
    Bounded(("standardize", {"eps": 1e-8}), (D - 3) ** 0.5, reach=0.99, slope=1e8),
    # Sequences: the least bound holds, and all of them do.
    Bounded(["norm-clip", ("value-clip", {"max_value": 0.1})], 0.1 * D**0.5),
    Bounded([("normalize", {"norm": 3.0}), "norm-clip"], 1.0, slope=None),
    Bounded(["norm-clip", "centralize"], 1.0 + 2.0**-8, reach=0.9),
    # declearn's own pass NaN on.
    Bounded(("l2-clipping", {"max_norm": 0.5}), 0.5 * 3**0.5),
    Bounded(("l2-global-clipping", {"max_norm": 0.5}), 0.5),
]


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: str(row.spec))
@pytest.mark.slow
def test_no_output_is_longer_than_its_bound(row: Bounded) -> None:
    found = analyse(as_list(row.spec), SHAPES, finite="l2" in str(row.spec))
    assert found.l2_bound == pytest.approx(row.bound, rel=5e-3)
    assert found.per_record_safe
    reached = max(norm(once(row.spec, x)) for x in starts(np.random.default_rng(0)))
    assert row.reach * row.bound <= reached <= found.l2_bound


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r in BOUNDED if r.slope], ids=lambda row: str(row.spec))
def test_no_two_inputs_are_stretched_apart_beyond_the_slope(row: Bounded) -> None:
    found = analyse(as_list(row.spec), SHAPES, finite="l2" in str(row.spec))
    assert found.lipschitz == pytest.approx(row.slope, rel=1e-9)
    assert found.non_expansive == (row.slope <= 1.0)
    rng = np.random.default_rng(8)
    points = [x for x in starts(rng) if norm(x) < 100]
    for x in points:
        y = points[rng.integers(len(points))] + 1e-6 * rng.normal(size=D)
        apart = norm(once(row.spec, x) - once(row.spec, y))
        assert apart <= row.slope * norm(x - y) * SLACK + 1e-12


def test_only_the_diameter_bounds_an_aggregate_that_is_normalised() -> None:
    found = analyse("normalize", SHAPES)
    assert found.sensitivity("add-remove", "aggregate", 1e-6) == 2.0
    # Whatever it stretches, two inputs that are the same stay so.
    assert found.sensitivity("add-remove", "aggregate", 0.0) == 0.0
    x = 1e-7 * np.ones(D)
    # A sensitivity of 2e-6 has become one of 2.
    assert 2.0 * (1 - 1e-5) <= norm(once("normalize", x) - once("normalize", -x)) <= 2.0


UNBOUNDED = [
    "no-op",
    "centralize",
    "percentile-clip",
    ("standardize", {"scope": ["enc.b", "enc.*"], "exclude": "head.*"}),
    ("norm-clip", {"ord": "std"}),
    ("norm-clip", {"max_norm": None, "min_norm": 1.0}),
    ("norm-clip", {"exclude": "head.*"}),
    ("norm-clip", {"dims": 1}),
    ("value-clip", {"exclude": "enc.b"}),
    ("agc", {"exclude": "head.*"}),
    ("zscore-clip", {"max_norm": None}),
    ("ema-clip", {"ratio": 2.0, "decay": 0.5}),
    "growth-clip",
    "ema-norm-clip",
    "momentum",
]


@pytest.mark.parametrize("spec", UNBOUNDED, ids=str)
@pytest.mark.slow
def test_what_has_no_bound_has_a_reason_and_a_counter_example(spec: Spec) -> None:
    found = analyse(as_list(spec), SHAPES)
    assert found.l2_bound is found.sensitivity("add-remove") is None
    assert found.sensitivity("replace-one", "aggregate") is None
    finite = analyse(as_list(spec), SHAPES, finite=True)
    assert found.reasons
    assert finite.reasons
    assert finite.l2_bound is None
    noise = np.random.default_rng(0).normal(size=D)
    streams = [[1e9 * (1.0 + share * noise)] * 400 for share in (1e-3, 1e-6)]
    assert max(norm(y) for stream in streams for y in run(spec, stream)) > 1e5


# The last one wraps an optimizer of torch, which has to be named.
KNOWN = {"l2-clipping", "l2-global-clipping", "gaussian-noise", "torch-optim"}
OTHERS = sorted({n for n, c in PLUGINS.items() if c.__module__.startswith("declearn.")} - KNOWN)


@pytest.mark.parametrize("name", OTHERS)
def test_of_declearns_other_plugins_no_bound_is_known(name: str) -> None:
    found = analyse(["norm-clip", name], SHAPES, finite=True)
    assert found.l2_bound is found.sensitivity("add-remove") is None
    assert not found.per_record_safe
    assert not found.non_expansive
    assert f"{name}: no bound is known of it" in found.reasons
    # A clipper that comes after it bounds what comes out.
    assert analyse([name, "norm-clip"], SHAPES).l2_bound == 1.0


@pytest.mark.parametrize(
    "spec", [("norm-clip", {"on_nonfinite": "propagate"}), "l2-global-clipping"], ids=str
)
def test_nan_has_no_bound_where_it_is_passed_on(spec: Spec) -> None:
    found = analyse(as_list(spec), SHAPES)
    assert found.l2_bound is None
    assert any("NaN" in reason for reason in found.reasons)
    assert not any("scope='tensor'" in reason for reason in found.reasons)
    (output,) = run(spec, [np.where(np.arange(D) == 3, np.nan, 1.0)])
    assert not np.isfinite(output).all()
    assert analyse(as_list(spec), SHAPES, finite=True).l2_bound is not None


def test_tensors_left_alone_keep_their_distances() -> None:
    gentle = {"norm": 0.1, "eps": 1.0}
    for config, slope in ((gentle, 0.1), ({**gentle, "exclude": "head.*"}, 1.0)):
        (found,) = analyse([("normalize", config)], SHAPES).guarantees
        assert found.lipschitz == pytest.approx(slope, rel=0.01)


def test_agc_lengthens_nothing() -> None:
    assert analyse(["norm-clip", "agc"], SHAPES).l2_bound == 1.0


def test_a_clip_of_declearn_by_tensor_has_a_counterpart() -> None:
    (reason,) = analyse(["l2-clipping"], SHAPES).reasons
    assert "use norm-clip with max_norm=1.0 and scope='tensor' for all gradients" in reason


def test_a_box_that_is_open_on_a_side_has_no_bound() -> None:
    for side, config in (("above", {"min_value": -1.0}), ("below", {"max_value": 1.0})):
        limits = {"min_value": -math.inf, "max_value": math.inf, **config}
        found = analyse([("value-clip", limits)], SHAPES)
        assert found.l2_bound is None
        assert f"there is no limit {side}" in found.reasons


def specs() -> st.SearchStrategy[Spec]:
    limit = st.floats(0.05, 5.0)
    scope = st.sampled_from(["global", "tensor", "layer", ["head.*"], {"enc.*": 0.3}])
    ords = st.sampled_from([0.5, 1, 1.5, 2, 3, 8, "inf", "rms", "mad", "std"])
    common = {"scope": scope, "ord": ords, "eps": st.sampled_from([0.0, 0.3])}

    def of(names: list[str], **config: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
        return st.tuples(st.sampled_from(names), st.fixed_dictionaries(config))

    return st.one_of(
        of(["norm-clip"], max_norm=limit, **common),
        of(["norm-clip"], max_norm=limit, dims=st.sampled_from([0, -1, [0, 1]])),
        of(["value-clip"], max_value=st.just(1.0), min_value=st.floats(-2, 0.5)),
        of(["normalize"], norm=limit, **common),
        of(["zscore-clip", "auto-clip", "growth-clip"], max_norm=limit, scope=st.just("tensor")),
        of(["momentum", "ewma"], beta=st.sampled_from([0.0, 0.5, 0.9])),
        of(["l2-clipping", "l2-global-clipping"], max_norm=st.just(0.7)),
        of(["centralize", "percentile-clip", "ema-norm-clip", "adam", "no-op"]),
        of(["standardize"], eps=st.just(0.5)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=4), st.integers(0, 2**20))
@pytest.mark.slow
def test_any_pipeline_keeps_what_is_said_of_it(pipeline: list[Spec], seed: int) -> None:
    found = analyse(pipeline, SHAPES)
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=D) ** 3
    first = [s * (direction + 0.1 * rng.normal(size=D)) for s in rng.lognormal(0, 2, 12)]
    second = [x + 1e-3 * rng.normal(size=D) for x in first]
    outputs = [run(pipeline, stream) for stream in (first, second)]
    if found.l2_bound is not None:
        assert max(norm(y) for stream in outputs for y in stream) <= found.l2_bound
    came_in = max(norm(x - y) for x, y in zip(first, second, strict=True))
    went_out = max(norm(x - y) for x, y in zip(*outputs, strict=True))
    limit = found.sensitivity("replace-one", "aggregate", came_in)
    if limit is not None:
        assert went_out <= limit * SLACK + 1e-12


def test_every_plugin_says_what_it_guarantees() -> None:
    # Other tests register plug-ins of their own, and frameworks bring some.
    found = {name: cls for name, cls in PLUGINS.items() if cls.__module__.startswith("fedclip.")}
    assert len(found) > 20
    for name, cls in found.items():
        stated = getattr(cls, "guarantee", Clipper.guarantee) is not Clipper.guarantee
        assert stated or name in GUARANTEES, name
