# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run; how fast anything is, they say and no test does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("__main__", "adapters", "cuda", "measure", "merge", "noise")


@pytest.mark.parametrize("name", NAMES)
def test_they_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name.strip('_')}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.slow
def test_what_is_measured_is_what_is_compared() -> None:
    """Of a small gradient, so that it takes a moment; every number of the tables is there."""
    code = (
        "import json\n"
        "from benchmarks import __main__ as b, measure as m\n"
        "times = m.measure_quiet('numpy', [(3, 5)] * 120, 3)\n"
        "times |= m.measure_clipped('numpy', [(3, 5)] * 120, 3)\n"
        "table = b.ratios({'numpy': {name: times for name, _, _ in m.GRADIENTS}})\n"
        "print(json.dumps([sorted(times), table.row_count, min(times['floor'], 1)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names, rows, positive = json.loads(done.stdout.splitlines()[-1])
    assert {"declearn", "floor", "multiply", "norm-clip", "zscore minus norm"} < set(names)
    assert rows > 15
    assert positive > 0


@pytest.mark.slow
def test_every_clipper_is_measured() -> None:
    code = (
        "import json\n"
        "from benchmarks import measure as m\n"
        "m.GRADIENTS = [('small', [(3, 5)] * 4, 1)]\n"
        "print(json.dumps(sorted(m.measure_clippers('numpy', 1))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "zscore-clip" in done.stdout
