# SPDX-License-Identifier: Apache-2.0
"""The table of promises: each row has an argument, an object and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "promises.md").read_text(encoding="utf-8")
CODE = "\n".join(file.read_text("utf-8") for file in (TESTS.parent / "fedclip").rglob("*.py"))
ARGUMENTS = re.findall(r"^## (.+)$", (DOCS / "developers" / "proofs.md").read_text("utf-8"), re.M)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| [")
]


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0].partition("]")[0][1:])
def test_each_promise_has_an_argument_an_object_and_tests(cells: list[str]) -> None:
    promise, objects, source, tests, uncovered = cells
    assert promise[1:].partition("]")[0] in ARGUMENTS
    assert source and uncovered
    names = re.findall(r"`(\w+)`", objects)
    assert names
    for name in names:
        assert re.search(rf"^(class|def) {name}\b", CODE, re.MULTILINE), name
    assert tests
    for test in tests.replace("<!-- V -->", "").split(","):
        file, _, name = test.strip(" `").partition("::")
        assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(), re.M), test


def test_no_argument_is_without_a_promise() -> None:
    promises = [cells[0][1:].partition("]")[0] for cells in ROWS]
    assert promises == ARGUMENTS
    assert len(promises) >= 20
