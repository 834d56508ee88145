# SPDX-License-Identifier: Apache-2.0
"""DP-SGD that protects persons with several records: sums, bounds, samples, budgets, files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from dpsgd_managers import Silent, data, manager, request
from report_runs import call
from units.dpsgd.test_dpsgd_persample import MODELS

from fedclip.cli.check.configuration import check_config
from fedclip.cli.check.data import person_findings, units
from fedclip.dpsgd.persons import Persons
from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import Records, clipped_sum
from fedclip.engines.declearn.sample_clip import SampleClip
from fedclip.privacy.ledger import Ledger, fingerprint

pytestmark = pytest.mark.slow

pytest.importorskip("opacus")

C = 0.3
UNITS = ("persons", "records")
# Of 13 records: five persons, with one to five of them.
OF = ["e", "a", "b", "c", "e", "b", "d", "c", "e", "c", "e", "d", "e"]


def records(n: int = 13) -> Records:
    return Records(data(n))


def clipped(model: Any, batches: Any, **settings: Any) -> tuple[Any, Any]:
    factors = partial(SampleClipping().factors, bound=settings.pop("bound", C))
    return clipped_sum(model, batches, factors, **settings)


# -- sums --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_batch", [1, 4, 100])
def test_a_person_adds_the_clipped_mean_of_its_records(name: str, micro_batch: int) -> None:
    model, x, y = MODELS[name]()
    persons = Persons(Records(InMemoryDataset(np.asarray(x), target=y)), OF)
    sums, norms = clipped(model, persons.take(range(5)), micro_batch=micro_batch)
    right: dict[str, Any] = {}
    lengths = []
    for person in sorted({*OF}):
        own = [i for i, of in enumerate(OF) if of == person]
        alone, _ = clipped_sum(model, [(x[own], y[own], None)], np.ones_like)
        mean = {n: a / len(own) for n, a in alone.items()}
        lengths.append(np.sqrt(sum((a**2).sum() for a in mean.values())))
        for n, a in mean.items():
            right[n] = right.get(n, 0.0) + a * min(1.0, C / lengths[-1])
    np.testing.assert_allclose(np.sort(norms[:, 0]), np.sort(lengths), rtol=1e-5)
    for n, a in sums.items():
        np.testing.assert_allclose(a, right[n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["flat", "layer", "automatic", "adaptive"])
@pytest.mark.parametrize("rows", [1.0, 1e6, 1e200, np.nan, np.inf])
def test_all_rows_of_a_person_move_the_sum_by_the_bound_at_most(mode: str, rows: float) -> None:
    def total(x: Any) -> Any:
        made = _private(x, modules=[SampleClip(mode=mode, micro_batch=2)])
        made.run_train_step(made.records.take(range(len(made.records))))
        ((sums, _),) = made.noise.seen
        return np.concatenate([a.ravel() for a in sums.values()])

    x = data(13).feats.copy()
    changed = np.where(np.array(OF)[:, None] == "e", rows, x)
    # To replace a person is to take it out and put another in.
    moved = np.linalg.norm(total(changed) - total(x))
    assert moved <= 2 * C * (1 + 1e-9)
    assert moved > 0


def _private(x: Any, modules: Any = (), of: Any = OF, **settings: Any) -> Any:
    y = np.arange(len(x)) % 2
    made = manager(modules, InMemoryDataset(x, target=y, expose_classes=True), private=None)
    units = Persons(Records(made.train_data), of, **settings)
    many = {"batches": {"batch_size": 5}, "sclip_norm": C}
    made.make_private(request(**many), records=units)
    made.noise = Silent()
    return made


def test_records_that_raise_or_hold_nan_count_as_zero_in_the_mean_of_their_person() -> None:
    class Lacking(Persons):
        def take(self, drawn: Any, failed: Any = None) -> Any:
            batches = super().take(drawn, failed)
            for batch in batches:
                batch[0][:2] = np.nan
            return batches

    model, x, y = MODELS["sklearn"]()
    whole = Records(InMemoryDataset(x, target=y))
    of = ["a", "a", "b", *["c"] * 10]
    sums, norms = clipped(model, Lacking(whole, of).take([0, 1]))
    alone, _ = clipped(model, Persons(whole, of).take([1]))
    # All of a's are NaN: a zero, like somebody whose gradient is none.
    assert norms[:, 0].tolist()[0] == 0.0
    for name, array in sums.items():
        np.testing.assert_allclose(array, alone[name])


def test_a_model_that_raises_for_a_record_spares_the_others_of_its_person() -> None:
    model, x, y = MODELS["sklearn"]()
    bad = y.copy().astype(object)
    bad[1] = "no class"
    told: list[int] = []
    of = ["a", "a", *["b"] * 11]
    whole = Records(InMemoryDataset(x, target=y))
    (batch,) = Persons(whole, of).take([0, 1])
    broken = type(batch)((batch[0], bad[np.asarray(batch.positions)], None))
    broken.positions, broken.owners, broken.shares = batch.positions, batch.owners, batch.shares
    sums, norms = clipped(
        model, [broken], bound=1e9, micro_batch=3, failed=lambda record, exc: told.append(record)
    )
    right, _ = clipped_sum(model, [(x[:1], y[:1], None)], lambda n: np.full_like(n, 0.5))
    others, _ = clipped_sum(model, [(x[2:], y[2:], None)], lambda n: np.full_like(n, 1 / 11))
    assert told == [1]
    assert len(norms) == 2
    for name, array in sums.items():
        np.testing.assert_allclose(array, right[name] + others[name], rtol=1e-9)


# -- samples -----------------------------------------------------------------------------------
def test_persons_are_drawn_whole_or_at_most_so_many_of_their_records() -> None:
    whole = Persons(records(), OF)
    (batch,) = whole.take([4, 1])
    assert sorted(batch.positions) == [i for i, of in enumerate(OF) if of in "eb"]
    assert {*np.round(batch.shares, 6)} == {0.2, 0.5}
    some = Persons(records(), OF, max_records=2)
    assert some.mean == pytest.approx(9 / 5)
    seen = np.zeros(13)
    for _ in range(400):
        for batch in some.take([4]):
            assert len(batch.positions) == 2
            seen[batch.positions] += 1
    drawn = seen[[i for i, of in enumerate(OF) if of == "e"]]
    # 160 of 400 each, with a standard deviation of 9.8.
    assert drawn.sum() == 800
    assert (abs(drawn - 160) < 60).all()


def test_an_empty_draw_is_a_step() -> None:
    made = _private(data(13).feats)
    made.run_train_step(made.records.take([]))
    assert not any(a.any() for a in made.noise.seen[0][0].values())


def test_noise_rate_and_steps_are_for_persons() -> None:
    made = _private(data(13).feats)
    plan = made.calibration
    assert (plan.records, plan.rate, plan.expected, plan.unit) == (5, 1.0, 5.0, "person")
    assert plan.steps == 4
    assert "5 persons" in plan.in_words()
    result = made.train_under_constraints({"batch_size": 5})
    assert result["n_steps"] == 1


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        (["a"] * 12, ValueError, "one id for each of the 13 records"),
        (np.ones((13, 2), int), ValueError, "shape \\(13, 2\\)"),
        (["a"] * 12 + [None], ValueError, "1 of 13 records have no id"),
        (np.where(np.arange(13) < 3, np.nan, 1.0), TypeError, "texts or whole numbers"),
        ([""] * 13, ValueError, "13 of 13 records have no id"),
        ([True] * 13, TypeError, "got bool"),
        # Of one person, and of another: each would be protected for a part of its records.
        (["a"] * 12 + [np.nan], ValueError, "1 of 13 records have no id"),
        (["a"] * 11 + ["nan", " "], ValueError, "2 of 13 records have no id"),
        ([1] * 12 + [None], ValueError, "1 of 13 records have no id"),
        (["1", 1.0] * 6 + [1], TypeError, "got float"),
        ([b"a"] * 13, TypeError, "got bytes"),
    ],
)
def test_ids_that_say_nothing_are_refused(ids: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        Persons(records(), ids)


def test_one_person_is_one_however_its_id_is_written() -> None:
    assert len(Persons(records(), [7, "7", " 7", np.int8(7), "é", "e\u0301", *"777é777"])) == 2


def test_ids_are_read_from_a_column_of_text(tmp_path: Path) -> None:
    file = tmp_path / "train_persons.csv"
    file.write_text("person\n" + "007\n7\n" * 6 + "007\n", encoding="utf-8")
    assert len(Persons(records(), file)) == 2
    file.write_text("person,visit\n" + "1,2\n" * 13, encoding="utf-8")
    with pytest.raises(ValueError, match="must have one column"):
        Persons(records(), file)


# -- budgets -----------------------------------------------------------------------------------
def test_a_ledger_is_for_records_or_for_persons(tmp_path: Path) -> None:
    kept = partial(Ledger, 3.0, 1e-5, tmp_path / "spent.json")
    kept(data=fingerprint(data(), 60)).reserve(2.0, 0.1, 3)
    with pytest.raises(ValueError, match="does not protect each person"):
        kept(data=fingerprint(data(), 5, "person"))


# -- files -------------------------------------------------------------------------------------
@pytest.fixture
def sites(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Two sites of twelve records, of which one names persons and both have a column of them."""
    found = {}
    for site in ("north", "south"):
        folder = tmp_path / site
        folder.mkdir()
        rows = "".join(f"{i}.5,p{i // 3},{i}\n" for i in range(12))
        found[site] = {}
        for use in ("train", "valid"):
            data, target = f"x,patient_id,visit_no\n{rows}", "y\n" + "0\n1\n" * 6
            for of, text in (("data", data), ("target", target)):
                file = folder / f"{use}_{of}.csv"
                file.write_text(text)
                found[site][f"{use}_{of}"] = str(file)
    whose = "".join(f"p{i // 3}\n" for i in range(12))
    (tmp_path / "north" / "train_persons.csv").write_text(f"person\n{whose}")
    return found


def test_persons_are_counted_where_a_file_names_them(sites: Any) -> None:
    found = list(person_findings(sites))
    assert [finding.level for finding in found] == ["ok", "note"]
    known, alone = (finding.message for finding in found)
    assert known == "north: DP-SGD protects 4 persons, each with all records"
    assert alone.startswith("south: there is no train_persons.csv, so DP-SGD protects each record")
    assert [units(sites[name]) for name in ("north", "south")] == [(4, "person"), (12, "record")]
    Path(sites["north"]["train_data"]).with_name("train_persons.csv").write_text("person\np1\n")
    assert next(iter(person_findings(sites))).level == "problem"


@pytest.mark.parametrize(
    ("rows", "share", "said"),
    [
        (None, 0.2, "north: evaluation_share needs the person of each"),
        (3, 0.0, "valid_persons.csv: persons must be one id for each of the 12 records"),
        (12, 0.2, ""),
        (None, 0.0, ""),
    ],
)
def test_a_check_knows_whose_the_validation_records_have_to_be(
    sites: Any, tmp_path: Path, rows: int | None, share: float, said: str
) -> None:
    if rows is not None:
        (tmp_path / "north" / "valid_persons.csv").write_text("person\n" + "p1\n" * rows)
    clip = f'["sample-clip", {{ evaluation_share = {share}, loss_bound = 3.0 }}]'
    clip = clip if share else '"sample-clip"'
    (tmp_path / "config.toml").write_text(f"""
        network = {{ protocol = "websockets", host = "127.0.0.1", port = 8765 }}
        data = {{ data_folder = "{tmp_path}", client_names = ["north", "south"] }}
        [optim]
        aggregator = "averaging"
        server_opt = 1.0
        client_opt = {{ lrate = 1.0, modules = [{clip}] }}
        [run]
        rounds = 2
        register = 2
        training.batch_size = 4
        privacy = {{ budget = [3.0, 1e-5], sclip_norm = 0.5 }}
        """)
    found = check_config(tmp_path / "config.toml")
    assert bool(found.problems) == bool(said)
    if not said:
        # To remove one record of a person may move the sum by twice as much.
        assert "To zero out a person moves the sum" in found.places[0]
    assert said in " ".join(finding.message for finding in found.problems)


def test_a_budget_is_sized_for_persons() -> None:
    def sized(*words: object) -> Any:
        run = ("--epsilon", 3, "--rounds", 2, "--batch-size", 20)
        return call("privacy", "calibrate", *run, *words)

    pytest.importorskip("dp_accounting")
    of_persons, of_records = (sized(f"--{unit}", 200, "--json").stdout for unit in UNITS)
    assert json.loads(of_persons)["unit"] == "person"
    a, b = json.loads(of_persons), json.loads(of_records)
    assert {name for name in a if a[name] != b[name]} == {"unit"}
    assert "zeroing out one person" in sized("--persons", 200).stdout
    assert "give --records, or --persons" in sized("--persons", 200, "--records", 200).stderr
