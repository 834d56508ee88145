# SPDX-License-Identifier: Apache-2.0
"""AGC: what its docstring promises; a unit is what leads to one output, found by derivatives."""

from typing import Any

import numpy as np
import pytest
from helpers import each_framework, pairwise, require

from fedclip import AGC, FedclipWarning
from fedclip.testing import FRAMEWORKS, to_numpy, to_vector

SHAPES = [(), (6,), (1, 6), (4, 6), (3, 4, 6), (2, 3, 4, 6), (2, 2, 3, 2, 4)]


def tensors(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": np.asarray(rng.normal(0, scale, shape)) for i, shape in enumerate(SHAPES)}


def run(agc: AGC, grads: Any, weights: Any, framework: str = "numpy", dtype: Any = None) -> Any:
    return to_numpy(agc.run(*(to_vector(x, framework, dtype) for x in (grads, weights))))


def unit_norms(values: np.ndarray, axis: int) -> np.ndarray:
    rows = np.moveaxis(values, axis, 0) if values.ndim > 1 else values.reshape(1, -1)
    return np.linalg.norm(rows.astype(float).reshape(len(rows), -1), axis=1)


@pairwise(framework=FRAMEWORKS, dtype=["float16", "bfloat16", "float32", "float64"], axis=[0, -1])
def test_no_unit_exceeds_its_limit(framework: str, dtype: str, axis: int) -> None:
    if framework == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    weights, grads = tensors(2, 0.1), tensors(3)
    agc = AGC(0.05, axis=axis, min_norm=1e-3)
    got = run(agc, grads, weights, framework, dtype)
    assert not agc._weights
    held = to_numpy(to_vector(weights, framework, dtype))
    for name, value in got.items():
        limit = 0.05 * np.maximum(unit_norms(held[name], axis), 1e-3)
        assert (unit_norms(value, axis) <= limit * (1 + 1e-12)).all()
        assert (unit_norms(value, axis) >= limit * (0.98 if "16" in dtype else 1 - 3e-6)).all()


def test_weights_of_zero_or_not_finite_leave_the_floor() -> None:
    weights = {"w": np.array([[0.0] * 4, [np.nan] * 4, [1e200, np.inf, 0, 0]])}
    with pytest.warns(FedclipWarning, match=r"weights with NaN or infinity.* is 0\.05"):
        got = run(AGC(0.1, axis=0, min_norm=0.5), {"w": np.ones((3, 4))}, weights)
    np.testing.assert_allclose(unit_norms(got["w"], 0), 0.05)


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ({"v": np.ones(2)}, ValueError, "agc has no weights for 'w'; it was given 'v'"),
        ({"w": np.ones((2, 1))}, ValueError, r"of shape \(2,\) and weights of shape \(2, 1\)"),
        ({}, ValueError, "agc has no weights for 'w'; it was given none"),
        ({"w": None}, ValueError, "agc has no weights for 'w'"),
        ({"w": [1.0, 2.0]}, TypeError, "fedclip clips dense arrays .* got builtins.list"),
        ({"w": np.ones(2, complex)}, TypeError, r"weights 'w' are complex128.*agc .*exclude"),
    ],
)
def test_weights_that_do_not_fit_are_told(weights: Any, error: type[Exception], text: str) -> None:
    gradient = {"w": np.ones(2)}
    for unit in ("output", "tensor", "global"):
        with pytest.raises(error, match=text):
            AGC(0.1, unit=unit).clip(gradient, weights)
        assert AGC(unit=unit, exclude="w").clip(gradient, {"w": np.ones(2, complex)}) is gradient


ROOT = np.random.default_rng(0)
FAR = 1e3


def check_units(weight: Any, gradient: Any, clipped: Any, jacobian: Any, name: str = "") -> None:
    """Each unit's norm is its limit; the jacobian, of (outputs, *weight.shape), tells units."""
    leads = np.abs(np.asarray(jacobian)) > 1e-7
    assert (leads.sum(0) <= 1).all(), "a weight leads to one output"
    for unit in leads[leads.reshape(len(leads), -1).any(1)]:
        limit = 0.1 * np.linalg.norm(weight[unit])
        assert np.linalg.norm(gradient[unit]) > limit
        np.testing.assert_allclose(np.linalg.norm(clipped[unit]), limit, rtol=1e-5, err_msg=name)


TORCH = {
    "Linear(4, 3)": (2, 4),
    "Linear(1, 3)": (2, 1),
    "Conv2d(4, 6, 2, groups=2)": (2, 4, 5, 5),
    "Conv3d(2, 3, 2)": (1, 2, 3, 3, 3),
    "ConvTranspose1d(4, 3, 2)": (2, 4, 5),
    "ConvTranspose2d(2, 5, 3)": (2, 2, 5, 5),
    "Embedding(5, 3)": None,
    "utils.parametrizations.weight_norm(torch.nn.Linear(4, 3))": (2, 4),
    "utils.parametrizations.spectral_norm(torch.nn.Linear(1, 3))": (2, 1),
    "transformers.Conv1D": (2, 4),
}


@pytest.mark.parametrize(("made", "shape"), TORCH.items())
def test_units_of_torchs_layers(made: str, shape: Any) -> None:
    torch = require("torch")
    from fedclip.loops.torch import attach, clip_

    torch.manual_seed(0)
    if made == "transformers.Conv1D":
        layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 4)
    else:
        layer = eval(f"torch.nn.{made}", {"torch": torch})
    x = torch.arange(5)[None] if shape is None else torch.randn(shape)
    last = made.startswith(("Linear", "Embed", "utils", "transformers"))
    model = torch.nn.Sequential(layer)
    name = next(n for n, p in layer.named_parameters() if p.ndim > 1)
    weight = layer.get_parameter(name)

    def outputs(w: Any) -> Any:
        found = torch.func.functional_call(layer, {name: w}, (x,))
        return (found.movedim(-1, 1) if last else found).transpose(0, 1).flatten(1).sum(1)

    if "utils" in made:
        # A derivative of the normed weight would mix a row, or all: take the rows of the raw one.
        jacobian = torch.eye(len(weight))[:, :, None].expand(-1, -1, weight.shape[1])
    else:
        jacobian = torch.func.jacrev(outputs)(weight.detach())
    gradient = FAR * torch.randn_like(weight)
    weight.grad = gradient.clone()
    clip_(model, AGC(0.1, min_norm=1e-6))
    check_units(*(t.detach().numpy() for t in (weight, gradient, weight.grad, jacobian)), made)
    clipped, before, weight.grad = weight.grad, weight.detach().clone(), gradient.clone()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with attach(optimizer, AGC(0.1, min_norm=1e-6), model):
        optimizer.step()
    torch.testing.assert_close(before - weight.detach(), clipped, rtol=1e-5, atol=1e-6)


def test_rows_of_attention_and_recurrent_layers_and_refusals() -> None:
    torch = require("torch")
    from fedclip.loops.torch import attach, clip_

    layers = torch.nn.MultiheadAttention(4, 2), torch.nn.LSTM(3, 2, proj_size=1), torch.nn.GRU(3, 2)
    model = torch.nn.ModuleList([*layers, torch.nn.Bilinear(2, 3, 4)])
    for p in model.parameters():
        p.grad = FAR * torch.randn_like(p)
    clip_(model, AGC(0.1, min_norm=1e-6))
    for p in model.parameters():
        if p.ndim > 1:
            norms = torch.linalg.vector_norm(p.grad.flatten(1), dim=1)
            torch.testing.assert_close(norms, 0.1 * torch.linalg.vector_norm(p.flatten(1), dim=1))
    with pytest.raises(ValueError, match=r"give the model, or an axis: AGC\(axis=0\)"):
        clip_(model.named_parameters(), AGC())
    with pytest.raises(ValueError, match="give the model, or an axis"):
        attach(torch.optim.SGD(model.parameters(), 0.1), AGC(), model.named_parameters())
    clip_(model.parameters(), AGC(axis=0))
    grouped = torch.nn.ConvTranspose2d(4, 6, 2, groups=2)
    with pytest.raises(ValueError, match="'weight' belongs to a ConvTranspose2d with groups=2"):
        attach(torch.optim.SGD(grouped.parameters(), 0.1), AGC(), grouped)
    attach(torch.optim.SGD(grouped.parameters(), 0.1), AGC(exclude="weight"), grouped).remove()


KERAS = {
    "Dense(3)": (2, 4),
    "Dense(3, use_bias=False, name='conv2d_transpose')": (2, 4),
    "Conv2D(6, 2, groups=2, name='up')": (2, 5, 5, 4),
    "Conv1DTranspose(3, 2, name='up')": (2, 5, 4),
    "Conv2DTranspose(3, 2, name='up')": (2, 5, 5, 4),
    "DepthwiseConv2D(2, depth_multiplier=2)": (2, 5, 5, 3),
    "EinsumDense('abc,cde->abde', (None, 2, 3), bias_axes='de')": (2, 3, 4),
    "EinsumDense('abde,dec->abc', (None, 4))": (2, 3, 2, 3),
    "Embedding(5, 3)": None,
}


@pytest.mark.parametrize(("made", "shape"), KERAS.items())
def test_units_of_keras_layers(made: str, shape: Any) -> None:
    tf, keras = require("tensorflow"), pytest.importorskip("keras")
    from fedclip.loops.keras import ClippedOptimizer
    from fedclip.loops.tensorflow import CompiledClipper, clip

    layer = eval(f"keras.layers.{made}", {"keras": keras})
    with tf.GradientTape(persistent=True) as tape:
        found = layer(tf.range(5)[None] if shape is None else tf.random.normal(shape, seed=1))
        axes = [i for i in range(len(found.shape) - 1) if "->abde" not in made or i < 2]
        found = tf.reshape(tf.reduce_sum(found, axes), [-1])
    variable = layer.trainable_variables[0]
    value = variable.value if hasattr(variable, "value") else variable
    # On some processors TensorFlow cannot batch the gradients of grouped convolutions.
    jacobian = tape.jacobian(found, value, experimental_use_pfor=False)
    weight = np.array(variable)
    gradient = (FAR * ROOT.normal(size=weight.shape)).astype("float32")
    others = layer.trainable_variables[1:]
    pairs = [(tf.constant(gradient), variable), *((tf.ones_like(v), v) for v in others)]
    one, other, third = (AGC(0.1, min_norm=1e-6) for _ in range(3))
    clipped = [np.array(clip(pairs, one)[0][0]), np.array(CompiledClipper(other)(pairs)[0][0])]
    optimizer = ClippedOptimizer(keras.optimizers.SGD(1.0), third)
    optimizer.apply([g for g, _ in pairs], layer.trainable_variables)
    clipped.append(weight - np.array(variable))
    for found in clipped:
        np.testing.assert_allclose(found, clipped[0], rtol=1e-4, atol=1e-6)
    check_units(weight, gradient, clipped[0], tf.convert_to_tensor(jacobian).numpy(), made)


@pytest.mark.parametrize(
    ("package", "made", "shape"),
    [
        ("flax.linen", "Dense(3)", (2, 4)),
        ("flax.linen", "Conv(4, (2, 2), feature_group_count=4)", (2, 5, 5, 4)),
        ("flax.linen", "ConvTranspose(3, (2, 2))", (2, 5, 5, 4)),
        ("flax.linen", "Embed(5, 3)", None),
        ("equinox.nn", "Linear(4, 3, key=key)", (4,)),
        ("equinox.nn", "Conv2d(4, 6, 2, groups=2, key=key)", (4, 5, 5)),
        ("equinox.nn", "Embedding(5, 3, key=key)", None),
    ],
)
def test_units_of_jax_layers(package: str, made: str, shape: Any) -> None:
    jax, module = require("jax"), pytest.importorskip(package)
    from fedclip.loops.jax import as_optax

    key = jax.random.key(0)
    x = jax.numpy.arange(5) if shape is None else jax.random.normal(key, shape)
    net = eval(f"nn.{made}", {"nn": module, "key": key})
    params = net.init(key, x) if package == "flax.linen" else net

    def outputs(p: Any) -> Any:
        if package == "flax.linen":
            found = net.apply(p, x)
        else:
            found = jax.vmap(p)(x) if shape is None else p(x)
        axis = 0 if package == "equinox.nn" and shape and len(shape) > 1 else -1
        found = jax.numpy.moveaxis(found, axis, 0)
        return found.reshape(len(found), -1).sum(1)

    gradient = jax.tree.map(lambda p: FAR * jax.random.normal(key, p.shape), params)
    transform = as_optax(AGC(0.1, min_norm=1e-6))
    clipped, _ = jax.jit(transform.update)(gradient, transform.init(params), params)
    parts = [jax.tree.leaves(t) for t in (params, gradient, clipped, jax.jacrev(outputs)(params))]
    matrices = [four for four in zip(*parts, strict=True) if four[0].ndim > 1]
    checked = [four for four in matrices if 1 not in four[0].shape[1:]] or matrices
    for four in checked:
        if not (package == "equinox.nn" and four[0].shape[-1] == 1):
            check_units(*map(np.asarray, four), f"{package} {made}")


@each_framework()
def test_vectors_of_declearn_have_the_layout_of_their_framework(framework: str) -> None:
    weight, gradient = ROOT.normal(size=(3, 4)), FAR * ROOT.normal(size=(3, 4))
    output = run(AGC.preset("nfnets"), {"w": gradient}, {"w": weight}, framework)["w"]
    axis = 0 if framework in ("tensorflow", "jax") else 1
    norms, limits = np.linalg.norm(output, axis=axis), 0.01 * np.linalg.norm(weight, axis=axis)
    np.testing.assert_allclose(norms, limits, rtol=1e-5)
