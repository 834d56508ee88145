# SPDX-License-Identifier: Apache-2.0
"""Runs tests of mutated copies of fedclip, each in a process forked from this one.

What the copies import is imported here, once, which takes most of a test's time. Each line of
the input is JSON: the folder of a copy, and a test; so is each of the output: how it has ended
(1: the test has failed), and what it said.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("declearn.main", "declearn.model.torch", "dp_accounting.pld", "hypothesis", "sklearn")


def main() -> None:
    for package in PACKAGES:
        importlib.import_module(package)
    assert "fedclip" not in sys.modules
    for line in sys.stdin:
        folder, test = json.loads(line)
        with tempfile.TemporaryFile() as said:
            process = os.fork()
            if not process:
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
                os._exit(run(folder, test))
            _, status = os.waitpid(process, 0)
            said.seek(0)
            text = said.read().decode(errors="replace")
        print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)


def run(folder: str, test: str) -> int:
    # Processes that the test starts, too, import the copy.
    os.environ["PYTHONPATH"] = folder
    os.chdir(folder)
    sys.path.insert(0, folder)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--backends", "numpy,torch"]
    # Nobody reads what was compared; and to rewrite the tests for it takes most of the time.
    options.append("--assert=plain")
    status = pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests" / test)])
    sys.stdout.flush()
    return int(status)


if __name__ == "__main__":
    main()
