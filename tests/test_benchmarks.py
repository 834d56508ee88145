# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run; how fast anything is, they say and no test does."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE
from sklearn.datasets import load_digits

from fedclip.tools.check import check_config

ROOT = Path(__file__).parent.parent
NAMES = (
    "__main__",
    "adapters",
    "averaging",
    "bound_speed",
    "combining",
    "cuda",
    "measure",
    "merge",
    "models",
    "noise",
    "simulate",
    "training",
    "turns",
    "turns_audit",
    "unlike_runs",
    "unlike_sites",
    "weights",
)


@pytest.mark.parametrize("name", NAMES)
def test_they_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name.strip('_')}", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("model", "tensors", "values"),
    [
        ("MLP", 6, 235_146),
        ("LSTM", 11, 819_920),
        ("ResNet-50", 161, 25_557_032),
        ("ViT-S", 152, 22_050_664),
        ("BERT-base", 197, 108_891_648),
    ],
)
def test_models_have_their_published_sizes(
    model: str, tensors: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    shapes = importlib.import_module("benchmarks.models").MODELS[model]
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, values)


def bench(*options: str) -> str:
    command = [sys.executable, "-m", *options]
    return subprocess.check_output(command, cwd=ROOT, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_the_table_has_every_cell_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    options = ("--quick", "--gradients", "20 t", "--frameworks", "numpy", "--threads", "1")
    table = bench("benchmarks", *options, "--json", str(file))
    cells = {tuple(row["cell"]): row["times"] for row in json.loads(file.read_text())}
    assert len(cells) == 2
    for (_, _, _, mode), times in cells.items():
        assert {"norm-clip", "declearn", "read, one core"} < set(times)
        assert ("multiply" in times) == (mode == "clipped")
        assert min(times["norm-clip"], times["declearn"]) > 0
    assert table.count("norm-clip / floor") == 2


@pytest.mark.slow
def test_means_are_compared_by_accuracy_and_by_time() -> None:
    rows = ("--rows", "trimmed", "equal clip")
    assert bench("benchmarks.weights", "--splits", "1", *rows).count(" ± ") == 6
    few = ("--clients", "5", "--values", "1000", "--hostile", "1", "--rounds", "1")
    assert "trimmed" in bench("benchmarks.combining", *few)


def test_unlike_sites_share_all_records_and_their_file_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT)
    task = importlib.import_module("benchmarks.unlike_sites")
    sites, test = task.split(0)
    assert tuple(len(labels) for _, labels in sites) == task.COUNTS
    assert sum(task.COUNTS) + len(test[1]) == 1797
    whole = np.concatenate([data for data, _ in [*sites, test]])
    assert whole.sum() == pytest.approx(load_digits().data.sum() / 16)
    folder = task.write(tmp_path, 0)
    for row in task.ROWS.values():
        (tmp_path / "config.toml").write_text(task.config(folder, row))
        assert not check_config(tmp_path / "config.toml", simulate=True).problems
