# SPDX-License-Identifier: Apache-2.0
"""From three hospitals' CSV files to a limit that helps, by commands only."""

import contextlib
import importlib
from pathlib import Path

import pytest
from report_runs import call

EXAMPLE = Path(__file__).parent.parent / "examples" / "hospitals"


@pytest.mark.slow
def test_a_hospital_gets_from_files_to_a_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    example = importlib.import_module("run")
    for name in ("run", "prepare"):
        monkeypatch.delitem(example.sys.modules, name)

    def fedclip(*words, folder, quiet=False):
        with contextlib.chdir(folder):
            done = call(*words)
        assert done.exit_code == 0, done.output
        print("" if quiet else done.stdout)
        return done.stdout

    # Each of its processes would import everything.
    monkeypatch.setattr(example, "fedclip", fedclip)
    found = example.play(tmp_path)

    assert found.right, found
    assert found.pages == ["report.html", "tune.html"]
    told = capsys.readouterr().out
    # The unit is seen in the files already, and the written limit is in the configuration.
    assert "valley: 'mean area'" in told
    assert "clip" in (tmp_path / "study" / "config.toml").read_text().partition("[run]")[0]
