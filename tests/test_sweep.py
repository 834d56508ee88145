# SPDX-License-Identifier: Apache-2.0
"""`fedclip compare` and `fedclip sweep`: several settings and seeds, side by side."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from report_runs import Node, call, large_run
from scipy import stats

import fedclip.tools.sweep
from fedclip.report import read_report
from fedclip.tools.compare import compared, interval
from fedclip.tools.output import ToolError
from fedclip.tools.sweep import MARK, Planned, plan

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickrun"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLE / "model.py", tmp_path / "model.py")
    return Path(shutil.copy(EXAMPLE / "config.toml", tmp_path / "config.toml"))


def loaded(planned: Planned) -> dict[str, Any]:
    return tomllib.loads(planned.text)


# -- compare ------------------------------------------------------------------------------------
def test_an_interval_is_students() -> None:
    values = [0.9, 0.92, 0.95, 0.91]
    mean, half = interval(values)
    low, high = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert half is not None
    assert (mean - half, mean + half) == pytest.approx((low, high))


@pytest.mark.slow
def test_a_seed_that_diverged_is_not_left_out_of_a_mean(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        large_run(tmp_path / "runs" / f"seed-{seed}", 4, 2, seed=seed)
    file = tmp_path / "runs" / "seed-2" / "server" / "metrics.csv"
    rows = file.read_text().splitlines()
    rows[-1] = f"{rows[-1].partition(',')[0]},nan,nan"
    file.write_text("\n".join(rows) + "\n")
    shown = call("compare", tmp_path / "runs", "--html", tmp_path / "page.html").stdout
    assert "NaN in 1" in shown
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    (experiment,) = json.loads(data[1], parse_constant=pytest.fail)["experiments"]
    # Neither a mean nor a band of those that are left.
    assert experiment["metrics"]["loss"]["server"][-1] == [4, None]
    assert experiment["metrics"]["loss"]["band"][-1] == [4, None, None]
    (setting,) = json.loads(call("compare", tmp_path / "runs", "--json").stdout)["settings"]
    assert setting["nonfinite"] == {"loss": 1, "accuracy": 1}
    assert "loss" not in setting["values"]


# -- sweep --------------------------------------------------------------------------------------
def test_each_value_is_run_with_each_seed(config: Path, tmp_path: Path) -> None:
    settings = ["optim.client_opt.lrate=0.1,0.5", "norm-clip.max_norm=1.5,3"]
    runs = plan(config, settings, 2, tmp_path / "out")
    assert len(runs) == 8
    assert [run.seed for run in runs] == [1] * 4 + [2] * 4
    first = loaded(runs[0])
    assert first["optim"]["client_opt"]["lrate"] == 0.1
    assert first["optim"]["client_opt"]["modules"] == [["norm-clip", {"max_norm": 1.5}]]
    assert runs[0].folder == tmp_path / "out" / "lrate=0.1,max_norm=1.5" / "seed-1"
    # The copy finds the same files, and writes to its own folder.
    assert first["model"]["model_file"] == str(tmp_path / "model.py")
    assert first["experiment"]["checkpoint"] == str(runs[0].folder)
    assert "metrics" in first["experiment"]
    assert "# Three clients" in runs[0].text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("client_opt.lrate=0.1", "write optim.client_opt.lrate"),
        ("lrate", "must be KEY=VALUE"),
        ("norm-clp.max_norm=1,2", "did you mean 'norm-clip'"),
        ("nowhere.key=1", "no section and no module 'nowhere'"),
        ('optim.client_opt.modules=["momentum"]', 'add "no-op"'),
    ],
)
def test_a_wrong_setting_is_a_sentence(
    config: Path, tmp_path: Path, setting: str, words: str
) -> None:
    if "momentum" in setting:
        config.write_text(config.read_text().replace('[["norm-clip", { max_norm = 5.0 }]]', "[]"))
    with pytest.raises(ToolError, match=words):
        plan(config, [setting], 1, tmp_path)
    result = call("sweep", config, setting)
    assert result.exit_code == 1
    assert words in result.stderr.replace("\\", "")


def test_a_value_that_would_not_run_is_refused_before_anything_runs(config: Path) -> None:
    result = call("sweep", config, "norm-clip.max_norm=2.0,-1.0", "--seeds", 1)
    assert result.exit_code == 1
    assert "max_norm=-1.0 would not run" in result.stderr


def played(planned: Planned, told: Any) -> None:
    """Stand for a run: write what one leaves behind."""
    large_run(planned.folder, 3, 2, seed=planned.seed)
    told(planned.rounds, "loss 1")
    (planned.folder / MARK).write_bytes(planned.text.encode())


def test_a_sweep_goes_on_where_it_stopped(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int]] = []
    interrupts = [True]

    def run(planned: Planned, told: Any, command: str) -> None:
        started.append((planned.label, planned.seed))
        if len(started) > 2 and interrupts:
            raise KeyboardInterrupt
        played(planned, told)

    monkeypatch.setattr(fedclip.tools.sweep, "run", run)
    words = ["sweep", config, "norm-clip.max_norm=1.5,3.0", "--seeds", 2]
    interrupted = call(*words)
    assert interrupted.exit_code == 130
    assert "goes on from here" in interrupted.stderr
    interrupts.clear()
    started.clear()
    result = call(*words)
    assert result.exit_code == 0, result.stderr
    assert "2 of 4 runs are done already" in result.stderr
    assert started == [("max_norm=1.5", 2), ("max_norm=3.0", 2)]
    assert result.stdout.count("max_norm=") == 2
    # Another configuration is another run, and other seeds are not mixed in.
    call(*words, "--rounds", 7)
    assert len(started) == 6
    assert call("sweep", config, "norm-clip.max_norm=1.5", "--seeds", 1).exit_code == 0
    assert "compare" in call("compare", tmp_path / "config-sweep", "--help").stdout
    assert call("compare", tmp_path / "config-sweep").stdout.count("max_norm=") == 2


def test_the_share_that_was_clipped_is_that_of_clippers(tmp_path: Path) -> None:
    node = Node(tmp_path / "c0", [["norm-clip", {"max_norm": 1.0}], "update-norms"])
    node.round([0.5, 2.0], update=9.0)
    (found,) = compared([("run", read_report(tmp_path))])
    assert found.values["clipped"][0] == 0.5
    assert found.values["largest norm"][0] == pytest.approx(2.0)


def test_a_run_in_the_folder_of_another_is_compared_with_it(tmp_path: Path) -> None:
    Node(tmp_path / "outer" / "a", ["norm-clip"]).round([0.5])
    Node(tmp_path / "outer" / "inner" / "a", ["norm-clip"]).round([2.0])
    facts = json.loads(
        call("compare", tmp_path / "outer", tmp_path / "outer/inner", "--json").stdout
    )
    clipped = [setting["values"]["clipped"]["mean"] for setting in facts["settings"]]
    assert clipped == [0.0, 1.0]


@pytest.mark.slow
def test_a_real_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "quickrun"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("data", "result"))
    import numpy as np

    for client in ("c0", "c1"):
        data = folder / "data" / client
        data.mkdir(parents=True)
        for part in ("train", "valid"):
            np.save(data / f"{part}_data.npy", np.random.default_rng(0).normal(size=(40, 64)))
            np.save(data / f"{part}_target.npy", np.arange(40) % 10)
    text = (folder / "config.toml").read_text().replace("_clients = 3", "_clients = 2")
    (folder / "config.toml").write_text(text)
    words = ["sweep", folder / "config.toml", "norm-clip.max_norm=1.5,3.0", "--seeds", 1]
    result = call(*words, "--rounds", 2)
    assert result.exit_code == 0, result.stderr
    assert "4 of 4 rounds done" in result.stderr
    assert "max_norm=3.0" in result.stdout
