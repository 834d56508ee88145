# SPDX-License-Identifier: Apache-2.0
"""The memory that outputs are written to is used again, and never while somebody holds it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from helpers import each_framework, hiding, needs, require, run
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclip import Centralize, NormClip, Standardize, ValueClip
from fedclip.arrays import NUMPY, Memory, memory
from fedclip.arrays.base import Arithmetic
from fedclip.testing import to_numpy, to_vector

MANY = [(1100, 210)] * 37 + [(), (0, 3), (5,)]
"""Above 32 MiB together, each below 4 MiB."""
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (300, 400),
    "middle": (130, 140),
    "also": (140, 130),
    "small": (7,),
    "one": (),
}


@pytest.fixture(autouse=True, scope="module")
def small_gradients_too() -> Iterator[None]:
    """Keep the memory of small gradients too, so that the tests are fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_FROM", 1)
        yield


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def gradient_of(seed: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(s), dtype) for name, s in SHAPES.items()}


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    clip, gradient = NormClip(1.0), NumpyVector(gradient_of(0))
    found = {address(clip.run(gradient).coefs["wide"]) for _ in range(5)}
    assert len(found) == 1


def test_only_what_is_held_gets_new_memory() -> None:
    clip, gradient = NormClip(1.0), NumpyVector(gradient_of(0))
    output = clip.run(gradient).coefs
    places, held = {name: address(array) for name, array in output.items()}, output["also"]
    del output
    again = clip.run(gradient).coefs
    assert not np.shares_memory(held, again["also"])
    assert address(again["wide"]) == places["wide"]
    assert address(again["middle"]) == places["middle"]


def test_what_is_done_to_an_output_stays_with_it() -> None:
    clip, gradient = NormClip(1.0), NumpyVector(gradient_of(0))
    output = clip.run(gradient).coefs["wide"]
    output.flags.writeable = False
    output.shape = (400, 300)
    output.dtype = np.int32
    del output
    assert clip.run(gradient).coefs["wide"].shape == (300, 400)
    assert clip.run(gradient).coefs["wide"].dtype == np.float32


def test_the_memory_of_small_gradients_is_not_kept() -> None:
    assert not Memory().serves([0, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_FROM", 1 << 22)
        assert not Memory().serves([1 << 20] * 3)
        assert Memory().serves([1 << 20] * 4)


def _torch() -> Any:
    return require("torch")


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the vector": lambda v: v,
    "an array": lambda v: v.coefs["wide"],
    "a row": lambda v: v.coefs["wide"][3],
    "a transpose": lambda v: v.coefs["wide"].T,
    "other numbers": lambda v: v.coefs["wide"].view(np.int32),
    "a matrix": lambda v: v.coefs["wide"].view(np.matrix),
    "broadcast": lambda v: np.broadcast_to(v.coefs["wide"], (2, 300, 400))[1:, ::2],
    "memory": lambda v: memoryview(v.coefs["wide"]),
    "bytes of memory": lambda v: memoryview(v.coefs["wide"]).cast("B")[5:],
    "an iterator": lambda v: v.coefs["wide"].flat,
    "pickled without a copy": lambda v: pickle.PickleBuffer(v.coefs["wide"]),
    "DLPack": lambda v: v.coefs["wide"].__dlpack__(),
    "from DLPack": lambda v: np.from_dlpack(v.coefs["wide"]),
    "torch": lambda v: _torch().from_numpy(v.coefs["wide"]),
    "a part of torch's": lambda v: _torch().as_tensor(v.coefs["wide"]).T[1:],
    "ctypes": lambda v: np.ctypeslib.as_ctypes(v.coefs["wide"]),
}


def as_array(holder: Any) -> Any:
    """Return what the holder sees, as bytes, without a copy."""
    if isinstance(holder, NumpyVector):
        holder = holder.coefs["wide"]
    if type(holder).__name__ == "PyCapsule":
        holder = _torch().utils.dlpack.from_dlpack(holder)
    if isinstance(holder, np.flatiter):
        holder = holder.base
    return np.array(holder, copy=True)


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_holds_does_not_change(holder: str) -> None:
    if "torch" in holder or holder == "DLPack":
        needs("torch")
    clip = NormClip(1.0)
    clip.run(NumpyVector(gradient_of(0)))
    held = HOLDERS[holder](clip.run(NumpyVector(gradient_of(1))))
    expected = as_array(HOLDERS[holder](NormClip(1.0).run(NumpyVector(gradient_of(1)))))
    for seed in range(2, 5):
        clip.run(NumpyVector(gradient_of(seed)))
    np.testing.assert_array_equal(as_array(held), expected)


TORCH_HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda t: t,
    "a view": lambda t: t.T[2:],
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "numpy of a view": lambda t: t[3:].T.numpy(),
    "DLPack": lambda t: _torch().utils.dlpack.to_dlpack(t),
    "other numbers": lambda t: t.view(_torch().int32),
    "alias": lambda t: t.expand(2, *t.shape),
    "unbound": lambda t: t.unbind()[3],
    "a parameter": lambda t: _torch().nn.Parameter(t),
    "nothing else": lambda t: [t.clone()],
}


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("float64", marks=pytest.mark.slow),
        pytest.param("float16", marks=pytest.mark.slow),
        "bfloat16",
    ],
)
@pytest.mark.parametrize("holder", TORCH_HOLDERS)
def test_what_somebody_holds_of_torch_does_not_change(holder: str, dtype: str) -> None:
    torch = require("torch")
    if (dtype == "bfloat16" and "numpy" in holder) or (
        "32" not in dtype and holder == "other numbers"
    ):
        pytest.skip("torch has no such view")

    def gradient(seed: int) -> Any:
        values = gradient_of(seed).items()
        return {n: torch.from_numpy(v).to(getattr(torch, dtype)) for n, v in values}

    clip = NormClip(1.0)
    clip.clip(gradient(0))
    output = clip.clip(gradient(1))["wide"]
    expected = output.clone()
    place = output.data_ptr()
    held = TORCH_HOLDERS[holder](output)
    del output
    for seed in range(2, 5):
        again = clip.clip(gradient(seed))["wide"]
        assert (again.data_ptr() == place) == (holder == "nothing else")
        del again
    if holder == "DLPack":
        held = torch.utils.dlpack.from_dlpack(held)
    if holder in ("a tensor", "detached", "data", "DLPack", "a parameter"):
        assert torch.equal(held, expected)


def test_gradients_of_parameters_and_what_autograd_saved_do_not_change() -> None:
    torch = require("torch")
    clip = NormClip(1.0)

    def clipped(seed: int) -> Any:
        return clip.clip({n: torch.from_numpy(v) for n, v in gradient_of(seed).items()})["wide"]

    clipped(0)
    parameter = torch.nn.Parameter(torch.zeros(300, 400))
    parameter.grad = clipped(1)
    expected = parameter.grad.clone()
    clipped(2)
    assert torch.equal(parameter.grad, expected)
    parameter.grad = None
    factor = torch.ones((), requires_grad=True)
    product = (clipped(3) * factor).sum()
    for seed in range(4, 7):
        clipped(seed)
    product.backward()
    (other,) = torch.autograd.grad(
        (
            NormClip(1.0).clip({n: torch.from_numpy(v) for n, v in gradient_of(3).items()})["wide"]
            * factor
        ).sum(),
        factor,
    )
    assert factor.grad == other


def _tf() -> Any:
    return require("tensorflow")


def _assigned(tensor: Any) -> Any:
    variable = _tf().Variable(_tf().zeros_like(tensor))
    variable.assign(tensor)
    return variable


TF_HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda t: t,
    "reshaped": lambda t: _tf().reshape(t, [-1]),
    "identity": lambda t: _tf().identity(t),
    "a slice": lambda t: t[3:],
    "NumPy": np.asarray,
    "NumPy's view": lambda t: np.asarray(t)[5:].T,
    "a variable": lambda t: _tf().Variable(t),
    "assigned": _assigned,
    "DLPack": lambda t: _tf().experimental.dlpack.to_dlpack(t),
    "from DLPack": np.from_dlpack,
    "other numbers": lambda t: _tf().bitcast(t, "int32" if t.dtype == "float32" else "int64"),
    "a list": lambda t: _tf().data.Dataset.from_tensors(t),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [NormClip, ValueClip])
@pytest.mark.parametrize("holder", TF_HOLDERS)
def test_what_somebody_holds_of_tensorflow_does_not_change(
    holder: str, kind: type, dtype: str
) -> None:
    tf = _tf()

    def seen(held: Any) -> Any:
        if holder == "DLPack":
            held = tf.experimental.dlpack.from_dlpack(held)
        return np.array(next(iter(held)) if holder == "a list" else held)

    def clipped(clip: Any, seed: int) -> Any:
        return clip.clip({n: tf.constant(v) for n, v in gradient_of(seed, dtype).items()})["wide"]

    clip = kind(0.5)
    clipped(clip, 0)
    held = TF_HOLDERS[holder](clipped(clip, 1))
    expected = seen(TF_HOLDERS[holder](clipped(kind(0.5), 1)))
    for seed in range(2, 5):
        clipped(clip, seed)
    np.testing.assert_array_equal(seen(held), expected)


def test_variables_do_not_write_to_memory_of_tensorflow_that_is_used_again() -> None:
    tf, clip = _tf(), NormClip(0.5)
    output = clip.clip({"wide": tf.constant(gradient_of(0)["wide"])})["wide"]
    expected = output.numpy().copy()
    variable = _assigned(output)
    variable.assign_sub(tf.ones_like(output))
    for seed in range(1, 4):
        clip.clip({"wide": tf.constant(gradient_of(seed)["wide"])})
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(variable, expected - 1)
    del output
    again = clip.clip({"wide": tf.constant(gradient_of(5)["wide"])})["wide"]
    variable.assign_sub(tf.ones_like(again))
    np.testing.assert_array_equal(variable, (expected - 1) - 1)


def test_tensorflow_gets_the_same_memory_again_once_nobody_holds_it() -> None:
    tf, clip = _tf(), NormClip(0.5)
    gradient = {"wide": tf.constant(gradient_of(0)["wide"])}
    found = {address(np.asarray(clip.clip(gradient)["wide"])) for _ in range(5)}
    assert len(found) == 1


@pytest.mark.parametrize("kind", [NormClip, ValueClip, Centralize])
def test_all_memory_of_tensorflow_is_aligned(kind: Any) -> None:
    # Its operations end the process where it is not.
    tf, clip = _tf(), kind()
    for size in (1, 3, 17, 513, 1025, 100_001):
        gradient = {"a": tf.fill([size, 2], 3.0), "b": tf.range(2.0 * size)}
        for output in clip.clip(gradient).values():
            assert address(np.asarray(output)) % 64 == 0
            assert np.isfinite(tf.reduce_sum(output * output))


def test_tensorflow_that_records_is_refused_by_what_learns() -> None:
    tf = _tf()
    x = tf.constant([3.0, -4.0])
    for kind in (NormClip, ValueClip):
        with tf.GradientTape() as tape:
            kind(1.0).clip({"x": x})
            tape.watch(x)
            narrow, variable = tf.cast(x, tf.bfloat16), tf.Variable(x)
            for recorded in (x, 2.0 * x, narrow, variable, tf.IndexedSlices(x, [0, 1])):
                with pytest.raises(TypeError, match="differentiated"):
                    kind(1.0).clip({"plain": tf.ones(2), "x": recorded})
        with tf.autodiff.ForwardAccumulator(x, tf.ones(2)), pytest.raises(TypeError):
            kind(1.0).clip({"x": x})


def _jax() -> Any:
    return require("jax")


JAX_HOLDERS: dict[str, Callable[[Any], Any]] = {
    "an array": lambda x: x,
    "reshaped": lambda x: x.reshape(-1),
    "a slice": lambda x: x[3:],
    "NumPy": np.asarray,
    "NumPy's view": lambda x: np.asarray(x)[5:].T,
    "DLPack": lambda x: _jax().dlpack.from_dlpack(x),
    "from DLPack": np.from_dlpack,
    "put again": lambda x: _jax().device_put(x, _jax().devices()[0]),
    "donated": lambda x: _jax().jit(lambda y: y + 1.0, donate_argnums=0)(x),
    "donated as it is": lambda x: _jax().jit(lambda y: y, donate_argnums=0)(x),
    "not there yet": lambda x: _jax().jit(lambda y: (y @ y.T) @ y)(x),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("holder", JAX_HOLDERS)
def test_what_somebody_holds_of_jax_does_not_change(holder: str) -> None:
    jax = _jax()

    def clipped(clip: Any, seed: int) -> Any:
        return clip.clip({n: jax.numpy.asarray(v) for n, v in gradient_of(seed).items()})["wide"]

    clip = NormClip(0.5)
    place = clipped(clip, 0).unsafe_buffer_pointer()
    assert clipped(clip, 0).unsafe_buffer_pointer() == place
    held = JAX_HOLDERS[holder](clipped(clip, 1))
    expected = np.array(JAX_HOLDERS[holder](clipped(NormClip(0.5), 1)))
    for seed in range(2, 5):
        clipped(clip, seed)
    np.testing.assert_array_equal(held, expected)


@pytest.mark.parametrize("put", [None, 0])
def test_jax_arrays_are_as_bound_to_their_device_as_before(put: int | None) -> None:
    jax = _jax()
    device = None if put is None else jax.devices()[put]
    gradient = {"wide": jax.device_put(gradient_of(0)["wide"], device)}
    output = NormClip(0.5).clip(gradient)["wide"]
    assert output.committed is gradient["wide"].committed
    assert output.sharding == gradient["wide"].sharding
    assert output.aval == gradient["wide"].aval


@pytest.mark.parametrize("kind", [NormClip, ValueClip])
def test_torch_views_that_are_negated_when_they_are_read(kind: Any) -> None:
    torch = require("torch")
    view = torch.from_numpy(gradient_of(0)["wide"].astype(np.complex64)).conj().imag
    view.add_(torch.from_numpy(gradient_of(1)["wide"]))
    assert view.is_neg()
    output = kind(0.5).clip({"wide": view})["wide"]
    expected = kind(0.5).clip({"wide": view.resolve_neg().numpy().copy()})["wide"]
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-6)


def test_torch_products_of_middling_tensors_without_kept_memory() -> None:
    torch = require("torch")
    shapes = ((1 << 15, 1), (1 << 15, 2), (), (0, 4), (3, 5))
    gradient = {str(i): torch.full(s, 2.0) for i, s in enumerate(shapes)}
    gradient["transposed"] = torch.randn(300, 400).T
    clip = NormClip(1.0, keep_memory=False)
    outputs = clip.clip(gradient)
    assert clip.last is not None
    for name, output in outputs.items():
        assert output.shape == gradient[name].shape
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, gradient[name] * (1 / clip.last.norms[0]))
        assert name != "transposed" or output.stride() == gradient[name].stride()


@each_framework()
def test_products_of_arrays_that_groups_put_into_another_order(framework: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (300, 200), "b": (200, 700), "c": (7,), "d": (4,)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    clip = NormClip(1.0, scope={"[bd]": 1.0, "[ac]": 2.0})
    clipped = to_numpy(clip.run(to_vector(arrays, framework)))
    for limit, names in ((1.0, "bd"), (2.0, "ac")):
        norm = np.sqrt(sum(np.square(arrays[name], dtype=float).sum() for name in names))
        for name in names:
            np.testing.assert_allclose(clipped[name], arrays[name] * (limit / norm), rtol=2e-6)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["run", "twice", "numpy", "drop", "round", "copy"]),
        st.integers(0, 5),
        st.sampled_from([*HOLDERS]),
        st.sampled_from(["float32", "float64"]),
    ),
    min_size=3,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, kind=st.sampled_from([NormClip, ValueClip]))
def test_no_held_output_ever_changes(steps: list[Any], kind: type) -> None:
    """Random programs of steps that keep, view, export and drop outputs."""
    needs("torch")
    clippers = [kind(0.5)]
    held: list[tuple[Any, Any]] = []
    last: Any = None
    for what, seed, holder, dtype in steps:
        clip = clippers[seed % len(clippers)]
        if what == "copy":
            clippers.append(copy.deepcopy(clip))
        elif what == "round":
            clip.on_round_start()
        elif what == "drop" and held:
            held.pop(seed % len(held))
        elif what == "twice" and last is not None:
            last = clip.run(last)
        elif what == "run":
            last = clip.run(NumpyVector(gradient_of(seed, dtype)))
        else:
            # A vector of the last step that is not kept.
            last = None
            clip.run(NumpyVector(gradient_of(seed, dtype)))
        if last is not None and seed % 2:
            kept = HOLDERS[holder](last)
            if holder != "DLPack":
                held.append((kept, as_array(kept)))
        for kept, expected in held:
            np.testing.assert_array_equal(as_array(kept), expected)


def test_no_output_shares_memory_with_an_input() -> None:
    clip = NormClip(1.0)
    output = clip.run(NumpyVector(gradient_of(0)))
    for _ in range(4):
        clip_again = NumpyVector({name: 3.0 * value for name, value in output.coefs.items()})
        inputs = [output.coefs, clip_again.coefs]
        output = clip.run(clip_again)
        for arrays in inputs:
            for name, value in output.coefs.items():
                assert not np.shares_memory(value, arrays[name])


def test_two_threads_never_share_memory() -> None:
    clip = NormClip(1.0)

    def work(seed: int) -> bool:
        gradient, right = NumpyVector(gradient_of(seed)), True
        expected = NormClip(1.0).run(gradient).coefs["wide"]
        for _ in range(40):
            output = clip.run(gradient).coefs["wide"]
            right &= bool(np.array_equal(output, expected))
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_step_within_a_step_has_memory_of_its_own() -> None:
    # As when the garbage collector runs a finaliser that clips.
    kept, views = Memory(), [np.ones(100_000, np.float32)] * 2
    arrays = [*kept.like([0], views), *kept.like([0], views), *kept.like([1, 0], views)]
    for i, array in enumerate(arrays):
        assert array is not None
        assert not any(np.shares_memory(array, other) for other in arrays[i + 1 :])


@pytest.mark.parametrize(
    "other", [copy.copy, copy.deepcopy, lambda clip: pickle.loads(pickle.dumps(clip))]
)
def test_a_copy_has_memory_of_its_own(other: Callable[[Any], Any]) -> None:
    clip, gradient = NormClip(1.0), NumpyVector(gradient_of(0))
    clip.run(gradient)
    twin = other(clip)
    first, second = clip.run(gradient).coefs, twin.run(gradient).coefs
    assert not any(np.shares_memory(first[name], second[name]) for name in first)


@pytest.mark.parametrize("end", ["on_round_start", "collect_aux_var"])
def test_the_end_of_a_round_gives_memory_back(end: str) -> None:
    clip, gradient = NormClip(1.0), NumpyVector(gradient_of(0))
    output = clip.run(gradient).coefs["wide"]
    owner = weakref.ref(output.base)
    del output
    assert owner() is not None
    getattr(clip, end)()
    assert owner() is None


def test_as_much_as_one_gradient_is_kept() -> None:
    kept = Memory()
    owners: list[Any] = []
    for shapes in ([100_000] * 9, [100_000] * 9, [80, 300_000, 1], [100_000]):
        views = [np.ones(n, np.float32) for n in shapes]
        assert kept.serves([view.nbytes for view in views])
        outs = kept.like(range(len(views)), views)
        assert [out is None for out in outs] == [n < 1024 for n in shapes]
        owners += [weakref.ref(out.base) for out in outs if out is not None]
        held = outs[-1]
        del outs
    alive = [owner() for owner in owners if owner() is not None]
    # The memory begins at a multiple of 64 bytes.
    assert [array.nbytes for array in alive] == [400_064]
    assert held is not None
    assert held.base is alive[0]


def test_it_can_be_switched_off() -> None:
    clip = NormClip(1.0, keep_memory=False)
    output = clip.run(NumpyVector(gradient_of(0))).coefs["wide"]
    assert output.base is None
    assert NormClip.from_config({"max_norm": 1.0, "keep_memory": False}).keep_memory is False


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": lambda x: x,
    "Fortran": np.asfortranarray,
    "transposed": lambda x: x.T,
    "channels last": lambda x: x.reshape(30, 10, 20, 20).transpose(0, 3, 1, 2),
    "with gaps": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "extra dimensions": lambda x: x[None, :, None].transpose(1, 3, 0, 2),
}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str, framework: str) -> None:
    array = LAYOUTS[layout](gradient_of(0)["wide"])
    if framework == "torch":
        torch = require("torch")
        if layout == "backwards":
            pytest.skip("torch has no negative strides")
        array = torch.from_numpy(array.copy("K") if layout == "broadcast" else array)
    off, clip = NormClip(1.0, keep_memory=False), NormClip(1.0)
    plain = off.clip({"w": array})["w"]
    for _ in range(3):
        output = clip.clip({"w": array})["w"]
        np.testing.assert_array_equal(np.asarray(output), np.asarray(plain))
        found = zip(np.asarray(output).strides, np.asarray(plain).strides, plain.shape, strict=True)
        assert all(a == b for a, b, length in found if length > 1)
        assert type(output) is type(plain)


@pytest.mark.parametrize("make", [NormClip, ValueClip, Centralize, Standardize])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_outputs_are_the_same_with_and_without(make: Any, framework: str, dtype: str) -> None:
    needs(framework)
    if framework == "numpy" and dtype == "bfloat16":
        dtype_ = pytest.importorskip("ml_dtypes").bfloat16
        arrays = {n: v.astype(dtype_) for n, v in gradient_of(3).items()}
    elif framework == "torch":
        torch = require("torch")
        values = gradient_of(3).items()
        arrays = {n: torch.from_numpy(v).to(getattr(torch, dtype)) for n, v in values}
    else:
        arrays = gradient_of(3, dtype)
    clip, plain = make(), make(keep_memory=False)
    for _ in range(3):
        for name, output in clip.clip(arrays).items():
            expected = plain.clip(arrays)[name]
            assert output.dtype == expected.dtype
            pair = (
                (output, expected) if framework == "numpy" else (output.double(), expected.double())
            )
            assert np.asarray(pair[0]).tobytes() == np.asarray(pair[1]).tobytes()


FAULTS = """
import resource
import numpy as np
from declearn.model.sklearn import NumpyVector
from fedclip import NormClip

gradient = NumpyVector({f"t{i}": np.full((384, 1536), i, np.float32) for i in range(20)})
clipper = NormClip(1.0)
for _ in range(3):
    clipper.run(gradient)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    clipper.run(gradient)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_memory_is_used_again_from_step_to_step() -> None:
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=hiding(), capture_output=True, text=True, check=True)
    # Page by page it would be 11,500 a step.
    assert int(done.stdout) < 2_000


@pytest.mark.slow
@each_framework()
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_large_gradient_is_clipped_as_a_small_one(framework: str, scope: str) -> None:
    needs(framework)
    rng = np.random.default_rng(7)
    arrays = {f"t{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(MANY)}
    arrays["wide"] = rng.standard_normal((1100, 1000)).astype(np.float32)
    arrays["turned"] = np.asfortranarray(rng.standard_normal((400, 90)).astype(np.float32))
    before = {name: array.copy() for name, array in arrays.items()}
    gradient = to_vector(arrays, framework)
    output = to_numpy(NormClip(0.01, scope=scope).run(gradient))
    norms = {name: float(np.linalg.norm(a.astype(np.float64))) for name, a in before.items()}
    total = float(np.linalg.norm(list(norms.values())))
    for name, expected in before.items():
        np.testing.assert_array_equal(to_numpy(gradient)[name], expected)
        norm = total if scope == "global" else norms[name]
        factor = 0.01 / norm if norm > 0.01 else 1.0
        assert output[name].shape == expected.shape
        np.testing.assert_allclose(output[name], expected * factor, rtol=3e-6)


def test_values_of_a_large_gradient() -> None:
    rng = np.random.default_rng(8)
    arrays = {f"t{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(MANY)}
    (output,) = run(ValueClip(0.5), [arrays])
    for name, values in arrays.items():
        np.testing.assert_array_equal(output[name], np.clip(values, -0.5, 0.5))


@pytest.mark.parametrize("held", [[1, 1, 1], [5, 5, 5], [8, 8, 8], [2, 8, 5]])
def test_selected_or_sorted_is_the_same(held: list[int]) -> None:
    rng = np.random.default_rng(9)
    table = rng.integers(0, 5, (8, 3)).astype(float)
    counts = np.array(held, float)
    for quantile in (0.0, 0.3, 0.5, 0.95, 1.0):
        rank = np.floor(quantile * (counts - 1))
        selected = NUMPY.ranked(table, counts, rank)
        ordered = Arithmetic.ranked(NUMPY, table, counts, rank)
        np.testing.assert_array_equal(selected, ordered)
    row = counts - 1
    values = np.array([7.0, 8.0, 9.0])
    put = NUMPY.put(table, row, values)
    np.testing.assert_array_equal(put, Arithmetic.put(NUMPY, table, row, values))
    assert (table < 5).all()
