# SPDX-License-Identifier: Apache-2.0
"""The study of docs/study.md: its page is what its numbers say, and its numbers come out again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

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
