# SPDX-License-Identifier: Apache-2.0
"""How far runs are: a line for each twentieth where there is no terminal."""

from __future__ import annotations

import io

import pytest

from fedclip.cli.progress import progress


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
