# SPDX-License-Identifier: Apache-2.0
"""The page of promises: each has a reason, a source, tests that are there, and its limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "promises.md"
PARTS = ["Why", "Source", "Tests", "Not covered"]

# A part of the page without a heading below it is one promise, too.
PROMISES = [
    (text.partition("\n")[0], text)
    for text in re.split(r"^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    if "**Why**" in text
]


@pytest.mark.parametrize(("promise", "text"), PROMISES, ids=[name for name, _ in PROMISES])
def test_each_promise_has_its_ground_and_tests_that_are_there(promise: str, text: str) -> None:
    assert re.findall(r"^- \*\*(.+?)\*\*: .{4}", text, re.MULTILINE) == PARTS
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert named
    for file, name in named:
        (there,) = TESTS.rglob(file)
        assert re.search(rf"^(async )?def {name}\(", there.read_text(), re.MULTILINE), name


def test_no_part_of_the_page_promises_without_a_reason() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(PROMISES) == text.count("**Why**") == text.count("**Not covered**") >= 14
