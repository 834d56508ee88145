# SPDX-License-Identifier: Apache-2.0
"""fedclip.report: what the checkpoints say, as rows, table, CSV and sentences."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from report_runs import Node, large_run

from fedclip.core.records import RoundRecord
from fedclip.report import ReportError, read_report


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Two clients with a limit of 1, the first of which is clipped in round 1 only."""
    for name, rounds in {"c0": ([0.5, 2.0], [0.5, 0.5]), "c1": ([0.1, 0.2], [0.3, 0.4])}.items():
        node = Node(tmp_path / name, [["norm-clip", {"max_norm": 1.0}]])
        for norms in rounds:
            node.round(norms)
    return tmp_path


@pytest.mark.parametrize("clock", ["set back", "names alone"])
def test_a_clock_that_was_set_back_starts_no_other_run(tmp_path: Path, clock: str) -> None:
    """As at the end of summer time: the names of the last files are those of an hour before."""
    for name, rounds in (("client", True), ("server", False)):
        node = Node(tmp_path / name, ["no-op"])
        for i in range(6):
            norm = 1.0 + i
            if rounds:
                node.round([norm], save=False)
            else:
                node.optimizer.modules[0].run(NumpyVector({"a": np.full(1, norm)}))
            node.checkpointer.save_optimizer(node.optimizer, timestamp=f"{(i + 3) % 6:02}")
            if clock == "names alone":
                file = tmp_path / name / f"optimizer_state_{(i + 3) % 6:02}.mpk"
                os.utime(file, (1e9 + i, 1e9 + i))
    report = read_report(tmp_path)
    assert [row.record.round for row in report.select("client")] == [1, 2, 3, 4, 5, 6]
    if clock == "names alone":
        (row,) = report.select("server")
        assert row.record.steps == 6


def write_state(folder: Path, *records: Any, name: str = "norm-clip") -> None:
    folder.mkdir(exist_ok=True)
    modules = [[name, {"rounds": [*records]} if records else {}]]
    (folder / "optimizer_state_1.mpk").write_bytes(msgpack.packb({"modules": modules}))


@pytest.mark.parametrize(
    "change",
    [{"buckets": 5}, {"buckets": [2**60], "counts": [3]}, {"round": -1}, {"norm_max": math.nan}],
)
def test_a_damaged_node_hides_no_other(experiment: Path, change: dict[str, Any]) -> None:
    record = dataclasses.asdict(RoundRecord(1, steps=2, clipped=1, norm_min=1.0, norm_max=2.0))
    write_state(experiment / "damaged", {**record, **change})
    (experiment / "folder" / "optimizer_state_1.mpk").mkdir(parents=True)
    (experiment / "pipe").mkdir()
    os.mkfifo(experiment / "pipe" / "optimizer_state_1.mpk")
    report = read_report(experiment)
    assert report.nodes == ("c0", "c1")
    assert [path.parent.name for path in report.skipped] == ["damaged", "folder", "pipe"]


def test_files_that_hold_no_records_are_not_called_damaged(tmp_path: Path) -> None:
    write_state(tmp_path / "whole", name="adam")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "optimizer_state_1.mpk").write_bytes(b"\xc1")
    with pytest.raises(ReportError, match=r"has no records .*adam.*; cannot read 1 of 2 state"):
        read_report(tmp_path)


@pytest.mark.parametrize(
    ("modules", "norms", "expected"),
    [
        (["no-op"], [0.5, 1.0], "No limit was set. The largest norm of 2 steps is 1."),
        ([["no-op", {"max_norm": 1.0}]], [0.5, 2.0], "50.0% of 2 steps would have been clipped."),
        (["norm-clip"], [0.5], "No step was clipped: the largest norm, 0.5, is below the limit, 1"),
        (["norm-clip"], [2.0, 0.5], "50.0% of 2 steps were clipped."),
        (["norm-clip"], [3.0, 2.0], "100% of 2 steps were clipped: the limit"),
        (["update-norms"], [], "No limit was set. The largest norm of 1 updates"),
        ([["zscore-clip", {"warmup": 50}]], [1.0] * 10, "Still in warm-up: 9 of 10 steps"),
        ([["zscore-clip", {"warmup": 5, "max_norm": 1.0}]], [3.0] * 9, "The fixed limit max_norm"),
    ],
)
def test_sentences(tmp_path: Path, modules: list[Any], norms: list[float], expected: str) -> None:
    Node(tmp_path, modules).round(norms, update=2.0)
    assert expected in " ".join(read_report(tmp_path).in_words())


@pytest.mark.parametrize(
    ("level", "words"),
    [(50.0, "25 times those"), (0.15, "12.7 times smaller"), (0.4, ""), (7.0, "")],
)
def test_a_client_unlike_the_others_is_named(tmp_path: Path, level: float, words: str) -> None:
    for name, norm in {"a": 2.0, "b": 2.1, "c": 1.9, "d": level, "server": 1000.0}.items():
        Node(tmp_path / name, ["no-op"]).round([norm] * 5)
    found = [line for line in read_report(tmp_path).in_words() if "d: the norms" in line]
    assert len(found) == bool(words)
    assert all(words in line for line in found)


def test_curves_are_read_where_declearn_writes_them(tmp_path: Path) -> None:
    client, server = Node(tmp_path / "c0", ["no-op"]), Node(tmp_path / "server", ["no-op"])
    for round_ in (1, 2, 3, 4, 5):
        # Only some rounds are evaluated.
        save = round_ in (2, 4, 5)
        client.round([1.0], save=save)
        server.round([1.0], save=save, metrics={"loss": 1 / round_, "accuracy": 0.1 * round_})
    server.checkpointer.save_metrics({"loss": 9.0}, prefix="metrics_far", timestamp="03")
    report = read_report(tmp_path)
    curves = {(c.node, c.metric): c.points for c in report.curves}
    assert curves["server", "loss"] == ((2, 0.5), (4, 0.25), (5, 0.2))
    assert curves["far", "loss"] == ((5, 9.0),)
    assert ("server", "timestamp") not in curves
    assert report.servers == {"server"}


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    large_run(tmp_path, 4, 2)
    file = tmp_path / "server" / "metrics.csv"
    head, *rows = file.read_text().splitlines()
    assert head == "timestamp,loss,accuracy"
    stamps = [row.partition(",")[0] for row in rows]
    lost = [f"{stamps[2]},nan,nan", f"{stamps[3]},inf,0.5"]
    file.write_text("\n".join([head, *rows[:2], *lost, ""]))
    found = read_report(tmp_path)
    curves = {c.metric: c for c in found.curves if c.node == "server"}
    assert [round_ for round_, _ in curves["loss"].points] == [1, 2]
    assert curves["loss"].nonfinite == (3, 4)
    assert math.isnan(curves["loss"].last[1])
    assert curves["accuracy"].last == (4, 0.5)
    (said,) = [finding.text for finding in found.findings() if finding.kind == "diverged"]
    assert "The loss of server is NaN or infinite from round 3" in said
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_norm_above_the_last_limit_is_not_called_below_it(tmp_path: Path) -> None:
    node = Node(tmp_path, ["zscore-clip"])
    # The first norm passes, and the limits come from shorter ones.
    node.round([9.0] + 40 * [1.0])
    node.round(40 * [1.0])
    (said,) = [f.text for f in read_report(tmp_path).findings() if f.kind == "inert"]
    assert "below the limit at that step. The largest norm is 9;" in said
