# SPDX-License-Identifier: Apache-2.0
"""The study of docs/study.md: its page is what its numbers say, and its numbers come out again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from declearn.model.sklearn import SklearnSGDModel

from fedclip.engines.declearn.quickrun import vectorize_gradients

RESULTS = Path(__file__).parents[2] / "benchmarks" / "study" / "results"


def part(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2])
        return importlib.import_module(f"benchmarks.study.{name}")


def fields() -> list[Any]:
    own = [part("mechanisms").FIELD, *part("mechanisms").ALTERNATIVES, part("noised").FIELD]
    return [*own, *part("orderings").FIELDS]


def test_no_cell_is_missing_and_none_is_left_over() -> None:
    cells = part("cells")
    scores = cells.read(RESULTS)
    assert not [cell for field in fields() for cell in cells.wanted(field, scores, 10)]
    planned: dict[Any, float] = {}
    # Those of the tuning first, then those that it chose.
    for _ in range(2):
        for field in fields():
            planned |= {c: scores.get(c, 0.0) for c in cells.wanted(field, planned, 10)}
    assert set(scores) == set(planned)


@pytest.mark.slow
def test_the_pages_are_what_the_numbers_say() -> None:
    tables, cells = part("tables"), part("cells")
    study, shown = tables.Study(cells.read(RESULTS)), 0
    for file in tables.PAGES:
        page = file.read_text(encoding="utf-8")
        assert tables.rewritten(page, study) == page, "run: python -m benchmarks.study page"
        shown += page.count("<!-- table: ")
    assert shown == len(tables.TABLES)


@pytest.mark.parametrize("labels", [2, 3])
def test_the_gradient_is_that_of_the_quick_linear_models(labels: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), np.arange(12) % labels
    info = {"features_shape": (4,), "n_features": 4, "classes": np.arange(labels)}
    theirs = SklearnSGDModel.from_parameters("classifier", loss="log_loss", penalty=None)
    gradients = []
    for model in (part("scenes").Linear(), theirs):
        model.initialize(info)
        vectorize_gradients(model)
        model.set_weights(model.get_weights() + 0.1)
        (batch,) = InMemoryDataset(x, y, seed=0).generate_batches(12)
        gradients.append(model.compute_batch_gradients(batch))
    for name, values in gradients[1].coefs.items():
        np.testing.assert_allclose(gradients[0].coefs[name], values, rtol=1e-9, atol=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("trouble", "data", "name"),
    [
        ("units", "wine", "zscore-clip"),
        ("hostile", "digits", "update-clip-server"),
        ("noise epsilon 8", "digits", "adaptive, banded"),
        ("attack labels", "digits", "arc"),
    ],
)
def test_a_cell_comes_out_again(trouble: str, data: str, name: str) -> None:
    cells = part("cells")
    job = cells.Job(trouble, data, 3, ((name, 1.0),))
    (field,) = [f for f in fields() if (trouble, data) in f.places and name in f.mechanisms]
    kept = cells.read(RESULTS)[cells.Cell(trouble, data, name, 1.0, 3)]
    # Sums in another order, on another machine, may turn a record or two.
    assert field.run(job) == [pytest.approx(kept, abs=0.02)]
