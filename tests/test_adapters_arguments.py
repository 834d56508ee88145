"""Every adapter takes a clipper, or its name, in the same way, and nothing else."""

from __future__ import annotations

import importlib
from functools import partial

import numpy as np
import pytest

from fedclip import AGC, EmaNormClip, EmaValueClip, NormClip, OwnLimit, ZScoreClip


def keras_optimizer(spec):
    keras = pytest.importorskip("keras")
    made = importlib.import_module("fedclip.adapters.keras").ClippedOptimizer
    return made(keras.optimizers.SGD(), spec).clipper


def torch_handle(spec, how="attach"):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    attach = getattr(importlib.import_module("fedclip.adapters.torch"), how)
    return attach(optimizer, spec, layer).clipper


def pure(spec):
    pytest.importorskip("torch")
    return importlib.import_module("fedclip.adapters.torch").PureClipping(spec).clipper


def lightning_callback(spec):
    pytest.importorskip("lightning")
    (clipper,) = importlib.import_module("fedclip.adapters.lightning").ClipCallback(spec).clippers
    return clipper


def transformers_callback(spec):
    pytest.importorskip("transformers")
    return importlib.import_module("fedclip.adapters.transformers").ClipCallback(spec).clipper


def compiled(spec):
    pytest.importorskip("tensorflow")
    return importlib.import_module("fedclip.adapters.tensorflow").CompiledClipper(spec).clipper


def of_optax(spec):
    pytest.importorskip("optax")
    jnp = importlib.import_module("jax.numpy")
    transformation = importlib.import_module("fedclip.adapters.jax").as_optax(spec)
    transformation.init({"w": jnp.zeros(2)})


MAKERS = {
    "attach": torch_handle,
    "attach_update": lambda spec: torch_handle(spec, "attach_update"),
    "PureClipping": pure,
    "as_optax": of_optax,
    "CompiledClipper": compiled,
    "keras": keras_optimizer,
    "lightning": lightning_callback,
    "transformers": transformers_callback,
}
pytestmark = pytest.mark.slow


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def make(request):
    return request.param


@pytest.mark.parametrize("given", [NormClip, None])
def test_what_is_not_a_clipper_is_refused_at_once(make, given):
    with pytest.raises(TypeError, match=r"is not a clipper of fedclip: give one, such as"):
        make(given)


@pytest.mark.parametrize("name", ["norm-clop", "adam"])
def test_an_unknown_name_is_refused_with_the_nearest(make, name):
    hint = "did you mean 'norm-clip'" if name == "norm-clop" else ""
    with pytest.raises(ValueError, match=f"no clipper is called '{name}'.*{hint}"):
        make(name)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("zscore-clip", ZScoreClip),
        (("norm-clip", {"max_norm": 2.0}), NormClip),
        (("agc", {"ratio": 0.1}), AGC),
    ],
)
def test_a_name_makes_a_clipper(make, spec, kind):
    clipper = make(spec)
    assert clipper is None or (type(clipper) is kind)
    if kind is NormClip and clipper is not None:
        assert clipper.max_norm == 2.0


@pytest.mark.parametrize("name", ["PureClipping", "as_optax", "CompiledClipper", "keras"])
def test_what_compiled_code_can_not_do_is_refused(name):
    with pytest.raises(NotImplementedError, match="'skip' or 'propagate'"):
        MAKERS[name](NormClip(1.0, on_nonfinite="raise"))
    with pytest.raises(NotImplementedError, match=r"own-limit asks a function .*`clip_`.* ZScore"):
        MAKERS[name](OwnLimit(lambda norm, past: 1.0))


def test_arguments_in_another_order_are_refused_in_words():
    torch = pytest.importorskip("torch")
    adapter = importlib.import_module("fedclip.adapters.torch")
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match="first argument must be a torch optimizer, got Linear"):
        adapter.attach(layer, NormClip(1.0))
    with pytest.raises(TypeError, match=r"Linear.* is not a clipper"):
        adapter.clip_(NormClip(1.0), layer)
    with pytest.raises(TypeError, match="'norm-clip' is not a clipper"):
        adapter.clip_(layer, "norm-clip")  # its statistics would be forgotten at each step


def test_tensorflow_clips_with_an_object_only():
    tf = pytest.importorskip("tensorflow")
    clip = importlib.import_module("fedclip.adapters.tensorflow").clip
    with pytest.raises(TypeError, match="'norm-clip' is not a clipper"):
        clip([(tf.ones(2), tf.Variable([0.0, 0.0]))], "norm-clip")


# -- the first step after a state was loaded -----------------------------------------------------
def begin_pure(clipper):
    torch = pytest.importorskip("torch")
    module = importlib.import_module("fedclip.adapters.torch")
    module.PureClipping(clipper).init({"w": torch.ones(2)})


def begin_compiled(clipper):
    tf = pytest.importorskip("tensorflow")
    module = importlib.import_module("fedclip.adapters.tensorflow")
    module.CompiledClipper(clipper)([(tf.ones(2), tf.Variable([0.0, 0.0], name="w"))])


def begin_keras(clipper):
    keras = pytest.importorskip("keras")
    module = importlib.import_module("fedclip.adapters.keras")
    module.ClippedOptimizer("sgd", clipper).build([keras.Variable([0.0, 0.0], name="w")])


@pytest.mark.parametrize(
    "begin",
    [lambda c: c.clip({"w": np.ones(2)}), begin_pure, of_optax, begin_compiled, begin_keras],
)
@pytest.mark.parametrize("make", [partial(ZScoreClip, scope="tensor"), EmaValueClip, EmaNormClip])
def test_a_state_of_other_tensors_is_refused(make, begin):
    learnt = make()
    learnt.clip({"v": np.ones(2)})
    clipper = make()
    clipper.set_state(learnt.get_state())
    with pytest.raises(ValueError, match=r"is of .*'v'.*\['w'\] besides: load the state of this"):
        begin(clipper)
