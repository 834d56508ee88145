"""Clip on four devices of one host, and compare with one device; started by a test."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fedclip import AGC, EmaNormClip, EmaValueClip, Normalize, NormClip, ValueClip, ZScoreClip
from fedclip.clippers.centralize import Centralize
from fedclip.loops.jax import as_optax

SHAPES = {"w": ((8, 6), P("data", None)), "v": ((4, 12), P(None, "data")), "b": ((3,), P())}
CLIPPERS = {
    "norm": NormClip(1.0),
    "z-score": ZScoreClip(warmup=2, scope="tensor"),
    "slices": NormClip(0.5, dims=[0]),
    "to a norm": Normalize(0.5),
    "averages": EmaNormClip(decay=0.5, init="first"),
    "agc": AGC(0.1),
    "huge": NormClip(3e24),
}
RNG = np.random.default_rng(0)


def tree(scale):
    return {n: (scale * RNG.standard_normal(s)).astype(np.float32) for n, (s, _) in SHAPES.items()}


PARAMS = tree(1.0)
# Squares of the fourth overflow, those of the fifth underflow.
GRADS = [tree(scale) for scale in (1.0, 0.1, 30.0, 1e25, 1e-28, 1.0)]


def run(clipper, place, mesh=None):
    transform = as_optax(clipper)
    params = place(PARAMS)
    state = transform.init(params)
    for name, kept in getattr(state.statistics, "arrays", {}).items():
        assert kept["past"].sharding.is_equivalent_to(params[name].sharding, params[name].ndim)
    step, found = jax.jit(transform.update), []
    for gradient in GRADS:
        updates, state = step(place(gradient), state, params)
        if mesh is not None:
            for name, (_, spec) in SHAPES.items():
                wanted, update = NamedSharding(mesh, spec), updates[name]
                assert update.sharding.is_equivalent_to(wanted, update.ndim), name
        found.append(jax.tree.map(np.asarray, updates))
    return found, np.asarray(state.norm)


def compare(what, found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-30, err_msg=what)


def placed(mesh):
    shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in SHAPES.items()}
    return lambda values: {n: jax.device_put(v, shardings[n]) for n, v in values.items()}


def meshes():
    kinds = itertools.cycle((AxisType.Auto, AxisType.Explicit))
    for (name, clipper), kind in zip(CLIPPERS.items(), kinds, strict=False):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        compare(f"{name}, {kind}", run(clipper, placed(mesh), mesh), run(clipper, jnp_tree))


def jnp_tree(values):
    return jax.tree.map(jnp.asarray, values)


def shard_maps():
    mesh = jax.make_mesh((4,), ("data",))
    specs = {name: spec for name, (_, spec) in SHAPES.items()}
    both, place = {"in_specs": (specs, P()), "out_specs": (specs, P())}, placed(mesh)
    for name in ("z-score", "to a norm", "huge"):
        clipper = CLIPPERS[name]
        transform, whole = as_optax(clipper, axis_name="data"), as_optax(clipper)
        # Compiled, as operations that are not are compiled one by one.
        alone = jax.jit(whole.update)
        state, expected_state = whole.init(PARAMS), whole.init(PARAMS)
        step = jax.jit(jax.shard_map(transform.update, mesh=mesh, **both))
        for gradient in GRADS:
            expected, expected_state = alone(jnp_tree(gradient), expected_state)
            found, state = step(place(gradient), jax.device_put(state, NamedSharding(mesh, P())))
            compare(f"{name}, shard_map", found, expected)
        compare(f"{name}, state", state, expected_state)
    for clipper in (ValueClip(1.0), NormClip(1.0, dims=[0]), AGC(0.1)):
        try:
            as_optax(clipper, axis_name="data").update(jnp_tree(GRADS[0]), None, jnp_tree(PARAMS))
        except NotImplementedError:
            continue
        raise AssertionError(f"{clipper} is not refused")


def eager():
    """Tensors of one gradient, each on a device of its own, and one tensor over two."""
    values = {"a": np.array([3.0]), "b": np.array([4.0])}
    places = dict(zip(values, jax.devices(), strict=False))
    vector = {name: jax.device_put(value, places[name]) for name, value in values.items()}
    for clipper in (NormClip(), ZScoreClip(), ValueClip(), EmaValueClip(), Centralize()):
        found = clipper.clip(clipper.clip(vector))
        assert all(found[n].devices() == {place} for n, place in places.items()), clipper
    compare("eager", NormClip(1.0).clip(vector), {"a": [0.6], "b": [0.8]})
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spread = jax.device_put(np.array([3.0, 4.0]), NamedSharding(mesh, P("x")))
    found = NormClip(1.0).clip({"w": spread})["w"]
    assert len(found.sharding.device_set) == 2
    compare("eager, spread", found, np.array([0.6, 0.8]))


if __name__ == "__main__":
    assert jax.device_count() == 4
    meshes()
    shard_maps()
    eager()
    print("all as on one device")
