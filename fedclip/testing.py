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
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
from declearn.model.api import Vector
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from numpy.typing import NDArray

from fedclip.arrays import backend_of
from fedclip.arrays.blocks import decode
from fedclip.errors import FEDERATIONS, FedclipWarning, Unchecked, needing, public_names
from fedclip.privacy import Context
from fedclip.privacy import guarantees as kinds
from fedclip.privacy.guarantees import Plugin
from fedclip.privacy.sensitivity import look_up

with needing(__name__, f"{FEDERATIONS}: pip install '{FEDERATIONS}'"):
    from declearn.utils import serialize

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

# For each framework, the module of `declearn.model` (called as the package) and the Vector in it,
# and the module and function that make arrays.
_VECTORS = {
    "numpy": ("sklearn", "NumpyVector", "numpy", "array"),
    "torch": ("torch", "TorchVector", "torch", "tensor"),
    "tensorflow": ("tensorflow", "TensorflowVector", "tensorflow", "cast"),
    # Importing this one turns on float64 for all of JAX, as for every user of declearn.
    "jax": ("haiku", "JaxNumpyVector", "jax.numpy", "asarray"),
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
    return [name for name, (package, *_) in _VECTORS.items() if find_spec(package)]


def to_vector(arrays: Arrays, framework: str = "numpy", dtype: str | None = None) -> Gradient:
    """Return a declearn Vector of the framework, in the arrays' own dtypes or in `dtype`.

    All frameworks but NumPy have "bfloat16".
    """
    module, name, package, function = _VECTORS[framework]
    # Import on demand: each of these imports its framework.
    cls: type[Gradient] = getattr(import_module(f"declearn.model.{module}"), name)
    xp = import_module(package)
    make, hosts = getattr(xp, function), {k: np.asarray(v) for k, v in arrays.items()}
    return cls({k: make(v, dtype=getattr(xp, dtype or str(v.dtype))) for k, v in hosts.items()})


def to_numpy(gradients: Gradient) -> dict[str, Host]:
    """Return the values of a Vector as NumPy arrays; bfloat16 as float32."""
    return {name: _to_numpy(value) for name, value in gradients.coefs.items()}


def _to_numpy(value: Unchecked) -> Host:
    backend = backend_of(value)
    if backend.dtype(value) != "bfloat16":
        return np.asarray(value)
    return decode(backend.to_host(value)).reshape(value.shape)


def gradient_stream(steps: int = 20, seed: int = 0) -> list[dict[str, Host]]:
    """Return float64 gradients of norm about 1.6, with a spike of 16 at every sixth step."""
    rng = np.random.default_rng(seed)
    return [_drawn(rng, 1.5 if step % 6 == 5 else 0.15) for step in range(steps)]


def _drawn(rng: np.random.Generator, std: float) -> dict[str, Host]:
    """Return normal numbers, one array for each of `SHAPES`."""
    return {name: np.asarray(rng.normal(0, std, shape)) for name, shape in SHAPES.items()}


def apply(clipper: Plugin, gradients: Gradient, weights: Gradient | None = None) -> Any:
    """Return the output of the clipper; only regularizers use the weights."""
    if isinstance(clipper, Regularizer):
        return clipper.run(gradients, gradients if weights is None else weights)
    return clipper.run(gradients)


def _applied(
    clipper: Plugin, steps: Iterable[Arrays], framework: str = "numpy", dtype: str | None = None
) -> Iterator[tuple[Gradient, Any]]:
    """Yield the gradient of each step, and the output of the clipper."""
    weights = to_vector(_drawn(np.random.default_rng(12345), 1.0), framework, dtype)
    for arrays in steps:
        gradients = to_vector(arrays, framework, dtype)
        yield gradients, apply(clipper, gradients, weights)


def _run(clipper: Plugin, steps: Iterable[Arrays], framework: str = "numpy") -> list[Arrays]:
    return [to_numpy(output) for _, output in _applied(clipper, steps, framework)]


def differences(gradients: Gradient, output: Gradient) -> Iterator[tuple[str, str]]:
    """Yield what an output must share with its gradient and does not, and what was seen."""
    if type(output) is not type(gradients) or list(output.coefs) != list(gradients.coefs):
        yield "same names", f"the output has other names, or is of another kind: {output!r:.100}"
        return
    for name, before in gradients.coefs.items():
        after = output.coefs[name]
        shapes = [tuple(map(int, value.shape)) for value in (after, before)]
        for what, (seen, expected) in (("dtype", (after.dtype, before.dtype)), ("shape", shapes)):
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
    checks = [check_config_round_trip, check_identity, check_nonfinite]
    if hasattr(factory(), "guarantee"):
        checks += [check_guarantee]
    if hasattr(factory(), "get_state"):
        checks += [check_state_round_trip, check_resume, check_state_refusals, check_state_size]
    for check in checks:
        check(factory)
    for framework in installed() if frameworks is None else frameworks:
        check_dtype_and_shape(factory, framework)
        check_equivalence(factory, framework)


def check_config_round_trip(factory: Factory) -> None:
    """Check that the configuration survives JSON and msgpack, and makes the same clipper.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_config_round_trip(lambda: ZScoreClip(z_max=3.0, scope="tensor"))
    """
    clipper, config = factory(), factory().get_config()
    base: Any = Regularizer if isinstance(clipper, Regularizer) else OptiModule
    for what, copy in _serialised(config):
        assert _same(copy, config), f"the configuration is not the same after {what}: {copy!r}"
        again = base.from_specs(clipper.name, copy)
        made = again.get_config()
        assert _same(made, config), f"get_config() changes from {config!r} to {made!r}"
        steps = gradient_stream(8)
        _assert_close(_run(again, steps), _run(factory(), steps), "a clipper made of get_config()")


def check_identity(factory: Factory) -> None:
    """Check that unclipped gradients come back as the same object, and inputs never change.

    Examples
    --------
    >>> from fedclip import NoOp
    >>> check_identity(NoOp)
    """
    steps = [*gradient_stream(12), {name: np.zeros(shape) for name, shape in SHAPES.items()}]
    for before, (gradients, output) in zip(steps, _applied(factory(), steps), strict=True):
        for name, value in gradients.coefs.items():
            assert np.array_equal(value, before[name]), f"the input {name!r} was changed in place"
        for _, seen in differences(gradients, output):
            raise AssertionError(seen)
        same = {n: np.array_equal(value, before[n]) for n, value in output.coefs.items()}
        changed = output is gradients or not all(same.values())
        assert changed, "an unchanged gradient must be the same object"
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
    clipper = factory()
    guarantee = look_up(clipper, Context(SHAPES))
    unknown = f"{clipper.name} does not say what it guarantees: see fedclip.privacy.guarantees"
    assert guarantee != kinds.unknown(clipper, Context()), unknown
    steps = [{k: s * v for k, v in g.items()} for g in gradient_stream(20) for s in (1.0, 1e3)]
    for _, output in _applied(clipper, steps):
        length = math.hypot(*(float(np.linalg.norm(value)) for value in output.coefs.values()))
        text = f"the norm {length!r} is above the bound that guarantee states, {guarantee.bound!r}"
        assert length <= guarantee.bound, text


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
        for gradients, output in _applied(factory(), gradient_stream(7), framework, dtype):
            for _, seen in differences(gradients, output):
                raise AssertionError(seen)
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
        _assert_close(_run(clipper, steps[:3]), _run(undisturbed, steps[:3]), "a fresh clipper")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            try:
                (output,) = _run(clipper, [bad])
            except ValueError:
                output = None
        wrong = f"a step with {value} must become zero, stay non-finite, or raise"
        if output is not None and all(np.isfinite(array).all() for array in output.values()):
            assert not any(array.any() for array in output.values()), wrong
        later, expected = _run(clipper, steps[4:]), _run(undisturbed, steps[4:])
        _assert_close(later, expected, f"the steps after one of {value}")


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
        expected = _run(factory(), steps)
        _assert_close(_run(factory(), steps, framework), expected, framework, tolerance)
        half, mixed = factory(), factory()
        if not hasattr(mixed, "get_state"):
            continue
        _run(half, steps[:7], framework)
        mixed.set_state(half.get_state())
        _assert_close(_run(mixed, steps[7:]), expected[7:], f"a state from {framework}", tolerance)


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
            after = again.get_state()
            assert _same(after, state), f"a clipper gives back another state: {after!r:.300}"


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
        resumed = factory()
        resumed.set_state(serialize.json_deserialize(serialize.json_serialize(clipper.get_state())))
        # Run to the end from every fourth step only, to save time.
        length = steps if step % 4 == 0 else step + 2
        got = _run(resumed, stream[step:length])
        _assert_close(got, expected[step:length], f"a run resumed at step {step}")
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
        except (KeyError, ValueError) as exc:
            words = str(exc).split()
        except Exception as exc:
            kind = type(exc).__name__
            raise AssertionError(f"{what}: raises {kind}, not KeyError or ValueError") from exc
        else:
            raise AssertionError(f"a state with {what} is taken over: {wrong!r:.300}")
        assert len(words) > 2, f"a state with {what} is refused without a word"
        assert _same(clipper.get_state(), state), f"a state with {what} is refused, but half kept"


def check_state_size(factory: Factory) -> None:
    """Check that the state does not grow with the number of steps.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> check_state_size(ZScoreClip)
    """
    clipper, sizes = factory(), list[int]()
    # Long enough for warm-ups and windows to fill.
    for _ in range(2):
        _run(clipper, gradient_stream(144))
        sizes.append(_count(clipper.get_state()))
    assert sizes[1] <= sizes[0], f"the state grew from {sizes[0]} to {sizes[1]} values"


def _wrong_states(state: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Yield states that are wrong in one place each, and say where."""
    others: tuple[object, ...] = (None, 1, "state", [], b"", np.zeros(2), {})
    yield from ((f"the type {type(value).__name__}", value) for value in others)
    for path, value in _values(state):
        where = "/".join(map(str, path))
        yield f"{where!r} missing", _changed(state, path)
        wrong: list[object] = [object(), {"a": 1}, "text" if path[0] != "clipper" else "other"]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            wrong += [float("nan"), float("inf"), True, "1", [1, 2]]
            if path[-1] in ("count", "round", "steps"):
                wrong += [-1, 1.5]
        elif isinstance(value, list) and value and isinstance(value[0], float):
            wrong += [[float("nan"), *value[1:]], ["1", *value[1:]], [*value, 1.0], 1.0]
        elif isinstance(value, np.ndarray):
            wrong += [value * np.nan, value.astype("O"), value.tolist()]
        for other in wrong:
            yield f"{other!r} for {where!r}", _changed(state, path, other)


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
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    parent.update((path[-1], value) for value in replacement)
    return copy


def _serialised(value: object) -> list[tuple[str, Unchecked]]:
    return [
        ("JSON", serialize.json_deserialize(serialize.json_serialize(value))),
        ("msgpack", serialize.msgpack_deserialize(serialize.msgpack_serialize(value))),
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


def _assert_close(
    got: Sequence[Arrays], wanted: Sequence[Arrays], what: str, tolerance: float = 0.0
) -> None:
    for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for name in b:
            difference = np.abs(a[name].astype(float) - b[name].astype(float)).max(initial=0.0)
            largest = np.abs(b[name]).max(initial=0.0)
            text = f"{what}: {name!r} is off by {difference:.3g} of {largest:.3g} in step {step}"
            assert difference <= tolerance * max(largest, 1e-30), text
