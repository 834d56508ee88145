# SPDX-License-Identifier: Apache-2.0
"""How far runs are: a line for each twentieth where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fedclip.tools.progress import latest, progress


def test_lines_say_how_much_is_done_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress({"[/red]": 100}) as tell:
        for done in (1, 2, 5, 6, 100, 100):
            tell("[/red]", done, "loss 1")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" done")[0] for line in lines] == [
        f"[/red]: {done} of 100" for done in (5, 100)
    ]
    assert ", loss 1, about " in lines[0]
    assert lines[-1].endswith("loss 1")


def test_each_of_several_tasks_has_a_time_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 100))
    monkeypatch.setattr("fedclip.tools.progress.time.monotonic", lambda: next(now))
    with progress({"a": 4, "b": 4}) as tell:
        tell("a", 0, "")
        tell("a", 4, "")
        tell("b", 0, "")
        tell("b", 2, "")
    # Half of b took 100 s, whatever a took before.
    assert capsys.readouterr().err.splitlines()[-1] == "b: 2 of 4 done, about 1 min 40 s left"


def test_several_bars_begin_when_they_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with progress({"[/red]": 4, "b": 4}) as tell:
        tell("[/red]", 4, "loss 1")
    shown = file.getvalue()
    assert "[/red]" in shown
    assert "loss 1" in shown
    assert "-:--:--" in shown


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress({"a": None}, quiet=True) as tell:
        tell("a", 1, "")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("timestamp,accuracy,loss\n1,0.5,2.0\n2,0.6,1.5\n", "loss 1.5, accuracy 0.6"),
        ("timestamp,loss\n1,2.0\n2", "loss 2"),
        ("timestamp,r2\n1,0.5\n", "r2 0.5"),
        ("", ""),
    ],
)
def test_the_last_loss_is_said(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(text)
    assert latest(file) == said
    assert latest(tmp_path / "none.csv") == ""
