# SPDX-License-Identifier: Apache-2.0
"""A site's policy on Flower, attacked by an app: what has left is looked at on the wire."""

from __future__ import annotations

from pathlib import Path

from flower_site import federation, leaks, policy


def test_a_hostile_app(tmp_path: Path) -> None:
    with federation(tmp_path) as running:
        running.node(policy(tmp_path))
        got = running.run("huge", "names", "twice", "error", "evaluate")()
        print(got)
        assert not leaks(running.left())
