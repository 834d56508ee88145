"""TensorFlow loops: the adapter does what the declearn module does."""

import logging
import warnings

import numpy as np
import pytest
from helpers import require

tf = require("tensorflow")

from fedclip import (  # noqa: E402
    AGC,
    EmaNormClip,
    EmaValueClip,
    FedclipWarning,
    NormClip,
    OwnLimit,
    PercentileClip,
    ValueClip,
    ZScoreClip,
)
from fedclip.adapters.tensorflow import CompiledClipper, clip  # noqa: E402

CLIPPERS = {
    "norm": lambda **kw: NormClip(1.0, **kw),
    "norm by tensor": lambda **kw: NormClip(1.0, scope="tensor", **kw),
    "norm by slice": lambda **kw: NormClip(0.5, dims=[0], **kw),
    "values": lambda **kw: ValueClip(0.5, **kw),
    "z-score": lambda **kw: ZScoreClip(warmup=4, max_norm=None, **kw),
    "z-score by layer": lambda **kw: ZScoreClip(warmup=4, max_norm=None, scope="layer", **kw),
    "excluding": lambda **kw: ZScoreClip(warmup=4, max_norm=None, exclude="*/b", **kw),
    "values by their past": lambda **kw: EmaValueClip(decay=0.8, **kw),
    "norm of the average": lambda **kw: EmaNormClip(decay=0.8, scope="layer", **kw),
    "percentile": lambda **kw: PercentileClip(60, **kw),
}
SHAPES = {"enc/w": (4, 3), "enc/b": (3,), "scale": ()}


def variables():
    return [
        tf.Variable(np.zeros(shape), name=name, trainable=True) for name, shape in SHAPES.items()
    ]


def stream(steps=30, seed=0):
    rng = np.random.default_rng(seed)
    for t in range(steps):
        size = 20.0 if t % 9 == 7 else 1.0
        yield {
            name: np.asarray(size * rng.standard_normal(shape)) for name, shape in SHAPES.items()
        }


def pairs(gradient, held):
    return list(zip(map(tf.constant, gradient.values()), held, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CLIPPERS)
def test_it_does_what_the_module_does(name, compiled):
    module, clipper, held = CLIPPERS[name](), CLIPPERS[name](), variables()

    def step(*gradients):
        return [g for g, _ in clip(zip(gradients, held, strict=True), clipper)]

    run = tf.function(step) if compiled else step
    for t, gradient in enumerate(stream()):
        if t == 20:
            gradient["enc/w"][0, 0] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedclipWarning)
            expected = module.clip(gradient)
            outputs = run(*map(tf.constant, gradient.values()))
        for output, value in zip(outputs, expected.values(), strict=True):
            np.testing.assert_allclose(output, value, rtol=1e-9, atol=1e-14)
    if compiled:
        compiled_clipper = CompiledClipper.of(clipper)
        assert compiled_clipper.stats()["round/steps"] == 30
        assert compiled_clipper.stats()["round/nonfinite"] == 1
        clipper.set_state(compiled_clipper.state())
    found, wanted = clipper.get_state()["groups"], module.get_state()["groups"]
    assert found.keys() == wanted.keys()
    for label, fields in wanted.items():
        assert found[label] == pytest.approx(fields, rel=1e-9)
    for name, fields in module.get_state()["arrays"].items():
        for field, value in fields.items():
            np.testing.assert_allclose(clipper.get_state()["arrays"][name][field], value, rtol=1e-9)


def test_traced_once_over_100_steps():
    clipper, held = CLIPPERS["z-score"](), variables()
    traces = 0

    @tf.function
    def step(*gradients):
        nonlocal traces
        traces += 1
        return [g for g, _ in clip(zip(gradients, held, strict=True), clipper)]

    first = next(stream())
    # The variables of the statistics are made by the first step, eagerly here.
    CompiledClipper.of(clipper)(pairs(first, held))
    for gradient in stream(100):
        step(*map(tf.constant, gradient.values()))
    assert traces == 1


# Few elements are joined before they are measured, many are measured one by one.
@pytest.mark.parametrize("sizes", [(5, 0, 700), (9_000, 9_000, 40)])
@pytest.mark.parametrize("scale", [1e30, 1.0, 1e-30])
@pytest.mark.parametrize("dtypes", ["float32 float32 float32", "bfloat16 float16 float32"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_any_size_is_measured_in_a_function(sizes, scale, dtypes, scope):
    kinds = dtypes.split()
    if "float16" in kinds and scale != 1.0:
        scale = scale**0.1
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((n, 1)).astype(np.float32) * np.float32(scale) for n in sizes]
    tensors = [tf.cast(tf.constant(a), k) for a, k in zip(arrays, kinds, strict=True)]
    held = [tf.Variable(tf.zeros(t.shape, t.dtype), name=f"v{i}") for i, t in enumerate(tensors)]
    exact = [float(np.linalg.norm(tf.cast(t, tf.float64))) for t in tensors]
    if scope == "global":
        exact = [float(np.linalg.norm(exact))]
    clipper = NormClip(float(min(n for n in exact if n)) / 2, scope=scope)
    outputs = tf.function(lambda: [g for g, _ in clip(zip(tensors, held, strict=True), clipper)])()
    compiled_clipper = CompiledClipper.of(clipper)
    np.testing.assert_allclose(compiled_clipper.last.norm_before, exact, rtol=1e-6)
    norms = [float(np.linalg.norm(tf.cast(t, tf.float64))) for t in outputs]
    bound = clipper.max_norm
    assert (float(np.linalg.norm(norms)) if scope == "global" else max(norms)) <= bound
    assert [t.dtype for t in outputs] == [t.dtype for t in tensors]


def test_before_the_first_gradient_there_is_nothing_to_read():
    compiled_clipper = CompiledClipper(NormClip(1.0))
    assert compiled_clipper.last is None
    assert compiled_clipper.stats()["round/steps"] == 0


def test_gradients_of_none_and_indexed_slices():
    table, other = tf.Variable(tf.zeros((5, 2)), name="table"), tf.Variable(0.0, name="other")
    slices = tf.IndexedSlices(tf.constant([[3.0, 0], [4.0, 0]]), tf.constant([1, 1]), [5, 2])
    clipper = NormClip(1.0)
    (found, _), (none, _) = clip([(slices, table), (None, other)], clipper)
    assert none is None
    assert clipper.last.norm_before == (7.0,)
    assert float(tf.norm(tf.convert_to_tensor(found))) == pytest.approx(1.0, rel=2e-6)
    compiled = NormClip(1.0)
    run = tf.function(lambda: clip([(slices, table), (None, other)], compiled)[0][0].values)
    np.testing.assert_allclose(run(), found.values, rtol=1e-6)


def test_variables_of_one_name_are_told_apart():
    held = [tf.Variable(0.0, name="same"), tf.Variable(0.0, name="same")]
    clipper = NormClip(1.0, scope="tensor")
    clip([(tf.constant(3.0), held[0]), (tf.constant(4.0), held[1])], clipper)
    assert clipper.last.norm_before == (3.0, 4.0)


def test_a_clipper_of_one_model_refuses_the_gradients_of_another():
    clipper = ZScoreClip()
    both = [tf.Variable([3.0, 4.0], name=name) for name in ("generator", "critic")]

    def step(variable):
        return clip([(tf.ones(2), variable)], clipper)[0][0]

    tf.function(step)(both[0])
    with pytest.raises(ValueError, match=r"zscore-clip clips generator, .* norms of critic"):
        tf.function(step)(both[1])


def test_checkpoint_and_resume_is_bit_identical(tmp_path):
    def start():
        held = variables()
        compiled = CompiledClipper(CLIPPERS["z-score"]())
        compiled(pairs(next(stream()), held))
        return compiled, tf.function(
            lambda *g: [o for o, _ in compiled(list(zip(g, held, strict=True)))]
        )

    gradients = [[tf.constant(v) for v in g.values()] for g in stream()]
    compiled, run = start()
    for gradient in gradients[:15]:
        run(*gradient)
    path = tf.train.Checkpoint(clipper=compiled).save(str(tmp_path / "c"))
    whole = [run(*gradient) for gradient in gradients[15:]]
    other, again = start()
    tf.train.Checkpoint(clipper=other).restore(path).assert_existing_objects_matched()
    for gradient, expected in zip(gradients[15:], whole, strict=True):
        for a, b in zip(again(*gradient), expected, strict=True):
            assert np.array_equal(a, b)


def test_what_can_not_be_done_is_refused():
    raising = NormClip(1.0, on_nonfinite="raise")
    with pytest.raises(NotImplementedError, match="'skip' or"):
        CompiledClipper.of(raising)
    with pytest.raises(NotImplementedError, match=r"own-limit asks a function .*`clip` in Tensor"):
        CompiledClipper.of(OwnLimit(lambda norm, past: 1.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unit", ["output", "tensor", "global"])
def test_agc_takes_the_weights_from_the_variables(unit, compiled):
    rng = np.random.default_rng(1)
    held = [tf.Variable(rng.standard_normal(s), name=n) for n, s in SHAPES.items()]
    weights = {name: v.numpy() for name, v in zip(SHAPES, held, strict=True)}
    agc, reference = AGC(0.1, unit=unit), AGC(0.1, unit=unit)

    def step(*gradients):
        return [g for g, _ in clip(zip(gradients, held, strict=True), agc)]

    run = tf.function(step) if compiled else step
    for gradient in stream(3):
        outputs = run(*map(tf.constant, gradient.values()))
        expected = reference.clip(gradient, weights).values()
        for output, value in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output, value, rtol=1e-9, atol=1e-14)


def test_the_verbs():
    clipper, held = CLIPPERS["z-score"](), variables()
    compiled_clipper = CompiledClipper(clipper)
    run = tf.function(lambda *g: compiled_clipper(list(zip(g, held, strict=True)))[0][0])
    for gradient in stream():
        run(*map(tf.constant, gradient.values()))
    stats = compiled_clipper.stats("clip/")
    assert stats["clip/norm"] == float(compiled_clipper.last)
    assert stats["clip/round/steps"] == 30
    state = compiled_clipper.state()
    compiled_clipper.reset()
    assert compiled_clipper.last is None
    assert compiled_clipper.state()["groups"]["all"]["count"] == 0
    compiled_clipper.load_state(state)
    assert compiled_clipper.state()["groups"] == state["groups"]


def test_what_is_not_counted_is_not_zero() -> None:
    compiled = CompiledClipper(NormClip(1.0))
    compiled([(tf.constant([3.0, 4.0]), tf.Variable([0.0, 0.0]))])
    found = compiled.stats()
    assert (found["round/steps"], found["round/clipped"]) == (1, 1)
    assert not {"round/fixed", "round/learnt", "round/warmup"} & {*found}


def test_tracing_says_nothing():
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        variable = tf.Variable([3.0, 4.0], name="v")
        clipper = ZScoreClip()
        step = tf.function(lambda g: [x for x, _ in clip([(g, variable)], clipper)])
        step(tf.constant([3.0, 4.0]))
    finally:
        tf.get_logger().removeHandler(handler)
    assert said == []


def test_a_state_that_was_loaded_is_forgotten_before_the_first_step_too() -> None:
    variable, known = tf.Variable([0.0, 0.0]), ZScoreClip()
    for size in (1.0, 2.0, 3.0):
        clip([(tf.constant([size, size]), variable)], known)
    compiled, fresh = (CompiledClipper(ZScoreClip()) for _ in range(2))
    compiled.load_state(known.get_state())
    compiled.reset()
    for one in (compiled, fresh):
        one([(tf.constant([100.0, 100.0]), variable)])
    assert compiled.state()["groups"] == fresh.state()["groups"]
