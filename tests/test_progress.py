# SPDX-License-Identifier: Apache-2.0
"""How far runs are: a line for each twentieth where there is no terminal."""

from __future__ import annotations

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
