# SPDX-License-Identifier: Apache-2.0
"""The demo: a real federation, started, watched, and ended in every case."""

from __future__ import annotations

import csv
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE, hiding
from rich.console import Console

from fedclip.report import read_report
from fedclip.tools.check import check_config
from fedclip.tools.compare import interval
from fedclip.tools.demo import DemoError, run, run_demo
from fedclip.tools.demo.data import FACTOR, SITES, write_data


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the nodes, other processes, import what the tests import, but for the frameworks."""
    for name, value in hiding().items():
        monkeypatch.setenv(name, value)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def children(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in found}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: object, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
def test_it_trains_in_three_ways_and_shows_what_came_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    console, folder, rounds = quiet(), tmp_path / "demo", 4
    results = {
        r.way.name: r for r in run_demo(folder, rounds=rounds, seeds=2, bound=0.7, console=console)
    }
    shown = console.file.getvalue()  # type: ignore[attr-defined]

    # The table is of this run: its numbers are those of the servers' files.
    for name, result in results.items():
        for seed in range(2):
            assert check_config(folder / name / f"seed-{seed}").ok
            report = read_report(folder / name / f"seed-{seed}")
            assert set(SITES) <= set(report.nodes)
            assert {row.record.round for row in report.select(node="site-a")} == {1, 2, 3, 4}
            with (folder / name / f"seed-{seed}" / "server" / "metrics.csv").open() as file:
                rows = list(csv.DictReader(file))
            assert len(rows) == rounds
            assert result.losses[seed] == float(rows[-1]["loss"])
            assert result.accuracies[seed] == float(rows[-1]["accuracy"])
        mean, half = interval(result.accuracies)
        assert f"{mean:.1%} ± {half:.1%}" in shown
        assert f"{max(result.losses):.3f}" in shown
    # Another seed is another split, from an untrained model; another way has the same splits.
    assert all(len(set(result.losses)) == 2 for result in results.values())
    assert shown.count("┏") == 1
    told = capsys.readouterr().err
    for name in results:
        assert f"{name}: 8 of 8 done, loss" in told

    # Clipping matters in it.
    for name in ("fixed-bound", "adaptive-bound"):
        assert max(results[name].losses) < min(results["no-clipping"].losses)
    limits = {
        row.record.limit for row in read_report(folder / "fixed-bound").select(node="seed-0/site-a")
    }
    assert limits == {0.7}

    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The demo may be run again in its folder.
    run._prepare(folder, 1.0)


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
        run_demo(tmp_path, console=quiet())
    with pytest.raises(DemoError, match="is a file"):
        run_demo(tmp_path / "thesis.tex", console=quiet())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_client_that_fails_ends_all_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_site_b(folder: Path, seed: int) -> None:
        write_data(folder, seed)
        (folder / "site-b" / "train_data.npy").unlink()

    monkeypatch.setattr(run, "write_data", without_site_b)
    before = children(os.getpid())
    with pytest.raises(DemoError, match=r"^site-b of no-clipping failed: ValueError"):
        run_demo(tmp_path / "demo", console=quiet())
    assert children(os.getpid()) <= before


@pytest.mark.slow
def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(DemoError, match="server of no-clipping failed: its port is in use"),
    ):
        run_demo(tmp_path / "demo", port=server.getsockname()[1], console=quiet())


@pytest.mark.slow
def test_the_time_is_bounded(tmp_path: Path) -> None:
    before = children(os.getpid())
    with pytest.raises(DemoError, match="did not finish within 1 s"):
        run_demo(tmp_path / "demo", timeout=1, console=quiet())
    assert children(os.getpid()) <= before


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_demo(tmp_path: Path, kill: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "fedclip", "demo", str(tmp_path / "demo")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: len(children(demo.pid)) == 1 + len(SITES))
        nodes = children(demo.pid)
        # A node listens to its parent from when it has imported what it needs.
        wait_for(lambda: any((tmp_path / "demo").rglob("server/metrics.csv")))
        demo.send_signal(kill)
        _, said = demo.communicate(timeout=PATIENCE)
        wait_for(lambda: not any(alive(pid) for pid in nodes))
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == (-kill if kill == signal.SIGKILL else 130)
    if kill != signal.SIGKILL:
        assert said.endswith("fedclip: interrupted; all processes of the demo were ended\n")
