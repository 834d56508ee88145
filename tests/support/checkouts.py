# SPDX-License-Identifier: Apache-2.0
"""Copies of the checkout, what is typed in them, and the wheel and source archive built of one."""

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
        text = re.sub(
            r"^port = \d+", f"port = {free_port()}", config.read_text("utf-8"), flags=re.M
        )
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
    folder.mkdir()
    for name, words in (("python", ""), ("fedclip", "-m fedclip")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def build(folder: Path) -> None:
    """Build the source archive, and from it the wheel."""
    checkout(folder / "checkout")
    hatchling = f"'{sys.executable}' -m hatchling build -d {folder} -t"
    type_in([f"{hatchling} sdist"], folder / "checkout")
    (archive,) = folder.glob("fedclip-*.tar.gz")
    type_in([f"tar xzf {archive.name}"], folder)
    type_in([f"{hatchling} wheel"], folder / archive.name.removesuffix(".tar.gz"))
