"""JAX loops: an optax transformation does what the declearn module does."""

import warnings

import numpy as np
import pytest
from helpers import require

jax = require("jax")
optax = require("optax")
import jax.numpy as jnp  # noqa: E402

from fedclip import (  # noqa: E402
    AGC,
    AutoClip,
    EmaNormClip,
    FedclipWarning,
    NormClip,
    ZScoreClip,
)
from fedclip.loops.jax import as_optax  # noqa: E402

# Arithmetic in compiled code is compared with all clippers in test_compiled.py.
CLIPPERS = {
    "norm by table": lambda **kw: NormClip(1.0, scope={"enc.*": 0.5}, **kw),
    "z-score by tensor": lambda **kw: ZScoreClip(warmup=4, max_norm=None, scope="tensor", **kw),
    "excluding": lambda **kw: ZScoreClip(warmup=4, max_norm=None, exclude="*.b", **kw),
}


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def stream(steps=40, seed=0):
    rng = np.random.default_rng(seed)
    for t in range(steps):
        size = 20.0 if t % 9 == 7 else 1.0
        yield {
            "enc": {"w": size * rng.standard_normal((4, 3)), "b": size * rng.standard_normal(3)},
            "scale": np.asarray(size * rng.standard_normal()),
        }


def by_name(tree):
    return {"enc.b": tree["enc"]["b"], "enc.w": tree["enc"]["w"], "scale": tree["scale"]}


def run(transform, gradients, *, compiled, params=None):
    gradients = list(gradients)
    params = jax.tree.map(jnp.asarray, gradients[0]) if params is None else params
    state = transform.init(params)
    traces = 0

    def update(gradient, state):
        nonlocal traces
        traces += 1
        return transform.update(gradient, state, params)

    step = jax.jit(update) if compiled else update
    outputs = []
    for gradient in gradients:
        output, state = step(jax.tree.map(jnp.asarray, gradient), state)
        outputs.append(output)
    if compiled:
        assert traces == 1
    return outputs, state


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, True) for name in CLIPPERS), ("norm by table", False)]
)
def test_it_does_what_the_module_does(name, compiled):
    module = CLIPPERS[name]()
    outputs, state = run(as_optax(CLIPPERS[name]()), stream(), compiled=compiled)
    for gradient, output in zip(stream(), outputs, strict=True):
        expected = module.clip(by_name(gradient))
        for key, value in by_name(output).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-9, atol=1e-14)
    assert int(state.steps) == 40
    assert int(state.clipped) == sum(r.clipped for r in module.rounds if r.group == "all")
    np.testing.assert_allclose(state.limit, module.last.limit, rtol=1e-9)


@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_nonfinite_steps_are_counted_and_teach_nothing(policy):
    gradients = list(stream(10))
    gradients[6]["enc"]["b"][1] = np.nan
    clipper = CLIPPERS["z-score by tensor"](on_nonfinite=policy)
    outputs, state = run(as_optax(clipper), gradients, compiled=True)
    assert int(state.nonfinite) == 1
    module = CLIPPERS["z-score by tensor"](on_nonfinite=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedclipWarning)
        for gradient in gradients:
            expected = module.clip(by_name(gradient))
    np.testing.assert_allclose(outputs[-1]["scale"], expected["scale"], rtol=1e-9)
    odd = outputs[6]
    if policy == "skip":
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(odd))
    else:
        assert np.isnan(odd["enc"]["b"]).all()
        assert np.isfinite(odd["enc"]["w"]).all()


def test_agc_gets_the_parameters():
    rng = np.random.default_rng(1)
    params = {
        "enc": {"w": jnp.asarray(rng.standard_normal((4, 3))), "b": jnp.zeros(3)},
        "scale": jnp.asarray(2.0),
    }
    agc, reference = AGC(ratio=0.1), AGC(ratio=0.1, axis=-1)
    outputs, _ = run(as_optax(agc), stream(5), compiled=True, params=params)
    weights = {key: np.asarray(value) for key, value in by_name(params).items()}
    for gradient, output in zip(stream(5), outputs, strict=True):
        expected = reference.clip(by_name(gradient), weights)
        for key, value in by_name(output).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-9, atol=1e-14)
    with pytest.raises(ValueError, match=r"agc has no weights for .*; it was given none"):
        as_optax(agc).update(params, as_optax(agc).init(params))


def test_leaves_of_the_same_path_are_clipped_each_by_itself():
    tree = {"a": {"b": jnp.array([3.0, 4.0])}, "a.b": jnp.array([0.3, 0.4])}
    weights = {"a": {"b": jnp.ones(2)}, "a.b": jnp.full(2, 5.0)}
    transform = as_optax(AGC(0.1))
    output, _ = transform.update(tree, transform.init(weights), weights)
    expected = AGC(0.1).clip(
        {"x": tree["a"]["b"], "y": tree["a.b"]}, {"x": weights["a"]["b"], "y": weights["a.b"]}
    )
    np.testing.assert_allclose(output["a"]["b"], expected["x"], rtol=1e-6)
    np.testing.assert_allclose(output["a.b"], expected["y"], rtol=1e-6)


@pytest.mark.parametrize(
    ("clipper", "dtype"),
    [(AutoClip(), "bfloat16"), (NormClip(0.1, dims=[0]), "float32"), (EmaNormClip(), "bfloat16")],
)
def test_sessions_that_forbid_promotion(clipper, dtype):
    params = {"w": jnp.full((3, 2), 2.0, dtype), "b": jnp.ones(2, dtype)}
    transformation = as_optax(clipper)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        state = transformation.init(params)
        updates, state = transformation.update(params, state, params)
        clipper.clip(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {dtype}
    # What a clipper keeps is no copy of the parameters to optax.
    mapped = optax.tree.map_params(transformation, lambda leaf: None, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
