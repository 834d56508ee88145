# SPDX-License-Identifier: Apache-2.0
"""Three hospitals, one in other units: from their CSV files to a limit that helps the others."""

import contextlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE
from report_runs import call

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospital"


@pytest.mark.slow
def test_a_hospital_in_other_units_is_found_and_its_updates_are_clipped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    example = importlib.import_module("run")
    for name in ("run", "tables"):
        monkeypatch.delitem(sys.modules, name)

    def run(program, *words, folder):
        if program == "python":
            command, limit = [sys.executable, *words], {"timeout": PATIENCE}
            return subprocess.run(command, cwd=folder, check=True, **limit)
        # Each process of fedclip's would import everything.
        with contextlib.chdir(folder):
            done = call(*words)
        assert done.exit_code == 0, done.output
        return done.stdout

    named, accuracies = example.play(tmp_path, 20, run)
    assert named == ["valley"]
    for site in ("harbour", "north"):
        before, after = accuracies[site]
        assert before < 0.8
        assert after > 0.9
