# SPDX-License-Identifier: Apache-2.0
"""What docs/stability.md promises: public names, and clients of an older version."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers import PATIENCE, free_port

ROOT = Path(__file__).parents[2]
NODE = ROOT / "tests" / "support" / "mixed_node.py"
OLD = "e0101f2"


def test_public_names_are_those_of_the_file() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "public_names.py"))
    listed = names["FILE"].read_text(encoding="utf-8").splitlines()
    now = list(names["lines"]())
    lost = sorted({*listed} - {*now})
    assert not lost, f"0.1 promises these; `make docs` lists what is new: {lost}"
    assert listed == now, "run `make docs`"


def test_the_tests_that_a_migration_page_names_are_there() -> None:
    page = (ROOT / "docs" / "migrate" / "dp-libraries.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    assert len(named) >= 12
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in path.read_text(encoding="utf-8"), name


def node(*words: object, path: Path = ROOT) -> subprocess.Popen[str]:
    """Start the server or a client, with the fedclip of a folder."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "ignore", str(NODE), *map(str, words)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=env, **pipe)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the fedclip of an earlier commit."""
    done = subprocess.run(["git", "archive", OLD, "fedclip"], cwd=ROOT, capture_output=True)
    if done.returncode:
        pytest.skip(f"no commit {OLD}: a source archive")
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("noise", [False, True])
def test_an_older_client_takes_part_and_its_vote_is_refused_with_noise(
    noise: bool, old: Path
) -> None:
    more = {"noise_multiplier": 1.0, "expected_clients": 2} if noise else {}
    port = free_port()
    server = node("server", port, json.dumps({"start_norm": 1.0, **more}))
    nodes = [server, node("here", port), node("older", port, path=old)]
    shown = [process.communicate(timeout=PATIENCE)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0, 0], "\n".join(shown)
    assert "coef" in shown[0]
    assert "Training is now over, after 2 rounds" in shown[2]
    assert ("a vote without bins" in shown[0]) == noise
