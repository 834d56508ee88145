# SPDX-License-Identifier: Apache-2.0
"""What would break a promise makes a test fail: each fault of `mutations.txt`, and its test."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "fedclip").rglob("*.py"))
}


class Change(NamedTuple):
    """Python code that a function contains once, and the code in its place."""

    function: str
    old: str
    new: str

    def parse(self) -> list[list[ast.AST]]:
        """Return the old and the new code: each an expression, or each a list of statements."""
        try:
            return [[ast.parse(code, mode="eval").body] for code in self[1:]]
        except SyntaxError:
            return [list(ast.parse(code).body) for code in self[1:]]


class Fault(NamedTuple):
    """A fault, and the test that fails for it."""

    room: str
    test: str
    name: str
    changes: list[Change]


def read_faults() -> list[Fault]:
    """Return the faults of `mutations.txt`, which explains the format."""
    faults: list[Fault] = []
    room = test = ""
    for line in (ROOT / "tests" / "mutations.txt").read_text(encoding="utf-8").splitlines():
        kind, _, text = line.partition(" ")
        if kind == "==":
            room = text
        elif kind == "::":
            test = text
        elif kind != "#":
            parts = re.fullmatch(r"(.*?): ([\w.]+): (.+) ==> (.+)", line)
            assert parts, f"`{line}` is not a fault: write `name: function: old code ==> new code`"
            name, *change = parts.groups()
            if name:
                faults.append(Fault(room, test, name, []))
            faults[-1].changes.append(Change(*change))
    return faults


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the qualified name and the node of each function, class and variable."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}.{child.name}", child
            yield from definitions(child, f"{prefix}.{child.name}")
        else:
            if isinstance(child, ast.Assign | ast.AnnAssign):
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                yield f"{prefix}.{ast.unparse(target)}", child
            yield from definitions(child, prefix)


FAULTS = read_faults()
ROOMS = dict.fromkeys(fault.room for fault in FAULTS)
DEFINITIONS = [(file, *found) for file, tree in TREES.items() for found in definitions(tree)]
TESTS = [
    f"{path.relative_to(ROOT / 'tests').as_posix()}::{name}"
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def matches(code: Any, pattern: Any) -> bool:
    """Return whether nodes are those of a pattern, in which `...` stands for any code."""
    single = pattern[0] if isinstance(pattern, list) and len(pattern) == 1 else pattern
    single = single.value if isinstance(single, ast.Expr) else single
    if isinstance(single, ast.Constant) and single.value is ...:
        return True
    if type(code) is not type(pattern):
        return False
    if isinstance(pattern, list):
        return len(code) == len(pattern) and all(map(matches, code, pattern))
    if isinstance(pattern, ast.AST):
        return all(
            matches(getattr(code, field, None), getattr(pattern, field, None))
            for field in pattern._fields
        )
    return bool(code == pattern)


def find(change: Change) -> set[tuple[str, ast.AST, str, int]]:
    """Return each place of the old code: file, node, field of the node, index in the field."""
    old, _ = change.parse()
    return {
        (file, node, field, i)
        for file, name, function in DEFINITIONS
        if name.endswith(f".{change.function}")
        for node in ast.walk(function)
        for field, value in ast.iter_fields(node)
        for values in [value if isinstance(value, list) else [value]]
        for i in range(len(values) - len(old) + 1)
        if matches(values[i : i + len(old)], old)
    }


def find_tests(test: str) -> list[str]:
    """Return the tests of that name, with their files."""
    name = test.partition("[")[0]
    return [found for found in TESTS if f"/{found}".endswith((f"/{name}", f"::{name}"))]


@pytest.mark.parametrize("room", ROOMS)
def test_each_mutation_changes_code_that_exists(room: str) -> None:
    for fault in (fault for fault in FAULTS if fault.room == room):
        assert len(find_tests(fault.test)) == 1, f"write its name, or file::name: {fault}"
        for change in fault.changes:
            assert len(find(change)) == 1, f"write once what the code is now: {change}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], Any]]:
    """Return a function that runs a test of a copy of fedclip: its exit status and its output."""
    for package in ("torch", "dp_accounting"):
        pytest.importorskip(package)
    if not hasattr(os, "fork"):
        pytest.skip("processes can not be forked here")
    command = [sys.executable, str(ROOT / "tests" / "support" / "mutated.py")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Outside the checkout, whose fedclip must not be found.
    with subprocess.Popen(command, cwd=tmp_path_factory.mktemp("runner"), **pipes) as runner:

        def run(copy: Path, test: str) -> Any:
            # It takes seconds; one that does not end is a failure.
            message = [str(copy), [test], 1, 300, "numpy,torch"]
            print(json.dumps(message), file=runner.stdin, flush=True)
            return json.loads(runner.stdout.readline())

        yield run
        runner.stdin.close()


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.room}-{fault.name}")
def test_each_mutation_fails_its_test(
    fault: Fault, run: Callable[[Path, str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "fedclip", tmp_path / "fedclip")
    # Opacus has a package of that name, too.
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for change in fault.changes:
        ((file, node, field, i),) = find(change)
        old, new = change.parse()
        value = getattr(node, field)
        changed = value[:i] + new + value[i + len(old) :] if isinstance(value, list) else new[0]
        monkeypatch.setattr(node, field, changed)
        (tmp_path / file).write_text(ast.unparse(TREES[file]), encoding="utf-8")
    (test,) = find_tests(fault.test)
    _, bracket, parameters = fault.test.partition("[")
    status, output, outcomes = run(tmp_path, f"tests/{test}{bracket}{parameters}")
    # 1: a test has failed; more: there was none, or it could not be run.
    assert status == 1, output[-2000:]
    assert not outcomes[-1][1], output[-2000:]
