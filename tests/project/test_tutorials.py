# SPDX-License-Identifier: Apache-2.0
"""The tutorials, command by command as they are typed, in a copy of the checkout."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from checkouts import ROOT, checkout, on_path, type_in
from helpers import PATIENCE, require

pytestmark = pytest.mark.slow

INSTALLING = ("python -m venv", ". .venv", "pip install")


def commands(page: str) -> list[str]:
    """Return the lines that a page asks its reader to type."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(
        r"(<!-- not in the tutorial -->\n)?^```console\n(.*?)^```$", text, re.M | re.S
    )
    lines = [line for left_out, body in found if not left_out for line in body.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def typed(page: str, tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    checkout(folder)
    lines = [line for line in commands(page) if not line.startswith(INSTALLING)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    type_in(lines, folder, PATH=on_path(tmp_path / "bin"), PYTHONPATH=paths)
    return folder


def test_the_first_ten_minutes_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    checkout(folder)
    (wheel,) = built.glob("fedclip-*.whl")
    constraints = str(ROOT / "constraints.txt")
    # Nobody waits for the whole demo here; tests/cli/test_demo.py runs it.
    shorter = {
        "pip install '.[": f"pip install -q '{wheel}[",
        "fedclip demo": "fedclip demo --seeds 1",
    }
    lines = []
    for line in commands("first-ten-minutes.md"):
        for words, others in shorter.items():
            line = line.replace(words, others)
        lines.append(line)
    python = tmp_path / "bin"
    shown = type_in(lines, folder, PATH=on_path(python), PIP_CONSTRAINT=constraints, PYTHONPATH="")
    results = folder / "examples" / "hospital" / "study"
    assert "data-norms" in (results / "report.html").read_text("utf-8")
    assert (folder / "fedclip-demo" / "demo.png").exists()
    assert "valley: the norms of its steps are" in shown
    assert '"no-op"' not in (results / "config.toml").read_text("utf-8").partition("server_opt")[0]
    assert "unclipped" in shown

    # What needs more than the core says what to install, and it is true of a wheel.
    for module, package in (("torch", "torch"), ("tensorflow", "tensorflow"), ("jax", "jax optax")):
        needs = type_in(
            [f"! .venv/bin/python -c 'import fedclip.loops.{module}'"], folder, PYTHONPATH=""
        )
        assert f"pip install {package}" in needs


def test_privacy(tmp_path: Path) -> None:
    require("torch")
    pytest.importorskip("dp_accounting")
    folder = typed("tutorial-privacy.md", tmp_path) / "examples" / "dp_sgd" / "result"
    assert {path.parent.name for path in folder.rglob("privacy_spent.json")} == {
        "client_0",
        "client_1",
        "client_2",
    }


def test_loops_as_a_notebook() -> None:
    require("torch")
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    notebook = jupytext.read(ROOT / "docs" / "tutorial-loops.md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=PATIENCE).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [o["text"] for cell in cells for o in cell.outputs if o.get("name") == "stdout"]
    assert len(cells) == 4
    assert "steps clipped" in "".join(shown)
