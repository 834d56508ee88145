# SPDX-License-Identifier: Apache-2.0
"""Every replacement that a page names gives the numbers of the original: its tables are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import require

import fedclip
from fedclip import translate
from fedclip.testing import apply, to_numpy, to_vector
from fedclip.translate.values import REQUIRED

DOCS = Path(__file__).parents[3] / "docs"
SHAPES = {"k": (3, 4), "b": (4,), "c": (2, 3, 4), "d": (2, 2, 3, 4), "e": (1, 5)}
Arrays = dict[str, Any]


def rows(page: str, *header: str) -> list[list[str]]:
    """Return the cells of the table with this header."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    first = r" \| ".join(header)
    table = re.search(rf"^\| {first} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert table is not None, (page, header)
    found = [re.split(r" \| ", line.strip("| ")) for line in table[1].splitlines()]
    return [[cell.strip() for cell in row] for row in found]


def code(cell: str) -> str:
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found is not None, f"a cell of code alone can be run: {cell}"
    return found[1]


def arrays(seed: int, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {n: (scale * rng.normal(size=s)).astype("float32") for n, s in SHAPES.items()}


def alike(ours: Any, theirs: Any, what: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), 3e-6, 1e-9, err_msg=what)


@pytest.mark.parametrize(("before", "after"), rows("jax", "before", "after"))
def test_tables_of_jax(before: str, after: str) -> None:
    jax = require("jax")
    import optax

    from fedclip.loops.jax import as_optax

    names = {**vars(fedclip), **{n: getattr(fedclip, n) for n in fedclip.__all__}}
    names |= {"jax": jax, "optax": optax, "as_optax": as_optax}
    for scale in (0.01, 1.0, 30.0):
        # Leaves of records have one more axis.
        leaves = [jax.numpy.asarray(a) for a in arrays(1, scale).values()]
        names["leaves"] = leaves[1:2]
        ours, theirs = eval(code(after), names), eval(code(before), names)
        if not isinstance(ours, list):
            params = [jax.numpy.asarray(a) for a in arrays(2).values()]
            ours, theirs = (t.update(leaves, t.init(params), params)[0] for t in (ours, theirs))
        alike(ours, theirs, before)


@pytest.mark.parametrize(("before", "after"), rows("keras", "before", "after"))
def test_tables_of_keras(before: str, after: str) -> None:
    require("tensorflow")
    keras = pytest.importorskip("keras")
    from fedclip.loops.keras import ClippedOptimizer

    names = {n: getattr(fedclip, n) for n in fedclip.__all__}
    names |= {"Adam": keras.optimizers.Adam, "ClippedOptimizer": ClippedOptimizer}
    ends = []
    for cell in (after, before):
        variables = [keras.Variable(a) for a in arrays(2).values()]
        optimizer = eval(code(cell), names)
        for scale in (0.01, 1.0, 30.0):
            gradients = [keras.ops.convert_to_tensor(a) for a in arrays(1, scale).values()]
            optimizer.apply(gradients, variables)
        ends.append([keras.ops.convert_to_numpy(v) for v in variables])
    alike(*ends, before)


@pytest.mark.parametrize(("before", "after"), rows("torch", "torch", "fedclip"))
def test_tables_of_torch(before: str, after: str) -> None:
    torch = require("torch")
    from fedclip.loops import torch as adapter

    ours = {n: getattr(fedclip, n) for n in fedclip.__all__} | vars(adapter)
    for scale in (0.01, 1.0, 30.0, float("nan")):
        ends = []
        for cell, names in ((after, ours), (before, vars(torch.nn.utils))):
            model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Conv2d(2, 3, 2))
            for p, a in zip(
                model.parameters(), np.random.default_rng(0).normal(size=4), strict=True
            ):
                p.grad = torch.full_like(p, scale * a)
            if scale == scale:
                result = eval(code(cell), {**names, "model": model})
                grads = [p.grad.numpy() for p in model.parameters()]
                ends.append([*grads, np.asarray(result if torch.is_tensor(result) else 0.0)])
            elif "error" in before:
                with pytest.raises(RuntimeError):
                    eval(code(cell), {**names, "model": model})
        if ends:
            alike(*ends, before)


# -- classes ------------------------------------------------------------------------------------
# Others run beside ours in tests/laws/test_peers.py, or were recorded in tests/golden.
HERE = ("optax", "torch", "declearn", "tensorflow", "keras")
OPTIONS = {"keras": ("clipnorm", "global_clipnorm", "clipvalue")}
CLASSES = [
    (package, cls, option)
    for package in HERE
    for cls in translate.known()[package]
    for option in OPTIONS.get(package, ("",))
]


def originals(peer: str, cls: str, config: Any, gradients: Arrays, weights: Arrays) -> Arrays:
    """Return what the package itself makes of gradients."""
    if peer == "optax":
        jnp, optax = require("jax").numpy, __import__("optax")
        tx = getattr(optax, cls)(**config)
        trees = ({n: jnp.asarray(a) for n, a in t.items()} for t in (gradients, weights))
        updates, params = trees
        return dict(tx.update(updates, tx.init(params), params)[0])
    if peer == "torch":
        torch = require("torch")
        found = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in weights.items()}
        for name, p in found.items():
            p.grad = torch.tensor(gradients[name])
        getattr(torch.nn.utils, cls)(found.values(), **config)
        return {n: p.grad.numpy() for n, p in found.items()}
    if peer == "declearn":
        from declearn.optimizer import modules

        vector = getattr(modules, cls)(**config).run(to_vector(gradients, "numpy"))
        return dict(to_numpy(vector))
    tf = require("tensorflow")
    if peer == "tensorflow":
        tensors = [tf.constant(a) for a in gradients.values()]
        found = (
            tf.clip_by_global_norm(tensors, **config)[0]
            if cls == "clip_by_global_norm"
            else [getattr(tf, cls)(t, **config) for t in tensors]
        )
        return dict(zip(gradients, found, strict=True))
    assert peer == "keras"
    import keras

    variables = [keras.Variable(np.zeros_like(a)) for a in gradients.values()]
    keras.optimizers.SGD(1.0, **config).apply([*map(tf.constant, gradients.values())], variables)
    return {n: -keras.ops.convert_to_numpy(v) for n, v in zip(gradients, variables, strict=True)}


VALUES = {"clip_value_min": -0.5, "clip_value_max": 0.5}


@pytest.mark.parametrize(("package", "cls", "option"), CLASSES)
def test_translated_classes(package: str, cls: str, option: str) -> None:
    parameters = translate.PEERS[package][cls].parameters
    config = {n: VALUES.get(n, 0.5) for n, d in parameters.items() if d is REQUIRED}
    config |= {option: 0.5} if option else {}
    kind, name, translated = translate.translate(package, cls, config)
    framework = {"optax": "jax", "torch": "torch"}.get(package, "numpy")
    for scale in (0.01, 1.0, 30.0):
        gradients, weights = arrays(1, scale), arrays(2)
        theirs = originals(package, cls, config, gradients, weights)
        base: Any = OptiModule if kind == "module" else Regularizer
        vectors = (to_vector(a, framework) for a in (gradients, weights))
        ours = to_numpy(apply(base.from_specs(name, translated), *vectors))
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], np.asarray(value), 3e-6, 1e-9, err_msg=cls)
