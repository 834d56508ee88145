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
    OwnLimit,
    Standardize,
    ValueClip,
    ZScoreClip,
)
from fedclip.adapters.jax import as_optax, load_state  # noqa: E402

CLIPPERS = {
    "norm": lambda **kw: NormClip(1.0, **kw),
    "norm by tensor": lambda **kw: NormClip(1.0, scope="tensor", **kw),
    "norm by table": lambda **kw: NormClip(1.0, scope={"enc.*": 0.5}, **kw),
    "norm by slice": lambda **kw: NormClip(0.5, dims=[0], **kw),
    "values": lambda **kw: ValueClip(0.5, **kw),
    "z-score": lambda **kw: ZScoreClip(warmup=4, max_norm=None, **kw),
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CLIPPERS)
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


def test_compiled_once_over_100_steps():
    run(as_optax(CLIPPERS["z-score"]()), stream(100), compiled=True)


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


def test_it_goes_into_a_chain_and_its_state_is_found():
    chain = optax.chain(as_optax(NormClip(1.0)), optax.sgd(0.1))
    params = {"w": jnp.zeros(2)}
    state = chain.init(params)
    updates, state = chain.update({"w": jnp.array([3.0, 4.0])}, state, params)
    assert optax.tree.get(state, "norm")[0] == pytest.approx(5.0)
    assert float(jnp.linalg.norm(updates["w"])) == pytest.approx(0.1)


def test_scan_and_vmap():
    transform = as_optax(ZScoreClip(warmup=4, max_norm=None))
    gradients = jnp.asarray(np.random.default_rng(0).standard_normal((30, 5)))
    gradients = gradients.at[20].multiply(50.0)

    def body(state, gradient):
        output, state = transform.update({"w": gradient}, state)
        return state, output["w"]

    state = transform.init({"w": gradients[0]})
    last, outputs = jax.lax.scan(body, state, gradients)
    module = ZScoreClip(warmup=4, max_norm=None)
    for gradient, output in zip(gradients, outputs, strict=True):
        np.testing.assert_allclose(output, module.clip({"w": np.asarray(gradient)})["w"], rtol=1e-9)
    assert int(last.steps) == 30
    many = jax.vmap(lambda g: transform.update({"w": g}, state)[1].norm[0])(gradients)
    np.testing.assert_allclose(many, np.linalg.norm(gradients, axis=1), rtol=1e-9)


def test_checkpoint_and_resume_is_bit_identical():
    transform = as_optax(ZScoreClip(warmup=4, max_norm=None))
    gradients = [jax.tree.map(jnp.asarray, g) for g in stream()]
    whole, _ = run(transform, gradients, compiled=True)
    _, state = run(transform, gradients[:17], compiled=True)
    leaves, tree = jax.tree.flatten(state)
    restored = jax.tree.unflatten(tree, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    update = jax.jit(lambda g, s: transform.update(g, s))
    for gradient, expected in zip(gradients[17:], whole[17:], strict=True):
        output, restored = update(gradient, restored)
        for a, b in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
            assert np.array_equal(a, b)


def test_what_was_learnt_goes_back_into_a_clipper_and_out_again():
    clipper = ZScoreClip(warmup=4, max_norm=None, scope="tensor")
    params = jax.tree.map(jnp.asarray, next(stream()))
    _, state = run(as_optax(clipper), stream(20), compiled=True)
    load_state(clipper, state, params)
    groups = clipper.get_state()["groups"]
    # The first five norms only fill the median that protects the start.
    assert groups["enc.w"]["count"] == 15
    again = as_optax(clipper).init(params)
    np.testing.assert_array_equal(again.statistics.mean, state.statistics.mean)


@pytest.mark.parametrize("unit", ["output", "tensor", "global"])
def test_agc_gets_the_parameters(unit):
    rng = np.random.default_rng(1)
    params = {
        "enc": {"w": jnp.asarray(rng.standard_normal((4, 3))), "b": jnp.zeros(3)},
        "scale": jnp.asarray(2.0),
    }
    agc = AGC(ratio=0.1, unit=unit)
    outputs, _ = run(as_optax(agc), stream(5), compiled=True, params=params)
    reference = AGC(ratio=0.1, unit=unit)
    weights = {key: np.asarray(value) for key, value in by_name(params).items()}
    for gradient, output in zip(stream(5), outputs, strict=True):
        expected = reference.clip(by_name(gradient), weights)
        for key, value in by_name(output).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-9, atol=1e-14)
    with pytest.raises(ValueError, match=r"agc has no weights for .*; it was given none"):
        as_optax(agc).update(params, as_optax(agc).init(params))


def test_float32_without_x64():
    with jax.enable_x64(False):
        gradients = list(stream())
        outputs, _ = run(as_optax(CLIPPERS["z-score"]()), gradients, compiled=True)
        module = CLIPPERS["z-score"]()
        for gradient, output in zip(gradients, outputs, strict=True):
            cast = {k: np.asarray(v, np.float32) for k, v in by_name(gradient).items()}
            expected = module.clip(cast)
            for key, value in by_name(output).items():
                assert value.dtype == jnp.float32
                np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "size"), [(jnp.float32, 1e20), (jnp.float32, 1e-30), (jnp.float16, 300.0)]
)
def test_extremes_under_jit(dtype, size):
    gradient = {"w": jnp.full(1000, size, dtype)}
    transform = as_optax(NormClip(0.5 * size * 1000**0.5))
    output, _ = jax.jit(transform.update)(gradient, transform.init(gradient))
    norm = np.linalg.norm(np.asarray(output["w"], np.float64) / size) / 1000**0.5
    assert output["w"].dtype == dtype
    assert norm == pytest.approx(0.5, rel=2e-6 if dtype == jnp.float32 else 2e-3)
    assert norm <= 0.5


def test_what_it_can_not_do_is_said_at_once():
    with pytest.raises(NotImplementedError, match="'skip' or 'propagate'"):
        as_optax(NormClip(1.0, on_nonfinite="raise"))
    with pytest.raises(NotImplementedError, match=r"own-limit asks a function .* ZScoreClip"):
        as_optax(OwnLimit(lambda norm, past: 1.0))


@pytest.mark.parametrize("make", [lambda: NormClip(1.0, scope="tensor"), lambda: AGC(0.1)])
def test_leaves_of_the_same_path_are_clipped_each_by_itself(make):
    x, y = jnp.array([3.0, 4.0]), jnp.array([0.3, 0.4])
    tree = {"a": {"b": x}, "a.b": y}
    weights = {"a": {"b": jnp.ones(2)}, "a.b": jnp.full(2, 5.0)}
    transform = as_optax(make())
    output, state = transform.update(tree, transform.init(weights), weights)
    names = {"x": np.asarray(x), "y": np.asarray(y)}
    clipper = make()
    args = [{"x": np.ones(2), "y": np.full(2, 5.0)}] if isinstance(clipper, AGC) else []
    expected = clipper.clip(names, *args)
    np.testing.assert_allclose(output["a"]["b"], expected["x"], rtol=1e-6)
    np.testing.assert_allclose(output["a.b"], expected["y"], rtol=1e-6)
    if not args:
        np.testing.assert_allclose(state.norm, [5.0, 0.5], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "clipper",
    [AutoClip(), NormClip(0.1, dims=[0]), EmaNormClip(), Standardize()],
    ids=lambda c: c.name,
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
