# SPDX-License-Identifier: Apache-2.0
"""How a site's SuperNode starts: with a known flwr only, and through a border."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.supernode import start_client_internal
from helpers import policy
from typer.testing import CliRunner

from fedclip.cli.main import app
from fedclip.engines.flower import supernode


@pytest.fixture
def as_installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Put back what `_guard` replaces."""
    for module, name in [
        (start_client_internal, "http_request_response"),
        (supernode.runtime_handlers, "TASK_TYPES_ALLOWED_TO_CREATE_TASKS"),
    ]:
        monkeypatch.setattr(module, name, getattr(module, name))
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value"),
    [("package_version", "1.41.1"), ("KNOWN", {"1.41.0": "0" * 64, "1.42.0": "1" * 64})],
)
def test_another_flwr_is_refused(as_installed: pytest.MonkeyPatch, name: str, value: Any) -> None:
    as_installed.setattr(supernode, name, value)
    known = r"flwr 1\.41\.0 or 1\.42\.0 from PyPI, and .* or changed: run pip"
    with pytest.raises(RuntimeError, match=known):
        supernode._check()


@pytest.mark.parametrize("file", ["supercore/servicer/runtime/runtime_handlers.py", "new.py"])
def test_a_changed_file_of_flwr_is_noticed(as_installed: Any, file: str, tmp_path: Path) -> None:
    root = Path(str(supernode.flwr.__file__)).parent
    copy = shutil.copytree(root, tmp_path / "flwr", ignore=shutil.ignore_patterns("__pycache__"))
    as_installed.setattr(supernode.flwr, "__file__", str(copy / "__init__.py"))
    supernode._check()
    with (copy / file).open("a") as changed:
        changed.write("# a comment")
    with pytest.raises(RuntimeError, match="or changed"):
        supernode._check()


def test_the_command_says_why_it_starts_nothing(as_installed: Any, tmp_path: Path) -> None:
    as_installed.setattr(supernode, "package_version", "1.40.0")
    for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
        as_installed.setenv(name, "not set")
    result = CliRunner().invoke(app, ["site", "supernode", str(policy(tmp_path)), "--insecure"])
    assert result.exit_code == 1
    assert "pip install --force-reinstall flwr==1.42.0" in result.stderr
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_a_node_that_fails_ends(as_installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threads of flwr would keep the process, and its port open."""

    def fails() -> None:
        assert shutil.which("flower-superexec")
        raise FileNotFoundError("flower-superexec")

    ended: list[Any] = []
    as_installed.setattr(supernode, "flower_supernode", fails)
    as_installed.setattr(supernode, "flwr_exit", lambda *args: ended.append(args))
    as_installed.setattr(supernode.fleet_http_connection, "http_request_response", None)
    as_installed.setattr(sys, "argv", ["fedclip"])
    as_installed.setenv("PATH", os.defpath)
    supernode.run(policy(tmp_path), ["--insecure"])
    assert "flower-superexec" in ended[0][1]
