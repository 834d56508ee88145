# SPDX-License-Identifier: Apache-2.0
"""Checks that every clipper of this package passes, for clippers that users write themselves.

Each check takes a factory: a class, or a function without arguments that returns a fresh clipper
(a declearn `OptiModule`, or a `Regularizer`, which also gets weights). It returns nothing, or
raises `AssertionError` with a sentence. The reference for all frameworks is NumPy in float64.

    from fedclip.testing import check_clipper

    def test_my_clipper():
        check_clipper(lambda: MyClip(max_norm=0.5))
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from operator import getitem
from typing import Any, TypeAlias

import numpy as np
from declearn.model.api import Vector
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from numpy.typing import NDArray

from fedclip.errors import FEDERATIONS, FedclipWarning, Unchecked, needing, public_names
from fedclip.privacy import Context
from fedclip.privacy import guarantees as kinds
from fedclip.privacy.guarantees import Plugin
from fedclip.privacy.sensitivity import look_up

with needing(__name__, f"{FEDERATIONS}: pip install '{FEDERATIONS}'"):
    from declearn.utils.serialize import (
        json_deserialize,
        json_serialize,
        msgpack_deserialize,
        msgpack_serialize,
    )

__all__ = [
    "FRAMEWORKS",
    "SHAPES",
    "apply",
    "check_clipper",
    "check_config_round_trip",
    "check_dtype_and_shape",
    "check_equivalence",
    "check_guarantee",
    "check_identity",
    "check_nonfinite",
    "check_resume",
    "check_state_refusals",
    "check_state_round_trip",
    "check_state_size",
    "gradient_stream",
    "installed",
    "to_numpy",
    "to_vector",
]

__dir__ = public_names(__name__)

Host: TypeAlias = NDArray[Any]
Arrays: TypeAlias = Mapping[str, Host]
Gradient: TypeAlias = Vector[Any]
Factory: TypeAlias = Callable[[], Plugin]

# The Vector of each framework, in the module of `declearn.model` that is called as the package.
_VECTORS = {
    "numpy": ("sklearn", "NumpyVector"),
    "torch": ("torch", "TorchVector"),
    "tensorflow": ("tensorflow", "TensorflowVector"),
    # Importing this one turns on float64 for all of JAX, as for every user of declearn.
    "jax": ("haiku", "JaxNumpyVector"),
}
FRAMEWORKS = tuple(_VECTORS)
"""Names of the frameworks."""

SHAPES: dict[str, tuple[int, ...]] = {
    "enc.weight": (7, 5),
    "enc.bias": (5,),
    "head.weight": (3, 3, 2, 4),
    "head.scale": (),
}
"""Names and shapes of the test gradients."""


# -- gradients of every framework -------------------------------------------------------------
def installed() -> list[str]:
    """Return the frameworks that are installed, NumPy first."""
    return [name for name, (package, _) in _VECTORS.items() if find_spec(package)]


@cache
def _vector_class(framework: str) -> type[Gradient]:
    module, name = _VECTORS[framework]
    # Import on demand: each of these imports its framework.
    cls: type[Gradient] = getattr(import_module(f"declearn.model.{module}"), name)
    return cls


def _array(value: object, framework: str, dtype: str | None) -> object:
    value = np.asarray(value)
    dtype = dtype or str(value.dtype)
    if framework == "torch":
        import torch

        return torch.tensor(value, dtype=getattr(torch, dtype))
    if framework == "tensorflow":
        import tensorflow as tf

        # TensorFlow makes no bfloat16 constant from float64 data: cast it.
        return tf.cast(tf.constant(value), dtype)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(value, dtype=dtype)
    return np.array(value, dtype=dtype)


def to_vector(arrays: Arrays, framework: str = "numpy", dtype: str | None = None) -> Gradient:
    """Return a declearn Vector of the framework, in the arrays' own dtypes or in `dtype`.

    All frameworks but NumPy have "bfloat16".
    """
    cls = _vector_class(framework)
    return cls({name: _array(value, framework, dtype) for name, value in arrays.items()})


def to_numpy(gradients: Gradient) -> dict[str, Host]:
    """Return the values of a Vector as NumPy arrays; bfloat16 as float32."""
    return {name: _as_numpy(value) for name, value in gradients.coefs.items()}


def _as_numpy(value: object) -> Host:
    if _dtype(value) != "bfloat16":
        return np.asarray(value)
    # torch cannot convert bfloat16 to NumPy; a 0-d tensor of TensorFlow needs `.numpy()`.
    for convert in ("float", "numpy"):
        if hasattr(value, convert):
            value = getattr(value, convert)()
    return np.asarray(value).astype(np.float32)


def _dtype(value: Unchecked) -> str:
    # "torch.float32", "float32", "<dtype: 'float32'>"
    return str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")


def gradient_stream(steps: int = 20, seed: int = 0) -> list[dict[str, Host]]:
    """Return float64 gradients of norm about 1.6, with a spike of 16 at every sixth step."""
    rng = np.random.default_rng(seed)
    return [
        {
            name: np.asarray(rng.normal(0, 1.5 if step % 6 == 5 else 0.15, shape))
            for name, shape in SHAPES.items()
        }
        for step in range(steps)
    ]


def _weights(framework: str, dtype: str | None = None) -> Gradient:
    rng = np.random.default_rng(12345)
    arrays = {name: np.asarray(rng.normal(0, 1, shape)) for name, shape in SHAPES.items()}
    return to_vector(arrays, framework, dtype)


def apply(clipper: Plugin, gradients: Gradient, weights: Gradient | None = None) -> Any:
    """Return the output of the clipper; only regularizers use the weights."""
    if isinstance(clipper, Regularizer):
        return clipper.run(gradients, gradients if weights is None else weights)
    return clipper.run(gradients)


def _run(
    clipper: Plugin, steps: Sequence[Arrays], framework: str = "numpy", dtype: str | None = None
) -> list[dict[str, Host]]:
    weights = _weights(framework, dtype)
    return [to_numpy(apply(clipper, to_vector(s, framework, dtype), weights)) for s in steps]


def differences(gradients: Gradient, output: Gradient) -> Iterator[tuple[str, str]]:
    """Yield what an output must share with its gradient and does not, and what was seen."""
    if type(output) is not type(gradients) or list(output.coefs) != list(gradients.coefs):
        yield "same names", f"the output has other names, or is of another kind: {output!r:.100}"
        return
    for name, before in gradients.coefs.items():
        after = output.coefs[name]
        for what, seen, expected in (
            ("dtype", after.dtype, before.dtype),
            ("shape", tuple(map(int, after.shape)), tuple(map(int, before.shape))),
        ):
            if seen != expected:
                yield f"same {what}", f"{name!r} came back with the {what} {seen}, not {expected}"


# -- checks -----------------------------------------------------------------------------------
def check_clipper(factory: Factory, frameworks: Sequence[str] | None = None) -> None:
    """Run all checks.

    Parameters
    ----------
    factory
        A class, or a function that returns a fresh clipper.
    frameworks
        Some of `FRAMEWORKS`; None for all that are installed.

    Raises
    ------
    AssertionError
        If the clipper fails one of the checks that fedclip's own clippers pass.

    Examples
    --------
    >>> from fedclip import NormClip
    >>> check_clipper(NormClip, frameworks=["numpy"])
    """
    chosen = installed() if frameworks is None else list(frameworks)
    check_config_round_trip(factory)
    check_identity(factory)
    check_nonfinite(factory)
    if hasattr(factory(), "guarantee"):
        check_guarantee(factory)
    if hasattr(factory(), "get_state"):
        check_state_round_trip(factory)
        check_resume(factory)
        check_state_refusals(factory)
        check_state_size(factory)
    for framework in chosen:
        check_dtype_and_shape(factory, framework)
        check_equivalence(factory, framework)


def check_config_round_trip(factory: Factory) -> None:
    """Check that the configuration survives JSON and msgpack, and makes the same clipper.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_config_round_trip(lambda: ZScoreClip(z_max=3.0, scope="tensor"))
    """
    clipper = factory()
    config = clipper.get_config()
    base: Any = Regularizer if isinstance(clipper, Regularizer) else OptiModule
    for what, copy in _serialised(config):
        assert _same(copy, config), f"the configuration is not the same after {what}: {copy!r}"
        again = base.from_specs(clipper.name, copy)
        assert _same(again.get_config(), config), (
            f"a clipper made of get_config() has {again.get_config()!r}, not {config!r}"
        )
        steps = gradient_stream(8)
        _assert_equal(_run(again, steps), _run(factory(), steps), "a clipper made of get_config()")


def check_identity(factory: Factory) -> None:
    """Check that unclipped gradients come back as the same object, and inputs never change.

    Examples
    --------
    >>> from fedclip import NoOp
    >>> check_identity(NoOp)
    """
    clipper, weights = factory(), _weights("numpy")
    zero = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for arrays in [*gradient_stream(12), zero]:
        gradients = to_vector(arrays)
        before = {name: value.copy() for name, value in gradients.coefs.items()}
        output = apply(clipper, gradients, weights)
        for name, value in gradients.coefs.items():
            assert np.array_equal(value, before[name]), f"the input {name!r} was changed in place"
        _assert_none(differences(gradients, output))
        same = {n: np.array_equal(value, before[n]) for n, value in output.coefs.items()}
        assert not all(same.values()) or output is gradients, (
            "an unchanged gradient must be the same object"
        )
        for name, value in output.coefs.items():
            shared = np.shares_memory(value, gradients.coefs[name])
            assert same[name] or not shared, f"the output {name!r} shares memory with the input"


def check_guarantee(factory: Factory) -> None:
    """Check that the clipper states a guarantee, and that no output exceeds its bound.

    Examples
    --------
    >>> from fedclip import NormClip
    >>> check_guarantee(NormClip)
    """
    clipper, weights = factory(), _weights("numpy")
    guarantee = look_up(clipper, Context(SHAPES))
    assert guarantee != kinds.unknown(clipper, Context()), (
        f"{clipper.name} does not say what it guarantees: write guarantee = kinds.… into its class "
        "(fedclip.privacy.guarantees)"
    )
    for arrays in gradient_stream(20):
        for scale in (1.0, 1e3):
            gradients = to_vector({name: scale * value for name, value in arrays.items()})
            output = apply(clipper, gradients, weights).coefs.values()
            length = math.hypot(*(float(np.linalg.norm(value)) for value in output))
            assert length <= guarantee.bound, (
                f"an output of norm {length!r} is above the bound that guarantee states, "
                f"{guarantee.bound!r}"
            )


def check_dtype_and_shape(factory: Factory, framework: str = "numpy") -> None:
    """Check that each tensor comes back in its own framework, dtype and shape.

    Examples
    --------
    >>> from fedclip import ValueClip
    >>> check_dtype_and_shape(lambda: ValueClip(0.1))
    """
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        if dtype == "bfloat16" and framework == "numpy":
            continue
        clipper, weights = factory(), _weights(framework, dtype)
        for arrays in gradient_stream(7):
            gradients = to_vector(arrays, framework, dtype)
            output = apply(clipper, gradients, weights)
            _assert_none(differences(gradients, output))
            for name, value in output.coefs.items():
                kind = type(gradients.coefs[name])
                assert isinstance(value, kind), f"{name!r} came back as {type(value).__name__}"


def check_nonfinite(factory: Factory) -> None:
    """Check the treatment of NaN and infinity.

    A gradient that holds one becomes zero, stays unchanged or raises. No statistic sees it: later
    steps give the same outputs as without it.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_nonfinite(lambda: ZScoreClip(warmup=2))
    """
    steps = gradient_stream(8)
    for value in (np.nan, np.inf, -np.inf):
        bad = {name: array.copy() for name, array in steps[3].items()}
        bad["enc.bias"][2] = value
        clipper, undisturbed = factory(), factory()
        _assert_equal(_run(clipper, steps[:3]), _run(undisturbed, steps[:3]), "a fresh clipper")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            try:
                (output,) = _run(clipper, [bad])
            except ValueError:
                output = None
        if output is not None and all(np.isfinite(array).all() for array in output.values()):
            assert not any(array.any() for array in output.values()), (
                f"a step with {value} must become zero, stay non-finite, or raise"
            )
        _assert_equal(
            _run(clipper, steps[4:]),
            _run(undisturbed, steps[4:]),
            f"the steps after one of {value}",
        )


def check_equivalence(factory: Factory, framework: str) -> None:
    """Check outputs against those of NumPy, and that a state moves between the frameworks.

    The tolerance, relative to the largest element, is 1e-9 in float64 and 1e-5 in float32.

    Examples
    --------
    >>> from fedclip import NormClip
    >>> check_equivalence(NormClip, "numpy")
    """
    for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-5)):
        # Round first, so that both frameworks see the same numbers.
        steps = [{k: v.astype(dtype) for k, v in s.items()} for s in gradient_stream(14)]
        oracle, other, mixed = factory(), factory(), factory()
        expected = _run(oracle, steps)
        _assert_close(_run(other, steps, framework), expected, tolerance, framework)
        if not hasattr(mixed, "get_state"):
            continue
        half = factory()
        _run(half, steps[:7], framework)
        mixed.set_state(half.get_state())
        _assert_close(_run(mixed, steps[7:]), expected[7:], tolerance, f"a state from {framework}")


def check_state_round_trip(factory: Factory) -> None:
    """Check that the state survives JSON and msgpack, before the first step and after some.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_state_round_trip(ZScoreClip)
    """
    for count in (0, 1, 9):
        clipper = factory()
        _run(clipper, gradient_stream(count))
        state = clipper.get_state()
        for what, copy in _serialised(state):
            assert _same(copy, state), f"the state is not the same after {what}: {copy!r:.300}"
            again = factory()
            again.set_state(copy)
            assert _same(again.get_state(), state), (
                f"a clipper that took over a state gives back another: {again.get_state()!r:.300}"
            )


def check_resume(factory: Factory, steps: int = 14) -> None:
    """Check that saving and resuming at any step gives the same outputs, bit for bit.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_resume(lambda: ZScoreClip(warmup=4))
    """
    stream = gradient_stream(steps)
    expected = _run(factory(), stream)
    clipper = factory()
    for step in range(steps):
        state = json_deserialize(json_serialize(clipper.get_state()))
        resumed = factory()
        resumed.set_state(state)
        # Run to the end from every fourth step only, to save time.
        length = steps if step % 4 == 0 else step + 2
        got = _run(resumed, stream[step:length])
        _assert_equal(got, expected[step:length], f"a run resumed at step {step}")
        _run(clipper, stream[step : step + 1])


def check_state_refusals(factory: Factory) -> None:
    """Check that the clipper refuses invalid states with a message, and keeps its old state.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_state_refusals(ZScoreClip)
    """
    clipper = factory()
    _run(clipper, gradient_stream(9))
    state = clipper.get_state()
    for what, wrong in _wrong_states(state):
        try:
            clipper.set_state(wrong)
        except Exception as caught:
            error = caught
        else:
            raise AssertionError(f"a state with {what} is taken over: {wrong!r:.300}")
        assert isinstance(error, (KeyError, ValueError)), (
            f"a state with {what} raises {type(error).__name__}, not KeyError or ValueError"
        )
        assert len(str(error).split()) > 2, f"a state with {what} is refused without a word"
        assert _same(clipper.get_state(), state), f"a state with {what} is refused, but half kept"


def check_state_size(factory: Factory) -> None:
    """Check that the state does not grow with the number of steps.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_state_size(ZScoreClip)
    """
    clipper = factory()
    stream = gradient_stream(24)
    # Long enough for warm-ups and windows to fill.
    for _ in range(6):
        _run(clipper, stream)
    before = _count(clipper.get_state())
    for _ in range(6):
        _run(clipper, stream)
    after = _count(clipper.get_state())
    assert after <= before, f"the state grew from {before} to {after} values in 144 steps"


def _wrong_states(state: dict[str, object]) -> list[tuple[str, object]]:
    """Return states that are wrong in one place each, and say where."""
    hostile: list[object] = [None, 1, "state", [], b"", np.zeros(2), {}]
    wrong = [(f"the type {type(value).__name__}", value) for value in hostile]
    for path, value in _values(state):
        where = "/".join(map(str, path))
        wrong.append((f"{where!r} missing", _changed(state, path)))
        replacements: list[object] = [
            object(),
            {"a": 1},
            "text" if path[0] != "clipper" else "other",
        ]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            replacements += [float("nan"), float("inf"), True, "1", [1, 2]]
            if path[-1] in ("count", "round", "steps"):
                replacements += [-1, 1.5]
        elif isinstance(value, list) and value and isinstance(value[0], float):
            replacements += [[float("nan"), *value[1:]], ["1", *value[1:]], [*value, 1.0], 1.0]
        elif isinstance(value, np.ndarray):
            replacements += [value * np.nan, value.astype("O"), value.tolist()]
        for replacement in replacements:
            wrong.append((f"{replacement!r} for {where!r}", _changed(state, path, replacement)))
    return wrong


def _values(
    state: dict[str, object], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values in nested dicts, and the path to each; lists count as values."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _values(value, (*path, key))
        else:
            yield (*path, key), value


def _changed(state: Unchecked, path: tuple[str, ...], *replacement: object) -> Unchecked:
    """Return a copy with another value at the path, or with none."""
    copy = deepcopy(state)
    parent = reduce(getitem, path[:-1], copy)
    if replacement:
        (parent[path[-1]],) = replacement
    else:
        del parent[path[-1]]
    return copy


def _serialised(value: object) -> list[tuple[str, Unchecked]]:
    return [
        ("JSON", json_deserialize(json_serialize(value))),
        ("msgpack", msgpack_deserialize(msgpack_serialize(value))),
    ]


def _same(a: object, b: object) -> bool:
    """Return whether two nested values are equal; a list equals a tuple."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _count(value: object) -> int:
    """Return the number of values, without the records of rounds."""
    if isinstance(value, dict):
        return sum(_count(v) for key, v in value.items() if key != "rounds")
    if isinstance(value, (list, tuple)):
        return sum(_count(v) for v in value)
    return int(value.size) if isinstance(value, np.ndarray) else 1


def _assert_none(broken: Iterable[tuple[str, str]]) -> None:
    for _, seen in broken:
        raise AssertionError(seen)


def _assert_equal(got: Sequence[Arrays], wanted: Sequence[Arrays], what: str) -> None:
    for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for name in b:
            assert np.array_equal(a[name], b[name]), f"{what}: {name!r} differs in step {step}"


def _assert_close(
    got: Sequence[Arrays], wanted: Sequence[Arrays], tolerance: float, what: str
) -> None:
    for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for name in b:
            difference = np.abs(a[name].astype(float) - b[name].astype(float)).max(initial=0.0)
            largest = np.abs(b[name]).max(initial=0.0)
            assert difference <= tolerance * max(largest, 1e-30), (
                f"{what}: {name!r} is off by {difference:.3g} in step {step}; its largest value is "
                f"{largest:.3g}"
            )
