"""DP-SGD attacked, and its accuracy: what the benchmarks show, shorter."""

from __future__ import annotations

import pytest
from dpsgd_wire import seeded
from helpers import require

pytest.importorskip("opacus")

from benchmarks import dpsgd_audit as attack

pytestmark = pytest.mark.slow


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
