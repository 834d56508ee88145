"""Every adapter takes a clipper, or its name, in the same way, and nothing else."""

from functools import partial
from importlib import import_module

import pytest

from fedclip import AGC, NormClip, OwnLimit, ZScoreClip

pytestmark = pytest.mark.slow


def torch_handle(spec, how="attach"):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    return getattr(import_module("fedclip.loops.torch"), how)(optimizer, spec, layer)


def of_optax(spec):
    pytest.importorskip("optax")
    jnp = import_module("jax.numpy")
    import_module("fedclip.loops.jax").as_optax(spec).init({"w": jnp.zeros(2)})


def of(adapter, kind, *first):
    """Return what makes an object of an adapter, which may have another first argument."""

    def make(spec):
        pytest.importorskip(adapter)
        return getattr(import_module(f"fedclip.loops.{adapter}"), kind)(*first, spec)

    return make


MAKERS = {
    "attach": torch_handle,
    "attach_update": partial(torch_handle, how="attach_update"),
    "PureClipping": of("torch", "PureClipping"),
    "as_optax": of_optax,
    "CompiledClipper": of("tensorflow", "CompiledClipper"),
    "keras": of("keras", "ClippedOptimizer", "sgd"),
    "lightning": of("lightning", "ClipCallback"),
    "transformers": of("transformers", "ClipCallback"),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every
def test_what_is_not_a_clipper_is_refused_at_once_with_the_nearest_name(make):
    for given in (NormClip, None):
        with pytest.raises(TypeError, match=r"is not a clipper of fedclip: make one before"):
            make(given)
    for name, hint in (("norm-clop", "did you mean 'norm-clip'"), ("adam", "")):
        with pytest.raises(ValueError, match=f"no clipper is called '{name}'.*{hint}"):
            make(name)


@every
def test_a_name_makes_a_clipper(make):
    for spec, kind in (
        ("zscore-clip", ZScoreClip),
        (("norm-clip", {"max_norm": 2.0}), NormClip),
        (("agc", {"ratio": 0.1}), AGC),
    ):
        made = make(spec)
        if made is not None:
            (clipper,) = getattr(made, "clippers", None) or [made.clipper]
            assert type(clipper) is kind
            assert getattr(clipper, "max_norm", 2.0) == 2.0 or kind is not NormClip


@pytest.mark.parametrize("name", ["PureClipping", "as_optax", "CompiledClipper", "keras"])
def test_what_compiled_code_can_not_do_is_refused(name):
    with pytest.raises(NotImplementedError, match="'skip' or 'propagate'"):
        MAKERS[name](NormClip(1.0, on_nonfinite="raise"))
    own, words = OwnLimit(lambda norm, past: 1.0), r"own-limit calls your function .*`clip_`.* ZSc"
    with pytest.raises(NotImplementedError, match=words):
        MAKERS[name](own)


def test_arguments_in_another_order_are_refused_in_words():
    layer = pytest.importorskip("torch").nn.Linear(2, 1)
    adapter = import_module("fedclip.loops.torch")
    with pytest.raises(TypeError, match="first argument must be a torch optimizer, got Linear"):
        adapter.attach(layer, NormClip(1.0))
    with pytest.raises(TypeError, match=r"Linear.* is not a clipper"):
        adapter.clip_(NormClip(1.0), layer)
    # The statistics of a clipper by name would be forgotten at each step.
    with pytest.raises(TypeError, match="'norm-clip' is not a clipper"):
        adapter.clip_(layer, "norm-clip")
    tf = pytest.importorskip("tensorflow")
    clip = import_module("fedclip.loops.tensorflow").clip
    with pytest.raises(TypeError, match="'norm-clip' is not a clipper"):
        clip([(tf.ones(2), tf.Variable([0.0, 0.0]))], "norm-clip")
