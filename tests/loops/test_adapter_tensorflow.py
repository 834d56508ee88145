"""TensorFlow loops: the adapter does what the declearn module does."""

import numpy as np
import pytest
from helpers import require

tf = require("tensorflow")

from fedclip import NormClip, ZScoreClip  # noqa: E402
from fedclip.loops.tensorflow import CompiledClipper, clip  # noqa: E402
from fedclip.testing import SHAPES, gradient_stream  # noqa: E402


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


@pytest.mark.parametrize(("wrap", "name"), [(tf.function, "generator"), (lambda f: f, "critic")])
def test_a_clipper_of_one_model_refuses_the_gradients_of_another(wrap, name):
    clipper = ZScoreClip()
    one, other = tf.Variable([3.0, 4.0], name="critic"), tf.Variable([3.0, 4.0], name=name)

    def step(variable):
        return clip([(tf.ones(2), variable)], clipper)[0][0]

    wrap(step)(one)
    with pytest.raises(ValueError, match=f"of zscore-clip for '{name}' are of other tensors"):
        wrap(step)(other)
    wrap(step)(one)
    if wrap is not tf.function:
        clipper.reset()
        wrap(step)(other)


def test_checkpoint_and_resume_is_bit_identical(tmp_path):
    gradients = [[tf.constant(g) for g in step.values()] for step in gradient_stream(30)]

    def start():
        held = [tf.Variable(np.zeros(shape), name=name) for name, shape in SHAPES.items()]
        compiled = CompiledClipper(ZScoreClip(warmup=4, max_norm=None))
        compiled(list(zip(gradients[0], held, strict=True)))
        return compiled, tf.function(
            lambda *g: [o for o, _ in compiled(list(zip(g, held, strict=True)))]
        )

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


def test_a_variable_without_a_gradient_has_no_norm_and_no_limit_in_the_step():
    held = [tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(3))]
    compiled_clipper = CompiledClipper(NormClip(1.0, scope="tensor"))
    compiled_clipper([(tf.fill([2], 3.0), held[0]), (tf.fill([3], 4.0), held[1])])
    for step in (lambda g: compiled_clipper(g), tf.function(lambda g: compiled_clipper(g))):
        step([(tf.constant([0.3, 0.4]), held[0]), (None, held[1])])
        found = compiled_clipper.metrics()
        assert (found["norm"], found["limit"], found["clipped"]) == (pytest.approx(0.5), 1.0, 0)
    compiled_clipper.on_round_start()
    assert compiled_clipper.metrics()["limit"] == 1.0
    assert compiled_clipper.metrics()["round/steps"] == 0
    compiled_clipper.reset()
    assert "limit" not in compiled_clipper.metrics()


def test_a_state_that_was_loaded_is_forgotten_before_the_first_step_too() -> None:
    variable, known = tf.Variable([0.0, 0.0]), ZScoreClip()
    for size in (1.0, 2.0, 3.0):
        clip([(tf.constant([size, size]), variable)], known)
    compiled, fresh = (CompiledClipper(ZScoreClip()) for _ in range(2))
    compiled.set_state(known.get_state())
    compiled.reset()
    for one in (compiled, fresh):
        one([(tf.constant([100.0, 100.0]), variable)])
    assert compiled.get_state()["groups"] == fresh.get_state()["groups"]
