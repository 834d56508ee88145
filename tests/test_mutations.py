# SPDX-License-Identifier: Apache-2.0
"""What would break a promise makes a test fail: each fault of `mutations.txt`, and its test."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A fault, and the test that fails for it."""

    room: str
    file: str
    test: str
    name: str
    texts: dict[str, str]
    """Those that are in the file once, and those in their place."""


def read_faults() -> list[Fault]:
    """Return what `mutations.txt` holds, which says how it is written."""
    found: list[Fault] = []
    place = {"==": "", "--": "", "::": ""}
    for line in (ROOT / "tests" / "mutations.txt").read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        if kind in place:
            place[kind] = rest
        elif kind != "#":
            name, _, change = line.partition(": ")
            if name:
                found.append(Fault(place["=="], place["--"], place["::"], name, {}))
            old, new = (
                json.loads(text) if text[0] == text[-1] == '"' else text
                for text in change.split(" ==> ")
            )
            found[-1].texts[old] = new
    return found


FAULTS = read_faults()
ROOMS = dict.fromkeys(fault.room for fault in FAULTS)


@pytest.mark.parametrize("room", ROOMS)
def test_each_mutation_is_of_a_text_that_is_there(room: str) -> None:
    wrong = {}
    for _, file, test, name, texts in (fault for fault in FAULTS if fault.room == room):
        source = (ROOT / "fedclip" / file).read_text(encoding="utf-8")
        tests, _, function = test.partition("::")
        found = [text for text in texts if source.count(text) != 1]
        if f"def {function.partition('[')[0]}(" not in (ROOT / "tests" / tests).read_text("utf-8"):
            found.append(test)
        if found:
            wrong[name] = found
    assert not wrong


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], Any]]:
    """Return a function that runs a test of a copy of fedclip: its exit status and its output."""
    for package in ("torch", "dp_accounting"):
        pytest.importorskip(package)
    if not hasattr(os, "fork"):
        pytest.skip("processes can not be forked here")
    # Outside the checkout, whose fedclip must not be found.
    folder = tmp_path_factory.mktemp("runner")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "mutated.py")],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as runner:
        assert runner.stdin
        assert runner.stdout
        stdin, stdout = runner.stdin, runner.stdout

        def run(copy: Path, test: str) -> Any:
            print(json.dumps([str(copy), test]), file=stdin, flush=True)
            return json.loads(stdout.readline())

        yield run
        stdin.close()


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.room}-{fault.name}")
def test_each_mutation_fails_its_test(
    fault: Fault, run: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "fedclip", tmp_path / "fedclip")
    # Opacus has a package of that name, too.
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    mutant = tmp_path / "fedclip" / fault.file
    source = mutant.read_text(encoding="utf-8")
    for old, new in fault.texts.items():
        source = source.replace(old, new)
    mutant.write_text(source, encoding="utf-8")
    status, said = run(tmp_path, fault.test)
    # 1: a test has failed; more: there was none, or it could not be run.
    assert status == 1, said[-2000:]
    assert re.search(r"^1 failed", said, re.MULTILINE), said[-2000:]
