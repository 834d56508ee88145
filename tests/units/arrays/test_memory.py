# SPDX-License-Identifier: Apache-2.0
"""The memory that outputs are written to is used again, and never while somebody holds it."""

import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import BACKENDS, each_framework, needs, require

from fedclip import Centralize, NormClip, ValueClip
from fedclip.arrays import Memory, memory
from fedclip.testing import to_vector

SHAPES: dict[str, tuple[int, ...]] = {"wide": (300, 400), "middle": (130, 140)}
SHAPES |= {"also": (140, 130), "small": (7,), "one": ()}


@pytest.fixture(autouse=True, scope="module")
def small_gradients_too() -> Iterator[None]:
    """Keep the memory of small gradients too, so that the tests are fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_FROM", 1)
        yield


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def gradient_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(s), np.float32) for name, s in SHAPES.items()}


def test_only_what_is_held_gets_new_memory() -> None:
    clip, gradient = NormClip(1.0), gradient_of(0)
    output = clip.clip(gradient)
    places, held = {name: address(array) for name, array in output.items()}, output["also"]
    del output
    again = clip.clip(gradient)
    assert not np.shares_memory(held, again["also"])
    assert address(again["wide"]) == places["wide"]
    assert address(again["middle"]) == places["middle"]
    assert NormClip(1.0, keep_memory=False).clip(gradient)["wide"].base is None


HOLDERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "numpy": {
        "an array": lambda x: x,
        "a row": lambda x: x[3],
        "other numbers": lambda x: x.view(np.int32),
        "broadcast": lambda x: np.broadcast_to(x, (2, 300, 400))[1:, ::2],
        "memory": memoryview,
        "an iterator": lambda x: x.flat,
        "pickled without a copy": pickle.PickleBuffer,
        "DLPack": lambda x: x.__dlpack__(),
        "from DLPack": np.from_dlpack,
        "torch": lambda x: require("torch").from_numpy(x),
        "ctypes": np.ctypeslib.as_ctypes,
    },
    "torch": {
        "a tensor": lambda t: t,
        "a view": lambda t: t.T[2:],
        "detached": lambda t: t.detach(),
        "storage": lambda t: t.untyped_storage(),
        "numpy": lambda t: t.numpy(),
        "DLPack": lambda t: require("torch").utils.dlpack.to_dlpack(t),
        "a parameter": lambda t: require("torch").nn.Parameter(t, requires_grad=False),
    },
    "tensorflow": {
        "a tensor": lambda t: t,
        "NumPy": np.asarray,
        "a variable": lambda t: require("tensorflow").Variable(t),
        "assigned": lambda t: require("tensorflow").Variable(0.0 * t).assign(t),
        "from DLPack": np.from_dlpack,
        "other numbers": lambda t: require("tensorflow").bitcast(t, "int32"),
        "a list": lambda t: require("tensorflow").data.Dataset.from_tensors(t),
    },
    "jax": {
        "an array": lambda x: x,
        "a slice": lambda x: x[3:],
        "NumPy": np.asarray,
        "DLPack": lambda x: require("jax").dlpack.from_dlpack(x),
        "from DLPack": np.from_dlpack,
        "donated": lambda x: require("jax").jit(lambda y: y + 1.0, donate_argnums=0)(x),
        "not there yet": lambda x: require("jax").jit(lambda y: (y @ y.T) @ y)(x),
    },
}


def as_array(holder: Any) -> Any:
    """Return a copy of what the holder sees."""
    if type(holder).__name__ == "PyCapsule":
        holder = require("torch").utils.dlpack.from_dlpack(holder)
    elif isinstance(holder, np.flatiter):
        holder = holder.base
    elif type(holder).__name__.endswith("Dataset"):
        holder = next(iter(holder))
    return np.array(list(holder) if "Storage" in type(holder).__name__ else holder, copy=True)


def clipped(clip: Any, seed: int, framework: str) -> Any:
    return clip.run(to_vector(gradient_of(seed), framework)).coefs["wide"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("framework", "holder"), [(f, h) for f in BACKENDS for h in HOLDERS[f]])
def test_what_somebody_holds_does_not_change(framework: str, holder: str) -> None:
    if "torch" in holder or "DLPack" in holder:
        needs("torch")
    clip, hold = NormClip(1.0), HOLDERS[framework][holder]
    clipped(clip, 0, framework)
    held = hold(clipped(clip, 1, framework))
    expected = as_array(hold(clipped(NormClip(1.0), 1, framework)))
    for seed in range(2, 5):
        clipped(clip, seed, framework)
    np.testing.assert_array_equal(as_array(held), expected)


@each_framework()
def test_memory_is_used_again_once_nobody_holds_it(framework: str) -> None:
    clip = NormClip(1.0)
    assert len({address(np.asarray(clipped(clip, seed, framework))) for seed in range(5)}) == 1


@pytest.mark.parametrize("kind", [NormClip, ValueClip, Centralize])
def test_all_memory_of_tensorflow_is_aligned(kind: Any) -> None:
    # Its operations end the process where it is not.
    tf, clip = require("tensorflow"), kind()
    for size in (1, 3, 17, 513, 1025, 100_001):
        gradient = {"a": tf.fill([size, 2], 3.0), "b": tf.range(2.0 * size)}
        for output in clip.clip(gradient).values():
            assert address(np.asarray(output)) % 64 == 0
            assert np.isfinite(tf.reduce_sum(output * output))


@pytest.mark.parametrize("put", [None, 0])
def test_jax_arrays_are_as_bound_to_their_device_as_before(put: int | None) -> None:
    jax = require("jax")
    device = None if put is None else jax.devices()[put]
    gradient = {"wide": jax.device_put(gradient_of(0)["wide"], device)}
    output = NormClip(0.5).clip(gradient)["wide"]
    assert output.committed is gradient["wide"].committed
    assert output.sharding == gradient["wide"].sharding
    assert output.aval == gradient["wide"].aval


def test_a_step_within_a_step_has_memory_of_its_own() -> None:
    # As when the garbage collector runs a finaliser that clips.
    kept, views = Memory(), [np.ones(100_000, np.float32)] * 2
    arrays = [*kept.like([0], views), *kept.like([0], views), *kept.like([1, 0], views)]
    for i, array in enumerate(arrays):
        assert array is not None
        assert not any(np.shares_memory(array, other) for other in arrays[i + 1 :])


@pytest.mark.parametrize("end", ["on_round_start", "collect_aux_var"])
def test_the_end_of_a_round_gives_memory_back(end: str) -> None:
    clip = NormClip(1.0)
    owner = weakref.ref(clip.clip(gradient_of(0))["wide"].base)
    assert owner() is not None
    getattr(clip, end)()
    assert owner() is None
