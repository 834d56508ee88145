# SPDX-License-Identifier: Apache-2.0
"""How far runs are: a line for each twentieth where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fedclip.tools.progress import latest, progress


def test_on_a_terminal_a_line_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", file)
    tell = progress({"[/red]": 100})
    for done in (1, 2, 100):
        tell("[/red]", done, "loss \x1b[31m")
    assert file.getvalue().count("left, loss") == 2
    *shown, last = file.getvalue().split("\r\x1b[K")[1:]
    assert len(shown) == 2
    assert "\n" not in "".join(shown)
    assert last == "[/red]: 100 of 100 rounds done, loss \\x1b[31m\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("timestamp,accuracy,loss\n1,0.5,2.0\n2,0.6,1.5\n", "loss 1.5, accuracy 0.6"),
        ("timestamp,loss\n1,2.0\n2", "loss 2"),
    ],
)
def test_the_last_loss_is_said(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(text)
    assert latest(file) == said
    assert latest(tmp_path / "none.csv") == ""
