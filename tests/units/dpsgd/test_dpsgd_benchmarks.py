"""DP-SGD attacked, its accuracy, and the example: what the benchmarks show, shorter."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from dpsgd_wire import seeded
from helpers import PATIENCE, ended, hiding, require

pytest.importorskip("opacus")

from benchmarks import dpsgd_audit as attack
from fedclip.cli.check.configuration import check_config
from fedclip.privacy.noise import insecure_normals

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "dp_sgd"


@pytest.mark.parametrize("name", attack.CASES)
def test_a_short_audit_finds_the_faults_and_no_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded(monkeypatch.setattr)
    monkeypatch.setattr(attack, "secure_normals", insecure_normals(4))
    coins = np.random.default_rng(5)
    monkeypatch.setattr("numpy.random.default_rng", lambda *seed: coins)
    found = attack.audit(attack.CASES[name], canaries=1000, guesses=200)
    assert (found > attack.EPSILON) == attack.CASES[name].found


@pytest.mark.soak
def test_the_audit_of_twenty_runs() -> None:
    assert attack.main(["20"]) == 0


def test_the_digits_are_learnt_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    seeded(monkeypatch.setattr)
    from benchmarks.dpsgd_accuracy import DIGITS, Setting, accuracy, digits

    assert accuracy("linear", digits(), DIGITS["linear"][0], seed=100) > 0.8
    # As much noise as for a thousandth of epsilon leaves little to learn.
    assert accuracy("linear", digits(), Setting("flat", 1.0, 0.5), 100, epsilon=3e-3) < 0.5


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    require("torch")
    folder = tmp_path / "dp_sgd"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("data", "result", "*.png"))
    monkeypatch.chdir(folder)
    runpy.run_path("prepare.py")
    return folder


def test_the_example_is_checked(example: Path) -> None:
    checked = check_config(example / "config.toml")
    assert checked.ok
    assert (len(checked.notes), checked.leaks) == (3, [])


# The federation of tests/project/test_tutorials.py is the same, but for its comparison.
@pytest.mark.soak
def test_the_example_trains_in_processes_and_plots(example: Path) -> None:
    pytest.importorskip("matplotlib")
    changes = {
        "config.toml": {"rounds = 10": "rounds = 3", "timeout = 120": f"timeout = {PATIENCE}"},
        # With little noise, twenty trainings came to .75 ± .05; chance is .1.
        "client.py": {"(8.0, 1e-5)": "(50.0, 1e-5)"},
    }
    for name, words in changes.items():
        text = (example / name).read_text()
        for old, new in words.items():
            text = text.replace(old, new)
        (example / name).write_text(text)
    program = """
import compare
found = compare.train(50.0)
compare.plot([1.0, 3.0], {"a": [0.1, found], "b": [0.2, 0.3]}, 0.9)
print(found)
"""
    environment = {**hiding("tensorflow", "jax", "haiku", "keras"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f"{os.pathsep}{example}"
    assert float(ended("-c", program, env=environment).stdout) > 0.35
    assert (example / "accuracy.png").stat().st_size > 5000
