# SPDX-License-Identifier: Apache-2.0
"""``fedclip site check``, and ``privacy spent`` on the ledger of a site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from report_runs import call

from fedclip.privacy.ledger import Ledger
from fedclip.site.gate import Gate
from fedclip.site.policy import Policy

MODEL = {"w": np.zeros((2, 2), "float32"), "b": np.zeros(2, "float32")}
NEEDS = "[update]\nmax_norm = 0.5\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def check(path: Path) -> Any:
    return call("site", "check", path)


def budget(folder: Path) -> Path:
    ledger = folder / "kept" / "spent.json"
    ledger.parent.mkdir()
    ledger.parent.chmod(0o700)
    more = f"noise_multiplier = 2\nmax_epsilon = 10\ndelta = 1e-5\nledger = '{ledger.as_posix()}'\n"
    return written(folder, NEEDS + more)


def test_a_policy_is_explained(tmp_path: Path) -> None:
    plain = check(written(tmp_path, f"{NEEDS}allow_metrics = ['loss']"))
    assert plain.exit_code == 0, plain.output
    assert "L2 norm of at most 0.5;" in plain.output
    assert "without noise: an update can reveal data" in plain.output
    assert "without limit or accounting: loss" in plain.output
    path = budget(tmp_path)
    assert "spent: epsilon 0 by 0 updates" in check(path).output
    # Nothing is made by looking.
    assert not (tmp_path / "kept" / "spent.json").exists()
    gate = Gate(Policy.read(path))
    for _ in range(3):
        gate.update(MODEL)
    found = check(path)
    assert found.exit_code == 0, found.output
    assert "standard deviation 1 is added" in found.output
    assert "spent: epsilon 8.385 by 3 updates" in found.output
    assert "remaining: 1 updates" in found.output
    gate.update(MODEL)
    found = check(path)
    assert found.exit_code == 1
    assert "budget of this site is spent: it sends no more updates" in found.stderr


def test_problems_of_a_policy_are_said(tmp_path: Path) -> None:
    path = budget(tmp_path)
    (tmp_path / "kept").rmdir()
    assert "does not exist: create it" in check(path).stderr
    (tmp_path / "kept").mkdir(mode=0o700)
    Ledger(9.0, 1e-5, tmp_path / "kept" / "spent.json", data="9 records")
    assert "is a ledger of records" in check(path).stderr
    (tmp_path / "kept" / "spent.json").write_text("")
    assert "is not a ledger" in check(path).stderr
    (tmp_path / "kept" / "spent.json").unlink()
    (tmp_path / "kept").chmod(0o777)
    if sys.platform != "win32":
        found = check(path)
        assert found.exit_code == 1
        assert "others than its owner may change" in found.stderr
    assert "nowhere.toml: No such file" in check(tmp_path / "nowhere.toml").stderr
