# SPDX-License-Identifier: Apache-2.0
"""Docs, docstrings and messages: no phrase of phrases.txt, and few long sentences."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from checkouts import ROOT

LONG = 28
"""A sentence with more words is long."""
SHARE = 0.06
"""The share of the sentences of a room that may be long."""


@cache
def listed() -> tuple[dict[str, str], list[str]]:
    """Return the phrases with what to write instead, and the rooms that are not checked yet."""
    text = (Path(__file__).with_name("phrases.txt")).read_text(encoding="utf-8")
    phrases, _, rooms = text.partition("\n# rooms")
    lines = [line for line in phrases.splitlines() if line and not line.startswith("#")]
    return dict(line.rsplit(" => ", 1) for line in lines), rooms.splitlines()[1:]


def strings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a file, and its other strings with at least five words."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and str(node.value).count(" ") > 3:
            yield str(node.value)


def prose(page: Path) -> str:
    """Return a page without code, tables, headings and pictures."""
    lines = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S).splitlines()
    return "\n".join(x for x in lines if not x.lstrip().startswith(("|", "<!--", "#", "!", "[!")))


@cache
def rooms() -> dict[str, list[tuple[Path, str]]]:
    """Return the texts of each room of fedclip/, and of each folder of docs."""
    texts: dict[str, list[tuple[Path, str]]] = {}
    for file in sorted((ROOT / "fedclip").rglob("*.py")):
        parts = file.relative_to(ROOT / "fedclip").parts
        room = "/".join(parts[:2]) if parts[0] == "engines" else parts[0]
        texts.setdefault(room, []).extend((file, text) for text in dict.fromkeys(strings(file)))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        room = page.relative_to(ROOT).parent.as_posix()
        texts.setdefault(page.name if room == "." else room, []).append((page, prose(page)))
    return texts


def long_sentences(text: str) -> tuple[list[str], int]:
    """Return the long sentences of a text, and the number of all; lists and doctests end one."""
    text = re.sub(r"^\s*(?:>>>|\.\.\.|[-*] |\d\. ).*$", ".", text, flags=re.M)
    pieces = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*-{3,}\s*\n", text)
    sentences = [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 2]
    return [sentence for sentence in sentences if len(sentence.split()) > LONG], len(sentences)


@pytest.mark.parametrize("room", rooms())
def test_prose_is_plain(room: str) -> None:
    phrases, pending = listed()
    if room in pending:
        pytest.skip("not reworded yet; see phrases.txt")
    wrong, total, long = [], 0, []
    for file, text in rooms()[room]:
        for phrase, instead in phrases.items():
            for hit in re.finditer(phrase, text, flags=re.M):
                wrong.append(f"{file.relative_to(ROOT)}: {hit[0]!r}; write: {instead}")
        sentences, count = long_sentences(text)
        long += sentences
        total += count
    assert not wrong
    assert len(long) <= SHARE * total, "\n".join(sorted(long, key=len))
