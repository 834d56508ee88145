# SPDX-License-Identifier: Apache-2.0
"""The ranking of settings, and `fedclip compare`: by the metric of each site, over seeds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import Node, call, large_run

from fedclip.cli.reporting import NONE, Ranking
from fedclip.report import read_report
from fedclip.report.results import Result, result_of

NAN = float("nan")


def standings(metric: str = "accuracy", **values: list[list[float]]) -> Ranking:
    """Return the ranking with these values at a, b and c, seed by seed; c is an outlier."""

    def result(seed: int, row: list[float]) -> Result:
        sites = zip("abc", row, strict=True)
        return Result({s: {"loss": seed * abs(value), metric: value} for s, value in sites}, ["c"])

    found = {
        name.replace("_", " "): {str(i): result(i, row) for i, row in enumerate(rows, 1)}
        for name, rows in values.items()
    }
    return Ranking(found, NONE)


BARE = [[0.80, 0.70, 0.5], [0.84, 0.60, 0.4], [0.79, 0.66, 0.6]]
RAISED = [[a + 0.1 + d, b + 0.1, 0.0] for (a, b, _), d in zip(BARE, (0.0, 0.01, 0.02), strict=True)]
ODD_ONLY = [[a, b, 1.0] for a, b, _ in BARE]
WORSE_AT_B = [[0.99, b - 0.02 - a / 100, 0] for a, b, _ in BARE]


@pytest.mark.parametrize(
    ("found", "winner", "words"),
    [
        (standings(no_clipping=BARE, x=RAISED), "x", "b, 0.75 ± 0.13; with no clipping b, 0.65"),
        (standings(no_clipping=RAISED, x=BARE), "", "The nearest is x: -0.105 ± 0.012"),
        # What an odd site gains or loses is shown, and decides nothing.
        (standings(no_clipping=BARE, x=ODD_ONLY), "", "No setting is better"),
        (standings(no_clipping=BARE, x=[[0.99, 0.6, 1]] * 3), "x", "than its interval"),
        # Two records more with each seed are no spread, and so no interval.
        (standings(no_clipping=BARE, x=[[a + 0.1, b, 1] for a, b, _ in BARE]), "", "more seeds"),
        (standings("loss", no_clipping=RAISED, x=BARE), "x", "The highest site with it is a, 0.81"),
        # Accuracies may be the same where losses are not.
        (standings(no_clipping=[BARE[0]] * 3, x=RAISED), "x", "than its interval"),
        (standings(no_clipping=[*BARE[:2], [NAN] * 3], x=RAISED), "x", "ping, the model diverged"),
        (standings(no_clipping=BARE, x=[*RAISED[:2], [NAN] * 3]), "", "over 3 seeds)."),
        (standings(no_clipping=BARE, x=WORSE_AT_B), "x", "But b does worse by more than the int"),
    ],
)
def test_the_answer_is_that_of_the_numbers(found: Ranking, winner: str, words: str) -> None:
    assert (found.winner, words in found.answer()) == (winner, True), found.answer()
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["winner"] == winner


def test_what_diverged_or_failed_comes_last() -> None:
    low = [[a - 0.3, b - 0.3 - a / 100, 1.0] for a, b, _ in BARE]
    found = standings(no_clipping=low, x=RAISED, one=BARE, lost=[[NAN, 0.5, 0.5]] * 2)
    found.results["failed"] = {"1": Result()}
    assert found.order() == ["x", "one", NONE, "lost", "failed"]
    assert (found.lost("lost"), found.lost("failed")) == (["1", "2"], ["1"])


def test_the_majority_share_and_balanced_accuracy_stand_next_to_accuracy() -> None:
    rare = [[98.0, 0.0], [2.0, 0.0]]
    run = Result({s: {"accuracy": 0.98} for s in "ab"}, confusions={"a": rare, "b": rare})
    assert run.classes() == (pytest.approx(0.98), 0.5)
    assert "accuracy 0.98 (majority class 0.98, balanced 0.5)" in run.in_words()
    found = Ranking({NONE: {"1": run}, "x": {"1": run}}, NONE)
    said = "The majority class alone gives 0.98; balanced accuracy: no clipping 0.5, x 0.5."
    assert said in found.tables()[0][1]
    settings: Any = found.as_dict()["settings"]
    assert settings[0]["balanced_accuracy"] == 0.5
    # Of a site without a matrix, or with no records, neither is known.
    assert run._replace(confusions={"a": rare}).classes() is None
    assert run._replace(confusions={"a": rare, "b": [[0.0, 0.0]] * 2}).classes() is None


def test_compare_ranks_by_the_sites_that_are_not_outliers(tmp_path: Path) -> None:
    for name, level in (("one", 2.0), ("two", 2.5)):
        for seed in (1, 2):
            large_run(tmp_path / name / f"seed-{seed}", 4, 4, seed=seed, level=level)
    folders = [tmp_path / "one", tmp_path / "two"]
    report = read_report(folders[0])
    runs = [result_of(report, run) for run in report.experiments]
    assert [run.outliers for run in runs] == [["client-003"]] * 2
    facts = json.loads(call("compare", *folders, "--json").stdout)
    assert facts["counted"] == ["client-000", "client-001", "client-002"]
    assert facts["sites"] == [*facts["counted"], "client-003"]
    means = [np.mean([run.sites[s]["accuracy"] for s in facts["counted"]]) for run in runs]
    first = next(setting for setting in facts["settings"] if setting["name"] == "one")
    assert first["mean"] == pytest.approx(np.mean(means))
    assert first["seeds"] == ["seed-1", "seed-2"]
    text = " ".join(call("compare", *folders).stdout.split())
    assert "Not counted, as outliers: client-003." in text
    assert "client-003 (not counted)" in text


def test_a_run_in_the_folder_of_another_is_compared_with_it(tmp_path: Path) -> None:
    Node(tmp_path / "outer" / "a", ["norm-clip"]).round([0.5])
    Node(tmp_path / "outer" / "inner" / "a", ["norm-clip"]).round([2.0])
    folders = [tmp_path / "outer", tmp_path / "outer" / "inner"]
    facts = json.loads(call("compare", *folders, "--json").stdout)
    clipped = {setting["name"]: setting["clipped"] for setting in facts["settings"]}
    assert clipped == {"outer": 0.0, "inner": 1.0}
