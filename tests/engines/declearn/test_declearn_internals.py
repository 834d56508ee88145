# SPDX-License-Identifier: Apache-2.0
"""The private names of declearn that fedclip uses: all are in one table, and exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import declearn
import pytest

import fedclip

OURS = Path(fedclip.__file__).parent
TABLE = OURS.parent / "docs" / "developers" / "declearn-internals.md"
DECLEARN = Path(declearn.__file__).parent
PARTS = re.compile("Client|Server|Network|Handler")
NAMES = re.findall(r"`([\w.]+:[\w.]+)`", TABLE.read_text(encoding="utf-8"))


@cache
def trees(package: Path) -> dict[Path, ast.Module]:
    files = [f for f in package.rglob("*.py") if "templates" not in f.parts]
    return {f: ast.parse(f.read_text(encoding="utf-8")) for f in files}


def is_private(name: str) -> bool:
    return bool(re.match("_[a-z]", name))


@cache
def defined(package: Path) -> set[str]:
    names = set()
    for tree in trees(package).values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if is_private(name)}


def used() -> Iterator[str]:
    """Yield the private names of declearn in fedclip: imported, overridden, or read."""
    theirs, ours = defined(DECLEARN), defined(OURS)
    for file, tree in trees(OURS).items():
        if "declearn" not in file.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and re.match(r"declearn\..*\._", node.module or ""):
                yield from (alias.name for alias in node.names)
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if node.attr in theirs and not (of_self and node.attr in ours):
                    yield node.attr
            if isinstance(node, ast.ClassDef) and PARTS.search(node.name):
                methods = {getattr(method, "name", "") for method in node.body}
                yield from methods & theirs


def test_each_private_name_that_is_used_is_in_the_table() -> None:
    # `_rng` is of fedclip's own records, which declearn's datasets have too.
    assert {*used()} - {"_rng"} <= {re.split("[:.]", name)[-1] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_exists(name: str) -> None:
    module, _, path = name.partition(":")
    owner, _, last = path.rpartition(".")
    # Not imported: all models would take a minute.
    assert last in defined(DECLEARN) if owner else hasattr(import_module(module), last)
