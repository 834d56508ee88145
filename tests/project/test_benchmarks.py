# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run; how fast anything is, they say and no test does."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE

ROOT = Path(__file__).parents[2]
# Flower is not installed beside declearn.
NAMES = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"flower"})


@pytest.mark.parametrize("name", NAMES)
def test_they_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    importlib.import_module(f"benchmarks.{name}")


def bench(*options: str) -> str:
    command = [sys.executable, "-m", *options]
    return subprocess.check_output(command, cwd=ROOT, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_the_table_has_every_cell_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    options = ("--quick", "--gradients", "20 t", "--frameworks", "numpy", "--threads", "1")
    table = bench("benchmarks", *options, "--json", str(file))
    cells = {tuple(row["cell"]): row["times"] for row in json.loads(file.read_text())}
    assert len(cells) == 2
    for (_, _, _, mode), times in cells.items():
        assert {"norm-clip", "declearn", "read, one core"} < set(times)
        assert ("multiply" in times) == (mode == "clipped")
        assert min(times["norm-clip"], times["declearn"]) > 0
    assert table.count("norm-clip / floor") == 2
