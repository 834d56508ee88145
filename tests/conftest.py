# SPDX-License-Identifier: Apache-2.0
"""What all tests share: quiet frameworks, and the choice of those to test with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# TensorFlow and XLA write to stderr at import; must be set before anything imports them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ALL = "numpy,torch,tensorflow,jax"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends", default=ALL, help=f"the frameworks to test with (default: {ALL})"
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--backends").split(",")
    # Read by `helpers`, which is not imported here, as it takes seconds.
    os.environ["FEDCLIP_BACKENDS"] = ",".join(chosen)
    # Doctests import the files that they are in.
    folder = config.rootpath / "fedclip" / "*"
    left_out = [str(folder / f"{name}.py") for name in ALL.split(",") if name not in chosen]
    config.option.ignore_glob = [*(config.option.ignore_glob or []), *left_out]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source archive, and the wheel that was built from it."""
    pytest.importorskip("hatchling")
    from checkouts import build

    folder = tmp_path_factory.mktemp("built")
    build(folder)
    return folder
