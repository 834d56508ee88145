# SPDX-License-Identifier: Apache-2.0
"""DP-SGD that protects persons with several records: sums, bounds, samples, budgets, files."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from dpsgd_managers import Silent, data, manager, request
from dpsgd_models import MODELS
from quickruns import write_config, write_sites
from report_runs import call

from fedclip.cli.check.configuration import check_config
from fedclip.dpsgd.persons import Persons
from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import Records, clipped_sum
from fedclip.engines.declearn.sample_clip import SampleClip
from fedclip.privacy.ledger import Ledger, fingerprint

pytestmark = pytest.mark.slow

pytest.importorskip("opacus")

C = 0.3
# Of 13 records: five persons, with one to five of them.
OF = ["e", "a", "b", "c", "e", "b", "d", "c", "e", "c", "e", "d", "e"]


def records() -> Records:
    return Records(data(13))


def clipped(model: Any, batches: Any, bound: float = C, **settings: Any) -> tuple[Any, Any]:
    return clipped_sum(model, batches, partial(SampleClipping().factors, bound=bound), **settings)


@pytest.mark.parametrize("micro_batch", [4, 1, 100])
@pytest.mark.parametrize("name", MODELS)
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
    # To replace a person is to take it out and put another in.
    moved = np.linalg.norm(total(np.where(np.array(OF)[:, None] == "e", rows, x)) - total(x))
    assert moved <= 2 * C * (1 + 1e-9)
    assert moved > 0


def _private(x: Any, modules: Any = ()) -> Any:
    y = np.arange(len(x)) % 2
    made = manager(modules, InMemoryDataset(x, target=y, expose_classes=True), private=None)
    asked = request(batches={"batch_size": 5}, sclip_norm=C)
    made.make_private(asked, records=Persons(Records(made.train_data), OF))
    made.noise = Silent()
    return made


def test_a_model_that_raises_for_a_record_spares_the_others_of_its_person() -> None:
    model, x, y = MODELS["sklearn"]()
    labels = y.astype(object)
    labels[1] = "no class"
    persons = Persons(Records(InMemoryDataset(x, target=labels)), ["a", "a", *["b"] * 11])
    told: list[int] = []
    failing: Any = {"failed": lambda record, exc: told.append(record), "micro_batch": 3}
    sums, norms = clipped(model, persons.take([0, 1]), bound=1e9, **failing)
    right, _ = clipped_sum(model, [(x[:1], y[:1], None)], lambda n: np.full_like(n, 0.5))
    others, _ = clipped_sum(model, [(x[2:], y[2:], None)], lambda n: np.full_like(n, 1 / 11))
    assert told == [1]
    assert len(norms) == 2
    for name, array in sums.items():
        np.testing.assert_allclose(array, right[name] + others[name], rtol=1e-9)


def test_persons_are_drawn_whole_or_at_most_so_many_of_their_records() -> None:
    of_e = [i for i, of in enumerate(OF) if of == "e"]
    (batch,) = Persons(records(), OF).take([4, 1])
    assert sorted(batch.positions) == [i for i, of in enumerate(OF) if of in "eb"]
    assert {*np.round(batch.shares, 6)} == {0.2, 0.5}
    some = Persons(records(), OF, max_records=2)
    assert some.mean == pytest.approx(9 / 5)
    seen = np.zeros(13)
    for _ in range(400):
        for batch in some.take([4]):
            assert len(batch.positions) == 2
            seen[batch.positions] += 1
    # 160 of 400 each, with a standard deviation of 9.8.
    assert seen[of_e].sum() == 800
    assert (abs(seen[of_e] - 160) < 60).all()


def test_noise_rate_and_steps_are_for_persons() -> None:
    made = _private(data(13).feats)
    plan = made.calibration
    assert (plan.records, plan.rate, plan.steps, plan.unit) == (5, 1.0, 4, "person")
    assert "5 persons" in plan.in_words()
    assert made.train_under_constraints({"batch_size": 5})["n_steps"] == 1


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["a"] * 12, "one id for each of the 13 records"),
        (np.ones((13, 2), int), "shape \\(13, 2\\)"),
        (["a"] * 12 + [None], "1 of 13 records have no id"),
        (np.where(np.arange(13) < 3, np.nan, 1.0), "texts or whole numbers"),
        ([""] * 13, "13 of 13 records have no id"),
        ([True] * 13, "got bool"),
        (["a"] * 11 + ["nan", " "], "2 of 13 records have no id"),
        ([1] * 12 + [None], "1 of 13 records have no id"),
        (["1", 1.0] * 6 + [1], "got float"),
        ([b"a"] * 13, "got bytes"),
    ],
)
def test_ids_that_say_nothing_are_refused(ids: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Persons(records(), ids)


def test_one_person_is_one_however_its_id_is_written(tmp_path: Path) -> None:
    assert len(Persons(records(), [7, "7", " 7", np.int8(7), "é", "e\u0301", *"777é777"])) == 2
    file = tmp_path / "train_persons.csv"
    file.write_text("person\n" + "007\n7\n" * 6 + "007\n", encoding="utf-8")
    assert len(Persons(records(), file)) == 2
    file.write_text("person,visit\n" + "1,2\n" * 13, encoding="utf-8")
    with pytest.raises(ValueError, match="must have one column"):
        Persons(records(), file)


def test_a_ledger_is_for_records_or_for_persons(tmp_path: Path) -> None:
    kept = partial(Ledger, 3.0, 1e-5, tmp_path / "spent.json")
    kept(data=fingerprint(data(), 60)).reserve(2.0, 0.1, 3)
    with pytest.raises(ValueError, match="does not protect each person"):
        kept(data=fingerprint(data(), 5, "person"))


@pytest.mark.parametrize(
    ("persons", "valid", "share", "said"),
    [
        (12, None, 0.2, "a: evaluation_share needs the person of each"),
        (12, 3, 0.0, "valid_persons.csv: persons must be one id for each of the 12 records"),
        (1, None, 0.0, "train_persons.csv: persons must be one id for each of the 12 records"),
        (12, 12, 0.2, ""),
        (12, None, 0.0, ""),
    ],
)
def test_a_check_knows_whose_the_records_are(
    tmp_path: Path, persons: int, valid: int | None, share: float, said: str
) -> None:
    write_sites(tmp_path, dict.fromkeys("abc", 12), valid=12)
    for part, rows in (("train", persons), ("valid", valid)):
        if rows is not None:
            ids = "".join(f"p{i // 3}\n" for i in range(rows))
            (tmp_path / "data" / "a" / f"{part}_persons.csv").write_text(f"person\n{ids}")
    settings = f"{{ evaluation_share = {share}, loss_bound = 3.0 }}" if share else "{}"
    more = "[run.privacy]\nbudget = [3.0, 1e-5]\nsclip_norm = 0.5"
    optim = {"aggregator": '"averaging"', "server": "[]", "more": more}
    file = write_config(tmp_path / "config.toml", client=f'[["sample-clip", {settings}]]', **optim)
    metrics = '[["binary-classif", {thresh = 0.0}]]'
    file.write_text(file.read_text().replace(metrics, '["accuracy"]'))
    found = check_config(file)
    problems = " ".join(finding.message for finding in found.problems)
    assert said in problems
    assert bool(problems) == bool(said)
    if not said:
        messages = " ".join(finding.message for finding in found.findings)
        assert "a: DP-SGD protects 4 persons, each with all records" in messages
        assert "b, c: there is no train_persons.csv, so DP-SGD protects each record" in messages
        # To remove one record of a person may move the sum by twice as much.
        assert "To zero out a person moves the sum" in found.places[0]


def test_a_budget_is_sized_for_persons() -> None:
    pytest.importorskip("dp_accounting")
    words = "privacy calibrate --epsilon 3 --rounds 2 --batch-size 20"
    sized = partial(call, *words.split())
    a, b = (json.loads(sized(unit, 200, "--json").stdout) for unit in ("--persons", "--records"))
    assert a["unit"] == "person"
    assert {name for name in a if a[name] != b[name]} == {"unit"}
    assert "zeroing out one person" in sized("--persons", 200).stdout
    assert "give --records, or --persons" in sized("--persons", 200, "--records", 200).stderr
