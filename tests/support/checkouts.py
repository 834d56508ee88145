# SPDX-License-Identifier: Apache-2.0
"""Copies of the checkout, and what is typed in them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from helpers import PATIENCE, free_port

ROOT = Path(__file__).parents[2]


def checkout(folder: Path) -> None:
    """Copy what a reader has, with a port that nobody uses."""
    for name in ("examples", "docs", "fedclip"):
        made = ("data", "result*") if name == "examples" else ()
        left_out = shutil.ignore_patterns(*made, "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for config in folder.glob("examples/*/config.toml"):
        text = config.read_text("utf-8")
        text = re.sub(r"^port = \d+", f"port = {free_port()}", text, flags=re.M)
        config.write_text(text, encoding="utf-8")


def type_in(lines: list[str], folder: Path, **environment: str) -> str:
    """Type the lines into a shell that stops at the first that fails; return what it showed."""
    # Only what is imported is compiled, and that once. (To pip, 0 is for "no compile".)
    quicker = {"PIP_NO_COMPILE": "0", "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env={**os.environ, **quicker, "COLUMNS": "80", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    return ran.stdout


def on_path(folder: Path) -> str:
    """Return a path on which `python` and `fedclip` are those of the tests."""
    folder.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("fedclip", "-m fedclip")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
