# SPDX-License-Identifier: Apache-2.0
"""The Python code of the pages on the engines runs; `project/test_docs.py` runs the rest."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("page", ["flower.md"])
def test_a_page_runs(page: str) -> None:
    text, names, said = (DOCS / page).read_text(encoding="utf-8"), dict[str, Any](), list[str]()
    found = re.findall(r"^```(python|pycon)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    for language, block in found:
        if language == "python":
            exec(compile(block, page, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, {}, page, page, 0)
        test.globs = names
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
