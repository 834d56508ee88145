# SPDX-License-Identifier: Apache-2.0
"""What lies around the package runs: example loops, which agree, benchmarks, study and site."""

import contextlib
import importlib
import os
import pkgutil
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkouts import ROOT
from helpers import PATIENCE, ended, require
from report_runs import call

import fedclip
from benchmarks.study import cells, mechanisms, noised, orderings, tables
from fedclip.report import read_report

pytestmark = pytest.mark.slow

LOOPS = ROOT / "examples" / "loops"
RESULTS = ROOT / "benchmarks" / "study" / "results"
FIELDS: list[Any] = [mechanisms.FIELD, *mechanisms.ALTERNATIVES, noised.FIELD, *orderings.FIELDS]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in (LOOPS, LOOPS.parent / "hospital", ROOT):
        monkeypatch.syspath_prepend(folder)
    yield
    for name in ["run", "tables", *(path.stem for path in LOOPS.glob("*.py"))]:
        sys.modules.pop(name, None)
    if "keras" in sys.modules:
        # An example changes it.
        sys.modules["keras"].config.set_floatx("float32")


def trained(name: str) -> Any:
    return importlib.import_module(name).train()


@pytest.mark.filterwarnings(
    # What Lightning and Transformers warn of is not ours.
    *("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
)
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("keras_fit", "tensorflow keras"),
        ("jax_loop", "jax optax"),
        ("lightning_fit", "lightning"),
        ("transformers_train", "transformers"),
    ],
)
def test_loops_are_alike(name: str, packages: str, capsys: pytest.CaptureFixture[str]) -> None:
    require("torch")
    for package in packages.split():
        pytest.importorskip(package)
    found = trained(name)
    if name == "transformers_train":
        limits, accuracy = found
        assert (len(limits), accuracy > 0.7) == (11, True)
    else:
        np.testing.assert_allclose(found, trained("torch_loop"), rtol=1e-5)
    assert " 0 of them clipped" not in capsys.readouterr().out


def test_four_devices_have_the_limits_of_one() -> None:
    for framework in ("torch", "jax", "optax"):
        require(framework)
    # Only a new process can have another number of devices.
    said = ended(LOOPS / "jax_mesh.py").stdout
    assert float(said.split()[-1]) == pytest.approx(trained("torch_loop")[-1], rel=1e-5)
    assert " 0 of them clipped" not in said


def test_a_hospital_in_other_units_is_found_and_its_updates_are_clipped(tmp_path: Path) -> None:
    def run(program: str, *words: str, folder: Path) -> Any:
        # Each process of fedclip's would import everything.
        with contextlib.chdir(folder):
            done: Any = ended(*words) if program == "python" else call(*words)
        assert program == "python" or done.exit_code == 0, done.output
        return done.stdout

    named, accuracies = importlib.import_module("run").play(tmp_path, 20, run)
    assert named == ["valley"]
    for site in ("harbour", "north"):
        before, after = accuracies[site]
        assert before < 0.8
        assert after > 0.9


def test_benchmarks_can_be_imported() -> None:
    # Flower is not installed beside declearn.
    for name in {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"flower"}:
        importlib.import_module(f"benchmarks.{name}")


def test_no_cell_of_the_study_is_missing_and_none_is_left_over() -> None:
    scores = cells.read(RESULTS)
    assert not [cell for field in FIELDS for cell in cells.wanted(field, scores, 10)]
    planned: dict[Any, float] = {}
    # Those of the tuning first, then those that it chose.
    for _ in range(2):
        for field in FIELDS:
            planned |= {c: scores.get(c, 0.0) for c in cells.wanted(field, planned, 10)}
    assert set(scores) == set(planned)


def test_the_pages_of_the_study_are_what_its_numbers_say() -> None:
    study, shown = tables.Study(cells.read(RESULTS)), 0
    for file in tables.PAGES:
        page = file.read_text(encoding="utf-8")
        assert tables.rewritten(page, study) == page, "run: python -m benchmarks.study page"
        shown += page.count("<!-- table: ")
    assert shown == len(tables.TABLES)


@pytest.mark.soak
def test_cells_of_the_study_come_out_again() -> None:
    scores = cells.read(RESULTS)
    for trouble, data, name in [
        ("units", "wine", "zscore-clip"),
        ("hostile", "digits", "update-clip-server"),
        ("noise epsilon 8", "digits", "adaptive, banded"),
        ("attack labels", "digits", "arc"),
    ]:
        (field,) = [f for f in FIELDS if (trouble, data) in f.places and name in f.mechanisms]
        found = field.run(cells.Job(trouble, data, 3, ((name, 1.0),)))
        # Sums in another order, on another machine, may turn a record or two.
        kept = scores[cells.Cell(trouble, data, name, 1.0, 3)]
        assert found == [pytest.approx(kept, abs=0.02)]


def test_the_site_has_every_public_name_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("material")
    # Strict: a link that leads nowhere and a page outside the navigation are errors.
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    quiet: Any = {"env": {**os.environ, "NO_MKDOCS_2_WARNING": "1"}, "timeout": 10 * PATIENCE}
    built = ended(*words, cwd=ROOT, **quiet)
    assert built.stdout + built.stderr == ""
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" py:")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    public = {f"fedclip.{name}" for name in fedclip.__all__ if not name.startswith("_")}
    for info in pkgutil.walk_packages(fedclip.__path__, "fedclip."):
        with contextlib.suppress(ImportError):
            names = getattr(importlib.import_module(info.name), "__all__", ())
            public |= {f"{info.name}.{name}" for name in names}
    assert public <= known, sorted(public - known)
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?([^\" >]+)", text)
        assert not [target for target in loaded if "//" in target], page


def test_the_example_clips_the_client_in_other_units(tmp_path: Path, monkeypatch: Any) -> None:
    """And docs/simulate.md has its numbers."""
    left_out = shutil.ignore_patterns("data", "result")
    folder = shutil.copytree(LOOPS.parent / "quickrun", tmp_path / "x", ignore=left_out)
    monkeypatch.chdir(folder)
    ended("prepare.py")
    config = folder / "config.toml"
    accuracies = []
    for modules in ("[]", '[["norm-clip", { max_norm = 1.0 }]]'):
        config.write_text(re.sub(r"modules = .*", f"modules = {modules}", config.read_text()))
        result = call("simulate", "--seed", "0")
        assert result.exit_code == 0, result.output
        rows = (folder / "result/simulated/server/metrics.csv").read_text().splitlines()
        accuracies.append(float(rows[-1].split(",")[1]))
    # A record or two may fall on the other side on another processor.
    assert accuracies == pytest.approx([0.86, 0.92], abs=0.015)
    found, shares = [*read_report(folder / "result").select(module="norm-clip")], []
    for client in (0, 1, 2):
        records = [row.record for row in found if row.node.endswith(f"client_{client}")]
        shares.append(sum(r.clipped for r in records) / sum(r.steps for r in records))
    assert shares == pytest.approx([0.09, 0.09, 1.0], abs=0.02)
