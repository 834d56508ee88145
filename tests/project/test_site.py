# SPDX-License-Identifier: Apache-2.0
"""The site: built without a warning, complete, and readable without a network."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from helpers import PATIENCE

import fedclip

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    # Strict: a link that leads nowhere and a page outside the navigation are errors.
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" py:")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    public = {f"fedclip.{name}" for name in fedclip.__all__ if not name.startswith("_")}
    for info in pkgutil.walk_packages(fedclip.__path__, "fedclip."):
        if info.name == "fedclip.__main__":
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        assert (site / "api" / f"{info.name}.html").exists()
        public |= {f"{info.name}.{name}" for name in getattr(module, "__all__", ())}
    assert public <= known, sorted(public - known)


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?([^\" >]+)", text)
        assert not [target for target in loaded if "//" in target], page
