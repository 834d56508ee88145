# SPDX-License-Identifier: Apache-2.0
"""``fedclip init``: from CSV files to a folder that runs, or a sentence."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import require
from report_runs import call

from fedclip.tools.check import check_config

ROWS = 60


def table(**columns: Sequence[object]) -> str:
    """Return a CSV file of two columns to learn from, one to tell, and others."""
    rng = np.random.default_rng(0)
    size, age = rng.normal(5, 1, ROWS), rng.normal(50, 9, ROWS).round()
    ill = np.where(size + 0.1 * age + rng.normal(0, 0.3, ROWS) > 10, "yes", "no")
    found = {"size": size.round(3), "age": age, "ill": ill, **columns}
    lines = zip(*found.values(), strict=True)
    return "\n".join([",".join(found), *(",".join(map(str, line)) for line in lines)])


def some(value: object, other: object, every: int = 10) -> list[object]:
    return [other if i % every == 0 else value for i in range(ROWS)]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[str, Path]]:
    """Write files, and make a folder of them; return what was said, and the folder."""

    def make(files: Mapping[str, str | bytes], *words: str, code: int = 0) -> tuple[str, Path]:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            (tmp_path / name).write_bytes(data)
        folder = tmp_path / "made"
        paths = [str(tmp_path / name) for name in files]
        words = words if "--target" in words else (*words, "--target", "ill")
        result = call("init", str(folder), *paths, *words)
        assert result.exit_code == code, result.output
        return (result.stderr if code else result.stdout), folder

    return make


def arrays(folder: Path, part: str) -> dict[str, np.ndarray]:
    return {site.name: np.load(site / f"{part}.npy") for site in (folder / "data").iterdir()}


TABLE = table()
WRONG = {
    "no target": ({"a.csv": TABLE.replace("ill", "sick", 1)}, "no column 'ill'"),
    "a near one": ({"a.csv": TABLE.replace("ill", "illl", 1)}, "did you mean 'illl'?"),
    "other columns": ({"a.csv": TABLE, "b.csv": TABLE.replace("size", "Size")}, "mean 'Size'?"),
    "a column less": (
        {
            "a.csv": "\n".join(line.partition(",")[2] for line in TABLE.split("\n")),
            **dict.fromkeys(("b.csv", "c.csv"), TABLE),
        },
        "a.csv lacks the column 'size'; it is in 2 of 3 files",
    ),
    "a column more": (
        {**dict.fromkeys(("a.csv", "b.csv"), TABLE), "c.csv": table(x=range(ROWS))},
        "c.csv has the column 'x'; it is in 1 of 3 files",
    ),
    "no header": (
        {"a.csv": TABLE.partition("\n")[2].replace("yes", "1")},
        "(there are: 5.126, 46.0, no)",
    ),
    "numbers on top": ({"a.csv": "1,2\n3,4\n"}, "holds numbers: write the columns' names"),
    "no name": ({"a.csv": TABLE.replace("age", "", 1)}, "column 2 of"),
    "a name twice": ({"a.csv": TABLE.replace("age", "size", 1)}, "column 2 of"),
    "nothing": ({"a.csv": ""}, "is empty"),
    "no record": ({"a.csv": "size,ill\n"}, "holds no record"),
    "no text": ({"a.csv": b"PK\0\1"}, "is no text"),
    "another code": ({"a.csv": TABLE.replace("yes", "gr\xfcn").encode("latin-1")}, "not UTF-8"),
    "long rows": ({"a.csv": TABLE.replace("\n", ",1\n").replace("ill,1", "ill")}, "is no table"),
    "a long row": ({"a.csv": TABLE + "\n1,2,yes,4"}, "cells in line 62: 4, names"),
    "a short row": ({"a.csv": TABLE + "\n1,2"}, "cells in line 62: 2, names in the first: 3"),
    "an open quote": ({"a.csv": TABLE + '\n1,2,"yes'}, "is no table: EOF inside string"),
    "one class": ({"a.csv": TABLE.replace("yes", "no")}, "is 'no' in all records"),
    "few records": ({"a.csv": TABLE, "b.csv": "\n".join(TABLE.split("\n")[:6])}, "b has 5"),
    "one site": ({"a.csv": table(at=["x"] * ROWS)}, "needs two sites"),
    "sites alike": ({"a.csv": table(at=some("x y", "x-y"))}, "would be the same: x-y, x y"),
    "no site": ({"a.csv": table(at=some("x", ""))}, "record 1 of a.csv names no site"),
    "a text among numbers": ({"a.csv": table(x=some(1, "high", 30))}, "'high' in record 1 of a"),
    "infinite": ({"a.csv": table(x=some(1, "inf", 30))}, "'x' is 'inf' in record 1"),
    "empty at a site": (
        {"a.csv": TABLE, "b.csv": table(age=[""] * ROWS)},
        "b has no value of 'age'",
    ),
    "constant": ({"a.csv": "ill,x\n" + "yes,1\nno,1\n" * 30}, "no column is left"),
    "only the target": ({"a.csv": "ill\n" + "yes\nno\n" * 30}, "no column is left"),
    "none at a site": ({"a.csv": TABLE, "b.csv": table(ill=[""] * ROWS)}, "b has 0"),
    "names to tell": ({"a.csv": table(ill=[f"p{i}" for i in range(ROWS)])}, "60 different texts"),
}


@pytest.mark.parametrize(("files", "why"), WRONG.values(), ids=WRONG)
def test_what_can_not_be_used_is_refused_in_a_sentence(
    make: Callable[..., tuple[str, Path]], files: Mapping[str, str | bytes], why: str
) -> None:
    words = ["--site", "at"] if b",at\n" in str(files["a.csv"]).encode() else []
    said, folder = make(files, *words, code=1)
    assert said.startswith("fedclip: ")
    assert said.count("\n") == 1
    assert why in said
    assert not folder.exists()


@pytest.mark.parametrize(
    ("files", "words", "code", "why"),
    [
        (["a.csv"], ["--site", "at", "--sites", "4"], 2, "only one of them can say the sites"),
        (["a.csv", "b.csv"], ["--site", "at"], 2, "only one of them can say the sites"),
        (["a.csv", "b.csv"], ["--sites", "4"], 2, "only one of them can say the sites"),
        (["b.csv", "b.csv", "a.csv"], [], 1, "b.csv, b.csv: each site needs one file"),
    ],
)
def test_sites_are_said_once(
    make: Callable[..., tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: Sequence[str],
    words: Sequence[str],
    code: int,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).write_text(TABLE)
    said, folder = make({}, *files, *words, code=code)
    assert why in said
    assert not folder.exists()


def test_numbers_that_are_equal_are_one_class_and_one_text(
    make: Callable[..., tuple[str, Path]],
) -> None:
    """Where a cell of a column of 0 and 1 is empty, pandas writes 0.0 and 1.0."""
    codes = table(ill=some(0, 1), x=some("few", 1, 2))
    gap = table(ill=["", *some(0.0, 1.0)[1:]], x=some("few", "1.0", 2))
    said, folder = make({"a.csv": codes, "b.csv": gap})
    assert "'ill' has 2 classes, and so this is a classification: 0 is '0' (108)" in said
    assert "records without 'ill' are left out: 1\n" in said
    assert "'x' is one of 2 texts" in said
    assert set(arrays(folder, "train_target")["b"]) == {0, 1}


@pytest.mark.parametrize(
    ("column", "hint"),
    [("hospital_id", "; by 'hospital_id': --site hospital_id\n"), ("opposite", "\n")],
)
def test_a_spread_at_random_is_said(
    make: Callable[..., tuple[str, Path]], column: str, hint: str
) -> None:
    said, _ = make({"a.csv": table(**{column: some("x", "y")})})
    assert f"records are spread at random over 3 sites{hint}" in said


def test_a_folder_that_holds_something_is_left_as_it_is(
    make: Callable[..., tuple[str, Path]], tmp_path: Path
) -> None:
    kept = tmp_path / "made" / "notes.txt"
    kept.parent.mkdir()
    kept.touch()
    said, folder = make({"a.csv": TABLE}, code=1)
    assert "give a new or empty folder" in said
    assert list(folder.iterdir()) == [kept]
    kept.unlink()
    make({"a.csv": TABLE})


def test_a_disk_that_is_full_leaves_nothing(
    make: Callable[..., tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedclip.tools.init.pd.DataFrame.to_csv", lambda *_, **__: full())
    said, folder = make({"a.csv": TABLE}, code=1)
    assert "No space left on device" in said
    assert not folder.exists()


def test_what_is_looked_at_is_said(make: Callable[..., tuple[str, Path]]) -> None:
    others = {
        "unit": ["kg"] * ROWS,
        "smoker": some("no", "yes"),
        "note": [f"note {i}" for i in range(ROWS)],
        "patient": range(ROWS),
        "pid": [i // 2 for i in range(ROWS)],
        "Patient-Nr.": [i // 2 for i in range(ROWS)],
        "crp": some(0.5, -999),
        "magnesium": some(70, -99),
        "cost": [500, 999, 2000] * 20,
        "empty": [""] * ROWS,
        "gap": [*([""] * 6), *np.arange(ROWS - 6)],
    }
    text = table(**others)
    rows = list(csv.DictReader(text.splitlines()))
    long = "\n".join(
        [
            text.split("\n")[0],
            *(",".join({**r, "size": f"{float(r['size']) * 100:.1f}"}.values()) for r in rows),
        ]
    )
    said, folder = make({"a.csv": text, "b.csv": text, "c.csv": long}, "--drop", "unit")
    for words in (
        "c: 'size' about 100 times what it is at most sites: look at the units",
        "'smoker' is one of 2 texts",
        "'note' holds 60 different texts: left out",
        "'pid' comes back in 90 records of a site: if it says whose they are",
        "'Patient-Nr.' comes back in 90 records of a site",
        "'patient' differs in each record",
        "'crp' is -999 in 18 of 180 records",
        "'magnesium' is -99 in 18 of 180 records",
        "'empty' holds nothing: left out",
        "'gap' is missing in 6 of a, 6 of b, 6 of c: filled by the median of that site",
        "a 48 + 12, b 48 + 12, c 48 + 12",
        f"cd {folder}",
    ):
        assert words in said, words
    assert said.count("look at the units") == 1
    assert "'cost'" not in said
    columns = csv.DictReader((folder / "columns.csv").read_text().splitlines())
    names = [row["column"] for row in columns]
    others = ["smoker=yes", "patient", "pid", "Patient-Nr.", "crp", "magnesium", "cost", "gap"]
    assert names == ["size", "age", *others]


PERSONS = ["ann ", "Bob", "7", "ann", *(f"p{i // 3}" for i in range(ROWS - 4))]


@pytest.mark.parametrize("words", [(), ("--sites", "2")], ids=["a file for each", "spread"])
def test_a_person_is_at_one_site_and_in_one_part_with_all_records(
    make: Callable[..., tuple[str, Path]], words: tuple[str, ...]
) -> None:
    text = table(who=PERSONS, size_again=range(ROWS))
    files = {"a.csv": text} if words else {"a.csv": text, "b.csv": text}
    said, folder = make(files, *words, "--persons", "who")
    assert "no 'who' is in both; DP-SGD protects each, with all records" in said
    wholes = []
    for site in (folder / "data").iterdir():
        parts = []
        for part in ("train", "valid"):
            head, *ids = (site / f"{part}_persons.csv").read_text().split()
            assert head == "person"
            assert len(ids) == len(np.load(site / f"{part}_data.npy"))
            parts.append({*ids})
        assert all(parts)
        assert not parts[0] & parts[1]
        wholes.append(parts[0] | parts[1])
    many = len({one.strip() for one in PERSONS})
    assert [len(one) for one in wholes] == ([(many + 1) // 2, many // 2] if words else [many] * 2)
    assert words == () or not wholes[0] & wholes[1]
    assert "who" not in (folder / "columns.csv").read_text()
    result = check_config(folder)
    assert not result.problems


@pytest.mark.parametrize(
    ("who", "words"),
    [
        (some("ann", ""), "'who': of 12 of 120 records it is not said whose they are"),
        (some("ann", "bob"), "each site needs 10 persons with 'ill', and a has 2"),
    ],
    ids=["nobody's", "few"],
)
def test_persons_that_can_not_be_protected_are_refused(
    make: Callable[..., tuple[str, Path]], who: Sequence[object], words: str
) -> None:
    text = table(who=who)
    said, folder = make({"a.csv": text, "b.csv": text}, "--persons", "who", code=1)
    assert words in said
    assert not folder.exists()


def test_no_site_decides_the_scale_and_no_record_of_the_validation(
    make: Callable[..., tuple[str, Path]], tmp_path: Path
) -> None:
    """A site in other units stands out, and those in the right ones are as they would be."""
    rows = [line.split(",") for line in TABLE.split("\n")]
    long = "\n".join(
        ",".join([f"{float(r[0]) * 1000:.1f}" if i else r[0], *r[1:]]) for i, r in enumerate(rows)
    )
    _, folder = make({"a.csv": TABLE, "b.csv": TABLE, "c.csv": long})
    train, valid = arrays(folder, "train_data"), arrays(folder, "valid_data")
    for site in "ab":
        assert train[site][:, 0].std() == pytest.approx(1, rel=0.2)
        assert abs(train[site][:, 0].mean()) < 0.3
    assert train["c"][:, 0].mean() > 1000
    # The records are all there, once: 60 at each site, one of five to validate with.
    assert {len(x) for x in valid.values()} == {12}
    # What is learnt is that of the records that are trained on.
    with (folder / "columns.csv").open() as file:
        (_, age) = csv.DictReader(file)
    back = {s: x[:, 1] * float(age["scale"]) + float(age["center"]) for s, x in train.items()}
    for site, ages in back.items():
        assert np.median(ages) == pytest.approx(float(age[f"fill {site}"]))
    means = [x.mean() for x in back.values()]
    assert float(age["center"]) == pytest.approx(np.median(means))


@pytest.mark.parametrize("words", [(), ("--site", "at"), ("--sites", "4")])
def test_classes_are_spread_evenly_and_a_seed_decides(
    make: Callable[..., tuple[str, Path]], words: Sequence[str], tmp_path: Path
) -> None:
    text = table(at=[f"Ward {i % 3}" for i in range(ROWS)], ill=some(0, 1, 2))
    said, folder = make({"a.csv": text}, *words)
    train = arrays(folder, "train_target")
    for site, valid in arrays(folder, "valid_target").items():
        expected = len(valid) * np.concatenate([train[site], valid]).mean()
        assert abs(valid.sum() - expected) <= 1
    if words == ("--site", "at"):
        assert sorted(train) == ["Ward-0", "Ward-1", "Ward-2"]
        assert "fit for folders: 'Ward 0' is Ward-0, 'Ward 1' is Ward-1" in said


def test_semicolons_and_decimal_commas(make: Callable[..., tuple[str, Path]]) -> None:
    commas = TABLE.replace(",", ";").replace(".", ",")
    _, folder = make({"a.csv": TABLE, "b.csv": "\ufeff" + commas})
    parts = [arrays(folder, f"{part}_data") for part in ("train", "valid")]
    ages = [np.sort([x[1] for part in parts for x in part[site]]) for site in "ab"]
    np.testing.assert_allclose(ages[0], ages[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PyTorch JSON serialization")
@pytest.mark.parametrize(
    ("target", "model"),
    [("ill", "sklearn"), ("size", "sklearn"), ("ill", "torch"), ("size", "torch")],
)
def test_the_folder_runs_and_learns(
    make: Callable[..., tuple[str, Path]], monkeypatch: pytest.MonkeyPatch, target: str, model: str
) -> None:
    if model == "torch":
        require("torch")
    _, folder = make({"a.csv": table()}, "--target", target, "--model", model)
    monkeypatch.chdir(folder)
    found = check_config(folder, quickrun=True)
    assert found.ok, found.problems
    assert call("check").exit_code == 0
    done = call("simulate")
    assert done.exit_code == 0, done.output
    server = folder / "results" / "simulated" / "server"
    metrics = list(csv.DictReader((server / "metrics.csv").read_text().splitlines()))
    assert len(metrics) == 20
    last = {k: float(v) for k, v in metrics[-1].items() if k in ("accuracy", "r2")}
    assert min(last.values()) > (0.8 if target == "ill" else 0.3), last
    assert (server / "metrics_site-1.csv").exists()
    assert "no-op" in call("report").stdout
