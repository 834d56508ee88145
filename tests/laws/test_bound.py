# SPDX-License-Identifier: Apache-2.0
"""The bound holds on hosts, on devices and in graphs; what is clipped is not far below."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from helpers import each_framework, needs, norm, pairwise, require
from hypothesis import given
from hypothesis import strategies as st

from fedclip import AdaptiveClip, NoOp, Normalize, NormClip, ValueClip
from fedclip.arrays import Repeated, backend_named, on_host
from fedclip.arrays.blocks import UNCERTAINTY, exact_norm, lanes
from fedclip.testing import FRAMEWORKS, apply, gradient_stream, to_numpy, to_vector
from fedclip.transforms import clip_on_device


@each_framework()
def test_no_element_above_the_bound(framework: str) -> None:
    # The limit itself is rounded to the dtype of the gradient.
    rounded = {"float16": float(np.float16(0.2)), "float32": float(np.float32(0.2)), "float64": 0.2}
    if framework != "numpy":
        rounded["bfloat16"] = rounded["float32"]
    for dtype, limit in rounded.items():
        clipper = ValueClip(0.2)
        for step in gradient_stream(14):
            out = to_numpy(apply(clipper, to_vector(step, framework, dtype)))
            assert max(np.abs(v).max(initial=0.0) for v in out.values()) <= limit


def test_float32_never_above_the_limit() -> None:
    # About half of all float32 clips exceed the limit where the factor is only rounded.
    rng = np.random.default_rng(0)
    for _ in range(500):
        arrays = {"w": rng.normal(size=rng.integers(1, 3000)).astype("float32")}
        if norm(arrays) > 0.5:
            assert 0.5 * (1 - 2e-6) <= norm(NormClip(0.5).run(to_vector(arrays)).coefs) <= 0.5


def test_norm_equal_to_the_limit_is_not_clipped() -> None:
    for dtype in ("float32", "float64"):
        vector = to_vector({"w": np.array([0.6, 0.8]), "b": np.array(0.0)}, dtype=dtype)
        clip = NormClip(max_norm=norm(vector.coefs))
        assert clip.run(vector) is vector
        assert clip.last.clipped == (False,)


def test_a_long_array_at_its_very_limit_is_not_clipped() -> None:
    """Its norm is measured again near the limit, as the fast one may be a little above."""
    for seed in range(10):
        array = np.random.default_rng(seed).standard_normal(100_003).astype("float32")
        vector = to_vector({"w": array}, dtype="float32")
        assert NormClip(exact_norm([array])).run(vector) is vector


# -- numbers that overflow or underflow when squared, and long arrays -----------------------------
MAGNITUDES = [
    ("torch", "float16", 300.0),
    ("numpy", "float16", 6e-5),
    ("tensorflow", "float16", 6e-8),
    ("torch", "bfloat16", 1e20),
    ("jax", "bfloat16", 1e-30),
    ("numpy", "float32", 1e20),
    ("tensorflow", "float32", 3e38),
    ("torch", "float32", 1e-30),
    ("jax", "float64", 1e20),
    ("numpy", "float64", 1e-28),
    ("torch", "float64", 1e200),
    # Squares underflow, and the array is long.
    ("numpy", "float32", 1e-30),
]


@pytest.mark.parametrize(("framework", "dtype", "magnitude"), MAGNITUDES)
def test_measured_norm(framework: str, dtype: str, magnitude: float) -> None:
    needs(framework)
    many = magnitude * np.random.default_rng(7).uniform(-1, 1, (50, 100))
    arrays = {"w": many, "b": many[0], "s": np.array(-magnitude), "e": np.zeros((0, 4))}
    vector, clip = to_vector(arrays, framework, dtype), NoOp()
    clip.run(vector)
    assert clip.last.norm_before[0] == pytest.approx(norm(to_numpy(vector)), rel=1e-6, abs=0)


# -- the ends of each dtype: products that become subnormal, and those that overflow ---------------
@each_framework()
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_no_output_that_becomes_subnormal_is_above_its_limit(framework: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for times in (0.3, 1.0, 3.7, 40.0, 900.0):
        limit = times * 2.0**-24
        for values in (np.full(size, 0.5), rng.uniform(0.1, 1.0, size)):
            output = NormClip(limit).run(to_vector({"w": values}, framework, "float16"))
            assert norm(to_numpy(output)) <= limit * (1 + 1e-12)


@each_framework()
@pytest.mark.parametrize("device", [False, True])
def test_the_ends_of_the_range_of_limits(framework: str, device: bool) -> None:
    for limit, value in ((1e-30, 1e4), (1e-30, 1e38), (1e30, 1e38), (1e-30, 1e-36)):
        arrays = {"w": np.full(5, value, np.float32), "x": np.full(5, value)}
        clip = NormClip(limit, ord="rms")
        host = to_numpy(clip.run(to_vector(arrays, framework)))
        output = on_device(clip, arrays, framework) if device else host
        # A factor below 2^-126 gives zeros.
        assert np.isfinite(output["w"]).all()
        found = norm(output) / 10**0.5
        assert found <= limit
        assert found > 0.99 * min(limit, value) or value / limit > 1e37


def test_a_learnt_limit_below_the_range_gives_zeros() -> None:
    for limit, zero in ((1e-29, False), (0.9e-30, True)):
        clip = AdaptiveClip(start_norm=1.0)
        clip.clip({"w": np.ones(3)})
        clip.set_statistics(limit=limit)
        assert clip.clip({"w": np.ones(3)})["w"].any() != zero


def on_device(clip: Any, arrays: dict[str, Any], framework: str) -> dict[str, Any]:
    """Return what a step on a device makes of arrays of several dtypes."""
    coefs = to_vector(arrays, framework).coefs
    groups, xp = clip._resolve(coefs), backend_named(framework)
    outputs, _ = clip_on_device(clip.transform(groups), coefs, groups, xp, (), "skip")
    return {name: np.asarray(xp.to_host(output)) for name, output in outputs.items()}


@each_framework(oracle=False)
def test_subnormals_of_one_dtype_leave_no_more_to_the_others_of_a_group(framework: str) -> None:
    size = 1000
    for share in np.linspace(0.3, 0.7, 12):
        half = np.full(size, share / math.sqrt(size)).astype(np.float16)
        # Where products of `half` lie above the middle of two of its numbers, all are rounded up
        # together.
        arrays = {"h": half, "w": np.array([math.sqrt(1.0 - norm({"h": half}) ** 2)], np.float32)}
        assert norm(on_device(NormClip(1e-3), arrays, framework)) <= 1e-3


@given(st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=30), st.floats(1e-8, 1e3))
def test_half_precision_keeps_to_any_limit(values: list[float], limit: float) -> None:
    output = NormClip(limit).run(to_vector({"w": np.array(values)}, dtype="float16"))
    assert norm(to_numpy(output)) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("dims", [None, 0])
@pytest.mark.parametrize("ord", [2, "inf", "rms", "std"])
def test_what_is_scaled_up_stays_finite_and_keeps_its_direction(ord: Any, dims: Any) -> None:
    values = np.array([1.0, 2.0, -4.0])
    for clipper in (Normalize(1e6, ord=ord, dims=dims), NormClip(None, min_norm=1e6, ord=ord)):
        output = to_numpy(clipper.run(to_vector({"w": values}, dtype="float16")))["w"]
        np.testing.assert_allclose(output / output[0], values, rtol=2e-3)
        assert 6e4 < np.abs(output).max() <= 65504


# -- numbers of which sums lose most digits --------------------------------------------------------
LIMIT = 0.7
SIZES = [100, 511, 512, 1024, 5000, 16_384, 100_003]
# Half of the last digit of 1.
TIE = {"float32": 2.0**-24, "float64": 2.0**-53}


def long_norm(values: Any) -> float:
    # NumPy adds up in pairs, and mostly in 80 bits here.
    return float(np.sqrt(np.square(np.asarray(values, np.longdouble)).sum()))


def hard(size: int, dtype: str) -> Iterator[np.ndarray]:
    """Yield arrays of which many kinds of sums lose many digits, to one side."""
    for value in np.random.default_rng(size).uniform(0.5, 1, 12):
        yield np.full(size, value)
    for many in (1, 8, 32, 128):
        squares = np.full(size, TIE[dtype])
        squares[:many] = 1
        yield np.sqrt(squares)
    for width in (16, 32, 256, 1024):
        squares = np.full(size, TIE[dtype])
        squares[::width] = 1
        yield np.sqrt(squares)
        yield np.sqrt(fractal(size, width, TIE[dtype]))


def fractal(size: int, width: int, tie: float) -> np.ndarray:
    """Return squares of which a tree of sums of so many loses all but the first."""
    squares = np.zeros(size)
    squares[0], held = 1.0, 1
    while held < size:
        for start in range(held, min(size, held * width), held):
            squares[start : start + held] = tie / held
        held *= width
    return squares


def assert_bound(clip: Callable[[np.ndarray], Any], size: int, dtype: str) -> None:
    for values in hard(size, dtype):
        found = long_norm(np.asarray(clip(values.astype(dtype))))
        assert found <= LIMIT
        # And the limit is used up, but for the margin.
        assert found >= LIMIT * (1 - 1.5e-6)


@pairwise(framework=FRAMEWORKS, dtype=[*TIE], size=SIZES)
def test_on_the_host(framework: str, dtype: str, size: int) -> None:
    clipper = NormClip(LIMIT)
    assert_bound(lambda v: clipper.run(to_vector({"w": v}, framework)).coefs["w"], size, dtype)


@contextmanager
def compiled(framework: str, dtype: str, size: tuple[int, ...], **config: Any) -> Iterator[Any]:
    """Give the step of `norm-clip` on a device, in a graph where the framework has one."""
    module, xp, jit = require(framework), backend_named(framework), config.pop("jit", False)
    clipper = NormClip(LIMIT, **config)
    groups = clipper.groups({"w": size})
    transform = clipper.transform(groups)

    def step(array: Any) -> Any:
        return clip_on_device(transform, {"w": array}, groups, xp, (), "skip")[0]["w"]

    session: Any = nullcontext()
    if framework == "torch":
        make, graph = module.from_numpy, step
    elif framework == "tensorflow":
        make, graph = module.constant, module.function(step, jit_compile=jit)
    else:
        from fedclip.arrays.jax import float64

        # JAX has float64 only if it is needed, as in plain JAX.
        make, graph, session = module.numpy.asarray, module.jit(step), float64(dtype == "float64")
    with session:
        yield lambda values: np.asarray(graph(make(values)))


ON_DEVICES = [framework for framework in FRAMEWORKS if framework != "numpy"]


@pairwise(framework=ON_DEVICES, jit=[False, True], dtype=[*TIE], size=[100, 512, 16_384, 100_003])
def test_on_devices(framework: str, jit: bool, dtype: str, size: int) -> None:
    with compiled(framework, dtype, (size,), jit=jit) as step:
        assert_bound(step, size, dtype)


@pytest.mark.parametrize("dtype", TIE)
@pytest.mark.parametrize("where", ["rows", "columns", *ON_DEVICES])
def test_slices(where: str, dtype: str) -> None:
    dims = [int(where == "rows")]
    device = compiled(where, dtype, (10_000, 4), dims=dims)
    host = nullcontext(lambda table: NormClip(LIMIT, dims=dims).clip({"w": table})["w"])
    with device if where in ON_DEVICES else host as step:
        for values in hard(40_000, dtype):
            table = values.astype(dtype).reshape(4, 10_000)
            clipped = step(table) if dims[0] else step(table.T).T
            assert max(map(long_norm, clipped)) <= LIMIT


@pytest.mark.parametrize(
    ("wide", "found"), [(1, 1), (8, 8), (12, 8), (16, 16), (32, 32), (64, 64), (128, 64)]
)
def test_lanes_of_a_processor(wide: int, found: int) -> None:
    def dot(x: np.ndarray, y: np.ndarray) -> float:
        sums = np.zeros(wide, np.float32)
        for start in range(0, len(x), wide):
            part = x[start : start + wide] * y[start : start + wide]
            sums[: len(part)] += part
        return math.fsum(sums.tolist())

    assert lanes(dot) == found


@pytest.mark.parametrize("shape", [(1 << 23,), (1 << 12, 1 << 11), (2, 1 << 22)])
def test_long_arrays_of_jax_are_measured_as_well_as_short_ones(shape: tuple[int, ...]) -> None:
    needs("jax")
    import jax

    values = np.zeros(math.prod(shape), np.float32)
    # Each of these is added to the first one, and lost, where XLA adds up all at once.
    values[[2**k for k in range(23) if not 10 < k < 15]] = 2.0**-12
    values[[48, 192, 768, 3 << 19, 3 << 21]] = 2.0**-12
    values[0] = 1.0
    xp = backend_named("jax")
    measured = jax.jit(lambda array: xp.group_norms([array], [[0]]))
    found = float(measured(jax.numpy.asarray(values.reshape(shape)))[0])
    assert long_norm(values) * (1 - UNCERTAINTY) <= found <= long_norm(values) * (1 + 1e-7)


SLICED = [
    *(((64, 64), (0,)), ((256, 784), (0,)), ((5, 1000), (1,)), ((16, 300, 17), (1,))),
    *(((3, 172, 19, 49), (0, 1, 2)), ((100, 60, 17), (0, 2)), ((700_000, 3), (0,))),
]


@pytest.mark.parametrize(("shape", "axes"), SLICED)
def test_slices_of_jax_lose_no_more_digits_than_the_margin_covers(shape: Any, axes: Any) -> None:
    needs("jax")
    import jax

    xp, kept = backend_named("jax"), [a for a in range(len(shape)) if a not in axes]
    sizes = [shape[a] for a in (*axes, *kept)]
    measured = jax.jit(lambda array: xp.slice_norms([array], [axes], fast=True))
    for values in hard(math.prod(sizes[: len(axes)]), "float32"):
        table = np.repeat(values.astype(np.float32), math.prod(sizes[len(axes) :]))
        array = np.moveaxis(table.reshape(sizes), range(len(shape)), (*axes, *kept))
        found = np.asarray(measured(jax.numpy.asarray(np.array(array, order="C"))), np.float64)
        true = long_norm(values.astype(np.float32))
        # One rounding more: without x64, JAX gives them in float32.
        assert np.all(np.abs(found / true - 1) <= UNCERTAINTY + 2.0**-24)


def test_slices_of_jax_out_of_the_range_of_squares_are_measured_again() -> None:
    needs("jax")
    import jax

    xp = backend_named("jax")
    usual = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    tiny, huge, bad = usual * np.float32(1e-25), usual * np.float32(1e25), usual.copy()
    usual[:, 2], bad[5, 7] = 0.0, math.nan
    arrays = [usual, tiny, huge, bad, usual[:, :2]]
    measured = jax.jit(lambda *some: xp.slice_norms(some, [(0,)] * len(some), fast=True))
    wanted = [np.linalg.norm(array.astype(np.float64), axis=0) for array in arrays]
    np.testing.assert_allclose(measured(*arrays), np.concatenate(wanted), rtol=UNCERTAINTY)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_largest_number_of_each_group(framework: str) -> None:
    xp = backend_named(require(framework).__name__)
    numbers = xp.asarray([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
    for groups, times, wanted in (
        *(((0, 1, 2), (2, 4, 2), [3, 9, 6]), ((2, 0, 1), (4, 2, 2), [9, 6, 4])),
        *(((0, 1, 0), (3, 3, 2), [6, 9]), ((1, 0), (4, 4), [9, 4])),
    ):
        found = xp.group_max(numbers, Repeated(groups, times), len(wanted))
        assert on_host(found).tolist() == wanted
