# SPDX-License-Identifier: Apache-2.0
"""What docs promise: each row names an object, a source and tests that exist; public names stay."""

import re
import runpy

import pytest
from checkouts import ROOT

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
CODE = "\n".join(file.read_text("utf-8") for file in (ROOT / "fedclip").rglob("*.py"))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| **")
]


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0].split("**")[1])
def test_each_promise_has_an_object_a_source_and_tests(cells: list[str]) -> None:
    _, objects, source, tests, uncovered = cells
    assert source
    assert uncovered
    names = re.findall(r"`(\w+)`", objects)
    assert names
    for name in names:
        assert re.search(rf"^(class|def) {name}\b", CODE, re.MULTILINE), name
    assert "`test_" in tests
    assert len(ROWS) >= 20


@pytest.mark.parametrize("page", ["promises", "migrate/dp-libraries"])
def test_the_tests_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(named) >= 12
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE), name


def test_public_names_are_those_of_the_file() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "public_names.py"))
    listed = names["FILE"].read_text(encoding="utf-8").splitlines()
    now = list(names["lines"]())
    lost = sorted({*listed} - {*now})
    assert not lost, f"0.1 promises these; `make docs` lists what is new: {lost}"
    assert listed == now, "run `make docs`"
