# SPDX-License-Identifier: Apache-2.0
"""Runs tests of mutated copies of fedclip, each in a process forked from this one.

What the copies import is imported here, once, which takes most of a test's time. Each line of
the input is JSON: the folder of a copy, tests, after how many failures and after how many seconds
to stop, and the frameworks. So is each line of the output: the exit status (1: a test has failed),
the text, and each test that ran with whether it passed.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("declearn.main", "declearn.model.torch", "dp_accounting.pld", "hypothesis", "sklearn")
# What a test may take after the others' time is over.
GRACE = 60


class Chosen:
    """Runs the chosen tests only, in their order, and writes each outcome at once."""

    def __init__(self, tests: list[str], seconds: float, file: int) -> None:
        self.order = {test: i for i, test in enumerate(tests)}
        self.end = time.monotonic() + seconds
        self.file = file

    def place(self, item: pytest.Item) -> int | None:
        return self.order.get(item.nodeid, self.order.get(item.nodeid.partition("[")[0]))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.place(item) is not None]
        items.sort(key=lambda item: self.place(item) or 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call":
            outcome = json.dumps([report.nodeid, not report.failed])
            os.write(self.file, outcome.encode() + b"\n")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is over"


def main() -> None:
    for package in PACKAGES:
        importlib.import_module(package)
    assert "fedclip" not in sys.modules
    for line in sys.stdin:
        folder, tests, most, seconds, backends = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as outcomes:
            process = os.fork()
            if not process:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                chosen = Chosen(tests, seconds, outcomes.fileno())
                os._exit(run(folder, tests, most, backends, chosen))
            status = wait(process, seconds + GRACE)
            output.seek(0)
            outcomes.seek(0)
            text = output.read().decode(errors="replace")
            print(json.dumps([status, text, [*map(json.loads, outcomes)]]), flush=True)


def wait(process: int, seconds: float) -> int:
    """Return the exit status of a process, which is killed if it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -signal.SIGKILL


def run(folder: str, tests: list[str], most: int, backends: str, chosen: Chosen) -> int:
    # Processes that the test starts, too, import the copy.
    os.environ["PYTHONPATH"] = folder
    os.chdir(folder)
    sys.path.insert(0, folder)
    options = ["-q", f"--maxfail={most}", "-p", "no:cacheprovider", "--backends", backends]
    # Nobody reads what was compared; and to rewrite the tests for it takes most of the time.
    options.append("--assert=plain")
    files = dict.fromkeys(str(ROOT / test.partition("::")[0]) for test in tests)
    status = pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), *files], plugins=[chosen])
    sys.stdout.flush()
    return int(status)


if __name__ == "__main__":
    main()
