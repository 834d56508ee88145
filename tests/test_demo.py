# SPDX-License-Identifier: Apache-2.0
"""The demo: a real federation, whose numbers are those that it shows."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedclip.report import read_report
from fedclip.tools.check import check_config
from fedclip.tools.compare import interval
from fedclip.tools.demo import DemoError, run, run_demo
from fedclip.tools.demo.data import FACTOR, SITES, write_data

# What declearn warns of itself, in what all nodes of a federation do.
pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning")


@pytest.mark.slow
def test_it_trains_in_three_ways_and_shows_what_came_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder, rounds = tmp_path / "demo", 4
    results = {r.name: r for r in run_demo(folder, rounds, seeds=2, bound=0.7)}
    shown, told = capsys.readouterr()

    # The table is of this run: its numbers are those of the servers' files.
    for name, result in results.items():
        losses = []
        for seed in range(2):
            assert check_config(folder / name / f"seed-{seed}").ok
            report = read_report(folder / name / f"seed-{seed}")
            assert set(SITES) <= set(report.nodes)
            assert {row.record.round for row in report.select(node="site-a")} == {1, 2, 3, 4}
            with (folder / name / f"seed-{seed}" / "server" / "metrics.csv").open() as file:
                rows = list(csv.DictReader(file))
            assert len(rows) == rounds
            losses.append(float(rows[-1]["loss"]))
        # Another seed is another split, from an untrained model; another way has the same splits.
        assert len(set(losses)) == 2
        assert result.values["loss"] == interval(losses)
        mean, half = result.values["accuracy"]
        assert f"{mean:.3g} ± {half:.2g}" in shown
        assert f"{name}: 8 of 8 done, loss" in told

    # Clipping matters in it.
    for name in ("fixed-bound", "adaptive-bound"):
        assert results[name].values["loss"][0] < results["no-clipping"].values["loss"][0]
    limits = {
        row.record.limit for row in read_report(folder / "fixed-bound").select(node="seed-0/site-a")
    }
    assert limits == {0.7}

    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The demo may be run again in its folder.
    run._prepare(folder)


def test_data_is_all_of_it_and_one_site_trains_in_another_unit(tmp_path: Path) -> None:
    write_data(tmp_path)
    load = {
        (site, part): np.load(tmp_path / site / f"{part}.npy")
        for site in SITES
        for part in ("train_data", "valid_data", "train_target", "valid_target")
    }
    assert sum(len(a) for (_, part), a in load.items() if part.endswith("target")) == 569
    # Nine of thirty features are lengths or areas; elsewhere the scale is that of site-a.
    typical = {key: np.median(np.abs(a), axis=0) for key, a in load.items() if a.ndim > 1}
    for key, sizes in typical.items():
        assert (sizes > FACTOR / 2).sum() == (9 if key == ("site-c", "train_data") else 0)
    write_data(tmp_path / "other", seed=1)
    assert not np.array_equal(
        np.load(tmp_path / "other" / "site-a" / "valid_target.npy"), load["site-a", "valid_target"]
    )


def test_it_does_not_write_into_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DemoError, match="holds something else"):
        run_demo(tmp_path)
    with pytest.raises(DemoError, match="is a file"):
        run_demo(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_client_that_fails_ends_all_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(folder: Path, seed: int) -> None:
        write_data(folder, seed)
        (folder / "site-b" / "train_data.npy").write_bytes(b"no array")

    monkeypatch.setattr(run, "write_data", torn)
    with pytest.raises(DemoError, match=r"^no-clipping failed: \w+Error: "):
        run_demo(tmp_path / "demo")


@pytest.mark.slow
def test_the_time_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="did not finish within 1 s"):
        run_demo(tmp_path / "demo", timeout=1)
