"""Keras' optimizers with a clipper, on each backend; Keras' own clipping is the oracle."""

import pickle
import warnings

import numpy as np
import pytest
from helpers import require

keras = require("keras")
require("tensorflow")

from fedclip import EmaValueClip, NormClip, ValueClip, ZScoreClip  # noqa: E402
from fedclip.loops.keras import ClipHistory, ClippedOptimizer  # noqa: E402

optimizers = keras.optimizers

SHAPES = {"kernel": (4, 3), "bias": (3,), "scale": ()}
LIMIT = 0.5


def variables():
    rng = np.random.default_rng(1)
    return [
        keras.Variable(rng.standard_normal(shape).astype("float32"), name=name)
        for name, shape in SHAPES.items()
    ]


def stream(steps=7, scale=1.0):
    rng = np.random.default_rng(0)
    for t in range(steps):
        size = scale * (10.0 if t % 3 else 0.05)
        yield [
            keras.ops.convert_to_tensor((size * rng.standard_normal(shape)).astype("float32"))
            for shape in SHAPES.values()
        ]


def trained(optimizer, *, exclude=(), scale=1.0):
    """Return the variables after some steps."""
    held = variables()
    if exclude:
        optimizer.exclude_from_weight_decay(var_names=list(exclude))
    for gradients in stream(scale=scale):
        optimizer.apply(gradients, held)
    optimizer.finalize_variable_values(held)
    return [v.numpy() for v in held]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=1e-6)


CLIPS = {
    "global_clipnorm": lambda: NormClip(LIMIT),
    "clipnorm": lambda: NormClip(LIMIT, scope="tensor"),
    "clipvalue": lambda: ValueClip(LIMIT),
}
INNER = {
    "sgd": lambda **kw: optimizers.SGD(0.1, momentum=0.9, **kw),
    "adam": lambda **kw: optimizers.Adam(0.1, **kw),
    "adamw, decayed": lambda **kw: optimizers.AdamW(0.1, weight_decay=0.1, **kw),
    "moving average": lambda **kw: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, **kw),
    "accumulation": lambda **kw: optimizers.Adam(0.1, gradient_accumulation_steps=3, **kw),
    "loss scale": lambda **kw: optimizers.SGD(0.1, loss_scale_factor=8.0, **kw),
    "callable rate": lambda **kw: optimizers.SGD(lambda: 0.05, **kw),
}


# Each optimizer and each clip, not all pairs.
PAIRS = [(i, c) for i in INNER for c in CLIPS if i == "sgd" or c == "global_clipnorm"]


@pytest.mark.parametrize(("inner", "clip"), PAIRS)
def test_it_does_what_keras_own_clip_does(inner, clip):
    excluded = ["bias"] if "decayed" in inner else []
    expected = trained(INNER[inner](**{clip: LIMIT}), exclude=excluded)
    optimizer = ClippedOptimizer(INNER[inner](), CLIPS[clip]())
    close(trained(optimizer, exclude=excluded), expected)
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations)


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="on JAX, Keras' loss scale steps in fit only"
)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_loss_scale_may_be_inside_or_outside(place):
    scaled = optimizers.LossScaleOptimizer
    expected = trained(optimizers.Adam(0.1, global_clipnorm=LIMIT))
    if place == "inside":
        inner = scaled(optimizers.Adam(0.1), initial_scale=64.0)
        optimizer = clipped = ClippedOptimizer(inner, NormClip(LIMIT))
    else:
        clipped = ClippedOptimizer(optimizers.Adam(0.1, loss_scale_factor=4.0), NormClip(LIMIT))
        optimizer = scaled(clipped, initial_scale=64.0)
    assert float(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))) == 64.0
    close(trained(optimizer, scale=64.0), expected)
    # A step that the loss scale skips teaches the clipper nothing.
    before = clipped.metrics()
    optimizer.apply([g * float("nan") for g in next(stream())], optimizer._trainable_variables)
    assert clipped.metrics() == before
    assert before["round/steps"] == 7
    last = np.concatenate([np.ravel(g) for g in list(stream())[-1]])
    assert before["norm"] == pytest.approx(np.linalg.norm(last), rel=1e-5)


def test_accumulated_steps_are_clipped_once_and_learnt_once():
    clipper = ZScoreClip(warmup=1, warmup_factor=None)
    optimizer = ClippedOptimizer(optimizers.SGD(0.1, gradient_accumulation_steps=3), clipper)
    trained(optimizer)
    assert optimizer.metrics()["round/steps"] == 2
    assert optimizer.get_state()["groups"]["all"]["count"] == 2
    gradients = [np.concatenate([np.ravel(g) for g in gs]) for gs in stream()]
    mean = np.linalg.norm(np.mean(gradients[3:6], axis=0))
    assert float(optimizer.last) == pytest.approx(mean, rel=1e-5)


def test_what_gradients_overwrite_is_neither_measured_nor_clipped():
    held = variables()
    held[1].overwrite_with_gradient = True
    optimizer = ClippedOptimizer(optimizers.SGD(1.0), NormClip(0.5, scope="tensor"))
    before = held[0].numpy()
    optimizer.apply([10.0 * keras.ops.ones(v.shape) for v in held], held)
    np.testing.assert_array_equal(held[1].numpy(), np.full(3, 10.0))
    assert len(optimizer.last.groups) == 2
    assert np.linalg.norm(held[0].numpy() - before) == pytest.approx(0.5, rel=1e-4)


def test_what_would_clip_twice_or_not_at_all_is_refused():
    optimizer = norm_clipped()
    with pytest.raises(ValueError, match="clipnorm of a ClippedOptimizer would clip nothing"):
        optimizer.clipnorm = 0.1
    optimizer.inner_optimizer.clipnorm = 0.1
    with pytest.raises(ValueError, match="clipnorm of the inner optimizer would clip twice"):
        optimizer.build(variables())
    inner = optimizers.SGD(0.1)
    ClippedOptimizer(inner, NormClip(1.0))

    class Applying(optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            raise NotImplementedError

    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1, clipvalue=1.0))
    several = optimizers.MultiOptimizer(lambda variable: optimizers.SGD(0.1))
    for given, error, words in (
        (optimizers.SGD(0.1, global_clipnorm=1.0), ValueError, "global_clipnorm of the inner"),
        (scaled, ValueError, "clipvalue of the inner optimizer"),
        (inner, ValueError, "already in another ClippedOptimizer"),
        (several, ValueError, "a ClippedOptimizer around each"),
        (object(), TypeError, "does not step as Keras' optimizers do"),
        (Applying(0.1), TypeError, "do not override apply"),
    ):
        with pytest.raises(error, match=words):
            ClippedOptimizer(given, NormClip(1.0))

    class Forgetting(optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    with pytest.raises(RuntimeError, match="without a call of _clip_gradients"):
        trained(ClippedOptimizer(Forgetting(0.1), NormClip(1.0)))


# -- in fit -----------------------------------------------------------------------------------
def model(optimizer, **settings):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    net.compile(optimizer, "mse", **settings)
    return net


def fit(net, epochs=1, **settings):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 5)).astype("float32") * 3
    y = x.sum(axis=1, keepdims=True)
    return net.fit(x, y, epochs=epochs, batch_size=16, verbose=0, shuffle=False, **settings).history


def norm_clipped(inner=None):
    return ClippedOptimizer(inner or optimizers.Adam(0.01), NormClip(0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "jit"), [({"gradient_accumulation_steps": 2}, True), ({"use_ema": True}, "auto")]
)
def test_fit_does_what_keras_own_clip_does(options, jit):
    if jit is True and keras.backend.backend() == "torch":
        pytest.skip("torch.compile is tried by the tests of torch")
    clipped = model(norm_clipped(optimizers.Adam(0.01, **options)), jit_compile=jit)
    plain = model(optimizers.Adam(0.01, global_clipnorm=0.1, **options), jit_compile=jit)
    np.testing.assert_allclose(*[fit(net, 2)["loss"] for net in (clipped, plain)], rtol=1e-5)
    close(clipped.get_weights(), plain.get_weights())


@pytest.mark.slow
def test_norm_and_limit_are_in_the_history_and_in_the_variables():
    net = model(optimizers.LossScaleOptimizer(norm_clipped()))
    history = fit(net, 2, callbacks=[ClipHistory()])
    assert history["clip/limit"] == pytest.approx([0.1, 0.1])
    assert history["clip/round/steps"] == [4, 4]
    assert history["clip/round/round"] == [1, 2]
    assert len(history["clip/norm"]) == 2
    (held,) = [v for v in net.optimizer.variables if v.name == "norm_clip_norm_limit_clipped"]
    assert held.numpy()[0, 0] == pytest.approx(history["clip/norm"][-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "clipper"), [("pickle", ZScoreClip(warmup=2)), ("save", EmaValueClip())]
)
def test_models_resume_bit_for_bit(how, clipper, tmp_path):
    net = model(ClippedOptimizer(optimizers.Adam(0.01), clipper))
    fit(net, 2)
    with warnings.catch_warnings():
        # Before the first step, Keras says of each of its optimizers that there are no variables.
        warnings.filterwarnings("ignore", "Skipping variable loading", UserWarning)
        if how == "save":
            net.save(tmp_path / "model.keras")
            again = keras.models.load_model(tmp_path / "model.keras")
        else:
            again = pickle.loads(pickle.dumps(net))
    assert isinstance(again.optimizer, ClippedOptimizer)
    assert again.optimizer.clipper.get_config() == net.optimizer.clipper.get_config()
    assert again.optimizer.metrics()["round/steps"] == 4 * 2
    fit(net)
    fit(again)
    for a, b in zip(net.get_weights(), again.get_weights(), strict=True):
        assert np.array_equal(a, b)


def test_the_optimizer_inside_does_not_step_before_the_clipper_is_built():
    inner, held = optimizers.SGD(0.1), variables()
    outer = ClippedOptimizer(inner, NormClip(LIMIT))
    with pytest.raises(RuntimeError, match="norm-clip clips in steps only: call apply"):
        outer._clip_gradients(list(stream())[1])
    with pytest.raises(ValueError, match="inside of a ClippedOptimizer that was not built"):
        inner.apply(list(stream())[1], held)
    outer.build(held)
    inner.apply(list(stream())[1], held)
    assert outer.metrics()["round/steps"] == 1


def test_several_optimizers_may_each_be_clipped_and_share_nothing():
    clipper = ZScoreClip()
    clipped = {name: ClippedOptimizer("sgd", clipper) for name in ("kernel", "rest")}
    choose = lambda v: clipped["kernel" if v.name == "kernel" else "rest"]  # noqa: E731
    gradients = list(stream())[1]
    optimizers.MultiOptimizer(choose).apply(gradients, variables())
    kernel, bias, scale = map(np.asarray, gradients)
    sizes = np.linalg.norm(kernel), np.hypot(np.linalg.norm(bias), scale)
    for name, size in zip(("kernel", "rest"), sizes, strict=True):
        assert clipped[name].metrics()["norm"] == pytest.approx(size, rel=1e-5)
