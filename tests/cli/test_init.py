# SPDX-License-Identifier: Apache-2.0
"""``fedclip init``: the project that it writes, used as a user would."""

import contextlib
import csv
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FRAMEWORK_MODULES, PATIENCE, ended, free_port, hiding, require
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import call, sentence

from fedclip.cli.projects import PACKAGES

Rows = list[list[str]]
SITES = ("north", "south", "east")


def written(folder: Path, model: str = "sklearn", privacy: str | None = None) -> Path:
    """Return a new project."""
    result = call("init", folder, "--model", model, *(["--privacy", privacy] if privacy else []))
    assert result.exit_code == 0, result.output
    return folder


def prepare_of(folder: Path) -> Any:
    """Return the module prepare.py of a project."""
    spec = importlib.util.spec_from_file_location("prepare", folder / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "prepare", module)
        spec.loader.exec_module(module)
    return module


def example(n: int = 40) -> Rows:
    """Return a header and records of the template's columns; two records have one identifier."""
    rows = [
        f"p{i // 2},,{60 + 9 * x:.1f},{26 + 3 * y:.1f},5.5,f,ex,{int(x > 0)}".split(",")
        for i, (x, y) in enumerate(np.random.default_rng(0).normal(size=(n, 2)))
    ]
    return [["id", "remarks", "age", "bmi", "glucose", "sex", "smoker", "outcome"], *rows]


def text_of(rows: Rows, separator: str = ",") -> str:
    return "".join(separator.join(row) + "\n" for row in rows)


@pytest.fixture(scope="module", params=["records", "persons"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("made") / "project", privacy=request.param)


def prepared(project: Path, rows: Rows) -> dict[str, list[bytes]]:
    """Prepare records; return each part's rows as bytes, with their targets and persons."""
    prepare, found = prepare_of(project), {}
    (project / "a.csv").write_text(text_of(rows), "utf-8")
    with contextlib.redirect_stdout(None):
        prepare.write_site(project / "a.csv", "a", prepare.read_columns())
    for part in ("train", "valid"):
        file = project / "data" / "a" / part
        arrays = [np.load(f"{file}_{name}.npy") for name in ("data", "target")]
        persons = Path(f"{file}_persons.csv")
        ids = persons.read_bytes().splitlines()[1:] if persons.exists() else [b""] * len(arrays[0])
        assert persons.exists() == ('unit = "person"' in (project / "columns.toml").read_text())
        rows_of = zip(*arrays, ids, strict=True)
        found[part] = [x.tobytes() + y.tobytes() + one for x, y, one in rows_of]
    return found


VALUES = st.sampled_from(["", "NA", "60", "-1e29", "1e-30", "59.99"])


@settings(max_examples=30, deadline=None)
@given(
    place=st.integers(1, 40),
    values=st.tuples(VALUES, VALUES, VALUES),
    others=st.sampled_from([("f", "ex", "0"), ("male", "", "ill"), ("NA", "never", "")]),
    name=st.sampled_from(["p0", "p7", "new", "Ünï", '"']),
)
def test_a_record_changes_no_other_row_and_no_split(
    project: Path, place: int, values: tuple[str, ...], others: tuple[str, ...], name: str
) -> None:
    """Whether it is removed, added, changed, or gets another identifier."""
    rows = example()
    less = prepared(project, [*rows[:place], *rows[place + 1 :]])
    for row in (rows[place], [name.replace('"', '""""'), "", *values, *others]):
        more = prepared(project, [*rows[:place], row, *rows[place + 1 :]])
        added = {part: len(more[part]) - len(less[part]) for part in more}
        assert sorted(added.values()) == [0, int(row[-1] != "")]
        for part, lines in more.items():
            cuts = range(len(lines)) if added[part] else [len(lines)]
            assert any(lines[:i] + lines[i + 1 :] == less[part] for i in cuts)


def test_the_key_decides_the_split_and_is_kept(project: Path) -> None:
    rows, key = example(), project / "split.key"
    first = prepared(project, rows)
    assert prepared(project, rows) == first
    assert all(first.values())
    assert key.stat().st_mode & 0o77 == 0
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(SystemExit, match="data/ was made with it"):
        prepared(project, rows)
    key.write_bytes(b"another")
    assert prepared(project, rows) != first
    key.write_bytes(kept)
    validates = prepare_of(project).validates
    share = np.mean([validates(str(i), kept, 0.2) for i in range(5000)])
    assert share == pytest.approx(0.2, abs=0.03)


def test_each_cell_becomes_what_columns_toml_says(tmp_path: Path) -> None:
    ill, well = ["a", "!", "75", "", "-9", "male", "", "Ill"], ["b", "", *"137", "f", "ex", "1"]
    found = prepared(written(tmp_path / "x"), [*example(0), ill, well])
    lines = [np.frombuffer(line[:32], np.float32) for part in found.values() for line in part]
    wanted = [[1, 0, 0, 0, 1, 0, 0, 0], [-59 / 15, -23 / 4, 1, 1, 0, 0, 1, 0]]
    np.testing.assert_allclose(sorted(map(list, lines)), sorted(wanted), rtol=1e-6)


def changed(row: int, column: int, cell: str) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        rows[row][column] = cell
        return rows

    return change


def test_what_is_not_declared_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = prepared(project, example())
    for change, expected in [
        (changed(3, 5, "w"), "row 4, column 'sex': 'w' is not in ['female', "),
        (changed(3, 7, "ILL"), "row 4, column 'outcome': 'ILL' is not in"),
        (changed(3, 2, "old"), "row 4, column 'age': 'old' is no number"),
        (changed(3, 2, '"1,5"'), "row 4, column 'age': '1,5'"),
        (changed(3, 2, '"1,5"'), "--decimal"),
        (changed(3, 2, "1e31"), "row 4, column 'age': '1e31' is too large"),
        (lambda rows: [row[:2] + row[3:] for row in rows], "column 'age': it is"),
        (changed(0, 2, "bmi"), "row 1, column 'bmi': it is there twice"),
        (changed(3, 1, '"'), "Is each quotation mark closed"),
        (lambda rows: rows[:1], "0 problems in 0 records"),
    ]:
        with pytest.raises(SystemExit) as ended:
            prepared(project, change(example()))
        said = capsys.readouterr().err + str(ended.value)
        assert expected in said
        assert "a.csv" in said
        assert prepared(project, example()) == before


@pytest.mark.parametrize(
    ("encoding", "separator", "said"),
    [
        ("latin-1", ",", "row 41, column 'remarks': write --encoding latin-1"),
        ("utf-8", ";", "row 1, column 'id;remarks;age;bmi;glucose;sex;smoker;outcome': write"),
        ("utf-8-sig", "\t", "write --separator '\\t'"),
    ],
)
def test_another_encoding_or_separator(
    project: Path, encoding: str, separator: str, said: str
) -> None:
    prepare, file = prepare_of(project), project / "b.csv"
    file.write_bytes(text_of(changed(40, 1, "wäiblich")(example()), separator).encode(encoding))
    wrong, right = prepare.read_columns(), prepare.read_columns(encoding, separator)
    with pytest.raises(SystemExit, match=re.escape(said)):
        prepare.read_records(file, wrong.names, wrong)
    assert len(prepare.read_records(file, right.names, right)[0]) == 40


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('identifier = "id"', 'identifier = ""', "row numbers are not identifiers"),
        ('identifier = "id"', 'identifier = "age"', "column 'age' is declared twice"),
        ("validation = 0.2", "validation = 1.0", "`validation` is between 0 and 1"),
        ('unit = "record"', 'unit = "visit"', '`unit` is "record" or "person"'),
        ("scale = 15", "scale = 0", "age has unit, centre, scale (above 0) and fill"),
        ("centre = 60", "centre = nan", "age has unit"),
        ("centre = 60", 'centre = "60"', "columns.toml: "),
        ("missing =", "mising =", "'mising'"),
        ("[text]", "[text", "columns.toml: "),
    ],
)
def test_mistakes_in_columns_toml_are_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    file = written(tmp_path / "x") / "columns.toml"
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(SystemExit, match=re.escape(why)):
        prepare_of(file.parent).read_columns()


NEEDED = {"jax": ["jax", "jaxlib", "haiku"], "tensorflow": ["tensorflow", "keras"]}


def project_of(folder: Path, model: str, privacy: str | None, rounds: int) -> tuple[Path, Any, int]:
    """Return a project with its example data, what hides frameworks from it, and its port."""
    if model != "sklearn":
        require(model)
    if privacy:
        pytest.importorskip("opacus")
    project, port = written(folder / "x", model, privacy), free_port()
    # Opacus needs torch.
    used = [*NEEDED.get(model, [model]), *(["torch"] if privacy else [])]
    env = hiding(*(name for name in FRAMEWORK_MODULES if name not in used))
    config = project / "config.toml"
    text = re.sub(r"port = \d+", f"port = {port}", config.read_text())
    config.write_text(re.sub(r"rounds = \d+", f"rounds = {rounds}", text))
    said = ended(project / "prepare.py", "--example", env=env, cwd=project).stdout
    assert all(f"\n{site} " in said for site in SITES)
    return project, {"env": env, "cwd": project}, port


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "privacy"),
    [
        ("sklearn", None),
        pytest.param("torch", "persons", marks=pytest.mark.soak),
        pytest.param("tensorflow", None, marks=pytest.mark.soak),
        pytest.param("jax", "records", marks=pytest.mark.soak),
    ],
)
def test_a_project_runs_as_written(tmp_path: Path, model: str, privacy: str | None) -> None:
    project, there, _ = project_of(tmp_path, model, privacy, 3)
    assert call("check", project).exit_code == 0
    ended("-m", "fedclip", "quickrun" if privacy else "simulate", project, **there)
    run = project / "results" / ("server" if privacy else "simulated/server")
    for best in ([], ["--best"]):
        words = ["example-north.csv", "--run", run, *best]
        said = ended(project / "predict.py", *words, **there).stdout
        assert ("model_state_best" in said) == bool(best)
        found, known = (
            [*csv.reader((project / name).read_text().splitlines())]
            for name in ("predictions.csv", "example-north.csv")
        )
        assert found[0] == ["id", "outcome"]
        assert [row[0] for row in found] == [row[0] for row in known]
        right = np.mean([a[1] == b[-1] for a, b in zip(found[1:], known[1:], strict=True)])
        assert right > (0.4 if privacy else 0.7)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_server_and_clients_as_the_readme_starts_them(tmp_path: Path) -> None:
    project, there, port = project_of(tmp_path, "sklearn", "persons", 2)
    readme = (project / "README.md").read_text().replace("server.example.org", "localhost")
    commands = re.findall(r"^ *(openssl .*?) *$", readme, re.M)
    assert len(commands) == 3
    for line in commands:
        subprocess.run(line, cwd=project, shell=True, check=True, capture_output=True)
    (server,) = re.findall(r"^ *python (server.py --host.*)", readme, re.M)
    (client,) = re.findall(r"^ *python (client.py.*)", readme, re.M)
    client = client.replace(":8765", f":{port}")
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **there}

    def start(line: str) -> Any:
        return subprocess.Popen([sys.executable, "-W", "ignore", *line.split()], **pipe)

    nodes = [start(server.replace("0.0.0.0", "127.0.0.1") + f" --port {port}")]
    try:
        # Clients try again for some seconds.
        log = project / "results" / "server" / "logs.txt"
        while nodes[0].poll() is None and not (log.exists() and "listening" in log.read_text()):
            time.sleep(0.2)
        nodes += [start(client.replace("north", site)) for site in SITES]
        for node in nodes:
            said, _ = node.communicate(timeout=PATIENCE)
            assert node.returncode == 0, said[-3000:]
    finally:
        for node in nodes:
            node.kill()
    assert len((project / "results" / "server" / "metrics.csv").read_text().splitlines()) == 3
    # A site has the weights, too.
    ended(project / "predict.py", "example-east.csv", "--run", "results/east", "--best", **there)
    assert call("privacy", "spent", project / "data").stdout.count("one person\n") == 3
    # Without TLS, only this machine is served.
    done = ended(project / "server.py", "--host", "0.0.0.0", well=False, **there)
    assert "other machines need TLS" in done.stderr


@pytest.mark.parametrize("privacy", [None, "records", "persons"])
@pytest.mark.parametrize("model", PACKAGES)
def test_each_project_is_complete(tmp_path: Path, model: str, privacy: str | None) -> None:
    project = written(tmp_path / "x", model, privacy)
    names = "config.toml columns.toml prepare.py model.py server.py client.py predict.py README.md"
    assert {file.name for file in project.iterdir()} == {*names.split()}
    assert ("## Privacy" in (project / "README.md").read_text()) == bool(privacy)


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.touch()
    for words in (["init", "--model", "torch"], ["demo"]):
        for folder in (tmp_path, notes, notes / "below"):
            assert sentence(*words, folder)
        assert [*tmp_path.iterdir()] == [notes]
