# SPDX-License-Identifier: Apache-2.0
"""The demo: a real federation, whose numbers are those that it shows."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from checkouts import ROOT

from fedclip.cli import projects as demo
from fedclip.cli.check.configuration import check_config
from fedclip.cli.projects import SITES, pulls, write_data
from fedclip.cli.projects import demo as run_demo
from fedclip.cli.reporting import interval
from fedclip.cli.reporting import shown as in_words
from fedclip.errors import ToolError
from fedclip.report import read_report

# What declearn warns of itself, in what all nodes of a federation do.
pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning")


@pytest.mark.slow
def test_it_trains_in_three_ways_and_shows_what_came_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder, rounds = tmp_path / "demo", 4
    ranking = run_demo(folder, rounds, seeds=2, bound=0.7)
    shown, told = capsys.readouterr()

    # The table is of this run: its numbers are those of the servers' files.
    last = {
        (name, node): [
            metrics(folder / name / f"seed-{seed}" / node, rounds)[-1] for seed in range(2)
        ]
        for name in ranking.results
        for node in ("server", *SITES)
    }
    for name in ranking.results:
        for seed in range(2):
            assert check_config(folder / name / f"seed-{seed}").ok
            report = read_report(folder / name / f"seed-{seed}")
            assert set(SITES) <= set(report.nodes)
            assert {row.record.round for row in report.select(node="site-a")} == {1, 2, 3, 4}
        losses = [float(row["loss"]) for row in last[name, "server"]]
        # Another seed is another split, from an untrained model; another way has the same splits.
        assert len(set(losses)) == 2
        means, fixed = (
            np.mean([[float(row["accuracy"]) for row in last[way, site]] for site in SITES], axis=0)
            for way in (name, "fixed-bound")
        )
        assert ranking.mean(name) == pytest.approx(interval(means.tolist()))
        assert in_words(*ranking.mean(name)) in shown
        assert ranking.gain(name, "fixed-bound") == pytest.approx(
            interval((means - fixed).tolist()), abs=1e-9
        )
    # A site is named, and what came out there; the one bar never starts again.
    (site, share) = re.findall(
        r"With the adaptive bound, the lowest site is (\S+): accuracy (\S+)%", shown
    )[0]
    found = {
        one: np.mean([float(row["accuracy"]) for row in last["adaptive-bound", one]])
        for one in SITES
    }
    assert found[site] == min(found.values()) == pytest.approx(float(share) / 100, abs=1e-3)
    assert "6 federations train for 4 rounds" in shown
    done = [int(number) for number in re.findall(r"^demo: (\d+) of 24 rounds done", told, re.M)]
    assert done == sorted(set(done))
    assert done[-1] == 24
    assert len(told.splitlines()) == len(done)

    # Clipping matters in it.
    for name in ("fixed-bound", "adaptive-bound"):
        assert ranking.mean(name)[0] > ranking.mean("no-clipping")[0]
    limits = {
        row.record.limit for row in read_report(folder / "fixed-bound").select(node="seed-0/site-a")
    }
    assert limits == {0.7}

    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The demo may be run again in its folder.
    demo.prepare(folder)


def metrics(folder: Path, rounds: int) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == rounds
    return rows


@pytest.mark.slow
def test_the_bound_comes_down_to_the_majority_as_the_page_says(tmp_path: Path) -> None:
    demo.prepare(tmp_path)
    write_data(tmp_path / "data" / "seed-0")
    planned = demo.planned(tmp_path, "adaptive-bound", 0, 30, 1.0)
    assert not demo.run_all([planned], "quickrun", 1, lambda done, text: None)
    (found,) = pulls(read_report(planned.folder.parent))
    assert found[:2] == pytest.approx([1, 1])
    assert all(1.2 < pull < 2.8 for pull in found[2:10])
    assert all(pull < 1.5 for pull in found[16:])
    assert np.median(found[20:]) == pytest.approx(1.0, abs=0.1)


@pytest.mark.soak
def test_the_page_has_the_numbers_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    ranking = run_demo(tmp_path / "demo")
    for way, row in {
        "no-clipping": "no clipping",
        "fixed-bound": "fixed bound 1",
        "adaptive-bound": "adaptive bound",
    }.items():
        found = re.search(rf"^\| {row} \| ([\d.]+) % ± ([\d.]+) % \|", page, re.M)
        assert found is not None
        said = [float(number) / 100 for number in found.groups()]
        assert ranking.mean(way) == pytest.approx(said, abs=0.01)
    gain = [100 * (number or 0.0) for number in ranking.gain("adaptive-bound", "fixed-bound")]
    assert "is 3.0 ± 1.6 points above" in page
    assert gain == pytest.approx([3.0, 1.6], abs=0.3)
    shown = capsys.readouterr().out
    for said in ("site-b", "4.6 times as hard", "and 1.1 times"):
        assert said in shown
        assert said.removeprefix("and ") in page


def test_it_does_not_write_into_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ToolError, match="is not empty"):
            run_demo(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_client_that_fails_ends_all_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(folder: Path, seed: int) -> None:
        write_data(folder, seed)
        (folder / "site-b" / "train_data.npy").write_bytes(b"no array")

    monkeypatch.setattr(demo, "write_data", torn)
    with pytest.raises(ToolError, match=r"^no-clipping, seed 0, failed: \w+Error: "):
        run_demo(tmp_path / "demo", seeds=1)
