"""DP-SGD attacked, and its accuracy: what the benchmarks show, shorter."""

from __future__ import annotations

import numpy as np
import pytest
from dpsgd_wire import seeded
from helpers import require

pytest.importorskip("opacus")

from benchmarks import dpsgd_audit as attack
from fedclip.privacy.noise import insecure_normals

pytestmark = pytest.mark.slow


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
