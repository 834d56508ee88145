# SPDX-License-Identifier: Apache-2.0
"""What lies around the package runs: example loops, which agree, benchmarks, and the site."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
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
from fedclip.report import read_report

LOOPS = ROOT / "examples" / "loops"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in (LOOPS, LOOPS.parent / "hospital", ROOT):
        monkeypatch.syspath_prepend(folder)
    yield
    for name in ["run", "tables", *(path.stem for path in LOOPS.glob("*.py"))]:
        sys.modules.pop(name, None)


def trained(name: str) -> Any:
    return importlib.import_module(name).train()


@pytest.mark.slow
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
def test_the_same_clipper_has_the_same_limits_in_each_loop(
    name: str, packages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    require("torch")
    for package in packages.split():
        pytest.importorskip(package)
    if name == "keras_fit":
        import keras

        before = keras.config.floatx()
    try:
        found = trained(name)
    finally:
        if name == "keras_fit":
            keras.config.set_floatx(before)
    if name == "transformers_train":
        limits, accuracy = found
        assert (len(limits), accuracy > 0.7) == (11, True)
    else:
        np.testing.assert_allclose(found, trained("torch_loop"), rtol=1e-5)
    assert " 0 of them clipped" not in capsys.readouterr().out


@pytest.mark.slow
def test_four_devices_have_the_limits_of_one() -> None:
    for framework in ("torch", "jax", "optax"):
        require(framework)
    # Only a new process can have another number of devices.
    said = ended(LOOPS / "jax_mesh.py").stdout
    assert float(said.split()[-1]) == pytest.approx(trained("torch_loop")[-1], rel=1e-5)
    assert " 0 of them clipped" not in said


@pytest.mark.slow
def test_the_example_clips_the_client_in_other_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And docs/simulate.md has its numbers."""
    folder = shutil.copytree(
        LOOPS.parent / "quickrun", tmp_path / "x", ignore=shutil.ignore_patterns("data", "result")
    )
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
    shares = []
    for client in (0, 1, 2):
        records = [
            row.record
            for row in read_report(folder / "result").select(module="norm-clip")
            if row.node.endswith(f"client_{client}")
        ]
        shares.append(sum(r.clipped for r in records) / sum(r.steps for r in records))
    assert shares == pytest.approx([0.09, 0.09, 1.0], abs=0.02)


@pytest.mark.slow
def test_a_hospital_in_other_units_is_found_and_its_updates_are_clipped(tmp_path: Path) -> None:
    def run(program: str, *words: str, folder: Path) -> Any:
        if program == "python":
            return ended(*words, cwd=folder)
        # Each process of fedclip's would import everything.
        with contextlib.chdir(folder):
            done = call(*words)
        assert done.exit_code == 0, done.output
        return done.stdout

    named, accuracies = importlib.import_module("run").play(tmp_path, 20, run)
    assert named == ["valley"]
    for site in ("harbour", "north"):
        before, after = accuracies[site]
        assert before < 0.8
        assert after > 0.9


# Flower is not installed beside declearn.
@pytest.mark.parametrize(
    "name", sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"flower"})
)
def test_benchmarks_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_the_table_of_benchmarks_has_every_cell_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    options = ["--quick", "--gradients", "20 t", "--frameworks", "numpy", "--threads", "1"]
    table = ended("-m", "benchmarks", *options, "--json", file, cwd=ROOT).stdout
    cells = {tuple(row["cell"]): row["times"] for row in json.loads(file.read_text())}
    assert len(cells) == 2
    for (*_, mode), times in cells.items():
        assert {"norm-clip", "declearn", "read, one core"} < set(times)
        assert ("multiply" in times) == (mode == "clipped")
    assert table.count("norm-clip / floor") == 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    # Strict: a link that leads nowhere and a page outside the navigation are errors.
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


@pytest.mark.slow
def test_every_public_name_is_on_the_site(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" py:")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    public = {f"fedclip.{name}" for name in fedclip.__all__ if not name.startswith("_")}
    for info in pkgutil.walk_packages(fedclip.__path__, "fedclip."):
        with contextlib.suppress(ImportError):
            names = getattr(importlib.import_module(info.name), "__all__", ())
            public |= {f"{info.name}.{name}" for name in names}
    assert public <= known, sorted(public - known)


@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?([^\" >]+)", text)
        assert not [target for target in loaded if "//" in target], page
