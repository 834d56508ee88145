"""The example loops run, and agree."""

import contextlib
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE, ended, require
from report_runs import call

from fedclip.report import read_report

LOOPS = Path(__file__).parents[2] / "examples" / "loops"


# What Lightning and Transformers warn of is not ours.
warned = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True)
def _loops_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(LOOPS))
    yield
    for name in [path.stem for path in LOOPS.glob("*.py")]:
        sys.modules.pop(name, None)


def test_the_same_clipper_has_the_same_limits_in_each_loop(capsys):
    for framework in ("torch", "keras", "jax", "optax"):
        require(framework)
    import keras

    before = keras.config.floatx()
    limits = {}
    try:
        for name in ("torch_loop", "keras_fit", "jax_loop"):
            limits[name] = importlib.import_module(name).train()
    finally:
        keras.config.set_floatx(before)
    for name, values in limits.items():
        assert len(values) == 56
        np.testing.assert_allclose(values, limits["torch_loop"], rtol=1e-5, err_msg=name)
    shown = capsys.readouterr().out
    assert shown.count("of them clipped") == 3
    assert " 0 of them clipped" not in shown


@pytest.mark.slow
@warned
def test_lightning_has_the_limits_of_the_plain_loop():
    require("torch")
    pytest.importorskip("lightning")
    found, expected = (importlib.import_module(f).train() for f in ("lightning_fit", "torch_loop"))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
@warned
def test_a_small_transformer_learns_the_digits(capsys):
    require("torch")
    pytest.importorskip("transformers")
    limits, accuracy = importlib.import_module("transformers_train").train()
    assert len(limits) == 11
    assert accuracy > 0.7
    assert " 0 of them clipped" not in capsys.readouterr().out


@pytest.mark.slow
def test_four_devices_have_the_limits_of_one():
    for framework in ("torch", "jax", "optax"):
        require(framework)
    # Only a new process can have another number of devices.
    said = ended(LOOPS / "jax_mesh.py").stdout
    expected = importlib.import_module("torch_loop").train()
    assert float(said.split()[-1]) == pytest.approx(expected[-1], rel=1e-5)
    assert " 0 of them clipped" not in said


@pytest.mark.slow
def test_the_example_clips_the_client_in_other_units(tmp_path, monkeypatch):
    """And docs/simulate.md has its numbers."""
    folder = shutil.copytree(
        LOOPS.parent / "quickrun", tmp_path / "x", ignore=shutil.ignore_patterns("data", "result")
    )
    monkeypatch.chdir(folder)
    subprocess.run([sys.executable, "prepare.py"], check=True, timeout=600)
    config = folder / "config.toml"
    accuracy = {}
    for modules in ("[]", '[["norm-clip", { max_norm = 1.0 }]]'):
        config.write_text(re.sub(r"modules = .*", f"modules = {modules}", config.read_text()))
        result = call("simulate", "--seed", "0")
        assert result.exit_code == 0, result.output
        rows = (folder / "result/simulated/server/metrics.csv").read_text().splitlines()
        accuracy[modules] = float(rows[-1].split(",")[1])
    # A record or two may fall on the other side on another processor.
    assert [*accuracy.values()] == pytest.approx([0.86, 0.92], abs=0.015)
    rows = read_report(folder / "result").select(module="norm-clip")
    shares = {
        client: sum(r.record.clipped for r in rows if r.node.endswith(client))
        / sum(r.record.steps for r in rows if r.node.endswith(client))
        for client in ("client_0", "client_1", "client_2")
    }
    assert shares == pytest.approx({"client_0": 0.09, "client_1": 0.09, "client_2": 1.0}, abs=0.02)


@pytest.mark.slow
def test_a_hospital_in_other_units_is_found_and_its_updates_are_clipped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(LOOPS.parent / "hospital"))
    example = importlib.import_module("run")
    for name in ("run", "tables"):
        monkeypatch.delitem(sys.modules, name)

    def run(program, *words, folder):
        if program == "python":
            command, limit = [sys.executable, *words], {"timeout": PATIENCE}
            return subprocess.run(command, cwd=folder, check=True, **limit)
        # Each process of fedclip's would import everything.
        with contextlib.chdir(folder):
            done = call(*words)
        assert done.exit_code == 0, done.output
        return done.stdout

    named, accuracies = example.play(tmp_path, 20, run)
    assert named == ["valley"]
    for site in ("harbour", "north"):
        before, after = accuracies[site]
        assert before < 0.8
        assert after > 0.9
