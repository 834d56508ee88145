# SPDX-License-Identifier: Apache-2.0
"""Every replacement that a page names gives the numbers of the original: its tables are run."""

import re
from typing import Any

import numpy as np
import pytest
from checkouts import ROOT
from helpers import require

import fedclip

SHAPES = {"k": (3, 4), "b": (4,), "c": (2, 3, 4), "d": (2, 2, 3, 4), "e": (1, 5)}
Arrays = dict[str, Any]
NAMES = {name: getattr(fedclip, name) for name in fedclip.__all__}


def rows(page: str, *header: str) -> list[list[str]]:
    """Return the cells of the table with this header."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
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

    names = {**vars(fedclip), **NAMES, "jax": jax, "optax": optax, "as_optax": as_optax}
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

    names = {**NAMES, "Adam": keras.optimizers.Adam, "ClippedOptimizer": ClippedOptimizer}
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

    for scale in (0.01, 1.0, 30.0, float("nan")):
        ends = []
        for cell, names in ((after, NAMES | vars(adapter)), (before, vars(torch.nn.utils))):
            model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Conv2d(2, 3, 2))
            for i, p in enumerate(model.parameters(), start=1):
                p.grad = torch.full_like(p, scale / i)
            if scale == scale:
                result = eval(code(cell), {**names, "model": model})
                grads = [p.grad.numpy() for p in model.parameters()]
                ends.append([*grads, np.asarray(result if torch.is_tensor(result) else 0.0)])
            elif "error" in before:
                with pytest.raises(RuntimeError):
                    eval(code(cell), {**names, "model": model})
        if ends:
            alike(*ends, before)
