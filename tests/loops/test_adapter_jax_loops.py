"""JAX as it is used: donated states, meshes, shard_map, schedules, pytrees."""

import re

import numpy as np
import pytest
from helpers import require

jax = require("jax")
optax = require("optax")
import jax.numpy as jnp  # noqa: E402
from helpers import SPECIMENS, Specimen, specimens  # noqa: E402

from fedclip import AGC, AutoClip, EmaNormClip, EmaValueClip, NormClip, ValueClip, ZScoreClip  # noqa: E402
from fedclip.loops.jax import ClipState, as_optax, metrics, on_round_start, set_state  # noqa: E402
from fedclip.testing import SHAPES  # noqa: E402

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.standard_normal((4, 3)), jnp.float32), "b": jnp.ones(3)}
GRADS = [
    {k: jnp.asarray(s * RNG.standard_normal(v.shape), v.dtype) for k, v in PARAMS.items()}
    for s in (1.0, 0.1, 10.0, 1.0, 50.0)
]


def by_tensor():
    return ZScoreClip(warmup=2, scope="tensor")


def close(found, expected, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def norm(tree):
    return float(optax.tree.norm(tree))


def test_states_can_be_donated():
    transform, other = as_optax(by_tensor()), as_optax(by_tensor())
    state = transform.init(PARAMS)
    arrays = jax.tree.leaves(state)
    assert len({a.unsafe_buffer_pointer() for a in arrays}) == len(arrays)
    step = jax.jit(transform.update, donate_argnums=(0, 1))
    kept = other.init(PARAMS)
    for gradient in GRADS:
        expected, kept = other.update(gradient, kept, PARAMS)
        found, state = step(jax.tree.map(jnp.copy, gradient), state, PARAMS)
        close(found, expected, 1e-5)


def test_nnx_modules_show_one_name_for_a_variable_and_its_array():
    nnx = pytest.importorskip("flax.nnx")
    model, clipper = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), EmaValueClip(exclude="bias")
    optimizer = nnx.Optimizer(model, as_optax(clipper), wrt=nnx.Param)
    before = jax.tree.structure(optimizer.opt_state)
    for _ in range(3):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((4, 3))) ** 2))(model))
    assert jax.tree.structure(optimizer.opt_state) == before
    params = nnx.state(model, nnx.Param)
    assert metrics(clipper, optimizer.opt_state, params)["round/steps"] == 3
    set_state(clipper, optimizer.opt_state, params)
    assert [*clipper.get_state()["arrays"]] == ["kernel"]


def test_modules_of_equinox_and_what_is_no_array_is_refused_by_name():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    clipper = NormClip(0.1, scope="tensor")
    transform = as_optax(clipper)
    with pytest.raises(TypeError, match=r"'act' is not an array, but .* eqx\.filter"):
        transform.init({"w": jnp.ones(2), "act": jax.nn.relu})
    gradients = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(3)) ** 2))(model)
    params = eqx.filter(model, eqx.is_array)
    updates, state = eqx.filter_jit(transform.update)(gradients, transform.init(params), params)
    assert norm(updates.weight) == pytest.approx(0.1, rel=1e-4)
    assert set(metrics(clipper, state, params)) >= {"weight/norm", "bias/norm"}


def test_complex_numbers_count_by_their_absolute_value():
    # declearn's Vector of JAX, if it is imported, makes float64 the default.
    gradient = {"z": jnp.array([3.0 + 4.0j, 0.0], jnp.complex64), "w": jnp.array([12.0])}
    expected, _ = optax.clip_by_global_norm(1.0).update(gradient, None)
    found, state = jax.jit(as_optax(NormClip(1.0)).update)(gradient, None)
    assert found["z"].dtype == gradient["z"].dtype
    close(found, expected, 1e-5)
    assert float(state.norm[0]) == pytest.approx(13.0)
    by_tensor, _ = as_optax(NormClip(1.0, scope="tensor")).update(gradient, None)
    assert norm(by_tensor["z"]) == pytest.approx(1.0, rel=1e-5)
    for clipper in (ValueClip(1.0), NormClip(1.0, dims=[0])):
        with pytest.raises(TypeError, match=r"is complex64, not a float: .* or clip by L2"):
            as_optax(clipper).update(gradient, None)
    left, _ = as_optax(ValueClip(1.0, exclude="z")).update(gradient, None)
    assert left["z"].dtype == gradient["z"].dtype
    assert jnp.array_equal(left["z"], gradient["z"])
    transform = as_optax(NormClip(1.0, exclude="z"))
    bad = {**gradient, "z": gradient["z"] * jnp.nan}
    found, state = jax.jit(transform.update)(bad, transform.init(bad))
    assert found["z"].dtype == gradient["z"].dtype
    assert not any(leaf.any() for leaf in found.values())
    assert int(state.nonfinite) == 1


def test_integers_are_refused_and_their_float0_passes():
    params = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([1, 2])}
    gradient = jax.grad(lambda p: jnp.sum(p["w"] ** 2) + 0.0 * p["n"].sum(), allow_int=True)(params)
    assert gradient["n"].dtype == jax.dtypes.float0
    transform = as_optax(NormClip(1.0))
    updates, _ = transform.update(gradient, None)
    assert updates["n"] is gradient["n"]
    assert norm({"w": updates["w"]}) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(TypeError, match=r"'n' is int(32|64)"):
        transform.update({**gradient, "n": jnp.array([1, 2])}, None)
    masked = optax.masked(transform, {"w": True, "n": False})
    updates, _ = masked.update({"w": gradient["w"], "n": params["n"]}, masked.init(params))
    assert norm({"w": updates["w"]}) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("dims", [None, [0]])
def test_a_schedule_sets_the_limit(dims):
    limits = [0.5, 2.0, 0.25, 1.0, 0.125]
    schedule = lambda count: jnp.asarray(limits)[count]  # noqa: E731
    injected = optax.inject_hyperparams(as_optax)(NormClip(1.0, dims=dims), max_norm=schedule)
    state, step = injected.init(PARAMS), jax.jit(injected.update)
    for gradient, limit in zip(GRADS, limits, strict=True):
        updates, state = step(gradient, state, PARAMS)
        slices = max(float(jnp.linalg.norm(u, axis=0).max()) for u in updates.values())
        assert (slices if dims else norm(updates)) <= limit
        assert dims or norm(updates) == pytest.approx(min(limit, norm(gradient)), rel=1e-4)
    assert float(state.hyperparams["max_norm"]) == limits[-1]


def test_a_state_may_be_left_out_if_there_is_nothing_to_learn_and_a_negative_limit_is_zero():
    for clipper in (NormClip(1.0), ValueClip(0.5), NormClip(0.5, dims=[0])):
        _, state = as_optax(clipper).update(GRADS[2], None)
        assert isinstance(state, ClipState)
    with pytest.raises(ValueError, match="learns from past steps"):
        as_optax(ZScoreClip()).update(GRADS[2], None)
    for clipper in (AGC(0.1), NormClip(1.0, scope={"w": 1.0, "b": 2.0})):
        with pytest.raises(TypeError, match="no single max_norm"):
            as_optax(clipper, max_norm=1.0).update(GRADS[0], None, PARAMS)
    updates, _ = as_optax(NormClip(1.0), max_norm=-1.0).update(GRADS[0], None)
    assert norm(updates) == 0.0


def test_accumulated_steps_are_clipped_once():
    clipper = ZScoreClip(warmup=2)
    inner = as_optax(clipper)
    every = optax.MultiSteps(inner, 2).gradient_transformation()
    state, update = every.init(PARAMS), jax.jit(every.update)
    expected_state = inner.init(PARAMS)
    for first, second in zip(GRADS[:4:2], GRADS[1:4:2], strict=True):
        nothing, state = update(first, state, PARAMS)
        assert norm(nothing) == 0.0
        found, state = update(second, state, PARAMS)
        mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
        expected, expected_state = inner.update(mean, expected_state, PARAMS)
        close(found, expected, 1e-5)
    assert metrics(clipper, state, PARAMS)["round/steps"] == 2


def test_updates_of_another_tree_than_the_state_are_refused():
    transform = as_optax(ZScoreClip(scope="tensor"))
    state = transform.init({"a": jnp.ones(2), "b": jnp.ones(3)})
    for other in ({"a": jnp.ones(2)}, {k: jnp.ones(2) for k in "abc"}):
        with pytest.raises(ValueError, match=r"the state is of 2 groups .* have [13]"):
            jax.jit(transform.update)(other, state)


def test_a_state_is_read_with_the_parameters_that_it_is_of():
    clipper = ZScoreClip(scope="tensor")
    transform = as_optax(clipper)
    _, state = transform.update(GRADS[0], transform.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="holds 0"):
        metrics(clipper, optax.sgd(0.1).init(PARAMS), PARAMS)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    for verb in (metrics, set_state):
        for wrong, params in ((state, dict([*PARAMS.items()][:1])), (many, PARAMS)):
            with pytest.raises(ValueError, match="give the parameters of init"):
                verb(clipper, wrong, params)
    assert not clipper.get_state()["groups"]
    chained = optax.chain(optax.masked(transform, True), optax.sgd(0.1), transform)
    _, state = chained.update(GRADS[0], chained.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="it holds 2: give the one of this clipper") as caught:
        metrics(clipper, state, PARAMS)
    for part in re.findall(r"state\S+", str(caught.value).partition("clipper, ")[2]):
        assert metrics(clipper, eval(part), PARAMS)["round/steps"] == 1
    begun = on_round_start(state)
    assert metrics(clipper, begun[2], PARAMS)["round/steps"] == 0
    assert begun[2].statistics is state[2].statistics
    assert "limit" not in metrics(clipper, chained.init(PARAMS)[2], PARAMS)
    with pytest.raises(TypeError, match="needs the ClipState that init returned"):
        transform.update(GRADS[0], optax.EmptyState(), PARAMS)
    for other in (NormClip(1.0, scope="tensor"), EmaNormClip(scope="tensor")):
        with pytest.raises(TypeError, match="another clipper's, or of zscore-clip with"):
            jax.jit(transform.update)(GRADS[0], as_optax(other).init(PARAMS), PARAMS)


@specimens(s for s in SPECIMENS if s.sampled)
def test_a_state_of_shapes_alone(specimen: Specimen):
    transform = as_optax(specimen.make())
    params = {name: jnp.ones(shape, jnp.float32) for name, shape in SHAPES.items()}
    shapes = jax.eval_shape(lambda: params)
    expected = transform.init(params)
    for found in (transform.init(shapes), jax.eval_shape(transform.init, shapes)):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
    close(transform.init(shapes), expected)
    # And a scan can carry it.
    for wide in (False, True):
        with jax.enable_x64(wide):
            state = transform.init(params)
            _, after = jax.eval_shape(transform.update, params, state, params)
            for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_leaves_of_the_same_path_are_clipped_each_by_itself():
    tree = {"a": {"b": jnp.array([3.0, 4.0])}, "a.b": jnp.array([0.3, 0.4])}
    weights = {"a": {"b": jnp.ones(2)}, "a.b": jnp.full(2, 5.0)}
    transform = as_optax(AGC(0.1))
    with pytest.raises(ValueError, match=r"agc has no weights for .*; it was given none"):
        transform.update(tree, transform.init(weights))
    output, _ = transform.update(tree, transform.init(weights), weights)
    apart = [{"x": leaves["a"]["b"], "y": leaves["a.b"]} for leaves in (tree, weights)]
    expected = AGC(0.1).clip(*apart)
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


def test_a_transformation_of_optax_refuses_the_statistics_of_another_model():
    clipper, (one, other) = ZScoreClip(warmup=2), ({name: jnp.ones(3)} for name in "ab")
    transform = as_optax(clipper)
    _, state = transform.update(one, transform.init(one), one)
    set_state(clipper, state, one)
    with pytest.raises(ValueError, match="load the state of this model"):
        as_optax(clipper).init(other)
    as_optax(clipper).init(one)


def test_a_wrapper_of_optax_keeps_its_state():
    clipper, params = ZScoreClip(warmup=2, on_spike="skip"), {"w": jnp.ones(3)}
    transform = as_optax(clipper, inner=optax.adamw(0.1))
    state, update = transform.init(params), jax.jit(transform.update)
    for value in (1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1):
        updates, state = update({"w": value * params["w"]}, state, params)
        assert updates["w"].any()
    for value in (np.nan, 1e6):
        updates, after = update({"w": value * params["w"]}, state, params)
        assert not updates["w"].any()
        assert repr(after[1]) == repr(state[1])
        state = after
    assert metrics(clipper, state, params)["round/nonfinite"] == 1
    with pytest.raises(NotImplementedError, match="use scope='global'"):
        as_optax(ZScoreClip(on_spike="skip", scope="tensor"), inner=optax.sgd(0.1))
