# SPDX-License-Identifier: Apache-2.0
"""DP-SGD without declearn: sampling, calibration, the ledger, and how records are clipped."""

import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fedclip.cli.privacy import read_spent
from fedclip.dpsgd.calibrate import calibrate, steps_of_a_round
from fedclip.dpsgd.step import MODES, PoissonSampler, SampleClipping
from fedclip.privacy import ledger as ledgers
from fedclip.privacy.accounting import Release, account, epsilon, order_for
from fedclip.privacy.ledger import Ledger, fingerprint, read_entries, total


def test_each_record_is_drawn_at_the_rate_independently_over_steps() -> None:
    """Within six standard deviations: of the share, of each record's, of sizes, over steps."""
    records, rate, steps = 200, 0.1, 4000
    bits = np.random.default_rng(0)
    sampler = PoissonSampler(records, 20, lambda n: bits.integers(0, 2**64, n, dtype=np.uint64))
    drawn = np.zeros((steps, records), dtype=bool)
    for row in drawn:
        row[sampler.draw()] = True
    variance = rate * (1 - rate)
    assert abs(drawn.mean() - rate) < 6 * math.sqrt(variance / drawn.size)
    assert np.abs(drawn.mean(axis=0) - rate).max() < 6 * math.sqrt(variance / steps)
    assert abs(drawn.sum(axis=1).var() / (records * variance) - 1) < 6 * math.sqrt(2 / steps)
    assert abs((drawn[1:] & drawn[:-1]).mean() - rate**2) < 6 * rate / math.sqrt(drawn.size)


def test_the_rate_in_use_is_never_above_the_one_accounted_for() -> None:
    for records, expected in ((3, 1), (4, 3), (10**6, 1)):
        edge = math.floor(Fraction(PoissonSampler(records, expected).rate) * 2**64)
        words = np.full(records, edge, dtype=np.uint64)
        words[1:3] = edge - 1, 0
        sampler = PoissonSampler(records, expected, lambda size, words=words: words)
        assert sampler.draw().tolist() == [1, 2]
    whole = PoissonSampler(5, 99)
    assert len(whole.draw()) == whole.expected == 5
    wrong: list[Any] = [(0, 1), (3, 0), (2.5, 1), (3, True)]
    for settings in wrong:
        with pytest.raises((TypeError, ValueError), match="must be an int"):
            PoissonSampler(*settings)


@pytest.mark.slow
def test_a_calibrated_run_costs_its_budget_and_no_more() -> None:
    found = calibrate(3.0, 1e-5, 400, 64, 60)
    cost = epsilon([Release(found.noise_multiplier, found.steps, found.rate)], 1e-5)
    assert 2.99 < cost <= 3.0
    assert found.noise == found.noise_multiplier / 64
    assert found.spent == cost
    # Twice the values: noise √2 times as long. Four times the steps: half of it, on a way as long.
    assert found.drift(200) == pytest.approx(found.noise * math.sqrt(200 / 60))
    whole = calibrate(3.0, 1e-5, 400, 999, 60)
    assert (whole.rate, whole.expected, whole.noise) == (1.0, 400.0, whole.noise_multiplier / 400)


@pytest.mark.parametrize(
    ("epochs", "steps", "kept", "expected"),
    [(1, None, False, 3), (1, None, True, 4), (2, 5, False, 5), (None, 7, False, 7)],
)
def test_steps_of_a_round(epochs: int | None, steps: int | None, kept: bool, expected: int) -> None:
    batches = {"batch_size": 30, "drop_remainder": not kept}
    assert steps_of_a_round(100, batches, epochs, steps) == expected
    assert steps_of_a_round(100, batches) is None
    assert steps_of_a_round(10, batches, 1) == 1
    # As in declearn, the rest is dropped if nothing is said.
    assert steps_of_a_round(100, {"batch_size": 30}, 1) == 3


def charge(ledger: Ledger, times: int, rate: float = 1.0) -> None:
    for _ in range(times):
        ledger.charge(2.0, rate)


@pytest.mark.slow
def test_the_ledger_stops_before_the_budget_would_be_passed() -> None:
    ledger = Ledger(1.0, 1e-5)
    taken = ledger.reserve(2.0, 0.1, 10_000)
    charge(ledger, taken, 0.1)
    with pytest.raises(StopIteration, match="budget is spent: epsilon"):
        ledger.charge(2.0, 0.1)
    assert taken == ledger.accountant.rounds
    assert ledger.spent <= 1.0 < epsilon([Release(2.0, taken + 1, 0.1)], 1e-5)


def held(path: Path) -> list[Release]:
    """Return what a file says was spent."""
    return total(read_entries(path).values()).spent


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process knows, as the next one would."""
    return lambda: monkeypatch.setattr(ledgers, "_OF_THIS_PROCESS", {})


def test_a_ledger_is_spent_to_its_very_end() -> None:
    """Each step is paid once, for its own noise, and nothing is given back."""
    ledger = Ledger(epsilon([Release(2.0, 5)], 1e-5), 1e-5)
    assert ledger.reserve(2.0, 1.0, 2, planned=9) == 2
    charge(ledger, 2)
    # Four steps at half of the noise cost as much as sixteen: there is room for three quarters.
    with pytest.raises(StopIteration):
        ledger.charge(1.0, 1.0)
    assert ledger.accountant.spent == [Release(2.0, 2)]
    assert ledger.reserve(2.0, 1.0, 9, planned=9) == 3
    charge(ledger, 3)
    assert ledger.accountant.spent == [Release(2.0, 5)]
    with pytest.raises(StopIteration):
        ledger.charge(2.0, 1.0)


def test_nothing_is_given_back(tmp_path: Path) -> None:
    ledger = Ledger(1.0, 1e-5, tmp_path / "spent.json")
    for steps in (7, 2):
        ledger.reserve(2.0, 0.1, steps)
        charge(ledger, 3, rate=0.1)
    assert held(tmp_path / "spent.json") == [Release(2.0, 10, 0.1)] == ledger.accountant.spent
    with pytest.raises(ValueError, match="steps must be an int >= 0"):
        ledger.reserve(2.0, 0.1, -5)
    assert ledger.accountant.rounds == 10


@pytest.mark.parametrize("fate", ["put back", "deleted", "emptied", "another", "cut off"])
def test_what_becomes_of_the_file_takes_nothing_from_this_process(
    tmp_path: Path, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = tmp_path / "spent.json", tmp_path / "other.json"
    Ledger(90.0, 1e-5, other, data="9 records").reserve(2.0, 1.0, 4)
    ledger = Ledger(90.0, 1e-5, path, data="7 records")
    old = path.read_bytes()
    for i in range(3):
        assert ledger.reserve(2.0, 1.0, 5) == 5
        cut = path.read_bytes()[: -20 * i or None]
        if fate == "deleted":
            path.unlink()
        else:
            fates = {"put back": old, "emptied": b"", "another": other.read_bytes(), "cut off": cut}
            path.write_bytes(fates[fate])
    for again in (ledger, Ledger(90.0, 1e-5, path, data="7 records")):
        again.reserve(2.0, 1.0, 1)
    another = fate == "another"
    assert held(path) == [Release(2.0, 17 + 4 * another, 1.0)] == ledger.accountant.spent
    assert "of the charges of this process: it was put back" in caplog.text
    assert ("is of other data (9 records) than these (7 records)" in caplog.text) == another


@pytest.mark.slow
def test_each_line_that_is_cut_off_is_told_from_damage(tmp_path: Path, restart: Any) -> None:
    path = tmp_path / "spent.json"
    for _ in range(2):
        Ledger(90.0, 1e-5, path).reserve(2.0, 1.0, 5)
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        restart()
        path.write_bytes(whole[:end])
        if end < whole.index(b"\n"):
            with pytest.raises(ValueError, match="is not a ledger"):
                Ledger(90.0, 1e-5, path)
            continue
        spent = 5 * (whole[:end] + b"\n").count(b"}\n") - 5
        ledger = Ledger(90.0, 1e-5, path)
        assert ledger.accountant.rounds == spent
        ledger.reserve(2.0, 1.0, 1)
        restart()
        assert Ledger(90.0, 1e-5, path).accountant.rounds == spent + 1
        assert path.read_bytes().startswith(whole[:end])
    path.write_bytes(whole.replace(b"}", b"", 1))
    with pytest.raises(ValueError, match="or is damaged"):
        read_entries(path)


def test_what_others_charge_is_seen_before_the_next_step(tmp_path: Path, restart: Any) -> None:
    path, most = tmp_path / "spent.json", Ledger(9.0, 1e-5).reserve(2.0, 1.0, 10_000)
    one = Ledger(9.0, 1e-5, path)
    assert one.reserve(2.0, 1.0, 1, planned=most) == 1
    restart()
    assert Ledger(9.0, 1e-5, path).reserve(2.0, 1.0, most - 3) == most - 3
    same = Ledger(9.0, 1e-5, path)
    assert same.reserve(2.0, 1.0, 1, planned=2) == 1
    # Another process has left one step of those that were free; or another client of this one.
    assert one.reserve(2.0, 1.0, 5) == 1
    assert same.reserve(2.0, 1.0, 1) == 0
    assert one.accountant.rounds == most


def test_a_fingerprint_has_names_and_sizes_and_no_value() -> None:
    pandas = pytest.importorskip("pandas")
    from declearn.dataset import InMemoryDataset

    def of(names: str, scale: float = 1.0, records: int = 6) -> str:
        values = np.arange(2.0 * records).reshape(records, 2) * scale
        frame, labels = pandas.DataFrame(values, columns=[*names]), np.arange(records) % 3
        return fingerprint(InMemoryDataset(frame, target=labels, expose_classes=True), records)

    assert of("ab").startswith("6 records, features (2,), names ")
    assert of("ab") == of("ab", 7.0)
    assert len({of("ab"), of("ac"), of("ba"), of("ab", records=9)}) == 4


@pytest.mark.slow
def test_processes_on_one_ledger_share_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    program = f"""
from pathlib import Path
from fedclip.privacy.ledger import Ledger
ledger = Ledger(50.0, 1e-5, Path({str(path)!r}))
print(sum(ledger.reserve(2.0, 1.0, 5) for _ in range(60)))
"""
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    taken = [int(process.communicate()[0]) for process in started]
    most = Ledger(50.0, 1e-5).reserve(2.0, 1.0, 10_000)
    assert held(path) == [Release(2.0, sum(taken), 1.0)] == [Release(2.0, most, 1.0)]
    assert min(taken) < 300


LINE = '{"spent": [[1.0, 1]], "delta": 0.1, "relation": "add-remove", "sampling": "Poisson"}'
SPENT = ["1.0, -1", "NaN, 1", "1.0, true", "true, 1", "1.0, 1, 0", "1.0, 1.5", "1e999, 1", '"ab"']


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "1", "\0", "\xff" + LINE, LINE[:-1], f"{LINE}\n[]\n", f"hello\n{LINE}\n"),
        *(LINE.replace("1.0, 1", new) for new in [*SPENT, f"1.0, {'9' * 5000}"]),
        LINE.replace("add-remove", "add-remov"),
        LINE.replace('"add-remove"', "[]"),
        LINE.replace('"relation": "add-remove", ', ""),
        LINE.replace("Poisson", "shuffled"),
        LINE.replace("0.1", "1"),
        LINE.replace("[[1.0, 1]]", "[" * 50_000 + "]" * 50_000),
        *(LINE.replace("}", f', "order": {x}}}') for x in ("1.0", "-3", "true", '"8"', "NaN")),
    ],
    ids=range(29),
)
def test_a_broken_ledger_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spent.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is not a ledger of privacy spent") as caught:
        Ledger(1.0, 1e-5, path)
    assert path.read_bytes() == text.encode("latin-1")
    assert len(str(caught.value)) < 600


def test_a_ledger_that_can_not_be_kept_is_refused_and_a_link_is_no_other(tmp_path: Path) -> None:
    path, link = tmp_path / "spent.json", tmp_path / "link.json"
    Ledger(9.0, 1e-5, path).reserve(2.0, 1.0, 3)
    link.symlink_to(path)
    assert Ledger(9.0, 1e-5, link).accountant.rounds == 3
    assert not (tmp_path / "link.json.lock").exists()
    with pytest.raises(OSError, match="no ledger can be kept at"):
        Ledger(1.0, 1e-5, path / "spent.json")
    with pytest.raises(ValueError, match="is not a ledger of privacy spent"):
        Ledger(1.0, 1e-5, tmp_path)


def test_steps_that_are_not_written_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spent.json"
    ledger = Ledger(1.0, 1e-5, path)
    ledger.reserve(2.0, 0.1, 5)
    charge(ledger, 5, rate=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            ledger.reserve(2.0, 0.1, 5)
    # They were written, though perhaps not to the disk.
    assert held(path) == [Release(2.0, 10, 0.1)]
    ledger.charge(2.0, 0.1)
    assert held(path) == [Release(2.0, 11, 0.1)] == ledger.accountant.spent


@pytest.mark.parametrize("mode", ["flat", "tensor", "layer", ["a.*", "b.w"], "automatic"])
def test_no_record_adds_more_than_the_bound(mode: str | list[str]) -> None:
    clipping = SampleClipping(mode)
    groups = clipping.groups(["a.w", "a.b", "b.w", "b.b"])
    norms = np.random.default_rng(0).lognormal(0, 5, (1000, len(groups)))
    norms[0] = 0.0
    after = clipping.factors(norms, 0.7) * norms
    assert np.sqrt((after**2).sum(axis=1)).max() <= 0.7 * (1 + 1e-12)


def test_the_adaptive_bound_by_hand() -> None:
    """Eight records are expected: the sum of ±1/2, over 8, is added to 1/2."""
    clipping = SampleClipping("adaptive", quantile=0.25, rate=2.0)

    def moved(norms: Any, draw: float = 0.0, z: float = 1.0, expected: float = 8.0) -> float:
        column = np.array(norms)[:, None]
        normals = partial(np.full, fill_value=draw)
        return math.log(clipping.next_bound(3.0, column, z, expected, normals) / 3.0) / 2.0

    assert moved([1.0, 2.0, 4.0, 5.0]) == pytest.approx(0.25 - 1 / 2)
    # A norm that is equal to the bound is within it; one that is NaN is neither.
    assert moved([3.0, 3.0]) == pytest.approx(0.25 - 5 / 8)
    assert moved([4.0, 4.0, math.nan]) == pytest.approx(0.25 - 3 / 8)
    # The noise of the bits is z, or a twentieth of the records expected.
    assert moved([], draw=-2.0) == pytest.approx(0.25 - 1 / 4)
    assert moved([], draw=-4.0, expected=80.0) == pytest.approx(0.25 - (1 / 2 - 16 / 80))
    # A share is between 0 and 1, and a bound is a number.
    assert (moved([], draw=99.0), moved([], draw=-99.0)) == pytest.approx((0.25 - 1, 0.25))
    for end in (1e-30, 1e30):
        normals = partial(np.full, fill_value=math.copysign(99, 1 - end))
        found = clipping.next_bound(end, np.array([[end * 2]]), 1.0, 8.0, normals)
        assert found == pytest.approx(end)
    # What bits cost is taken off: z = 1 beside a noise of 1, and of 5, on bits of 1/2.
    shares = [clipping.noise_multiplier(1.0, m) for m in (8.0, 100.0)]
    assert shares == pytest.approx([math.sqrt(4 / 3), math.sqrt(100 / 99)])
    assert SampleClipping("flat").noise_multiplier(1.0, 8.0) == 1.0


def test_factors_and_scales_by_hand() -> None:
    automatic = SampleClipping("automatic", gamma=0.5)
    np.testing.assert_allclose(automatic.factors(np.array([[0.0], [1.5]]), 2.0), [[4.0], [1.0]])
    np.testing.assert_allclose(SampleClipping("tensor").factors(np.full((1, 4), 10.0), 1.0), 0.05)
    scales = {mode: SampleClipping(mode).scale(4.0) for mode in MODES}
    assert scales == {"flat": 1, "tensor": 1, "layer": 1, "automatic": 0.25, "adaptive": 0.25}


@pytest.mark.slow
def test_several_plans_are_counted_at_the_order_of_the_first(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    path = tmp_path / "privacy_spent.json"
    first, second = Release(1.0, 120, 0.05), Release(0.9, 50, 0.02)
    ledger = Ledger(5.0, 1e-5, path)
    # The plan is of 120 steps, in two rounds.
    assert ledger.reserve(1.0, 0.05, 60, 120) == ledger.reserve(1.0, 0.05, 60, 60) == 60
    assert ledger.spent == epsilon([first], 1e-5)
    # Another budget, and another plan, are no other order: chosen afterwards, it would be too low.
    again = Ledger(6.0, 1e-6, path)
    assert again.reserve(0.9, 0.02, 50) == 50
    order = order_for(first, 1e-5)
    found = account([first, second], 1e-6, order=order).epsilon
    assert again.spent == found
    assert epsilon([first, second], 1e-6) < found < 1.2 * epsilon([first, second], 1e-6)
    (found,) = read_spent(path)
    assert [*found.cost()["epsilons"]] == [f"rdp at order {order:.4g}"]


def test_a_ledger_of_version_0_1_0_is_read_as_then(tmp_path: Path) -> None:
    """Its numbers, counted by the package that has written it."""
    pytest.importorskip("dp_accounting")
    path = tmp_path / "privacy_spent.json"
    every = (
        '"delta": 1e-05, "relation": "add-remove", "sampling": "Poisson", "data": '
        '"400 records, features (4,)", "time": "2026-11-26T13:48:12+00:00", "fedclip": "0.1.0"}\n'
    )
    lines = [
        '{"id": "2e61", "spent": [], "order": null, ',
        '{"id": "63e3", "spent": [[2.0, 30, 0.16]], "order": 6.2, "plan": [[9.0, 10, 1.0]], ',
        '{"id": "323d", "spent": [[9.0, 1]], "order": null, "evaluation": true, ',
        '{"id": "2a78", "spent": [[3.0, 20, 0.1]], "order": null, ',
    ]
    path.write_text("".join(line + every for line in lines))
    (found,) = read_spent(path)
    assert found.cost()["epsilons"] == {"rdp at order 6.2": pytest.approx(2.6191280225606333)}
    ledger = Ledger(3.0, 1e-5, path, data="400 records, features (4,)")
    assert ledger.spent == pytest.approx(2.6191280225606333)
    assert ledger.reserve(2.0, 0.16, 1) == 1
    path.write_text("".join(line + every for line in lines[:2]))
    (found,) = read_spent(path)
    assert found.cost()["epsilons"] == {"pld": pytest.approx(2.132066725188051)}
