# SPDX-License-Identifier: Apache-2.0
"""What all tests share: quiet frameworks, and the choice of those to test with."""

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# TensorFlow and XLA write to stderr at import; must be set before anything imports them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Threads of torch that wait leave the processor to other tests; must be set before it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ALL = ("numpy", "torch", "tensorflow", "jax")
# Files whose tests take up to minutes, the longest first.
LONG = ["adapter_processes", "wheel", "init", "registration", "declearn_suite", "examples", "tune"]
SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)
# Files whose packages take seconds to import, by the framework that they need, or as slow.
IMPORTING = {
    "tensorflow": ["tensorflow", "keras"],
    "jax": ["jax", "jax_*"],
    "slow": ["lightning", "transformers"],
}


def quick(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default=",".join(ALL), help="the frameworks to test with")


def pytest_configure(config: pytest.Config) -> None:
    # The process that only hands out tests needs no hypothesis, whose import takes a second.
    if not getattr(config.option, "numprocesses", None):
        from hypothesis import settings

        # The same examples each time, however long one takes.
        settings.register_profile("alike", derandomize=True, deadline=None)
        settings.load_profile("alike")
    # Read by `helpers`, which is not imported here, as it takes seconds.
    os.environ["FEDCLIP_BACKENDS"] = config.getoption("--backends")
    config.pluginmanager.register(Documented(config))
    # Doctests import the files that they are in.
    chosen = config.getoption("--backends").split(",")
    left_out = {*ALL, "slow"} - {*chosen, *([] if quick(config) else ["slow"])}
    files = [file for name in left_out for file in IMPORTING.get(name, [name])]
    globs = [str(config.rootpath / "fedclip" / "*" / f"{file}.py") for file in files]
    config.option.ignore_glob = [*(config.option.ignore_glob or []), *globs]


class Documented:
    """Looks for doctests in the files of fedclip that have some: for them, no other is imported."""

    def __init__(self, config: pytest.Config) -> None:
        self.option, self.package = config.option, config.rootpath / "fedclip"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_file(self, file_path: Path) -> None:
        documented = self.package in file_path.parents and file_path.suffix == ".py"
        self.option.doctestmodules = documented and ">>>" in file_path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what tests start, and what is slow if slow tests are left out."""
    if collection_path.suffix != ".py" or Path(__file__).parent not in collection_path.parents:
        return None
    helps = not collection_path.name.startswith("test_")
    return True if helps or (quick(config) and SLOW.search(collection_path.read_text())) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each process begin with what takes long; a quick run tries a sample of the clippers."""
    if quick(config):
        config.hook.pytest_deselected(items=[item for item in items if not sampled(item)])
        items[:] = filter(sampled, items)
    names = {item: item.path.stem.removeprefix("test_") for item in items}
    rest, ordered = [item for item in items[::-1] if names[item] not in LONG], []
    # Each takes as many tests as the others, in this order, and later steals the last of them.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for i in range(processes):
        ordered += [item for item in items if names[item] in LONG[i::processes]]
        ordered += [rest.pop() for _ in range(len(ordered), len(items) * (i + 1) // processes)]
    items[:] = ordered


def sampled(item: pytest.Item) -> bool:
    """Whether a test is of no row of the table of clippers, or of one that is in the sample."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return getattr(params.get("specimen"), "sampled", True)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays: tests and frameworks are millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _on_the_cpu() -> None:
    """Leave a graphics processor to the tests that ask for it."""
    from declearn.utils import set_device_policy

    set_device_policy(gpu=False)


@pytest.fixture
def checked(tmp_path: Path) -> Callable[[str], Any]:
    """Return what `fedclip check` finds in a file of this text."""
    from fedclip.cli.check.configuration import check_config

    def checked(text: str) -> Any:
        file = tmp_path / "config.toml"
        file.write_text(text, encoding="utf-8")
        return check_config(file)

    return checked


@pytest.fixture
def no_round_left_open() -> Iterator[None]:
    """Forget, after a test, the round of update clipping that it has begun, and who has replied."""
    yield
    from fedclip.engines.declearn.context import change, note

    note(None, {})
    change(client=None, server=None, evaluations=None, members=None)
